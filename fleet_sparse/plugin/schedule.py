"""Schedule: when a job saves by itself, and what. Pure."""

from __future__ import annotations

from fleet_sparse.snapshot.dirname import check_dirname
from fleet_sparse.worker.control.save import DELTA, FULL


class Schedule:
    """Saves every so many seconds or steps, whichever is over first. A save begins both anew.

    Args:
        dirname: Where to.
        seconds: Between the beginnings of two saves; None if time does not count.
        steps: Of the worker that saves, between two saves; None if they do not count.
        keep_last: How many full snapshots stay, with all deltas on top of them; None for all.
        deltas: How many deltas come between two full ones.

    Raises:
        ValueError: A number is too small, or neither seconds nor steps are given.
        SnapshotError: No directory under any root is called so.
    """

    def __init__(
        self, dirname: str, *, seconds: float | None, steps: int | None, keep_last: int | None, deltas: int
    ) -> None:
        if seconds is None and steps is None:
            raise ValueError("save_every: neither seconds nor steps are given; write one of them, or both")
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
        self._seconds = seconds
        self._steps = steps
        self._deltas = deltas

        self._begun_at: float | None = None  # the last save, or the first step; monotonic
        self._num_steps = 0  # since then
        self._num_saves = 0

    def count_step(self, now: float) -> None:
        """A training step ended."""
        if self._begun_at is None:
            self._begun_at = now
        self._num_steps += 1

    def is_due(self, now: float) -> bool:
        """Whether a save should begin."""
        if self._begun_at is None:
            return False
        is_over = self._seconds is not None and now - self._begun_at >= self._seconds
        return is_over or (self._steps is not None and self._num_steps >= self._steps)

    def begin(self, now: float) -> str:
        """A save begins; its kind."""
        kind = FULL if self._num_saves % (self._deltas + 1) == 0 else DELTA
        self._begun_at, self._num_steps, self._num_saves = now, 0, self._num_saves + 1
        return kind
