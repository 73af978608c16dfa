"""Who may connect to the streams of a pserver with keys."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.keys import SERVER_NAME, WATCHER, read_keys
from fleet_sparse.net_addresses import Address
from fleet_sparse.pserver.net import handshakes
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Buffer
from fleet_sparse.wire.stream import GREETING, FrameWriter
from fleet_sparse.worker.net.stream_channel import StreamChannel
from support.job_keys import both_credentials, credentials_of, make_keys
from support.streams import StreamServer


class Served:
    """A pserver's streams with keys, and the frames that reached it."""

    def __init__(self, directory: Path) -> None:
        self.pserver, self.trainer = both_credentials(make_keys(directory))
        self.directory = directory
        self.frames: list[list[bytes]] = []
        self.server = StreamServer(self._answer, host="127.0.0.1", credentials=self.pserver)
        self.address = tuple(Address.parse(self.server.endpoint.removeprefix("tcp:")))

    def _answer(self, parts: Sequence[Buffer]) -> list[Buffer]:
        self.frames.append([bytes(part) for part in parts])
        return list(parts)

    def asked(self, request: bytes) -> list[bytes]:
        """What a trainer of the job is answered."""
        channel = StreamChannel([self.server.endpoint], Settings(), credentials=self.trainer)
        try:
            channel.send(0, [request])
            until = time.monotonic() + 20
            while time.monotonic() < until:
                if (reply := channel.receive(1.0)) is not None:
                    return [bytes(part) for part in reply[1]]
            raise AssertionError("no answer")
        finally:
            channel.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, 20.0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "keys")
    yield served
    served.server.close()


