"""StepGradients: the gradients of rows between two steps of the optimizer, and their sum for each table."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.worker.rows.deduplicator import Deduplicator, TableLookups, UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch


class RowGradient(NamedTuple):
    """What the backward pass of one lookup computed."""

    table: str
    unique: UniqueIds
    """The k distinct ids of the lookup."""
    grads: NDArray[np.float32]
    """`(k, dim)`."""
    statistics: Sequence[NDArray[Any]]
    """`(k,)` for each of the statistics of the table."""
    num_examples: int
    """First dimension of the ids."""


class StepGradients:
    """Collects gradients of rows in the order of the backward passes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gradients: list[RowGradient] = []

    def add(self, gradient: RowGradient) -> None:
        """Adds the gradient of one lookup."""
        with self._lock:
            self._gradients.append(gradient)

    def take(self) -> list[RowGradient]:
        """Returns and forgets all gradients since the last call."""
        with self._lock:
            taken, self._gradients = self._gradients, []
        return taken


def summed(
    deduplicator: Deduplicator, lookups: TableLookups, spec: TableSpec, gradients: Sequence[RowGradient]
) -> RowBatch:
    """Returns the sum of the gradients of one table, without a learning rate; no row if there are none."""
    if len(gradients) == 1:
        unique, grads, statistics = gradients[0][1:4]
        return RowBatch(spec, unique, grads, statistics=statistics)
    ids = [each.unique.ids for each in gradients] or [np.empty(0, np.int64)]
    places = [np.empty(each.shape, np.int64) for each in ids]
    lookups = lookups._replace(paddings=(None,) * len(ids), size=None)  # padding has no row, bounds were checked
    unique = deduplicator.place(lookups, ids, places)
    total = np.zeros((len(unique.ids), spec.dim), np.float32)
    counts = [np.zeros(len(unique.ids), each.dtype) for each in gradients[0].statistics] if gradients else []
    for each, place in zip(gradients, places, strict=False):  # none of them: the place of no id
        total[place] += each.grads  # the ids of one lookup are distinct
        for count, statistic in zip(counts, each.statistics, strict=True):
            count[place] += statistic
    return RowBatch(spec, unique, total, statistics=counts)
