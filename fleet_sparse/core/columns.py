"""Columns: the per-row arrays of a table. Stores, snapshots, exports and diffs iterate them; `EXTRA` declares them.

Rows and optimizer state are columns too, but a store keeps these two in a layout of their own. Every other column is a
separate array with one element for each row. To add one, add a `Column` to `EXTRA`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import entries
from .kernels_sketch import LINE_BYTES
from .table_spec import TableSpec

Elements = NDArray[Any]
OnPush = Callable[[Elements, NDArray[np.int64]], None]
"""Updates a column for a push: its array `(capacity, *shape)` and the distinct indices `(n,)` of the pushed rows."""


def _always(spec: TableSpec, num_days: int) -> bool:
    return True


class Column(NamedTuple):
    """One per-row array of a table."""

    name: str
    """Unique in the table. Part of the snapshot format."""
    dtype: np.dtype[Any]
    """Little-endian."""
    shape: tuple[int, ...] = ()
    """Shape of the element of one row."""
    initial: float | None = 0
    """Value of a new row, and of a row from a file without this column. None: the column is in every file."""
    on_push: OnPush | None = None
    """Called in the thread that owns the store for each push. None: pushes do not change the column."""
    is_present: Callable[[TableSpec, int], bool] = _always
    """Returns whether a table with this spec and this age in days has the column."""

    @property
    def width(self) -> int:
        """Values in one element."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize * self.width

    @property
    def layout(self) -> tuple[str, str, tuple[int, ...]]:
        """Name, dtype as a string and shape: equal for two columns whose arrays can be joined."""
        return self.name, self.dtype.str, self.shape

    def new(self, num_rows: int) -> Elements:
        """The elements of new rows, `(num_rows, *shape)`.

        Raises:
            ValueError: The column has no initial value of its own.
        """
        if self.initial is None:
            raise ValueError(f"column {self.name!r}: has no initial value")
        return np.full((num_rows, *self.shape), self.initial, self.dtype)


ROWS, STATES = "rows", "states"
"""Names of the two columns that every table has."""
FLOATS = np.dtype("<f4")

LAST_UPDATE_DAY = Column("last_update_day", np.dtype("<u2"), is_present=lambda spec, num_days: num_days > 0)
"""The table's age in days at the last push of each row. Stores update it through `RowMetadata`, not at each push."""

COUNTERS = Column("counters", np.dtype("|u1"), (LINE_BYTES,), is_present=lambda spec, num_days: spec.is_sketch)
"""The line of a sketch, of which each row of its table has one; `kernels_sketch` changes it."""

STATISTICS = tuple(
    Column(name, FLOATS, is_present=lambda spec, num_days, name=name: name in spec.statistics)  # type: ignore[misc]
    for name in entries.STATISTICS
)
"""Totals of what all pushes said of a row: `counts`, `show` and `click`, as far as the table's entry policy reads them.
Pushes pass them to the store."""

EXTRA: tuple[Column, ...] = (LAST_UPDATE_DAY, COUNTERS, *STATISTICS)
"""Every column besides rows and states, in the order of the files."""


def row_columns(spec: TableSpec) -> tuple[Column, Column]:
    """The columns of rows and states. Their initial values are those of the initializer and the update rule."""
    return (
        Column(ROWS, FLOATS, (spec.dim,), None),
        Column(STATES, FLOATS, (spec.update_rule.num_states, spec.dim), None),
    )


def extra_columns(spec: TableSpec, num_days: int) -> tuple[Column, ...]:
    """The other columns of a table whose age is `num_days`."""
    return tuple(column for column in EXTRA if column.is_present(spec, num_days))


def columns_of(spec: TableSpec, num_days: int) -> tuple[Column, ...]:
    """All columns of a table whose age is `num_days`."""
    return (*row_columns(spec), *extra_columns(spec, num_days))


def merged_columns(*lists: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns that at least one of the lists has, in the order of their first occurrence.

    Raises:
        ValueError: Two lists have a column of one name and different layouts.
    """
    merged: dict[str, Column] = {}
    for column in (column for columns in lists for column in columns):
        known = merged.setdefault(column.name, column)
        if known.layout != column.layout:
            raise ValueError(f"column {column.name!r}: {known.layout[1:]} and {column.layout[1:]}")
    return tuple(merged.values())


def new_states(spec: TableSpec, num_rows: int) -> NDArray[np.float32]:
    """The optimizer states of new rows, `(num_rows, num_states, dim)`."""
    initial = np.array(spec.update_rule.initial_state(dict(spec.hyperparameters)), FLOATS)
    return np.broadcast_to(initial[:, None], (num_rows, len(initial), spec.dim)).copy()


def layouts(columns: Mapping[str, Elements]) -> str:
    """Names, dtypes and shapes of some arrays, for messages."""
    return ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in columns.items())
