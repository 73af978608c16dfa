"""`fleet-sparse predict`: the answer of one version of a model, inside the process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleet_sparse.errors import SettingError

from .custom_rules import add_custom_rules
from .terminal import AS_IS, bar, console


def predict(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Directory of fleet.save_inference_model; a path or URL.")
    ],
    feeds: Annotated[Path, typer.Argument(metavar="FEEDS.npz", help="One array for each input, by its name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.npz", help="One array for each target, and the version.")],
    version: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of the version. Default: what readers serve.")
    ] = None,
) -> None:
    """Predicts with one version of a model, without pservers: bit for bit what they answered for the same inputs.

    The answer names the version in `version.number` and `version.checksum`.
    """
    import numpy as np

    from fleet_sparse.serving.model import read_model, series_of
    from fleet_sparse.serving.npz_file import read_npz, write_npz
    from fleet_sparse.serving.version_predictor import version_predictor
    from fleet_sparse.serving.versions import Versions
    from fleet_sparse.snapshot.directory import directory_at

    add_custom_rules()
    feed, directory = read_npz(feeds), directory_at(model)
    snapshot = Versions(series_of(directory)).directory_of(version)
    saved_with = read_model(directory).number
    with bar("reading") as progress, version_predictor(model, snapshot, progress) as predictor:
        try:
            outputs, answered = predictor.run(feed)
        except ValueError as error:
            raise SettingError(f"{feeds}: {error}") from error
    checksum = f"{answered.checksum:016x}"
    named = {"version.number": np.array(answered.number), "version.checksum": np.array(checksum)}
    write_npz(out, {**outputs, **named})
    if answered.number < saved_with:
        console.print(
            f"the network was saved with snapshot {saved_with}; if it is another one than before, so are the answers",
            **AS_IS,
        )
    console.print(f"wrote {out}, of snapshot {answered.number} ({checksum})", **AS_IS)
