"""DedupLedger: the newest push of each client, so that every push is applied once and in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum, auto

from fleet_sparse.core.watermark import Watermark


class Verdict(Enum):
    """The judgement of a request."""

    NEW = auto()  # a push to apply, or to stage
    ANSWER = auto()  # nothing to apply: a pull, or a push that was applied or staged before
    GAP = auto()  # a push before it is missing: refuse it, with the number of the push to resend from


class DedupLedger:
    """Watermarks of all clients. Pushes of a client count from 1.

    Judging changes nothing. A push that was judged NEW is either committed and then recorded, or staged now and
    recorded when its step is committed.

    Args:
        watermarks: Those to start with.
    """

    def __init__(self, watermarks: Iterable[Watermark] = ()) -> None:
        self._applied = {mark.client_id: mark for mark in watermarks}
        self._newest = {mark.client_id: mark.watermark for mark in self._applied.values()}  # applied or staged

    def judge_push(self, client_id: bytes, seq: int) -> Verdict:
        """Returns what to do with push `seq`, which is at least 1."""
        newest = self._newest.get(client_id, 0)
        if seq <= newest:
            return Verdict.ANSWER
        return Verdict.NEW if seq == newest + 1 else Verdict.GAP

    def judge_pull(self, client_id: bytes, floor: int) -> Verdict:
        """Returns what to do with a pull that must see push `floor`; 0 for none."""
        return Verdict.ANSWER if floor <= self._newest.get(client_id, 0) else Verdict.GAP

    def stage(self, client_id: bytes, seq: int) -> None:
        """Push `seq` was received and will be applied with its step."""
        self._newest[client_id] = seq

    def record(self, watermarks: Iterable[Watermark]) -> None:
        """All pushes up to these watermarks are applied."""
        for mark in watermarks:
            self._applied[mark.client_id] = mark
            if mark.watermark > self._newest.get(mark.client_id, 0):
                self._newest[mark.client_id] = mark.watermark

    def skip_to(self, mark: Watermark) -> None:
        """All pushes up to a watermark count as applied, although some may be lost. An older one changes nothing."""
        if mark.watermark > self.applied(mark.client_id):
            self.record([mark])

    def forget(self, client_ids: Collection[bytes]) -> None:
        """Drops the watermarks of clients whose pushes are refused from now on."""
        # Made again, because a dict does not shrink.
        self._applied = {each: mark for each, mark in self._applied.items() if each not in client_ids}
        self._newest = {each: seq for each, seq in self._newest.items() if each not in client_ids}

    def check_new(self, watermarks: Iterable[Watermark]) -> None:
        """Checks that none of these watermarks is recorded.

        Raises:
            ValueError: One is.
        """
        for mark in watermarks:
            applied = self._applied.get(mark.client_id)
            if applied is not None and mark.watermark <= applied.watermark:
                raise ValueError(f"client {mark.client_id.hex()}: push {mark.watermark} is applied already")

    def has_staged(self, client_id: bytes) -> bool:
        """Returns whether a push of a client is staged and not applied."""
        mark = self._applied.get(client_id)
        return self._newest.get(client_id, 0) > (0 if mark is None else mark.watermark)

    def newest(self, client_id: bytes) -> int:
        """Returns the newest push received, applied or staged; 0 before the first."""
        return self._newest.get(client_id, 0)

    def applied(self, client_id: bytes) -> int:
        """Returns the newest applied push; 0 before the first."""
        mark = self._applied.get(client_id)
        return 0 if mark is None else mark.watermark

    def watermarks(self) -> list[Watermark]:
        """Returns the watermark of every client, for a snapshot."""
        return list(self._applied.values())
