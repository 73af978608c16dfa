"""PrefetchQueue: the batches that `look_ahead` announced and that no step has run yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.transpiler.plan import RewritePlan
from fleet_sparse.transpiler.raw_op import Reserved
from fleet_sparse.worker.rows.deduplicator import SuccessiveIds
from fleet_sparse.worker.rows.early_rows import EarlyRows


class ExpectedTable(NamedTuple):
    """The lookups of an expected batch on one table."""

    ids: SuccessiveIds
    positions: list[NDArray[np.int64]]
    """Row index of each id of each lookup, flat."""


@dataclass(slots=True, eq=False)
class ExpectedBatch:
    """A batch of a later step, as far as its ids are known from the feed.

    Attributes:
        ids: Ids of each lookup by its index in the plan, flat, never written to.
        tables: Its lookups by index of the table in the plan.
        rows: Its rows, once the step before it runs.
        memory: By index of the table, memory of the rows, once the step before it runs.
    """

    ids: Mapping[int, NDArray[Any]]
    tables: Mapping[int, ExpectedTable]
    rows: EarlyRows | None = None
    memory: dict[int, Reserved] = field(default_factory=dict)

    def is_of(self, inputs: Sequence[NDArray[Any]]) -> bool:
        """Returns whether the batch has these ids; `inputs` has one array per lookup."""
        return all(np.array_equal(ids, inputs[site].reshape(-1)) for site, ids in self.ids.items())


class PrefetchQueue:
    """The next batch of each plan, and the one after it."""

    def __init__(self) -> None:
        # The key is id() of the plan. The plan is stored as well, so that no other object gets its id().
        self._of_plan: dict[int, tuple[RewritePlan, deque[ExpectedBatch]]] = {}

    def expect(self, plan: RewritePlan, batch: ExpectedBatch) -> None:
        """Appends a batch."""
        _, batches = self._of_plan.setdefault(id(plan), (plan, deque(maxlen=2)))
        batches.append(batch)

    def forget(self, plan: RewritePlan, batches: Collection[ExpectedBatch]) -> None:
        """Removes these batches, as far as they are still expected."""
        of_plan = self._of_plan.get(id(plan))
        if of_plan is not None:
            for batch in batches:
                with suppress(ValueError):
                    of_plan[1].remove(batch)

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
