"""Schedule: when a job saves by itself, and which kind of snapshot. Pure."""

from __future__ import annotations

from fleet_sparse.snapshot.dirname import check_dirname
from fleet_sparse.worker.control.save import DELTA, FULL


class Schedule:
    """Saves after a number of seconds or steps, whichever is reached first. A save restarts both counts.

    Args:
        dirname: Directory of the snapshots.
        seconds: Seconds between the beginnings of two saves; None for no limit.
        steps: Steps of the worker that saves between two saves; None for no limit.
        keep_last: Number of full snapshots that are kept, with the deltas based on them; None for all.
        deltas: Number of deltas between two full snapshots.

    Raises:
        ValueError: A number is too small, or neither seconds nor steps are given.
        SnapshotError: `dirname` is empty or contains `..`.
    """

    def __init__(
        self, dirname: str, *, seconds: float | None, steps: int | None, keep_last: int | None, deltas: int
    ) -> None:
        if seconds is None and steps is None:
            raise ValueError("save_every: neither seconds nor steps are given, should be one of them or both")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"save_every: seconds is {seconds!r}, should be above 0, or None")
        if steps is not None and not steps >= 1:
            raise ValueError(f"save_every: steps is {steps!r}, should be at least 1, or None")
        if keep_last is not None and not (isinstance(keep_last, int) and keep_last >= 1):
            raise ValueError(f"save_every: keep_last is {keep_last!r}, should be a whole number of at least 1, or None")
        if not deltas >= 0:
            raise ValueError(f"save_every: deltas is {deltas!r}, should be at least 0")
        check_dirname(dirname)
        self.dirname = dirname  # constant after construction, as all down to the blank line
        self.keep_last = keep_last
        self.seconds = seconds
        self.steps = steps
        self._deltas = deltas

        self._begun_at: float | None = None  # monotonic time of the last save, or of the first step
        self._num_steps = 0  # since `_begun_at`
        self._num_saves = 0

    def count_step(self, now: float) -> None:
        """Counts a training step that ended."""
        if self._begun_at is None:
            self._begun_at = now
        self._num_steps += 1

    def is_due(self, now: float) -> bool:
        """Returns whether a save should begin."""
        if self._begun_at is None:
            return False
        is_over = self.seconds is not None and now - self._begun_at >= self.seconds
        return is_over or (self.steps is not None and self._num_steps >= self.steps)

    def begin(self, now: float) -> str:
        """Notes that a save begins; returns its kind."""
        kind = FULL if self._num_saves % (self._deltas + 1) == 0 else DELTA
        self._begun_at, self._num_steps, self._num_saves = now, 0, self._num_saves + 1
        return kind
