"""Two fake pservers whose answers on the control plane a test defines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from google.protobuf.message import Message

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import METHODS
from fleet_sparse.worker.control.rpc import PendingCall, Unreachable

JOB_ID = 55
QUICK = Settings(deadline_s=0.5, connect_s=5.0, heartbeat_s=0.02, worker_lost_s=1.0, barrier_s=5.0, positions_s=0.3)
SPEC = TableSpec(name="table", dim=4, rule="sgd", initializer=constant(1.0))
Answer = Callable[[int, str, Any], Message]


def registered(shard: int, num_shards: int = 2, **changed: Any) -> messages.RegisterReply:
    """Returns the usual answer of a pserver to `Register`."""
    values = {
        "cluster_id": 7,
        "shard": shard,
        "num_shards": num_shards,
        "incarnation": 100 + shard,
        "placement_version": 1,
        "data_endpoint": f"10.0.0.{shard}:5000",
        "stream_endpoint": f"unix:{shard}",
        "job_id": JOB_ID,
    }
    return messages.RegisterReply(**{**values, **changed})


class FakePservers:
    """A `Transport` to two pservers that answer by `answer`, which a test may replace.

    Attributes:
        needs_full: True if shard 1 cannot write a delta.
        attended: One shard and request for each `Attend` call; they last until a test or `close` ends them.
        closed: True after `close`.
    """

    endpoints: Sequence[str] = ("host-a:1", "host-b:2")

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, Any]] = []
        self.timeouts_s: dict[str, float | None] = {}
        self.answer: Answer = self.usual
        self.needs_full = False
        self.closed = False
        self.attended: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._lock = threading.Lock()  # guards the next one
        self._attending: list[tuple[int, _EndlessCall]] = []

    def usual(self, shard: int, method: str, request: Any) -> Message:
        replies: dict[str, Callable[[], Message]] = {
            "Register": lambda: registered(shard),
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
        """Makes every later call of a method raise, on one shard or on both."""
        before = self.answer

        def answer(asked: int, name: str, request: Any) -> Message:
            if name == method and shard in (None, asked):
                raise error
            return before(asked, name, request)

        self.answer = answer

    def restart(self, incarnation: int) -> None:
        """Makes both pservers supervised, and starts shard 1 again with this incarnation and another data plane."""

        def answer(shard: int, method: str, request: Any) -> Message:
            number, endpoint = (incarnation, f"unix:{incarnation}") if shard == 1 else (100, "unix:0")
            if method == "Stats":
                return messages.StatsReply(shard=shard, incarnation=number)
            if method != "Register":
                return self.usual(shard, method, request)
            return registered(shard, incarnation=number, stream_endpoint=endpoint, is_supervised=True)

        self.answer = answer
        self.end_attendance(1, messages.AttendReply(incarnation=incarnation))

    def start(self, shard: int, method: str, request: Message, timeout_s: float | None) -> PendingCall:
        copy = type(request)()
        copy.CopyFrom(request)
        self.timeouts_s[method] = timeout_s
        if method == "Attend":
            call = _EndlessCall()
            with self._lock:
                self._attending.append((shard, call))
            self.attended.put((shard, copy))
            return call
        self.asked.append((shard, method, copy))
        return _Answered(lambda: self.answer(shard, method, copy))

    def end_attendance(self, shard: int, end: Message | Exception) -> None:
        """Ends the `Attend` calls to a shard, with a reply or an error."""
        with self._lock:
            ended = [call for asked, call in self._attending if asked == shard]
            self._attending = [(asked, call) for asked, call in self._attending if asked != shard]
        for call in ended:
            call.end(end)

    def close(self) -> None:
        self.closed = True
        for shard in range(len(self.endpoints)):
            self.end_attendance(shard, Unreachable("the connection was closed"))

    def asked_for(self, method: str) -> list[tuple[int, Any]]:
        """Returns shards and requests of a call, in order."""
        return [(shard, request) for shard, asked, request in self.asked if asked == method]

    def methods(self) -> list[str]:
        """Returns the calls to shard 0."""
        return [method for shard, method, _ in self.asked if shard == 0]


class _Answered:
    def __init__(self, result: Callable[[], Message]) -> None:
        self.result = result

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


class _EndlessCall:
    def __init__(self) -> None:
        self._future: Future[Message] = Future()

    def end(self, end: Message | Exception) -> None:
        if isinstance(end, Exception):
            self._future.set_exception(end)
        else:
            self._future.set_result(end)

    def result(self) -> Message:
        return self._future.result()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._future.add_done_callback(callback)
