"""StepClock: the progress of each worker of a job, as one shard sees it. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StepClock:
    """The newest step that each worker counts with, and which workers left the step group.

    A step is complete when every worker in the group has pushed it. `complete` decreases by `rejoin` only. When all
    rejoin they count with the newest step; a worker may not have pushed the last steps up to it itself.

    Args:
        num_workers: Number of workers of the job; their indexes count from 0.
    """

    def __init__(self, num_workers: int) -> None:
        self._steps = [0] * num_workers
        self._pushed = [0] * num_workers  # newest step that each pushed itself; at most what it counts with
        self._left = [False] * num_workers

    @property
    def complete(self) -> int:
        """The newest complete step; 0 before the first."""
        working = [step for step, left in zip(self._steps, self._left, strict=True) if not left]
        return min(working) if working else max(self._steps)

    def has_left(self, worker: int) -> bool:
        """Returns whether a worker is outside the step group."""
        return self._left[worker]

    def behind(self, step: int) -> set[int]:
        """Returns the workers of the group that have not pushed a step."""
        return {w for w, newest in enumerate(self._steps) if newest < step and not self._left[w]}

    def next_step(self, worker: int) -> int:
        """Returns the step that a worker pushes next."""
        return self._steps[worker] + 1

    def pushed(self, worker: int) -> int:
        """Returns the newest step that a worker pushed itself."""
        return self._pushed[worker]

    def push(self, worker: int, step: int) -> None:
        """Records that a worker pushed all steps up to one completely; some of them may be lost."""
        self._steps[worker] = max(self._steps[worker], step)
        self._pushed[worker] = max(self._pushed[worker], step)

    def steps(self) -> list[int]:
        """Returns the newest step that each worker counts with."""
        return list(self._steps)

    def pushed_steps(self) -> list[int]:
        """Returns the newest step that each worker pushed itself."""
        return list(self._pushed)

    def restore(self, steps: Sequence[int], pushed_steps: Sequence[int]) -> None:
        """Continues with the steps of all workers, as a log kept them."""
        self._steps, self._pushed = list(steps), list(pushed_steps)

    def leave(self, worker: int) -> None:
        """Takes a worker out of the step group."""
        self._left[worker] = True

    def rejoin(self, worker: int) -> None:
        """Puts a worker into the step group again. What is complete may then be less than before."""
        self._left[worker] = False

    @property
    def have_all_left(self) -> bool:
        """True if no worker is in the step group: all are due to rejoin."""
        return all(self._left)

    def rejoin_all(self) -> None:
        """All workers, which have left, rejoin and continue from the newest step."""
        newest = self.complete
        self._steps = [newest] * len(self._steps)
        self._left = [False] * len(self._left)
