"""Jobs whose rows count the updates that they have: workers that read and update in steps, or at their own speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .cached_jobs import CachedJob, Step
from .cached_shards import CachedShards
from .counted_updates import CountedUpdates

Begun = TypeVar("Begun")
"""A batch between its lookup and its update."""


class CountingJob(ABC, Generic[Begun]):
    """A job of `CountedUpdates`.

    Args:
        updates: What the workers make.
        num_workers: Number of workers.

    Attributes:
        updates: As given.
        num_workers: As given.
        num_made: Of `updates`.
        rng: Of `updates`.
        num_ended: By worker, number of steps that it ended.
    """

    def __init__(self, updates: CountedUpdates, num_workers: int) -> None:
        self.updates, self.num_workers = updates, num_workers
        self.num_made, self.rng = updates.num_made, updates.rng
        self.num_ended = [0] * num_workers

    @abstractmethod
    def read(self, worker: int) -> Begun:
        """Reads a batch and checks every row of it."""

    @abstractmethod
    def update(self, worker: int, begun: Begun) -> None:
        """Makes an update of each row of a batch."""

    def step(self) -> None:
        """All workers read, then all update, in any order."""
        begun = [self.read(worker) for worker in range(self.num_workers)]
        for worker in self.rng.permutation(self.num_workers).tolist():
            self._end(worker, begun[worker])

    def in_steps(self, num_steps: int) -> None:
        """Runs steps of all workers."""
        for _ in range(num_steps):
            self.step()

    def at_own_speed(
        self, num_turns: int, *, max_step_lag: int | None = None, speeds: Sequence[float] | None = None
    ) -> None:
        """In each turn one worker begins a step or ends it; at last all that were begun end.

        Args:
            num_turns: Number of turns.
            max_step_lag: Number of steps that a worker may be ahead of the slowest one; None for any number.
            speeds: Shares of the turns by worker; None for equal ones.
        """
        begun: dict[int, Begun] = {}
        for _ in range(num_turns):
            worker = int(self.rng.choice(self.num_workers, p=speeds))
            if worker in begun:
                self._end(worker, begun.pop(worker))
            elif max_step_lag is None or min(self.num_ended) >= self.num_ended[worker] - max_step_lag:
                begun[worker] = self.read(worker)
        while begun:
            self._end(*begun.popitem())

    def _end(self, worker: int, begun: Begun) -> None:
        self.update(worker, begun)
        self.num_ended[worker] += 1


class CachedCounting(CountingJob[Step]):
    """A counting job of `CachedTable`s.

    Args:
        cached: Its workers and pservers, of a table of SGD whose rows begin with zeros.
        updates: As of a `CountingJob`.
    """

    def __init__(self, cached: CachedJob | CachedShards, updates: CountedUpdates) -> None:
        super().__init__(updates, len(cached.tables))
        self.cached = cached

    def read(self, worker: int) -> Step:
        begun = self.cached.read(worker, self.updates.batch(), self.num_ended[worker] + 1)
        self.updates.check(worker, begun.plan.ids, begun.rows)
        return begun

    def update(self, worker: int, begun: Step) -> None:
        self.cached.update(worker, begun, self.updates.grads(worker, len(begun.plan.ids)))
        self.updates.note(worker, begun.plan.ids)

    def flush(self) -> None:
        """All workers send what they hold, in any order; then the pservers have all that was made."""
        for worker in self.rng.permutation(self.num_workers).tolist():
            self.cached.flush(worker)
            self.num_ended[worker] += 1
        np.testing.assert_array_equal(self.rows(), self.num_made)

    def rows(self) -> NDArray[np.float32]:
        """The rows that the pservers have."""
        return self.cached.rows_of(np.arange(len(self.num_made)))
