"""Expectations: the batches that a loader has announced and that no step has taken yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.transpiler.plan import Plan
from fleet_sparse.worker.batch import UniqueIds
from fleet_sparse.worker.look_ahead import RowsAhead


class ExpectedBatch(NamedTuple):
    """A batch that is to come, as far as its ids are known from the feed."""

    ids: dict[int, NDArray[Any]]
    """By site, flat."""
    tables: dict[int, tuple[UniqueIds, list[NDArray[np.int64]]]]
    """By number of the table in the plan: its distinct ids, and the rows of the ids of each of its sites."""
    rows: RowsAhead

    def is_of(self, inputs: Sequence[NDArray[Any]]) -> bool:
        """Whether these are the ids that came, one array a site."""
        return all(np.array_equal(ids, inputs[site].reshape(-1)) for site, ids in self.ids.items())


class Expectations:
    """The batches that are to come, of each plan, in order: the next one, and the one after it."""

    def __init__(self) -> None:
        self._of_plan: dict[int, deque[ExpectedBatch]] = {}

    def expect(self, plan: Plan, batch: ExpectedBatch) -> None:
        """Another batch is to come after those that are known."""
        self._of_plan.setdefault(id(plan), deque(maxlen=2)).append(batch)

    def take(self, plan: Plan, inputs: Sequence[NDArray[Any]]) -> tuple[ExpectedBatch | None, ExpectedBatch | None]:
        """The batch that came, if it was expected, and the one that is to come after it, if it is known."""
        expected = self._of_plan.get(id(plan))
        while expected:
            batch = expected.popleft()
            if batch.is_of(inputs):
                return batch, expected[0] if expected else None
        return None, None
