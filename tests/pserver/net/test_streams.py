from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.pserver.net import streams
from fleet_sparse.pserver.net.receiving import ReceivingBytes
from fleet_sparse.pserver.net.streams import Peer, Streams
from fleet_sparse.wire.frame_format import Buffer
from fleet_sparse.wire.stream import GREETING, MAGIC, FrameMemory, socket_to
from support.streams import MAX_BYTES, StreamServer, StreamSocket, pair

LARGE = 4 << 20


def echo(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    return [bytes(part) for part in parts]


@pytest.fixture
def serve() -> Iterator[Callable[..., StreamServer]]:
    """Starts servers that echo; `host` makes one of TCP."""
    servers: list[StreamServer] = []

    def start(answer: Callable[[Sequence[Buffer]], Sequence[Buffer]] = echo, **options: object) -> StreamServer:
        servers.append(StreamServer(answer, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(params=[None, "127.0.0.1"])
def endpoint(request: pytest.FixtureRequest, serve: Callable[..., StreamServer]) -> str:
    """Of a server that echoes, by a Unix socket or TCP."""
    return serve(host=request.param).endpoint


@pytest.fixture
def dial() -> Iterator[Callable[..., StreamSocket]]:
    """Connects to an endpoint."""
    sockets: list[StreamSocket] = []

    def connect(endpoint: str, **options: bool) -> StreamSocket:
        sockets.append(StreamSocket(endpoint, **options))
        return sockets[-1]

    yield connect
    for each in sockets:
        each.close()


def asked(to: StreamSocket, *parts: bytes) -> list[bytes]:
    to.send_multipart(parts)
    return to.recv_multipart()


Dial = Callable[..., StreamSocket]
Serve = Callable[..., StreamServer]


def test_requests_are_answered(endpoint: str, dial: Dial) -> None:
    to = dial(endpoint)
    assert asked(to, b"a", b"", b"bc") == [b"a", b"", b"bc"]
    assert asked(to, b"x" * LARGE, b"y") == [b"x" * LARGE, b"y"]


def test_a_unix_socket_has_another_name_each_time(serve: Serve) -> None:
    names = {serve().endpoint for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("unix:fleet_sparse-") for name in names)


def test_tcp_endpoint_has_the_advertised_host(serve: Serve) -> None:
    endpoint = serve(host="127.0.0.1", advertised_host="localhost").endpoint
    assert endpoint.startswith("tcp:localhost:")


def test_without_a_unix_socket_it_is_tcp_on_loopback(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket

    def refuse(family: int, *rest: int) -> socket.socket:
        if family == socket.AF_UNIX:
            raise OSError("no such family")
        return made(family, *rest)

    monkeypatch.setattr(streams.socket, "socket", refuse)
    assert serve().endpoint.startswith("tcp:127.0.0.1:")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingError, match=r"stream: cannot bind to '203\.0\.113\.77'"):
        Streams(max_frame_bytes=MAX_BYTES, host="203.0.113.77")


def test_process_of_another_user_is_disconnected(serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "is_trusted", lambda stream: False)
    assert dial(serve().endpoint, greets=False).is_ended()


def test_connection_that_cannot_be_set_up_is_closed(serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = serve().endpoint
    good = dial(endpoint)
    assert asked(good, b"x") == [b"x"]

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patched:
        patched.setattr(streams, "set_up", refuse)
        assert dial(endpoint, greets=False).is_ended()
    assert asked(good, b"x") == [b"x"]
    assert asked(dial(endpoint), b"y") == [b"y"]


@pytest.mark.parametrize("data", [bytes(1000), struct.pack("<4sIQ", MAGIC, 1, 2**62)])
def test_connection_without_valid_messages_is_closed(endpoint: str, dial: Dial, data: bytes) -> None:
    good, bad = dial(endpoint), dial(endpoint)
    assert asked(bad, b"first") == [b"first"]
    bad.stream.sendall(data)
    assert bad.is_ended()
    assert asked(good, b"x") == [b"x"]


def test_peer_that_ends_within_a_message_harms_nobody(endpoint: str, dial: Dial) -> None:
    good, bad = dial(endpoint), dial(endpoint)
    bad.stream.sendall(struct.pack("<4sIQ", MAGIC, 1, LARGE) + bytes(100_000))
    bad.close()
    assert asked(good, b"x") == [b"x"]


def test_peer_without_a_greeting_is_disconnected(endpoint: str, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "GREETING_S", 0.1)
    monkeypatch.setattr(streams, "CHECK_MS", 20)
    good, silent = dial(endpoint), dial(endpoint, greets=False)
    half = dial(endpoint, greets=False)
    half.stream.sendall(GREETING[:10])
    assert silent.is_ended()
    assert half.is_ended()
    assert asked(good, b"x") == [b"x"]


def test_stalled_peer_is_closed_while_others_are_busy(
    endpoint: str, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STALL_S", 0.1)
    monkeypatch.setattr(streams, "CHECK_MS", 20)
    busy, idle, stalled = dial(endpoint), dial(endpoint), dial(endpoint)
    stalled.stream.sendall(struct.pack("<4sIQ", MAGIC, 1, LARGE) + bytes(100_000))
    until = time.monotonic() + 20
    while not stalled.poll(0):
        assert time.monotonic() < until
        assert asked(busy, b"x") == [b"x"]
    assert stalled.is_ended()
    assert asked(idle, b"x") == [b"x"]  # between messages a connection may rest


def test_peer_that_does_not_read_delays_nobody(endpoint: str, dial: Dial) -> None:
    """And its requests are left where they are: the socket, not the pserver, is full."""
    good, deaf = dial(endpoint), dial(endpoint)
    deaf.stream.setblocking(False)
    large = struct.pack("<4sIQQ", MAGIC, 1, 8 + LARGE, LARGE) + bytes(LARGE)
    num_sent = 0
    with pytest.raises(BlockingIOError):
        while num_sent < 100 * LARGE:
            num_sent += deaf.stream.send(large[num_sent % len(large) :])
            assert asked(good, b"x") == [b"x"]
    assert num_sent < 100 * LARGE


def test_poll_sleeps_while_a_peer_does_not_read() -> None:
    """The pserver sleeps, with requests that it does not read and replies that nobody takes."""
    with closing(Streams(max_frame_bytes=MAX_BYTES, buffer_bytes=1)) as served:
        deaf = StreamSocket(served.endpoint)
        for _ in range(5):
            deaf.send_multipart([b"x"])
        num_answered, until = 0, time.monotonic() + 0.5
        while time.monotonic() < until:
            served.poll(0)
            request = served.receive()
            if request is not None:
                request[0].send([bytes(LARGE)])
                num_answered += 1
        deaf.send_multipart([b"more"])
        assert num_answered == streams.PAUSE_BYTES // LARGE + 1
        before = time.thread_time(), time.monotonic()
        served.poll(0.2)
        assert time.monotonic() - before[1] > 0.1
        assert time.thread_time() - before[0] < 0.1
        deaf.close()


def test_peer_that_reads_late_gets_every_reply(endpoint: str, dial: Dial) -> None:
    """More waits than is read ahead, small requests behind it too."""
    late = dial(endpoint)
    late.stream.settimeout(0.2)
    num_sent = 0
    with pytest.raises(TimeoutError):
        while num_sent < 1000:
            late.send_multipart([b"small"] * 3)
            late.send_multipart([bytes(LARGE)])
            num_sent += 1
    late.stream.settimeout(20)
    assert 0 < num_sent < 1000
    for _ in range(num_sent):
        assert late.recv_multipart() == [b"small"] * 3
        assert late.recv_multipart() == [bytes(LARGE)]


def test_answers_past_the_bound_are_dropped(serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_WAITING_REPLIES", 3)
    server = serve(lambda parts: [bytes(parts[0]), bytes(1 << 18)], buffer_bytes=1)
    to = dial(server.endpoint)
    for number in range(100):
        to.send_multipart([str(number).encode()])
    answered = [to.recv_multipart()[0]]
    time.sleep(0.05)
    while to.poll(100):
        answered.append(to.recv_multipart()[0])
    numbers = [int(number) for number in answered]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    assert len(numbers) < 100


def test_flood_of_one_peer_delays_no_other(endpoint: str, dial: Dial) -> None:
    flood, good = dial(endpoint), dial(endpoint)
    flood.stream.setblocking(False)
    data = (GREETING * 50 + struct.pack("<4sIQQ", MAGIC, 1, 16, 1) + bytes(8)) * 500
    for _ in range(100):
        for _ in range(10):
            try:
                flood.stream.send(data[: len(data) - len(data) % 16])
            except BlockingIOError:
                break
            except ConnectionError:
                return
        begun = time.monotonic()
        assert asked(good, b"x") == [b"x"]
        assert time.monotonic() - begun < 5


def test_more_connections_than_the_limit_wait_for_one_to_end(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(streams, "CHECK_MS", 20)
    endpoint = serve().endpoint
    first, second = dial(endpoint), dial(endpoint)
    assert [asked(to, b"x") for to in (first, second)] == [[b"x"], [b"x"]]
    third = dial(endpoint)
    third.send_multipart([b"y"])
    assert not third.poll(200)
    first.close()
    assert third.recv_multipart() == [b"y"]


def half_a_frame(to: StreamSocket) -> bytes:
    """Sends half of a frame of `LARGE` bytes; returns the rest."""
    frame = struct.pack("<4sIQQ", MAGIC, 1, 8 + LARGE, LARGE) + bytes(LARGE)
    to.stream.sendall(frame[: LARGE // 2])
    return frame[LARGE // 2 :]


def test_large_frames_past_the_bound_wait_for_others(serve: Serve, dial: Dial) -> None:
    endpoint = serve(max_receiving_bytes=2 * LARGE).endpoint
    first, second, small = dial(endpoint), dial(endpoint), dial(endpoint)
    rest = half_a_frame(first)
    assert asked(small, b"x") == [b"x"]  # so the half is received
    sending = threading.Thread(target=second.send_multipart, args=([bytes(LARGE)],))
    sending.start()
    assert not second.poll(200)
    assert asked(small, b"x") == [b"x"]
    first.stream.sendall(rest)
    assert first.recv_multipart() == [bytes(LARGE)]
    assert second.recv_multipart() == [bytes(LARGE)]
    sending.join()


def test_frame_past_the_bound_is_received_alone(serve: Serve, dial: Dial) -> None:
    endpoint = serve(max_receiving_bytes=1).endpoint
    to = dial(endpoint)
    sending = threading.Thread(target=to.send_multipart, args=([bytes(LARGE)],))
    sending.start()
    assert to.recv_multipart() == [bytes(LARGE)]
    sending.join()


def test_the_slowest_frame_ends_for_one_that_waits(serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STALL_S", 0.5)
    monkeypatch.setattr(streams, "CHECK_MS", 20)
    endpoint = serve(max_receiving_bytes=LARGE).endpoint
    slow, waiting = dial(endpoint), dial(endpoint)
    slow.stream.sendall(struct.pack("<4sIQQ", MAGIC, 1, 8 + LARGE, LARGE) + bytes(20_000))
    assert asked(waiting, b"x") == [b"x"]
    sending = threading.Thread(target=waiting.send_multipart, args=([bytes(LARGE)],))
    sending.start()
    until = time.monotonic() + 20
    while not slow.poll(50):  # never stalled: something moves all the time
        assert time.monotonic() < until
        slow.stream.sendall(bytes(8))
    assert slow.is_ended()
    assert waiting.recv_multipart() == [bytes(LARGE)]
    sending.join()


def test_frame_of_the_first_second_is_not_the_slowest_at_once(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CHECK_MS", 300)
    endpoint = serve(max_receiving_bytes=LARGE).endpoint
    first, second = dial(endpoint), dial(endpoint)
    rest = half_a_frame(first)
    sending = threading.Thread(target=second.send_multipart, args=([bytes(LARGE)],))
    sending.start()
    assert not first.poll(1000)  # some checks
    first.stream.sendall(rest)
    assert first.recv_multipart() == [bytes(LARGE)]
    assert second.recv_multipart() == [bytes(LARGE)]
    sending.join()


def test_room_of_a_connection_that_ends_is_free(serve: Serve, dial: Dial) -> None:
    endpoint = serve(max_receiving_bytes=LARGE).endpoint
    for _ in range(3):
        to = dial(endpoint)
        half_a_frame(to)
        to.close()
    to = dial(endpoint)
    sending = threading.Thread(target=to.send_multipart, args=([bytes(LARGE)],))
    sending.start()
    assert to.recv_multipart() == [bytes(LARGE)]
    sending.join()


def next_request(served: Streams) -> tuple[Peer, list[Buffer]]:
    """Waits for one."""
    while True:
        served.poll(0.1)
        request = served.receive()
        if request is not None:
            return request


def test_answers_on_their_way_are_sent_before_the_end() -> None:
    served = Streams(max_frame_bytes=MAX_BYTES, buffer_bytes=1)
    with closing(StreamSocket(served.endpoint)) as to:
        to.send_multipart([b"x"])
        request = next_request(served)
        request[0].send([bytes(LARGE)])
        received: list[list[bytes]] = []

        def receive() -> None:
            received.append(to.recv_multipart())

        reading = threading.Thread(target=receive)
        reading.start()
        served.close()
        served.close()
        reading.join()
        assert received == [[bytes(LARGE)]]


def test_the_end_waits_for_no_peer_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the thread did not run between its looks at the clock."""
    served = Streams(max_frame_bytes=MAX_BYTES, buffer_bytes=1)
    with closing(StreamSocket(served.endpoint)) as deaf:
        deaf.send_multipart([b"x"])
        request = next_request(served)
        request[0].send([bytes(LARGE)])
        clock = iter(range(1_000_000))
        monkeypatch.setattr(streams, "LAST_REPLIES_S", 1.5)
        monkeypatch.setattr(streams.time, "monotonic", lambda: float(next(clock)))
        closing_it = threading.Thread(target=served.close, daemon=True)
        closing_it.start()
        closing_it.join(20)
        assert not closing_it.is_alive()


def test_requests_after_the_last_are_not_awaited() -> None:
    watched = []
    near, far = pair()
    receiving = ReceivingBytes[Peer](MAX_BYTES, Peer.pause, Peer.resume)
    connection = Peer(near, MAX_BYTES, FrameMemory(), receiving, lambda changed: watched.append(changed.events))
    connection.send([bytes(streams.PAUSE_BYTES + LARGE)])
    connection.end_requests()
    watched.clear()
    far.sendall(GREETING)
    while connection.num_waiting:
        assert far.recv(1 << 20)
        connection.flush()
    assert not any(events & select.EPOLLIN for events in watched)
    connection.close()
    far.close()


def test_closed_connection_ignores_replies() -> None:
    served = Streams(max_frame_bytes=MAX_BYTES)
    to = StreamSocket(served.endpoint)
    to.send_multipart([b"x"])
    request = next_request(served)
    to.close()
    while not request[0].is_broken:
        served.poll(0.1)
        served.receive()
    request[0].send([b"late"])
    served.close()


def test_nothing_connects_after_the_end() -> None:
    served = Streams(max_frame_bytes=MAX_BYTES)
    served.close()
    stream, address = socket_to(served.endpoint)
    with stream, pytest.raises(ConnectionRefusedError):
        stream.connect(address)
