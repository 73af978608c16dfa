from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from fleet_sparse.control_socket import ControlSocket
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import ShardUnavailable, SnapshotCorrupt, TableMismatch, WorkerLost
from fleet_sparse.net_addresses import Address
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import METHODS, SERVICE, to_status
from fleet_sparse.worker.control import rpc
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.rpc import GrpcTransport, Rpc, Unreachable
from support.fake_pservers import QUICK, SPEC, registered


class Server:
    """A gRPC server of the control service on a port of the system."""

    def __init__(self, answer: Callable[[str, Any], Message]) -> None:
        self._stopped = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._answer = answer
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name), request.FromString, reply.SerializeToString)
            for name, (request, reply) in METHODS.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._socket = ControlSocket(Address("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._socket.port}"
        self._server.add_insecure_port(f"unix:{self._socket.path}")
        self._server.start()

    def _handler(self, name: str) -> Callable[[Any, Any], Message]:
        def handle(request: Any, context: Any) -> Message:
            if name == "Attend":
                self._stopped.wait()
                return messages.AttendReply()
            try:
                return self._answer(name, request)
            except Exception as error:
                status = to_status(error)
                context.set_trailing_metadata(status.metadata)
                context.abort(grpc.StatusCode[status.code], status.details)
                raise

        return handle

    def stop(self) -> None:
        self._stopped.set()
        self._server.stop(None).wait()
        self._socket.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, Any], Message]], Server]]:
    servers: list[Server] = []

    def start(answer: Callable[[str, Any], Message]) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


Serve = Callable[[Callable[[str, Any], Message]], Server]


def raising(error: Exception) -> Callable[[str, Any], Message]:
    def answer(method: str, request: Any) -> Message:
        raise error

    return answer


def test_calls_travel_over_grpc(serve: Serve) -> None:
    server = serve(lambda method, request: registered(0, 1, data_endpoint=f"{request.worker_index}"))
    with ControlClient([server.endpoint], QUICK) as control:
        assert control.register([SPEC], 0, 1)[0].data_endpoint == "0"


@pytest.mark.parametrize(
    ("error", "attribute"),
    [
        (TableMismatch("table 'C1': dim 8 and 16"), "args"),
        (WorkerLost("worker 3 is lost", worker_index=3), "worker_index"),
        (SnapshotCorrupt("block 17", path="/a", offset=4), "path"),
    ],
)
def test_errors_of_a_pserver_arrive_as_they_were(serve: Serve, error: Exception, attribute: str) -> None:
    server = serve(raising(error))
    with ControlClient([server.endpoint], QUICK) as control, pytest.raises(type(error)) as caught:
        control.stats()
    assert str(caught.value) == str(error)
    assert getattr(caught.value, attribute) == getattr(error, attribute)


def test_endpoint_where_nobody_listens_is_named(serve: Serve) -> None:
    server = serve(lambda method, request: messages.StatsReply())
    server.stop()
    begun = time.monotonic()
    with (
        ControlClient([server.endpoint], QUICK) as control,
        pytest.raises(ShardUnavailable, match=f"shard 0 at {server.endpoint}: Stats") as caught,
    ):
        control.stats()
    assert caught.value.endpoint == server.endpoint
    assert QUICK.deadline_s < time.monotonic() - begun < 10


def call_in_vain(calls: Rpc) -> None:
    with pytest.raises(ShardUnavailable):
        calls.call(0, "Stats", messages.StatsRequest(), 1.0, patience_s=0.15)


def call_all_in_vain(calls: Rpc) -> None:
    (reply,) = calls.try_all("Stats", messages.StatsRequest(), 1.0, patience_s=0.0)
    assert isinstance(reply, ShardUnavailable)


def attend_in_vain(calls: Rpc) -> None:
    call = calls.start(0, "Attend", messages.AttendRequest(), None)
    with pytest.raises(Unreachable):
        call.result()


@pytest.mark.parametrize("call", [call_in_vain, call_all_in_vain, attend_in_vain])
def test_a_failed_call_leaves_no_garbage(serve: Serve, call: Callable[[Rpc], None]) -> None:
    server = serve(lambda method, request: messages.StatsReply())
    server.stop()
    calls = Rpc(GrpcTransport([server.endpoint], Credentials.of(QUICK)), QUICK)
    try:
        call(calls)  # gRPC connects at its first call
        gc.collect()
        gc.disable()
        for _ in range(5):
            call(calls)
        assert gc.collect() < 25  # each call would leave 34 to 85 objects; other threads may leave a few
    finally:
        gc.enable()
        calls.close()


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_directory_without_the_socket_of_a_pserver_is_named(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    endpoint = serve(lambda method, request: messages.StatsReply()).endpoint
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = tmp_path / f"fleet_sparse-{os.getuid()}" / f"{Address.parse(endpoint).port}.sock"
    with ControlClient([endpoint], QUICK) as control, pytest.raises(ShardUnavailable) as caught:
        control.stats()
    assert str(path) in str(caught.value)
    assert f"{variable}" in str(caught.value)
    assert f"is not {str(tmp_path)!r}" in str(caught.value)


class DyingPserver:
    """A `Transport` to one pserver that dies each time that a call has waited there for these seconds.

    Then it answers. It is started again at once. `now` is the clock.
    """

    endpoints = ("host:1",)

    def __init__(self, *waits_s: float) -> None:
        self.now = 0.0
        self._waits_s = list(waits_s)

    def start(self, shard: int, method: str, request: Message, timeout_s: float | None) -> DyingPserver:
        return self

    def result(self) -> Message:
        if not self._waits_s:
            return messages.BarrierReply(num_loads=7)
        self.now += self._waits_s.pop(0)
        raise Unreachable("killed")

    def add_done_callback(self, callback: Callable[[Any], object]) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("waits_s", "is_answered"),
    [((100.0, 400.0), True), ((100.0, 400.0, 1500.0), True), ((100.0, *[20.0] * 20), False), ([100.0] * 22, False)],
    ids=["second death", "third death", "nobody listens", "deaths without end"],
)
def test_patience_begins_again_with_each_death_in_one_call(
    monkeypatch: pytest.MonkeyPatch, waits_s: Sequence[float], *, is_answered: bool
) -> None:
    pserver = DyingPserver(*waits_s)
    monkeypatch.setattr(rpc, "time", SimpleNamespace(monotonic=lambda: pserver.now))
    monkeypatch.setattr(rpc, "RETRY_S", 0.0)
    with nullcontext() if is_answered else pytest.raises(ShardUnavailable):
        reply = Rpc(pserver, QUICK).call(0, "Barrier", messages.BarrierRequest(), 1800.0, patience_s=300.0)
        assert reply.num_loads == 7


def test_pserver_that_hangs_is_named_after_the_deadline(serve: Serve) -> None:
    hang = threading.Event()

    def answer(method: str, request: Any) -> Message:
        hang.wait(20)
        return messages.StatsReply()

    server = serve(answer)
    with ControlClient([server.endpoint], QUICK) as control:
        with pytest.raises(ShardUnavailable, match=f"shard 0 at {server.endpoint}: Stats"):
            control.stats()
        hang.set()
