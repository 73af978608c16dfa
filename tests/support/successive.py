"""Lookups of a worker without Paddle that looks ahead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.worker.rows.deduplicator import BatchSequence, Deduplicator, SuccessiveIds, TableLookups, UniqueIds
from fleet_sparse.worker.rows.early_rows import EarlyRows, SuccessiveBatch
from fleet_sparse.worker.rows.row_batch import RowBatch

Batch = Mapping[str, Sequence[int]]
"""Ids by name of a table."""


class Lookup(NamedTuple):
    """A lookup on one table."""

    rows: RowBatch
    inverse: NDArray[np.int64]
    """Index of each id of the batch in `rows`."""


class _Known(NamedTuple):
    values: tuple[int, ...]
    ids: SuccessiveIds
    inverse: NDArray[np.int64]


class SuccessiveLookups:
    """Finds the distinct ids of batches, and those that an announced batch has in common with the one before it."""

    def __init__(self, deduplicator: Deduplicator, specs: Iterable[TableSpec]) -> None:
        self._deduplicator = deduplicator
        self._specs = {spec.name: spec for spec in specs}
        self._sequences: dict[str, BatchSequence] = {}
        self._known: dict[str, list[_Known]] = {}  # the last two of each sequence

    def announce(self, batch: Batch, before: Batch, names: Iterable[str] | None = None) -> EarlyRows:
        """A batch, of which the ids of these tables are known, and the batch that is run before it."""
        lookups = []
        for name in batch if names is None else names:
            known = self._known.setdefault(name, [])
            if not known or known[-1].values != tuple(before.get(name, ())):
                self._place(name, before.get(name, ()))
            ids = self._place(name, batch[name])
            lookups.append(SuccessiveBatch(RowBatch.empty(self._specs[name], ids.unique), ids))
        return EarlyRows(lookups)

    def of(self, batch: Batch, early: EarlyRows | None = None) -> dict[str, Lookup]:
        """Lookups of a batch; those of `early` on its tables."""
        lookups = {}
        for name, values in batch.items():
            rows = None if early is None else early.batches.get(name)
            if rows is not None:
                (inverse,) = (known.inverse for known in self._known[name] if known.ids.unique is rows.unique)
            else:
                unique, inverse = self._unique(name, values)
                rows = RowBatch.empty(self._specs[name], unique)
                rows.values[:] = np.nan
            lookups[name] = Lookup(rows, inverse)
        return lookups

    def _unique(self, name: str, values: Sequence[int]) -> tuple[UniqueIds, NDArray[np.int64]]:
        for known in self._known.get(name, []):  # the batch before an announced one with the same ids comes first
            if known.values == tuple(values):
                return known.ids.unique, known.inverse
        unique, (inverse,) = self._deduplicator.unique([np.array(values, np.int64)], self._specs[name].salt)
        return unique, inverse

    def _place(self, name: str, values: Sequence[int]) -> SuccessiveIds:
        if name not in self._sequences:
            self._sequences[name] = self._deduplicator.sequence(TableLookups(name, np.uint64(self._specs[name].salt)))
        inverse = np.empty(len(values), np.int64)
        ids = self._sequences[name].place([np.array(values, np.int64)], [inverse])
        self._known[name] = [*self._known[name][-1:], _Known(tuple(values), ids, inverse)]
        return ids
