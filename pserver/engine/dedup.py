"""DedupLedger: the newest push of each client, so that every push is applied once and in order."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from fleet_sparse.core.watermark import Watermark


class Verdict(Enum):
    """What to do with a request."""

    APPLY = auto()
    DUPLICATE = auto()  # it was applied or staged before: answer it, do not apply it
    GAP = auto()  # a push before it is missing: refuse it, with the number of the push to resend from


class DedupLedger:
    """Watermarks of all clients. Pushes of a client count from 1.

    Judging changes nothing. A push that was judged APPLY is either committed and then recorded, or staged now and
    recorded when its step is committed.

    Args:
        watermarks: Those to start with.
    """

    def __init__(self, watermarks: Iterable[Watermark] = ()) -> None:
        self._applied = {mark.client_id: mark for mark in watermarks}
        self._staged: dict[bytes, int] = {}  # newest push received, applied or not

    def judge_push(self, client_id: bytes, seq: int) -> Verdict:
        """Returns what to do with push `seq`, which is at least 1."""
        newest = self.newest(client_id)
        if seq <= newest:
            return Verdict.DUPLICATE
        return Verdict.APPLY if seq == newest + 1 else Verdict.GAP

    def judge_pull(self, client_id: bytes, floor: int) -> Verdict:
        """Returns what to do with a pull that must see push `floor`; 0 for none."""
        return Verdict.APPLY if floor <= self.newest(client_id) else Verdict.GAP

    def stage(self, client_id: bytes, seq: int) -> None:
        """Push `seq` was received and will be applied with its step."""
        self._staged[client_id] = seq

    def record(self, watermarks: Iterable[Watermark]) -> None:
        """All pushes up to these watermarks are applied."""
        for mark in watermarks:
            self._applied[mark.client_id] = mark

    def newest(self, client_id: bytes) -> int:
        """Returns the newest push received, applied or staged; 0 before the first."""
        return max(self.applied(client_id), self._staged.get(client_id, 0))

    def applied(self, client_id: bytes) -> int:
        """Returns the newest applied push; 0 before the first."""
        mark = self._applied.get(client_id)
        return 0 if mark is None else mark.watermark

    def watermarks(self) -> list[Watermark]:
        """Returns the watermark of every client, for a snapshot."""
        return list(self._applied.values())
