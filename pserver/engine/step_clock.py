"""StepClock: how far each worker of a job has come, as one shard sees it. Pure."""

from __future__ import annotations


class StepClock:
    """The newest step that each worker pushed, and who rests.

    A step is complete when every worker that does not rest has pushed it. `complete` never falls.

    Args:
        num_workers: Of the job; they count from 0.
    """

    def __init__(self, num_workers: int) -> None:
        self._steps = [0] * num_workers
        self._resting = [False] * num_workers

    @property
    def complete(self) -> int:
        """The newest step that is complete; 0 before the first."""
        working = [step for step, rests in zip(self._steps, self._resting, strict=True) if not rests]
        return min(working) if working else max(self._steps)

    def rests(self, worker: int) -> bool:
        """Whether a worker rests."""
        return self._resting[worker]

    def behind(self, step: int) -> set[int]:
        """The workers that do not rest and have not pushed a step."""
        return {w for w, newest in enumerate(self._steps) if newest < step and not self._resting[w]}

    def next_step(self, worker: int) -> int:
        """The step that a worker pushes next."""
        return self._steps[worker] + 1

    def push(self, worker: int) -> None:
        """A worker pushed its next step, all of it."""
        self._steps[worker] += 1

    def rest(self, worker: int) -> None:
        """A worker rests."""
        self._resting[worker] = True

    def wake_all(self) -> bool:
        """If all workers rest, all work again, and go on from the newest step. Returns whether they did rest."""
        if not all(self._resting):
            return False
        newest = self.complete
        self._steps = [newest] * len(self._steps)
        self._resting = [False] * len(self._resting)
        return True
