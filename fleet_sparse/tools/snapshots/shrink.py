"""Removes rows from a snapshot by criteria, and reports which rows go and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.criteria import NUM_EXAMPLES, Criterion, Judged, Removal, has_scores, selected_by
from fleet_sparse.snapshot.manifest import WorkerPosition
from fleet_sparse.snapshot.reader import DenseContent, SnapshotReader, TableContent
from fleet_sparse.snapshot.rows import Rows


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
                Removal(name, str(criterion), int(count), tuple(ids))
                for criterion, count, ids in zip(self._criteria, counts, examples, strict=True)
            ]
        return found

    def unscored(self) -> list[str]:
        """Returns the names of the tables that shrink and whose rows have no scores."""
        return [name for name, table in self.tables.items() if name in self._shrinks and not has_scores(table.spec)]

    def _selected_by(self, table: str, rows: Rows) -> NDArray[np.int64]:
        """Returns the number of the first criterion that selects each row, `(n,)`; -1 if the row stays."""
        if table not in self._shrinks:
            return np.full(len(rows.ids), -1, np.int64)
        content = self.tables[table]
        return selected_by(self._criteria, Judged(content.spec, content.num_days, rows.rows, rows.columns))
