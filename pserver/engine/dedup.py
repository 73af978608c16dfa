"""DedupLedger: which pushes of which client are applied, so that each is applied once and in order."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from fleet_sparse.core.watermark import Watermark


class Verdict(Enum):
    """What to do with a request."""

    APPLY = auto()
    DUPLICATE = auto()  # applied, or held, before: answer it, do not apply it
    GAP = auto()  # a push before it is missing: refuse it and name the push to send from
    STALE_EPOCH = auto()  # a newer epoch of the client has pushed: refuse it


class DedupLedger:
    """The mark of each client that pushed. Pushes count from 1 in each epoch of a client.

    To judge changes nothing. `record` follows a push that was judged APPLY and then applied; `hold` one that was judged
    APPLY and is to be applied later.
    """

    def __init__(self, marks: Iterable[Watermark] = ()) -> None:
        self._marks = {mark.client_id: mark for mark in marks}
        self._held: dict[bytes, Watermark] = {}  # its watermark is that of the pushes that are here, applied or not

    def judge_push(self, client_id: bytes, epoch: int, seq: int) -> Verdict:
        """What to do with push number `seq`, which is at least 1."""
        if self._is_stale(client_id, epoch):
            return Verdict.STALE_EPOCH
        newest = self.newest(client_id, epoch)
        if seq <= newest:
            return Verdict.DUPLICATE
        return Verdict.APPLY if seq == newest + 1 else Verdict.GAP

    def judge_pull(self, client_id: bytes, epoch: int, floor: int) -> Verdict:
        """What to do with a pull that must see push number `floor`; 0 for none."""
        if self._is_stale(client_id, epoch):
            return Verdict.STALE_EPOCH
        return Verdict.APPLY if floor <= self.newest(client_id, epoch) else Verdict.GAP

    def record(self, client_id: bytes, epoch: int, seq: int) -> None:
        """Push `seq` is applied."""
        self._marks[client_id] = Watermark(client_id, epoch, seq)

    def hold(self, client_id: bytes, epoch: int, seq: int) -> None:
        """Push `seq` is here, and will be applied."""
        self._held[client_id] = Watermark(client_id, epoch, seq)

    def newest(self, client_id: bytes, epoch: int) -> int:
        """The newest push of this epoch of the client that is here, applied or held; 0 before the first."""
        held = self._held.get(client_id)
        return max(self.watermark(client_id, epoch), held.watermark if held is not None and held.epoch == epoch else 0)

    def watermark(self, client_id: bytes, epoch: int) -> int:
        """The newest applied push of this epoch of the client; 0 before the first."""
        mark = self._marks.get(client_id)
        return mark.watermark if mark is not None and mark.epoch == epoch else 0

    def epoch(self, client_id: bytes) -> int:
        """The newest epoch in which the client pushed; 0 before its first push."""
        return max((marks[client_id].epoch for marks in (self._marks, self._held) if client_id in marks), default=0)

    def marks(self) -> list[Watermark]:
        """Every client's mark, for a snapshot; `DedupLedger(marks)` is the same ledger again."""
        return list(self._marks.values())

    def _is_stale(self, client_id: bytes, epoch: int) -> bool:
        return epoch < self.epoch(client_id)
