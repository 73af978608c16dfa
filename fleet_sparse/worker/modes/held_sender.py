"""HeldSender: sends what the row caches of a worker hold back in a job in which pushes are parts of steps."""

from __future__ import annotations

from collections.abc import Callable

from ..rows.row_caches import RowCaches


class HeldSender:
    """Sends held updates in steps without gradients, of which every worker makes the same number: its **parts**.

    It also counts the steps of the job that were trained. Used by one thread at a time, with no step under way.

    Args:
        caches: Caches of this worker; None if it has none, or if no steps send what they hold.
        make_part: Makes a step that sends a part of what the caches hold.
        step: Returns the newest step of this worker.

    Attributes:
        num_trained: How many steps of the job were trained, as far as this worker knows: until all workers have met,
            others may have trained while it waited or sent.
    """

    def __init__(self, caches: RowCaches | None, make_part: Callable[[], None], step: Callable[[], int]) -> None:
        self._caches = caches
        self._make_part = make_part
        self._step = step
        self._sent_step = 0  # after which no worker held updates
        self.num_trained = 0

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

    def send(self, make_part: Callable[[], object] | None = None, *, is_leaving: bool = False) -> bool:
        """Makes all parts, unless this worker has made no step since all workers had sent what they held.

        Args:
            make_part: Calls `send_part` as a part of more; `send_part` itself if left out.
            is_leaving: True if this worker leaves the step group next: it also sends what it holds of a step whose push
                was not accepted. At another time the others would not make as many parts.

        Returns:
            True if it made steps.

        Raises:
            FleetSparseError: As `Training.update`.
        """
        if self._caches is None or not self.holds_back:
            return False
        if self._step() == self._sent_step and not (is_leaving and self._caches.num_held):
            return False
        for _ in range(self.num_parts):
            (make_part or self.send_part)()
        self.note_sent()
        return True

    def note_sent(self) -> None:
        """Takes note that no worker holds updates any more."""
        self._sent_step = self._step()
