"""Compares two snapshots, whatever the numbers of their shards."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import ROWS, STATES
from fleet_sparse.snapshot.reader import DenseContent, SnapshotReader, TableContent
from fleet_sparse.snapshot.row_merge import side_by_side
from fleet_sparse.snapshot.rows import Rows

MAX_EXAMPLES = 5


class Differences(NamedTuple):
    """Differences of two arrays that should be equal."""

    num_different: int = 0
    """Number of different rows, or values of a dense array."""
    largest: float = 0.0
    """Largest absolute difference; infinite if one of two values is not finite."""

    def joined(self, other: Differences) -> Differences:
        """Adds the differences of other arrays."""
        return Differences(self.num_different + other.num_different, max(self.largest, other.largest))


class TableDiff(NamedTuple):
    """Differences of a table that is in both."""

    name: str
    description: tuple[str, ...]
    """Differences other than rows, as `dim 8 and 16`, the value of the first snapshot first."""
    num_rows: tuple[int, int]
    num_only: tuple[int, int]
    """Number of ids that are only in the first snapshot, and only in the second."""
    only: tuple[tuple[int, ...], tuple[int, ...]]
    """Examples of them."""
    columns: dict[str, Differences]
    """Differences by name of the columns that both have with one layout; names of others are in `description`."""
    different: tuple[int, ...]
    """Examples of ids of which a column differs."""
    is_compared: bool
    """True if rows and states were compared; False if their shapes differ."""

    @property
    def is_equal(self) -> bool:
        """True if there is no difference."""
        return not (self.description or any(self.num_only) or self.different)


class DenseDiff(NamedTuple):
    """Differences of a dense array that is in both."""

    name: str
    description: tuple[str, ...]
    """Differences other than values."""
    num_values: tuple[int, int]
    values: Differences
    states: Differences
    is_compared: bool
    """True if values and states were compared; False if their shapes differ or one is not assigned."""

    @property
    def is_equal(self) -> bool:
        """True if there is no difference."""
        return not (self.description or self.values.num_different or self.states.num_different)


class Diff(NamedTuple):
    """Differences of two snapshots."""

    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of tables and dense arrays that are only in the first snapshot, and only in the second."""
    tables: tuple[TableDiff, ...]
    dense: tuple[DenseDiff, ...]

    @property
    def is_equal(self) -> bool:
        """True if both have the same content."""
        return not any(self.only) and all(t.is_equal for t in self.tables) and all(d.is_equal for d in self.dense)


def diff(first: SnapshotReader, second: SnapshotReader, *, tolerance: float = 0.0) -> Diff:
    """Compares all tables and dense arrays, but not who saved them, when, and which pushes they contain.

    Args:
        first: The first snapshot.
        second: The second snapshot.
        tolerance: Two floats are equal if they differ by at most this; with 0, if all their bits are equal.

    Raises:
        SnapshotCorrupt: Bytes of a file are wrong.
        SnapshotError: A file cannot be read.
    """
    names = [[*content.tables, *content.dense] for content in (first, second)]
    only = tuple(tuple(name for name in mine if name not in its) for mine, its in (names, names[::-1]))
    tables = [_table(first, second, name, tolerance) for name in first.tables if name in second.tables]
    dense = [_dense(first, second, name, tolerance) for name in first.dense if name in second.dense]
    return Diff((only[0], only[1]), tuple(tables), tuple(dense))


def _table(first: SnapshotReader, second: SnapshotReader, name: str, tolerance: float) -> TableDiff:
    one, other = first.tables[name], second.tables[name]
    layouts = [{column.name: column.layout for column in content.columns} for content in (one, other)]
    common = [column for column in layouts[0] if layouts[1].get(column) == layouts[0][column]]
    comparison = _Comparison(tolerance, common)
    for pair in side_by_side(first.rows(name), second.rows(name), one.spec.salt):
        comparison.add(*pair)
    different_columns = sorted({*layouts[0], *layouts[1]} - {*common, ROWS, STATES})
    return TableDiff(
        name,
        (
            *_description(one, other),
            *_pair("num_days", one.num_days, other.num_days),
            *(
                f"column {each} {_layout(layouts[0], each)} and {_layout(layouts[1], each)}"
                for each in different_columns
            ),
        ),
        (comparison.num_rows[0], comparison.num_rows[1]),
        (comparison.num_only[0], comparison.num_only[1]),
        (tuple(comparison.only[0]), tuple(comparison.only[1])),
        comparison.columns,
        tuple(comparison.different),
        {ROWS, STATES} <= set(common),
    )


