"""The rows of an export: which of a snapshot's, in which type, and the row of ids without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse import machine_memory
from fleet_sparse.core.columns import LAST_UPDATE_DAY
from fleet_sparse.core.initializer import mean_of
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PlanError
from fleet_sparse.snapshot.reader import SnapshotReader

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "int8": np.dtype("i1")}
MEAN, ZEROS = "mean", "zeros"
_COUNTS = "counts"
_MAX_INT8 = 127.0


class RowChoice(NamedTuple):
    """The choice of rows to export, and of their type."""

    dtype: str = "float32"
    """A key of `DTYPES`."""
    unseen: str = MEAN
    """`MEAN` or `ZEROS`: the row of an id without one."""
    seen_within_days: int | None = None
    """Only rows that were pushed in the last ended days; None for all."""
    min_count: int | None = None
    """Only rows that were pushed so often; None for all."""


class Quantised(NamedTuple):
    """Rows in the type of an export."""

    rows: NDArray[Any]
    scales: NDArray[np.float32] | None
    """Factor of each row; only of int8."""

    def as_floats(self) -> NDArray[np.float32]:
        """Returns the rows as readers see them."""
        rows = self.rows.astype(np.float32)
        return rows if self.scales is None else rows * self.scales[:, None]


class RowError:
    """The error that a type of rows makes in one table.

    Attributes:
        num_rows: Number of rows so far.
        max_error: Largest difference of a value.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.max_error = 0.0
        self._num_values = 0
        self._squares = 0.0

    @property
    def rms_error(self) -> float:
        """Root of the mean squared difference."""
        return float(np.sqrt(self._squares / self._num_values)) if self._num_values else 0.0

    def add(self, rows: NDArray[np.float32], stored: Quantised) -> None:
        """Counts rows `(n, dim)` and what is stored of them."""
        self.num_rows += len(rows)
        if stored.rows.dtype == rows.dtype or not rows.size:
            return
        errors = np.abs(rows.astype(np.float64) - stored.as_floats())
        self.max_error = max(self.max_error, float(errors.max()))
        self._num_values += errors.size
        self._squares += float((errors * errors).sum())


def check_choice(content: SnapshotReader, tables: Iterable[str], choice: RowChoice) -> None:
    """Checks that the tables have what a choice selects by.

    Raises:
        PlanError: One has not; the message names it.
        SnapshotError: There is no such table.
    """
    for name in tables:
        table = content.table(name)
        if choice.seen_within_days is not None and not table.num_days:
            raise PlanError(
                f"table {name!r}: --seen-within-days {choice.seen_within_days} needs days, and no save ended one. Save "
                "with fleet.save_persistables(exe, dirname, mode=3) at the end of a day, or leave the option out"
            )
        if choice.min_count is not None and _COUNTS not in (column.name for column in table.columns):
            raise PlanError(
                f"table {name!r}: --min-count {choice.min_count} needs counts, which only a table with an entry by "
                "count has, such as paddle.distributed.CountFilterEntry(2). Leave the option out"
            )


def check_memory(content: SnapshotReader, tables: Iterable[str], choice: RowChoice, *, is_forced: bool) -> None:
    """Checks that the rows fit into memory.

    Raises:
        PlanError: They take more than half of the memory that is available, and that is not forced.
    """
    num_rows = sum(member.manifest.num_rows for member in content.members)
    dims = [content.table(name).spec.dim for name in tables]
    row_bytes = 8 + max(dims, default=0) * DTYPES[choice.dtype].itemsize
    available = machine_memory.available_bytes()
    if num_rows * row_bytes > available / 2 and not is_forced:
        raise PlanError(
            f"export: up to {num_rows} rows take {num_rows * row_bytes / 1e9:.1f} GB, more than half of the "
            f"{available / 1e9:.1f} GB that are available. Write --dtype int8, --seen-within-days D, or --force"
        )


def chosen_rows(
    content: SnapshotReader, table: str, choice: RowChoice, owned: NDArray[np.bool_] | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yields ids and rows of a table block by block, in the order of their hash.

    Args:
        content: The snapshot.
        table: Its name.
        choice: Which rows.
        owned: Buckets whose rows are read, as in `SnapshotReader.rows`; None for all.
    """
    num_days = content.table(table).num_days
    for block in content.rows(table, owned):
        is_kept = np.ones(len(block.ids), np.bool_)
        if choice.seen_within_days is not None:
            is_kept &= num_days - block.columns[LAST_UPDATE_DAY.name].astype(np.int64) <= choice.seen_within_days
        if choice.min_count is not None:
            is_kept &= block.columns[_COUNTS] >= choice.min_count
        yield block.ids[is_kept], block.rows[is_kept]


def unseen_row(spec: TableSpec, choice: RowChoice) -> NDArray[np.float32]:
    """Returns the row `(dim,)` of an id without one. Tables with an entry read zeros, as in training."""
    is_zero = choice.unseen == ZEROS or spec.entry is not None
    return np.full(spec.dim, 0.0 if is_zero else mean_of(spec.initializer), np.float32)


def quantised(rows: NDArray[np.float32], dtype: str) -> Quantised:
    """Returns rows `(n, dim)` in the type of an export."""
    if dtype != "int8":
        return Quantised(rows.astype(DTYPES[dtype]), None)
    largest = np.abs(rows).max(axis=1) if rows.shape[1] else np.zeros(len(rows), np.float32)
    scales = (largest / np.float32(_MAX_INT8)).astype(np.float32)
    scales[scales == 0] = 1
    return Quantised(np.rint(rows / scales[:, None]).astype(np.int8), scales)


def stored_rows(table: str, ids: NDArray[np.int64], rows: NDArray[np.float32], dtype: str) -> Quantised:
    """Returns the rows `(n, dim)` of a table in the type of an export.

    Args:
        table: Name of the table.
        ids: Ids of the first rows; rows after them belong to no id.
        rows: The rows.
        dtype: A key of `DTYPES`.

    Raises:
        PlanError: A row is not finite in a type other than float32: float16 ends at 65504.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        stored = quantised(rows, dtype)
    if dtype != "float32":
        is_finite = np.isfinite(rows if dtype == "int8" else stored.rows)
        if not is_finite.all():
            first = int(np.argmin(is_finite.all(axis=1)))
            whose = f"id {ids[first]}" if first < len(ids) else "unseen ids"
            value = rows[first, np.argmin(is_finite[first])]
            raise PlanError(
                f"table {table!r}: the row of {whose} has {value:g}, which {dtype} cannot store. Write --dtype float32"
            )
    return stored


def user_tables(content: SnapshotReader) -> list[str]:
    """Returns the names of the tables that users declare: all but the counters of entries."""
    return [name for name, table in content.tables.items() if table.spec.counts_for is None]
