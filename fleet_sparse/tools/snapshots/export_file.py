"""The parts that all files of an export share: one table or dense array each, and its description."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import Column, columns_of
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import InputFile, OutputFile
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_format import ColumnIndex, Count, columns_in_index

FORMAT = "fleet_sparse export"
VERSION = 2
"""Version 1 had no columns."""


class Description(NamedTuple):
    """A file's description of its table or dense array. Files of other programs have none."""

    spec: TableSpec | DenseSpec
    optimizer_step: int = 0
    num_days: int = 0
    """Age of a table in days."""
    columns: tuple[Column, ...] = ()
    """Columns of a table."""
    assigned: bool = True
    """True if a dense array has values."""

    def to_json(self) -> str:
        """The description as JSON."""
        fields = _Fields(
            FORMAT,
            VERSION,
            self.spec.to_json(),
            self.optimizer_step,
            self.num_days,
            columns_in_index(self.columns),
            self.assigned,
        )
        return msgspec.json.encode(fields).decode()

    @classmethod
    def parse(cls, text: str, path: str) -> Description:
        """Parses what `to_json` wrote.

        Raises:
            SnapshotError: It is something else.
        """
        try:
            check_version(msgspec.json.decode(text, type=Versioned))
            fields = msgspec.json.decode(text, type=_Fields)
            columns = tuple(each.column() for each in fields.columns)
            return cls(parse_spec(fields.spec), fields.optimizer_step, fields.days, columns, fields.assigned)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise SnapshotError(f"{path}: inconsistent description: {error}") from error


class Versioned(msgspec.Struct, frozen=True):
    """Format and version of an export."""

    format: str
    version: int


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    spec: str
    optimizer_step: Count
    days: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    columns: tuple[ColumnIndex, ...]
    assigned: bool


class ImportFile(Protocol):
    """A file that is being read."""

    @property
    def description(self) -> Description | None:
        """None in a file of another program."""

    def rows(self, spec: TableSpec, columns: tuple[Column, ...]) -> Iterator[Rows]:
        """Yields the rows of a table in the order of the file, block by block. In a file without description, missing
        columns, states included, are those of new rows.

        Raises:
            SnapshotError: A column is missing or has another type or shape, or the file cannot be read.
        """

    def dense_values(self, spec: DenseSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns values `(num_values,)` and states `(num_states, num_values)`.

        Raises:
            SnapshotError: As `rows`.
        """


class Format(NamedTuple):
    """A kind of file. Its functions raise SnapshotError if the system refuses or a file cannot be read."""

    suffix: str
    write_table: Callable[[OutputFile, Description, Iterator[Rows]], int]
    """Writes rows and returns how many; the caller finishes the file."""
    write_dense: Callable[[OutputFile, Description, NDArray[np.float32], NDArray[np.float32]], None]
    """Writes values `(num_values,)` and states `(num_states, num_values)`."""
    open: Callable[[InputFile, Callable[[int], None]], AbstractContextManager[ImportFile]]
    """Opens a file; the function is called with the number of bytes of each read."""


def columns_to_read(description: Description | None, spec: TableSpec) -> tuple[Column, ...]:
    """Returns the columns of a file."""
    return description.columns if description is not None else columns_of(spec, 0)


def check_version(found: Versioned) -> None:
    """Checks that a file is an export of a version that can be read.

    Raises:
        ValueError: It is not.
    """
    if (found.format, found.version) != (FORMAT, VERSION):
        raise ValueError(
            f"format and version are {(found.format, found.version)}, should be {(FORMAT, VERSION)}; export the "
            "snapshot again"
        )


def check(path: str, column: str, found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Checks type and shape of a column.

    Raises:
        SnapshotError: They differ.
    """
    if found != expected:
        raise SnapshotError(f"{path}: {column!r} is {found[0]} {found[1]}, should be {expected[0]} {expected[1]}")
