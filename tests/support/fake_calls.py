"""Two pservers that answer calls of the control plane as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import METHODS
from fleet_sparse.worker.control.control import Pending

Answer = Callable[[int, str, Any], Message]


def registered(shard: int, num_shards: int = 2, **changed: Any) -> messages.RegisterReply:
    """The usual answer of a pserver to `Register`."""
    values = {
        "cluster_id": 7,
        "shard": shard,
        "num_shards": num_shards,
        "incarnation": 100 + shard,
        "placement_version": 1,
        "data_endpoint": f"10.0.0.{shard}:5000",
        "stream_endpoint": f"unix:{shard}",
    }
    return messages.RegisterReply(**{**values, **changed})


class FakeCalls:
    """Two pservers that answer as `answer` says, which may be changed; keeps what was asked.

    Attributes:
        needs_full: Whether a delta cannot be written.
    """

    endpoints: Sequence[str] = ("host-a:1", "host-b:2")

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, Any]] = []
        self.timeouts_s: dict[str, float] = {}
        self.answer: Answer = self.usual
        self.needs_full = False
        self.closed = False

    def usual(self, shard: int, method: str, request: Any) -> Message:
        replies: dict[str, Callable[[], Message]] = {
            "Register": lambda: registered(shard),
            "Heartbeat": lambda: messages.HeartbeatReply(incarnation=100 + shard),
            "PlanSave": lambda: messages.SavePlan(
                dirname=request.dirname, save_id=request.save_id, number=3, kind=request.kind
            ),
            "BeginSave": lambda: messages.BeginSaveReply(
                needs_full=self.needs_full and shard == 1 and request.plan.kind == "delta"
            ),
            "WriteSave": lambda: messages.ShardFile(shard=shard, file=f"file-{shard}"),
            "FinishSave": lambda: messages.FinishSaveReply(snapshot="000003-full", checksum=99),
        }
        return replies.get(method, METHODS[method][1])()

    def fails(self, method: str, error: Exception, shard: int | None = None) -> None:
        """From now on a call raises, on one shard or on both."""
        before = self.answer

        def answer(asked: int, name: str, request: Any) -> Message:
            if name == method and shard in (None, asked):
                raise error
            return before(asked, name, request)

        self.answer = answer

    def start(self, shard: int, method: str, request: Message, timeout_s: float) -> Pending:
        self.asked.append((shard, method, request))
        self.timeouts_s[method] = timeout_s
        return _Pending(lambda: self.answer(shard, method, request))

    def close(self) -> None:
        self.closed = True

    def asked_for(self, method: str) -> list[tuple[int, Any]]:
        """Shards and requests of a call, in order."""
        return [(shard, request) for shard, asked, request in self.asked if asked == method]

    def methods(self) -> list[str]:
        """What shard 0 was asked, besides heartbeats."""
        return [method for shard, method, _ in self.asked if shard == 0 and method != "Heartbeat"]


class _Pending:
    def __init__(self, result: Callable[[], Message]) -> None:
        self.result = result
