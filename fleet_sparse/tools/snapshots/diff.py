"""Diff: what two snapshots say differently, whatever the numbers of their shards."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.snapshot.reader import DenseContent, SnapshotReader, TableContent
from fleet_sparse.snapshot.row_merge import part_of, side_by_side
from fleet_sparse.snapshot.rows import Rows

MAX_EXAMPLES = 5


class Differences(NamedTuple):
    """Of float arrays that should be equal."""

    num_different: int = 0
    """Rows, or values of a dense array."""
    largest: float = 0.0
    """Absolute; infinite where one of two floats is not finite."""

    def joined(self, other: Differences) -> Differences:
        """Of these arrays and others."""
        return Differences(self.num_different + other.num_different, max(self.largest, other.largest))


class TableDiff(NamedTuple):
    """What is different in a table that both have."""

    name: str
    description: tuple[str, ...]
    """What else than rows, as `dim 8 and 16`, the first one's value first."""
    num_rows: tuple[int, int]
    num_only: tuple[int, int]
    """Ids that only the first has, and only the second."""
    only: tuple[tuple[int, ...], tuple[int, ...]]
    """Some of them."""
    rows: Differences
    states: Differences
    num_different_days: int
    """Rows whose last push was on another day."""
    different: tuple[int, ...]
    """Some ids whose row, states or day differ."""
    is_compared: bool
    """Whether the ids of both were compared by row and states, or their shapes differ."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing is."""
        return not (self.description or any(self.num_only) or self.different)


class DenseDiff(NamedTuple):
    """What is different in a dense array that both have."""

    name: str
    description: tuple[str, ...]
    """What else than values."""
    num_values: tuple[int, int]
    values: Differences
    states: Differences
    is_compared: bool
    """Whether values and states were, or their shapes differ, or one is not assigned."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing is."""
        return not (self.description or self.values.num_different or self.states.num_different)


class Diff(NamedTuple):
    """Of two snapshots."""

    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of tables and dense arrays that only the first has, and only the second."""
    tables: tuple[TableDiff, ...]
    dense: tuple[DenseDiff, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both say the same."""
        return not any(self.only) and all(t.is_equal for t in self.tables) and all(d.is_equal for d in self.dense)


def diff(first: SnapshotReader, second: SnapshotReader, *, tolerance: float = 0.0) -> Diff:
    """Compares all tables and dense arrays; not who saved them, when, and which pushes they contain.

    Args:
        first: One.
        second: The other.
        tolerance: Two floats are equal if they differ by no more; with 0 if all their bits are the same.

    Raises:
        SnapshotCorrupt: Bytes of one are wrong.
        SnapshotError: A file cannot be read.
    """
    names = [[*content.tables, *content.dense] for content in (first, second)]
    only = tuple(tuple(name for name in mine if name not in its) for mine, its in (names, names[::-1]))
    tables = [_table(first, second, name, tolerance) for name in first.tables if name in second.tables]
    dense = [_dense(first, second, name, tolerance) for name in first.dense if name in second.dense]
    return Diff((only[0], only[1]), tuple(tables), tuple(dense))


def _table(first: SnapshotReader, second: SnapshotReader, name: str, tolerance: float) -> TableDiff:
    one, other = first.tables[name], second.tables[name]
    comparison = _Comparison(tolerance, is_compared=_shape(one) == _shape(other))
    for pair in side_by_side(first.rows(name), second.rows(name), one.spec.salt):
        comparison.add(*pair)
    return TableDiff(
        name,
        (*_description(one, other), *_pair("days", one.days, other.days)),
        (comparison.num_rows[0], comparison.num_rows[1]),
        (comparison.num_only[0], comparison.num_only[1]),
        (tuple(comparison.only[0]), tuple(comparison.only[1])),
        comparison.rows,
        comparison.states,
        comparison.num_different_days,
        tuple(comparison.different),
        comparison.is_compared,
    )


class _Comparison:
    """Of the rows of a table."""

    def __init__(self, tolerance: float, *, is_compared: bool) -> None:
        self.num_rows = [0, 0]
        self.num_only = [0, 0]
        self.only: tuple[list[int], list[int]] = ([], [])
        self.rows = Differences()
        self.states = Differences()
        self.num_different_days = 0
        self.different: list[int] = []
        self.is_compared = is_compared
        self._tolerance = tolerance

    def add(self, first: Rows | None, second: Rows | None) -> None:
        """Goes on with the rows of the next hashes, the same of both."""
        ids = [np.empty(0, np.int64) if side is None else side.ids for side in (first, second)]
        common, *places = np.intersect1d(ids[0], ids[1], assume_unique=True, return_indices=True)
        for side in (0, 1):
            alone = np.delete(ids[side], places[side])
            self.num_rows[side] += len(ids[side])
            self.num_only[side] += len(alone)
            _note(self.only[side], alone)
        if self.is_compared and len(common) and first is not None and second is not None:
            self._compare(part_of(first, places[0]), part_of(second, places[1]))

    def _compare(self, first: Rows, second: Rows) -> None:
        in_rows, rows = _compared(first.rows, second.rows, self._tolerance)
        in_states, states = _compared(first.states, second.states, self._tolerance)
        self.rows, self.states = self.rows.joined(rows), self.states.joined(states)
        in_days = _days(first) != _days(second)
        self.num_different_days += int(in_days.sum())
        _note(self.different, first.ids[in_rows | in_states | in_days])


def _note(examples: list[int], ids: NDArray[np.int64]) -> None:
    examples += ids[: MAX_EXAMPLES - len(examples)].tolist()


def _days(rows: Rows) -> NDArray[np.uint16]:
    return np.zeros(len(rows.ids), np.uint16) if rows.last_days is None else rows.last_days


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
    # Rules of which one only reads may meet in a job; what was saved with them is not the same.
    rules = _pair("rule", one.spec.rule, other.spec.rule)
    return (*(one.spec.differences(other.spec) or rules), *steps)


def _pair(what: str, mine: object, its: object) -> tuple[str, ...]:
    return () if mine == its else (f"{what} {mine} and {its}",)


def _shape(content: TableContent | DenseContent) -> tuple[int, int]:
    size = content.spec.num_values if isinstance(content, DenseContent) else content.spec.dim
    return size, content.spec.update_rule.num_states


def _compared(
    first: NDArray[np.float32], second: NDArray[np.float32], tolerance: float
) -> tuple[NDArray[np.bool_], Differences]:
    """Which of `(n, ...)` differ, `(n,)`, and by how much."""
    differs = first.view(np.uint32) != second.view(np.uint32)
    places = np.nonzero(differs)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        distances = np.abs(first[places].astype(np.float64) - second[places])
    distances[~np.isfinite(distances)] = math.inf
    is_far = distances > tolerance if tolerance else np.ones(len(distances), np.bool_)
    which = np.zeros(len(first), np.bool_)
    which[places[0][is_far]] = True
    return which, Differences(int(which.sum()), float(distances.max(initial=0.0)))
