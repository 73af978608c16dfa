"""`fleet-sparse version`: which version of a model readers serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table

from .custom_rules import add_custom_rules
from .terminal import AS_IS, bar, console, print_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fleet_sparse.core.version import Version
    from fleet_sparse.serving.comparison import Comparison, Limits, Quality
    from fleet_sparse.serving.versions import ListedVersion, Versions
    from fleet_sparse.snapshot.directory import Directory

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Directory of fleet.save_inference_model, or of snapshots; a path or URL.",
        show_default=False,
    ),
]

_CHECKSUM_DIGITS = 8
_MINUTES = len("2026-03-01T10:15")

app = typer.Typer(
    help="Say which version of a model readers serve: the newest, or one that stays.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("list")
def list_(
    model: Model, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Shows all versions, and which one readers serve.

    Rows, removed rows and bytes of a delta are those that it has itself. --json has the whole checksums.
    """
    listed = _versions(model).listed()
    if as_json:
        print_json({"versions": [_json_of(each) for each in listed]})
        return
    narrow = [Column(name, no_wrap=True) for name in ("version", "checksum", "kind", "saved at", "rows", "size")]
    table = Table(*narrow, Column("status", overflow="fold"))
    for each in listed:
        manifest = each.manifest
        removed = f" -{manifest.num_removed}" if manifest.num_removed else ""
        table.add_row(
            str(manifest.number),
            str(manifest.checksum)[:_CHECKSUM_DIGITS],
            manifest.kind,
            manifest.saved_at[:_MINUTES].replace("T", " "),
            f"{manifest.num_rows}{removed}",
            decimal(_num_bytes(each)),
            ", ".join(_status_of(each)),
            style="bold" if each.is_served else None,
        )
    console.print(table)
    if not any(each.is_served for each in listed) and listed:
        console.print("the version that readers should serve is not there; they serve what they have", **AS_IS)


@app.command()
def promote(
    model: Model,
    number: Annotated[
        int | None, typer.Argument(min=1, metavar="NUMBER", help="Version to serve. Default: the newest.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="LABELLED.npz", help="Inputs and labels; a candidate that predicts them worse is refused."
        ),
    ] = None,
    label: Annotated[str, typer.Option(metavar="NAME", help="Array of the labels in that file.")] = "label",
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="Target with the predictions. Default: the only one.")
    ] = None,
    max_auc_loss: Annotated[float, typer.Option(min=0, help="Loss of AUC that is allowed.")] = 0.0,
    max_calibration_error: Annotated[
        float, typer.Option(min=0, help="Distance of the calibration from 1 that is allowed.")
    ] = 0.05,
) -> None:
    """Makes readers serve a version and stay with it, until the next command.

    With --check, the exit code is 1 and nothing changes if the candidate is worse than what readers serve.
    """
    versions = _versions(model)
    if check is not None:
        from fleet_sparse.serving.comparison import Limits

        number = versions.newest().number if number is None else number
        comparison = _compared(
            model, versions, number, check, label, target, Limits(max_auc_loss, max_calibration_error)
        )
        served = versions.served()
        console.print(_comparison_table(comparison, served.number, number))
        if comparison.faults:
            Console(stderr=True).print(
                f"fleet-sparse: snapshot {number} is worse than snapshot {served.number}: "
                f"{'; '.join(comparison.faults)}",
                **AS_IS,
            )
            raise typer.Exit(1)
    _print_served(versions.promote(number))


@app.command()
def pin(
    model: Model,
    number: Annotated[
        int | None, typer.Argument(min=1, metavar="NUMBER", help="Version to serve. Default: what they serve.")
    ] = None,
) -> None:
    """Makes readers stay with the version that they serve, or with another one, until the next command."""
    _print_served(_versions(model).pin(number))


@app.command()
def unpin(model: Model) -> None:
    """Makes readers follow the newest version."""
    version = _versions(model).unpin()
    console.print(f"readers follow the newest version, now {_name_of(version)}", **AS_IS)


@app.command()
def rollback(model: Model) -> None:
    """Makes readers serve the version before the last command, without one the next older one, and stay with it."""
    _print_served(_versions(model).rollback())


def _versions(model: str) -> Versions:
    from fleet_sparse.serving.model import series_of
    from fleet_sparse.serving.versions import Versions
    from fleet_sparse.snapshot.directory import directory_at

    add_custom_rules()
    return Versions(series_of(directory_at(model)))


def _compared(
    model: str, versions: Versions, number: int, check: Path, label: str, target: str | None, limits: Limits
) -> Comparison:
    from fleet_sparse.serving.comparison import compare
    from fleet_sparse.serving.labelled import predictions, read_labelled, target_of
    from fleet_sparse.serving.model import read_model
    from fleet_sparse.serving.version_predictor import version_predictor
    from fleet_sparse.snapshot.directory import directory_at

    examples, served_model = read_labelled(check, label), read_model(directory_at(model))
    name = target_of(served_model, target)

    def predicted(snapshot: Directory) -> NDArray[np.floating[Any]]:
        with bar(snapshot.name) as progress, version_predictor(model, snapshot, progress) as predictor:
            return predictions(served_model, lambda feed: predictor.run(feed).outputs, examples, name)

    served = predicted(versions.directory_of(None))
    return compare(examples.labels, served, predicted(versions.directory_of(number)), limits)


def _print_served(version: Version) -> None:
    console.print(f"readers serve {_name_of(version)} and stay with it", **AS_IS)


def _name_of(version: Version) -> str:
    return f"snapshot {version.number} ({version.checksum:016x})"


def _comparison_table(comparison: Comparison, served: int, candidate: int) -> Table:
    table = Table("", f"served: {served}", f"candidate: {candidate}", title=f"{comparison.num_examples} examples")
    columns = [_figures_of(each) for each in (comparison.served, comparison.candidate)]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    if comparison.p_value is not None:
        table.caption = f"p of the loss of AUC by chance: {comparison.p_value:.3g}"
    return table


def _figures_of(quality: Quality) -> dict[str, str]:
    return {
        "AUC": "-" if quality.auc is None else f"{quality.auc:.6f}",
        "calibration": f"{quality.calibration:.4f}",
        "not finite": str(quality.num_not_finite),
    }


def _num_bytes(listed: ListedVersion) -> int:
    return sum(file.num_bytes for file in listed.manifest.files)


def _status_of(listed: ListedVersion) -> list[str]:
    status = {
        "newest": listed.is_newest,
        "served": listed.is_served,
        "pinned": listed.is_pinned,
        "rollback": listed.is_way_back,
        "some tables only": not listed.manifest.is_complete,
    }
    return [name for name, holds in status.items() if holds]


def _json_of(listed: ListedVersion) -> dict[str, Any]:
    manifest = listed.manifest
    return {
        "number": manifest.number,
        "checksum": str(manifest.checksum),
        "kind": manifest.kind,
        "saved_at": manifest.saved_at,
        "num_rows": manifest.num_rows,
        "num_removed": manifest.num_removed,
        "num_bytes": _num_bytes(listed),
        "is_complete": manifest.is_complete,
        "is_newest": listed.is_newest,
        "is_served": listed.is_served,
        "is_pinned": listed.is_pinned,
        "is_rollback": listed.is_way_back,
    }
