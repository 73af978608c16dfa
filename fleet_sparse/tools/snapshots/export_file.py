"""What all files of an export have in common: one table or dense array each, and what it is."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import InputFile, OutputFile
from fleet_sparse.snapshot.fields import number, typed
from fleet_sparse.snapshot.rows import Rows

FORMAT = "fleet_sparse export"
VERSION = 1
FLOATS = np.dtype("<f4")
IDS = np.dtype("<i8")
DAYS = np.dtype("<u2")


class Description(NamedTuple):
    """What a file says about its table or dense array; not in files that others made."""

    spec: TableSpec | DenseSpec
    optimizer_step: int = 0
    days: int = 0
    """Of a table."""
    assigned: bool = True
    """Of a dense array."""

    def to_json(self) -> str:
        """As it stands in the file."""
        fields = {**self._asdict(), "spec": self.spec.to_json()}
        return json.dumps({"format": FORMAT, "version": VERSION, **fields})

    @classmethod
    def parse(cls, text: str, path: str) -> Description:
        """What `to_json` wrote.

        Raises:
            SnapshotError: It is something else.
        """
        try:
            value = json.loads(text)
            if (found := (value["format"], value["version"])) != (FORMAT, VERSION):
                raise ValueError(f"format and version are {found}, should be {(FORMAT, VERSION)}")
            return cls(
                parse_spec(typed(str, value["spec"])),
                number(value["optimizer_step"]),
                number(value["days"]),
                typed(bool, value["assigned"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SnapshotError(f"{path}: its description does not hold together ({error})") from error


class ImportFile(Protocol):
    """A file that is being read."""

    @property
    def description(self) -> Description | None:
        """None in a file that others made."""

    def rows(self, spec: TableSpec, days: int) -> Iterator[Rows]:
        """The rows of a table in the order in which they are there, block by block; states that are not there are those
        of a new row.

        Raises:
            SnapshotError: They are of another type or shape than the table's, or cannot be read.
        """

    def dense_values(self, spec: DenseSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Values `(num_values,)` and states `(num_states, num_values)`.

        Raises:
            SnapshotError: As `rows`.
        """


class Format(NamedTuple):
    """A kind of file. What the system refuses, and what cannot be read, is SnapshotError."""

    suffix: str
    write_table: Callable[[OutputFile, Description, Iterator[Rows]], int]
    """Writes rows and returns how many; the file is the caller's to finish."""
    write_dense: Callable[[OutputFile, Description, NDArray[np.float32], NDArray[np.float32]], None]
    """Writes values `(num_values,)` and states `(num_states, num_values)`."""
    open: Callable[[InputFile, Callable[[int], None]], AbstractContextManager[ImportFile]]
    """Reads a file; the function is told how many bytes each read takes."""


def new_states(spec: TableSpec, count: int) -> NDArray[np.float32]:
    """The states of so many new rows, `(count, num_states, dim)`."""
    initial = np.array(spec.update_rule.initial_state(dict(spec.hyperparameters)), FLOATS)
    return np.broadcast_to(initial[:, None], (count, len(initial), spec.dim)).copy()


def check(path: str, column: str, found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Whether a column has the type and shape that it should have.

    Raises:
        SnapshotError: It has not.
    """
    if found != expected:
        raise SnapshotError(f"{path}: {column!r} is {found[0]} {found[1]}, should be {expected[0]} {expected[1]}")


def no_room(error: OSError) -> SnapshotError:
    """The error that says that a temporary file cannot be written."""
    return SnapshotError(
        f"{tempfile.gettempdir()}: a temporary file cannot be written: {error}. "
        "Set TMPDIR to a directory with room for the largest table"
    )
