"""StepGradients: the gradients of rows since they were last cleared, and their sum for each table."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.worker.rows.deduplicator import Deduplicator, TableLookups, UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch


class RowGradient(NamedTuple):
    """The gradient of rows of one table, which backward passes computed."""

    table: str
    unique: UniqueIds
    """The k distinct ids."""
    grads: NDArray[np.float32]
    """`(k, dim)`."""
    statistics: Sequence[NDArray[Any]]
    """`(k,)` for each of the statistics of the table."""
    num_examples: frozenset[int]
    """Numbers of examples of the lookups."""


class StepGradients:
    """Collects gradients of rows in the order of the backward passes. Thread-safe.

    As those of Paddle's parameters, they stay after a step, and are part of the next one, until they are cleared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gradients: list[RowGradient] = []
        self._num_pushed = 0  # the first ones: those that were part of a step

    def add(self, gradient: RowGradient) -> None:
        """Adds the gradient of one lookup."""
        with self._lock:
            self._gradients.append(gradient)

    @property
    def has_pushed(self) -> bool:
        """True if some of the gradients were part of a step."""
        return self._num_pushed > 0

    def of_step(self) -> list[RowGradient]:
        """Returns all gradients. The examples of those that were part of a step are not counted again."""
        with self._lock:
            return [*map(_uncounted, self._gradients[: self._num_pushed]), *self._gradients[self._num_pushed :]]

    def note_pushed(self, gradients: list[RowGradient]) -> None:
        """Notes that a step is done; its gradients, or sums of them, take the place of those that it had."""
        with self._lock:
            self._gradients, self._num_pushed = gradients, len(gradients)

    def clear(self, tables: Container[str] | None = None) -> None:
        """Drops the gradients of these tables; None for all."""
        with self._lock:
            stay = [tables is not None and each.table not in tables for each in self._gradients]
            self._num_pushed = sum(stay[: self._num_pushed])
            self._gradients = [each for each, stays in zip(self._gradients, stay, strict=True) if stays]


def summed(
    deduplicator: Deduplicator, lookups: TableLookups, spec: TableSpec, gradients: Sequence[RowGradient]
) -> RowBatch:
    """Returns the sum of the gradients of one table, without a learning rate; no row if there are none."""
    if len(gradients) == 1:
        return RowBatch(spec, gradients[0].unique, gradients[0].grads, statistics=gradients[0].statistics)
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


def _uncounted(gradient: RowGradient) -> RowGradient:
    """Returns a gradient whose ids count for no example: an entry policy counted them already."""
    return gradient._replace(statistics=[np.zeros_like(each) for each in gradient.statistics])