def message(parts: Sequence[bytes]) -> bytes:
    """The bytes of a greeting and a frame."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = FrameWriter()
        writer.send(parts, ours)
        return GREETING + theirs.recv(1 << 16)


def is_ended(stream: socket.socket) -> bool:
    with suppress(TimeoutError):
        try:
            while stream.recv(1 << 16):
                pass
        except (ssl.SSLError, ConnectionError):
            pass
        return True
    return False


def context_of(served: Served, **changes: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for name, value in changes.items():
        setattr(context, name, value)
    return context


def tries(served: Served, context: ssl.SSLContext) -> None:
    """Sends a frame over TLS, and checks that the pserver ends the connection."""
    with served.connect() as plain:
        try:
            with context.wrap_socket(plain, server_hostname=SERVER_NAME) as stream:
                with suppress(OSError):
                    stream.sendall(message([b"secret"]))
                assert is_ended(stream)
        except (ssl.SSLError, ConnectionError):
            pass


def test_a_trainer_with_keys_is_answered(served: Served) -> None:
    assert served.asked(b"hello") == [b"hello"]


def test_plain_streams_reach_nothing(served: Served) -> None:
    with served.connect() as stream:
        stream.sendall(message([b"secret"]))
        assert is_ended(stream)
    assert served.asked(b"hello") == [b"hello"]
    assert served.frames == [[b"hello"]]


def test_a_peer_without_a_certificate_reaches_nothing(served: Served) -> None:
    tries(served, context_of(served))
    assert served.frames == []


def test_a_certificate_of_another_authority_reaches_nothing(served: Served, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other")
    context = context_of(served)
    context.load_cert_chain(other / "trainer.pem")
    tries(served, context)
    assert served.frames == []


def test_an_expired_certificate_reaches_nothing(served: Served, tmp_path: Path) -> None:
    from fleet_sparse.tools import authority

    signer = authority.new_authority()
    valid, expired = tmp_path / "valid", tmp_path / "expired"
    make_keys(valid, signer=signer)
    make_keys(expired, signer=signer, days=-1)
    with ExitStack() as stack:
        other = Served.__new__(Served)
        other.frames = []
        other.server = StreamServer(other._answer, host="127.0.0.1", credentials=credentials_of(valid, "pserver"))
        other.address = tuple(Address.parse(other.server.endpoint.removeprefix("tcp:")))
        stack.callback(other.server.close)
        context = context_of(other)
        context.load_cert_chain(expired / "trainer.pem")
        tries(other, context)
        assert other.frames == []
        context.load_cert_chain(valid / "trainer.pem")
        with other.connect() as plain, context.wrap_socket(plain, server_hostname=SERVER_NAME) as stream:
            stream.sendall(message([b"good"]))
            assert stream.recv(100)
    assert other.frames == [[b"good"]]


def test_the_certificate_of_a_pserver_is_no_clients(served: Served) -> None:
    context = context_of(served)
    context.load_cert_chain(served.directory / "pserver.pem")
    tries(served, context)
    assert served.frames == []


def test_tls_1_2_reaches_nothing(served: Served) -> None:
    context = context_of(served, maximum_version=ssl.TLSVersion.TLSv1_2)
    context.load_cert_chain(served.directory / "trainer.pem")
    tries(served, context)
    assert served.frames == []


def test_a_recorded_session_reaches_nothing_again(served: Served) -> None:
    """A proxy records what a trainer sends, and sends the same bytes to the pserver again."""
    listener = socket.create_server(("127.0.0.1", 0))
    recorded = bytearray()
    endpoint = f"tcp:{Address(*listener.getsockname())}"
    channel = StreamChannel([endpoint], Settings(), credentials=served.trainer)
    channel.send(0, [b"once"])
    with listener, listener.accept()[0] as near, served.connect() as far:
        near.settimeout(0.01)
        far.settimeout(0.01)
        reply = None
        while reply is None:
            reply = channel.receive(0.01)
            for source, target in ((near, far), (far, near)):
                with suppress(TimeoutError):
                    data = source.recv(1 << 16)
                    target.sendall(data)
                    if source is near:
                        recorded += data
    channel.close()
    assert served.frames == [[b"once"]]
    with served.connect() as stream:
        with suppress(OSError):
            stream.sendall(recorded)
        assert is_ended(stream)
    assert served.frames == [[b"once"]]


def test_a_trainer_sends_nothing_to_a_pserver_of_another_job(tmp_path: Path) -> None:
    ours, theirs = make_keys(tmp_path / "ours"), make_keys(tmp_path / "theirs")
    frames: list[Sequence[Buffer]] = []

    def answer(parts: Sequence[Buffer]) -> Sequence[Buffer]:
        frames.append(parts)
        return parts

    server = StreamServer(answer, host="127.0.0.1", credentials=credentials_of(theirs, "pserver"))
    channel = StreamChannel([server.endpoint], Settings(), credentials=credentials_of(ours, "trainer"))
    channel.send(0, [b"secret"])
    assert channel.receive(0.3) is None
    assert (channel.condition(0), frames) == ("not connected", [])
    channel.close()
    server.close()


def test_silent_connections_end_and_delay_others_no_longer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.5)
    silent = [served.connect() for _ in range(2 * handshakes.MAX_HANDSHAKES)]
    begun_at = time.monotonic()
    assert served.asked(b"hello") == [b"hello"]
    assert time.monotonic() - begun_at < 15
    assert all(map(is_ended, silent))
    for each in silent:
        each.close()


def test_role_of_a_peer_is_that_of_its_certificate(served: Served) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    keys = read_keys(str(served.directory), "pserver")
    waiting = handshakes.Handshakes(listener, keys, 1 << 16)
    watcher = read_keys(str(served.directory), WATCHER).client_context()
    with socket.create_connection(listener.getsockname(), 20.0) as plain:
        with watcher.wrap_socket(plain, server_hostname=SERVER_NAME):
            until = time.monotonic() + 20
            known: list[handshakes.Known] = []
            while not known and time.monotonic() < until:
                known = waiting.take()
            assert [each.role for each in known] == [WATCHER]
        known[0].stream.close()
    waiting.close()
    waiting.close()
