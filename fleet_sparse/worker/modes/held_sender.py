"""HeldSender: sends what the row caches of a worker hold back in a job in which pushes are parts of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..rows.row_caches import RowCaches


class _Sent(NamedTuple):
    """A step after which no worker held updates."""

    step: int
    num_untrained: int
    """How many steps until then trained nothing."""


class HeldSender:
    """Sends held updates in steps without gradients, of which every worker makes the same number: its **parts**.

    It also counts the steps of this worker that trained nothing. Used by one thread at a time, with no step under way.

    Args:
        caches: Caches of this worker; None if it has none, or if no steps send what they hold.
        make_part: Makes a step that sends a part of what the caches hold, and counts it by `count_untrained`.
        step: Returns the newest step of this worker.

    Attributes:
        num_untrained: How many of the steps so far trained nothing, as far as this worker knows: until all workers have
            met, others may have trained in its parts.
    """

    def __init__(self, caches: RowCaches | None, make_part: Callable[[], None], step: Callable[[], int]) -> None:
        self._caches = caches
        self._make_part = make_part
        self._step = step
        self._sent = _Sent(0, 0)
        self.num_untrained = 0

    @property
    def holds_back(self) -> bool:
        """True if the caches may hold updates that are in no step. It may change until the first step."""
        return self._caches is not None and self._caches.may_hold

    @property
    def num_parts(self) -> int:
        """Number of steps in which a worker sends all that it holds: the same for all workers of a job."""
        return self._caches.num_flushes if self._caches is not None and self._caches.may_hold else 0

    def send_part(self) -> None:
        """Makes one of `num_parts` steps, in which other workers may train. Raises as `Training.update`."""
        self._make_part()

    def send(self, make_part: Callable[[], object] | None = None, *, leaves: bool = False) -> bool:
        """Makes all parts, unless this worker has made no step since all workers had sent what they held.

        Args:
            make_part: Calls `send_part` as a part of more; `send_part` itself if left out.
            leaves: True if this worker leaves the steps next, with which others may go on; then `note_sent` follows.

        Returns:
            True if it made steps.

        Raises:
            FleetSparseError: As `Training.update`.
        """
        if not self.holds_back or self._step() == self._sent.step:
            return False
        num_parts = self.num_parts
        for _ in range(num_parts):
            (make_part or self.send_part)()
        if not leaves:
            self.note_sent(num_parts)
        return True

    def count_untrained(self) -> None:
        """Counts a step in which this worker trained nothing."""
        self.num_untrained += 1

    def note_sent(self, num_untrained: int) -> None:
        """Takes note that no worker holds updates any more.

        Args:
            num_untrained: Number of steps that trained nothing since that was so before.
        """
        step = self._step()
        if step > self._sent.step:
            self.num_untrained = self._sent.num_untrained + num_untrained
            self._sent = _Sent(step, self.num_untrained)
