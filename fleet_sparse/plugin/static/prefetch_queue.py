"""PrefetchQueue: the batches that a loader has announced and that no step has taken yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.transpiler.plan import Plan
from fleet_sparse.worker.rows.deduplicator import UniqueIds
from fleet_sparse.worker.rows.early_rows import EarlyRows


class ExpectedBatch(NamedTuple):
    """A batch that is to come, as far as its ids are known from the feed."""

    ids: Mapping[int, NDArray[Any]]
    """By site, flat; nobody writes to them."""
    tables: Mapping[int, tuple[UniqueIds, list[NDArray[np.int64]]]]
    """By number of the table in the plan: its distinct ids, and the rows of the ids of each of its sites."""
    rows: EarlyRows

    def is_of(self, inputs: Sequence[NDArray[Any]]) -> bool:
        """Whether these are the ids that came, one array a site."""
        return all(np.array_equal(ids, inputs[site].reshape(-1)) for site, ids in self.ids.items())


class PrefetchQueue:
    """The batches that are to come, of each plan, in order: the next one, and the one after it."""

    def __init__(self) -> None:
        # By id of the plan, which is kept with them: no other can get its id.
        self._of_plan: dict[int, tuple[Plan, deque[ExpectedBatch]]] = {}

    def expect(self, plan: Plan, batch: ExpectedBatch) -> None:
        """Another batch is to come after those that are known."""
        _, batches = self._of_plan.setdefault(id(plan), (plan, deque(maxlen=2)))
        batches.append(batch)

    def take(self, plan: Plan, inputs: Sequence[NDArray[Any]]) -> tuple[ExpectedBatch | None, ExpectedBatch | None]:
        """The batch that came, if it was expected, and the one that is to come after it, if it is known.

        The batches before it are expected no more. One that was not expected leaves all as they are.
        """
        _, batches = self._of_plan.get(id(plan), (plan, deque[ExpectedBatch]()))
        for number, batch in enumerate(batches):
            if batch.is_of(inputs):
                for _ in range(number + 1):
                    batches.popleft()
                return batch, batches[0] if batches else None
        return None, None
