"""PrefetchQueue: the batches that `look_ahead` announced and that no step has run yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.transpiler.plan import RewritePlan
from fleet_sparse.worker.rows.deduplicator import UniqueIds
from fleet_sparse.worker.rows.early_rows import EarlyRows


class ExpectedBatch(NamedTuple):
    """A batch of a later step, as far as its ids are known from the feed."""

    ids: Mapping[int, NDArray[Any]]
    """Ids of each lookup by its index in the plan, flat, never written to."""
    tables: Mapping[int, tuple[UniqueIds, list[NDArray[np.int64]]]]
    """By index of the table in the plan: its distinct ids, and the row index of each id of each of its lookups."""
    rows: EarlyRows

    def is_of(self, inputs: Sequence[NDArray[Any]]) -> bool:
        """Returns whether the batch has these ids; `inputs` has one array per lookup."""
        return all(np.array_equal(ids, inputs[site].reshape(-1)) for site, ids in self.ids.items())


class PrefetchQueue:
    """For each plan the next batch and the one after it."""

    def __init__(self) -> None:
        # By id() of the plan. The plan is kept as well, so that no other object gets its id().
        self._of_plan: dict[int, tuple[RewritePlan, deque[ExpectedBatch]]] = {}

    def expect(self, plan: RewritePlan, batch: ExpectedBatch) -> None:
        """Appends a batch."""
        _, batches = self._of_plan.setdefault(id(plan), (plan, deque(maxlen=2)))
        batches.append(batch)

    def take(
        self, plan: RewritePlan, inputs: Sequence[NDArray[Any]]
    ) -> tuple[ExpectedBatch | None, ExpectedBatch | None]:
        """The expected batch with these ids and the batch after it; None for what is not expected.

        Removes that batch and those before it. Ids that were not expected change nothing.
        """
        of_plan = self._of_plan.get(id(plan))
        if of_plan is None:
            return None, None
        batches = of_plan[1]
        for number, batch in enumerate(batches):
            if batch.is_of(inputs):
                for _ in range(number + 1):
                    batches.popleft()
                return batch, batches[0] if batches else None
        return None, None
