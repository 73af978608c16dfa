"""Removes rows from a snapshot by criteria, and reports which rows go and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import LAST_UPDATE_DAY
from fleet_sparse.core.entries import CLICK, COUNTS, ENTRIES, SHOW
from fleet_sparse.snapshot.manifest import WorkerPosition
from fleet_sparse.snapshot.reader import DenseContent, SnapshotReader, TableContent
from fleet_sparse.snapshot.rows import Rows

NUM_EXAMPLES = 5
"""Largest number of removed ids that a report names for each table and criterion."""


class Criterion(NamedTuple):
    """Which rows go."""

    name: str
    """As a report says it: `unseen for more than 30 days`."""
    selects: Callable[[Rows, TableContent], NDArray[np.bool_]]
    """Function from rows and their table to whether each row goes, `(n,)`."""


def unseen_for(max_days: int) -> Criterion:
    """Rows for which more than `max_days` days have ended since their last push."""

    def selects(rows: Rows, table: TableContent) -> NDArray[np.bool_]:
        days = rows.columns.get(LAST_UPDATE_DAY.name)
        last = np.zeros(len(rows.ids), np.int64) if days is None else days.astype(np.int64)
        goes: NDArray[np.bool_] = table.num_days - last > max_days
        return goes

    return Criterion(f"unseen for more than {max_days} days", selects)


def smaller_than(norm: float) -> Criterion:
    """Rows whose L2 norm is below `norm`."""

    def selects(rows: Rows, table: TableContent) -> NDArray[np.bool_]:
        goes: NDArray[np.bool_] = np.linalg.norm(rows.rows.astype(np.float64), axis=1) < norm
        return goes

    return Criterion(f"norm below {norm:g}", selects)


def scored_below(score: float) -> Criterion:
    """Rows whose score is below `score`: shows and clicks, weighed as the table's entry policy does, or else counts.

    Rows of a table without these columns stay.
    """

    def selects(rows: Rows, table: TableContent) -> NDArray[np.bool_]:
        columns, settings = rows.columns, dict(table.spec.entry.settings) if table.spec.entry is not None else {}
        if SHOW in columns and CLICK in columns:
            weights = dict(ENTRIES["show_click"].defaults) | settings
            show, click = columns[SHOW].astype(np.float64), columns[CLICK].astype(np.float64)
            found = weights["nonclick_coeff"] * (show - click) + weights["click_coeff"] * click
        elif COUNTS in columns:
            found = columns[COUNTS].astype(np.float64)
        else:
            return np.zeros(len(rows.ids), np.bool_)
        goes: NDArray[np.bool_] = found < score
        return goes

    return Criterion(f"score below {score:g}", selects)


class Removal(NamedTuple):
    """The rows of one table that one criterion removes. A row counts for the first criterion that selects it."""

    table: str
    criterion: str
    num_removed: int
    examples: tuple[int, ...]
    """Some of their ids, in the order of their hash."""


class Shrunk:
    """A snapshot without the rows that go; a `Readable`, to be written by `write_full`.

    Args:
        content: The snapshot.
        criteria: A row goes if one of them selects it.
        tables: Names of the tables that shrink; empty for all. Counters never shrink.

    Raises:
        SnapshotError: There is no such table.
    """

    def __init__(self, content: SnapshotReader, criteria: Sequence[Criterion], tables: Collection[str] = ()) -> None:
        self._content = content
        self._criteria = criteria
        for name in tables:
            content.table(name)
        self._shrinks = {
            name
            for name, table in content.tables.items()
            if table.spec.counts_for is None and (not tables or name in tables)
        }

    @property
    def tables(self) -> Mapping[str, TableContent]:
        """As `Readable.tables`."""
        return self._content.tables

    @property
    def dense(self) -> Mapping[str, DenseContent]:
        """As `Readable.dense`."""
        return self._content.dense

    @property
    def workers(self) -> tuple[WorkerPosition, ...]:
        """As `Readable.workers`."""
        return self._content.workers

    @property
    def is_complete(self) -> bool:
        """As `Readable.is_complete`."""
        return self._content.is_complete

    def rows(self, table: str, owned: NDArray[np.bool_] | None = None) -> Iterator[Rows]:
        """As `Readable.rows`."""
        for rows in self._content.rows(table, owned):
            stays = self._selected_by(table, rows) < 0
            if stays.any():
                yield rows if stays.all() else rows.part(stays)

    def dense_values(
        self, name: str, begin: int = 0, end: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """As `Readable.dense_values`."""
        return self._content.dense_values(name, begin, end)

    def removals(self) -> list[Removal]:
        """Reads all rows of the tables that shrink; returns what each criterion removes of each."""
        found = []
        for name in self.tables:
            if name not in self._shrinks:
                continue
            counts = np.zeros(len(self._criteria), np.int64)
            examples: list[list[int]] = [[] for _ in self._criteria]
            for rows in self._content.rows(name):
                number = self._selected_by(name, rows)
                for index, ids in enumerate(examples):
                    goes = number == index
                    counts[index] += int(goes.sum())
                    ids.extend(rows.ids[goes][: NUM_EXAMPLES - len(ids)].tolist())
            found += [
                Removal(name, criterion.name, int(count), tuple(ids))
                for criterion, count, ids in zip(self._criteria, counts, examples, strict=True)
            ]
        return found

    def _selected_by(self, table: str, rows: Rows) -> NDArray[np.int64]:
        """Returns the number of the first criterion that selects each row, `(n,)`; -1 if the row stays."""
        number = np.full(len(rows.ids), -1, np.int64)
        if table in self._shrinks:
            for index, criterion in reversed(list(enumerate(self._criteria))):
                number[criterion.selects(rows, self.tables[table])] = index
        return number
