"""A coordinator in this process, which answers as a test tells it."""

from __future__ import annotations

import threading

from fleet_sparse.pserver.lease.coordinator import Holder


class FakeCoordinator:
    """Answers as it is told; a renewal waits for `may_renew`."""

    def __init__(self) -> None:
        self.holder: Holder | None = None
        self.refusals: list[OSError | Holder] = []  # of the next calls of `lease`
        self.answer: bool | Exception = True
        self.may_renew, self.renews = threading.Event(), threading.Event()
        self.may_renew.set()
        self.refuses_release = False
        self.ended: list[str] = []

    def lease(self, shard: str, ttl_s: float, *, after: int = 0) -> int | Holder:
        refusal = self.refusals.pop(0) if self.refusals else self.holder
        if isinstance(refusal, OSError):
            raise refusal
        return after + 1 if refusal is None else refusal

    def renew(self, shard: str) -> bool:
        self.renews.set()
        self.may_renew.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def watch(self, shard: str, timeout_s: float) -> None:
        pass

    def release(self, shard: str) -> None:
        if self.refuses_release:
            raise OSError("no answer")
        self.ended.append("released")

    def close(self) -> None:
        self.ended.append("closed")
