"""A predictor with one version of a model, all inside the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fleet_sparse.errors import InstallError
from fleet_sparse.snapshot.directory import Directory, directory_at
from fleet_sparse.snapshot.reader import ProgressCallback, open_content

from .local_reader import LocalReader
from .model import read_model

if TYPE_CHECKING:
    from .predictor import Predictor


@contextmanager
def version_predictor(
    model: str, version: Directory, on_progress: ProgressCallback = lambda num_bytes: None
) -> Iterator[Predictor]:
    """Opens a predictor for a `with` block; it answers as one whose pservers serve that version.

    Args:
        model: Path or URL of a directory that `fleet.save_inference_model` wrote.
        version: Directory of the snapshot.
        on_progress: Called now and then with the number of bytes read so far.

    Raises:
        InstallError: Paddle is not installed.
        SnapshotError: Model or snapshot cannot be read.
        PlanError, TableMismatch: As `Predictor`.
    """
    tables = [table.name for table in read_model(directory_at(model)).tables]
    try:
        from .predictor import Predictor
    except ModuleNotFoundError as error:
        raise InstallError(f"predict: {error.name} is not installed; pip install 'fleet-sparse[cpu]'") from None
    with open_content(version, on_progress) as content:
        reader = LocalReader(content, tables)
    with Predictor(model, reader) as predictor:
        yield predictor