def _layout(layouts: dict[str, tuple[str, str, tuple[int, ...]]], name: str) -> str:
    return f"{layouts[name][1]} {layouts[name][2]}" if name in layouts else "missing"


class _Comparison:
    """Comparison of the rows of a table by some columns."""

    def __init__(self, tolerance: float, columns: list[str]) -> None:
        self.num_rows = [0, 0]
        self.num_only = [0, 0]
        self.only: tuple[list[int], list[int]] = ([], [])
        self.columns = {name: Differences() for name in columns}
        self.different: list[int] = []
        self._tolerance = tolerance

    def add(self, first: Rows | None, second: Rows | None) -> None:
        """Compares the rows with the next hashes, the same in both."""
        ids = [np.empty(0, np.int64) if side is None else side.ids for side in (first, second)]
        common, *places = np.intersect1d(ids[0], ids[1], assume_unique=True, return_indices=True)
        for side in (0, 1):
            alone = np.delete(ids[side], places[side])
            self.num_rows[side] += len(ids[side])
            self.num_only[side] += len(alone)
            _add_examples(self.only[side], alone)
        if len(common) and first is not None and second is not None:
            self._compare(first.part(places[0]), second.part(places[1]))

    def _compare(self, first: Rows, second: Rows) -> None:
        differs = np.zeros(len(first.ids), np.bool_)
        for name, before in self.columns.items():
            in_column, found = _compared(first.columns[name], second.columns[name], self._tolerance)
            self.columns[name] = before.joined(found)
            differs |= in_column
        _add_examples(self.different, first.ids[differs])


def _add_examples(examples: list[int], ids: NDArray[np.int64]) -> None:
    examples += ids[: MAX_EXAMPLES - len(examples)].tolist()


def _dense(first: SnapshotReader, second: SnapshotReader, name: str, tolerance: float) -> DenseDiff:
    one, other = first.dense[name], second.dense[name]
    description = (*_description(one, other), *_pair("assigned", one.assigned, other.assigned))
    num_values = (one.spec.num_values, other.spec.num_values)
    is_compared = one.assigned and other.assigned and _shape(one) == _shape(other)
    if not is_compared:
        return DenseDiff(name, description, num_values, Differences(), Differences(), is_compared)
    (values, states), (its_values, its_states) = first.dense_values(name), second.dense_values(name)
    _, in_values = _compared(values, its_values, tolerance)
    _, in_states = _compared(states.T, its_states.T, tolerance)
    return DenseDiff(name, description, num_values, in_values, in_states, is_compared)


def _description(one: TableContent | DenseContent, other: TableContent | DenseContent) -> tuple[str, ...]:
    steps = _pair("optimizer step", one.optimizer_step, other.optimizer_step)
    # `differences` leaves out the rule if one of the two only reads.
    rules = _pair("rule", one.spec.rule, other.spec.rule)
    return (*(one.spec.differences(other.spec) or rules), *steps)


def _pair(what: str, mine: object, its: object) -> tuple[str, ...]:
    return () if mine == its else (f"{what} {mine} and {its}",)


def _shape(content: TableContent | DenseContent) -> tuple[int, int]:
    size = content.spec.num_values if isinstance(content, DenseContent) else content.spec.dim
    return size, content.spec.update_rule.num_states


def _compared(first: NDArray[Any], second: NDArray[Any], tolerance: float) -> tuple[NDArray[np.bool_], Differences]:
    """Returns which elements of `(n, ...)` differ, `(n,)`, and by how much."""
    bits = np.dtype(f"u{first.dtype.itemsize}")
    places = np.nonzero(np.ascontiguousarray(first).view(bits) != np.ascontiguousarray(second).view(bits))
    with np.errstate(invalid="ignore"):  # infinity less infinity
        distances = np.abs(first[places].astype(np.float64) - second[places])
    distances[~np.isfinite(distances)] = math.inf
    # Only floats have rounding errors.
    is_far = distances > tolerance if tolerance and first.dtype.kind == "f" else np.ones(len(distances), np.bool_)
    which = np.zeros(len(first), np.bool_)
    which[places[0][is_far]] = True
    return which, Differences(int(which.sum()), float(distances.max(initial=0.0)))
