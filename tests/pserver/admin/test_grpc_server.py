from __future__ import annotations

import asyncio
import random
import socket
import threading
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import ErrorCode, ProtocolError, SettingError
from fleet_sparse.pserver.admin import grpc_server
from fleet_sparse.pserver.admin.grpc_server import ControlPlane
from fleet_sparse.wire.control import ATTRIBUTES_KEY, ERROR_KEY, METHODS, SERVICE, from_status
from support.controls import HeldControl, registration
from support.threads import JOIN_S

BY_TCP = Credentials(has_control_sockets=False)


def test_address_that_was_taken_meanwhile_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        held = HeldControl(tmp_path)
        with pytest.raises(SettingError, match=address):
            ControlPlane(address, held.service, held.settings)


def test_connection_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_MS", 100)
    held = HeldControl(tmp_path)
    with (
        closing(ControlPlane("127.0.0.1:0", held.service, held.settings, BY_TCP)) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=20) as silent,
    ):
        while silent.recv(1 << 10):
            pass


def test_connection_past_the_limit_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 1)
    held = HeldControl(tmp_path)
    with closing(ControlPlane("127.0.0.1:0", held.service, held.settings, BY_TCP)) as served:
        address = "127.0.0.1", served.port
        with socket.create_connection(address, timeout=20), socket.create_connection(address, timeout=4) as second:
            while second.recv(1 << 10):
                pass


def test_request_that_is_no_message_is_malformed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = HeldControl(tmp_path)
    with (
        closing(ControlPlane("127.0.0.1:0", held.service, held.settings, BY_TCP)) as served,
        BY_TCP.grpc_channel(f"127.0.0.1:{served.port}", ()) as channel,
    ):
        for name in METHODS:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{SERVICE}/{name}")(b"\xff" * 9, timeout=20)
            metadata = dict(caught.value.trailing_metadata())
            error = from_status(caught.value.details(), metadata[ERROR_KEY], metadata[ATTRIBUTES_KEY])
            assert isinstance(error, ProtocolError)
            assert error.code is ErrorCode.MALFORMED
            assert name in str(error)
    assert held.num_stops == 0
    assert "Traceback" not in caplog.text


def test_calls_of_a_pserver_that_stops_are_for_the_next_process(tmp_path: Path) -> None:
    held = HeldControl(tmp_path)
    held.cancels = True
    with (
        closing(ControlPlane("127.0.0.1:0", held.service, held.settings, BY_TCP)) as served,
        BY_TCP.grpc_channel(f"127.0.0.1:{served.port}", ()) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/{SERVICE}/Register")(registration().SerializeToString(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_callers_that_wait_too_short_leave_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = HeldControl(tmp_path)
    rng = random.Random(1)
    with (
        closing(ControlPlane("127.0.0.1:0", held.service, held.settings, BY_TCP)) as served,
        BY_TCP.grpc_channel(f"127.0.0.1:{served.port}", ()) as channel,
    ):
        calls = [channel.unary_unary(f"/{SERVICE}/{name}") for name in ("Stats", "Barrier")]
        for _ in range(20):
            futures = [rng.choice(calls).future(b"", timeout=rng.random() / 100) for _ in range(50)]
            for future in futures:
                future.exception()
        assert calls[0](b"", timeout=20)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("ends", [True, False])
def test_a_stop_waits_for_the_work_of_calls_that_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(grpc_server, "LAST_REPLIES_S", 0.2)
    held, begun, cancelled, ended = HeldControl(tmp_path), threading.Event(), threading.Event(), threading.Event()

    async def call(method: str, request: Message) -> Message:
        begun.set()
        try:
            await asyncio.sleep(JOIN_S)
        finally:
            cancelled.set()
            try:
                await asyncio.sleep(0.1 if ends else JOIN_S)
            finally:
                ended.set()
        return METHODS[method][1]()

    monkeypatch.setattr(held.service, "call", call)
    with closing(ControlPlane("127.0.0.1:0", held.service, held.settings, BY_TCP)) as served:
        with BY_TCP.grpc_channel(f"127.0.0.1:{served.port}", ()) as channel:
            waiting = channel.unary_unary(f"/{SERVICE}/Attend").future(b"")
            assert begun.wait(JOIN_S)
            assert not waiting.done()
        assert cancelled.wait(JOIN_S)
        served.close()
    assert ended.is_set()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_stop_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own stop waits for events of a thread, and has none."""
    monkeypatch.setattr(grpc_server, "LAST_REPLIES_S", 0.1)
    held = HeldControl(tmp_path)
    served = ControlPlane("127.0.0.1:0", held.service, held.settings, BY_TCP)
    cancelled, stop_server = threading.Event(), served._server.stop

    async def stop(grace: float) -> None:
        try:
            await stop_server(grace)
            await asyncio.sleep(JOIN_S)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(served._server, "stop", stop)
    served.close()
    assert cancelled.is_set()
