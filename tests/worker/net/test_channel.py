"""What every channel does; then what only one of them does."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from fleet_sparse.errors import SettingError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Buffer
from fleet_sparse.wire.stream import GREETING
from fleet_sparse.worker.net import stream_channel
from fleet_sparse.worker.net.channel import Channel
from fleet_sparse.worker.net.stream_channel import StreamChannel
from fleet_sparse.worker.net.zmq_channel import ZmqChannel
from support.in_process_channel import InProcessChannel
from support.job_keys import both_credentials, make_keys
from support.streams import StreamServer

NUM_SHARDS = 3


def answer(shard: int, parts: Sequence[Buffer]) -> list[Buffer]:
    return [f"shard {shard}".encode(), *parts]


def stream_server(shard: int, **options: Any) -> StreamServer:
    return StreamServer(partial(answer, shard), **options)


class Router:
    """Answers as a pserver would, on a port of the system, until it is closed."""

    def __init__(self, shard: int, port: int | None = None) -> None:
        self._shard = shard
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        if port is None:
            self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        else:
            self.port = port
            self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect("inproc://stop")
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        while stop not in dict(poller.poll()):
            peer, *parts = self._socket.recv_multipart()
            self._socket.send_multipart([peer, *answer(self._shard, parts)])
        stop.close()
        self._socket.close()

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        self._stop.close()
        self._context.term()


@pytest.fixture(params=["in process", "zmq", "unix", "tcp", "tls", "small buffers"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Channel]:
    opened: Channel
    others: list[Router] | list[StreamServer] = []
    if request.param == "in process":
        opened = InProcessChannel(NUM_SHARDS, answer)
    elif request.param == "zmq":
        routers = others = [Router(shard) for shard in range(NUM_SHARDS)]
        opened = ZmqChannel([f"127.0.0.1:{router.port}" for router in routers], Settings())
    elif request.param == "tls":
        pserver, trainer = both_credentials(make_keys(tmp_path / "keys"))
        servers = others = [stream_server(shard, host="127.0.0.1", credentials=pserver) for shard in range(NUM_SHARDS)]
        opened = StreamChannel([server.endpoint for server in servers], Settings(), credentials=trainer)
    else:
        options = {"unix": {}, "tcp": {"host": "127.0.0.1"}, "small buffers": {"buffer_bytes": 1}}[request.param]
        servers = others = [stream_server(shard, **options) for shard in range(NUM_SHARDS)]
        opened = StreamChannel(
            [server.endpoint for server in servers], Settings(), buffer_bytes=options.get("buffer_bytes", 4 << 20)
        )
    yield opened
    opened.close()
    for other in others:
        other.close()


def received(channel: Channel, within_s: float = 10.0) -> tuple[int, list[bytes]]:
    """The next message; a wake-up in between is passed over."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        message = channel.receive(until - time.monotonic())
        if message is not None:
            return message[0], [bytes(part) for part in message[1]]
    raise AssertionError("nothing came")


def test_what_stays_on_the_machine_is_said_of_each_shard(channel: Channel) -> None:
    assert all(map(channel.stays_on_machine, range(NUM_SHARDS)))


def test_parts_stay_apart(channel: Channel) -> None:
    parts = [b"head", b"", memoryview(bytes(range(256)) * 4096), b"end"]
    assert channel.send(0, parts)
    assert received(channel) == (0, [b"shard 0", *map(bytes, parts)])


def test_messages_of_one_shard_stay_in_order(channel: Channel) -> None:
    for number in range(50):
        assert channel.send(1, [str(number).encode()])
    assert [received(channel)[1][1] for _ in range(50)] == [str(number).encode() for number in range(50)]


def test_receive_ends_after_its_timeout(channel: Channel) -> None:
    begun = time.monotonic()
    assert channel.receive(0.05) is None
    assert 0.04 < time.monotonic() - begun < 5


def test_wake_ends_a_running_receive(channel: Channel) -> None:
    timer = threading.Timer(0.05, channel.wake)
    timer.start()
    begun = time.monotonic()
    assert channel.receive(60.0) is None
    assert time.monotonic() - begun < 30
    timer.join()


def test_wake_ends_the_next_receive_only(channel: Channel) -> None:
    channel.wake()
    channel.wake()
    begun = time.monotonic()
    assert channel.receive(60.0) is None
    assert channel.receive(0.05) is None
    assert 0.04 < time.monotonic() - begun < 30


def test_wake_may_interrupt_any_line_of_another_call(channel: Channel) -> None:
    """As a signal's handler does, which runs in the thread that it interrupts."""
    num_interrupted = 0

    def interrupt(frame: object, event: str, argument: object) -> Any:
        nonlocal num_interrupted
        num_interrupted += 1
        channel.wake()
        return interrupt

    def call_everything() -> None:
        sys.settrace(interrupt)
        channel.receive(0.0)
        channel.wake()
        channel.receive(0.0)
        channel.close()
        sys.settrace(None)

    calling = threading.Thread(target=call_everything, daemon=True)
    calling.start()
    calling.join(20)
    assert not calling.is_alive()
    assert num_interrupted > 10


def test_what_was_answered_does_not_wait_to_be_sent(channel: Channel) -> None:
    channel.send(0, [b"x"])
    received(channel)
    assert not channel.needs_receive


def test_a_reopened_shard_answers(channel: Channel) -> None:
    channel.reopen(1)
    assert channel.send(1, [b"again"])
    assert received(channel) == (1, [b"shard 1", b"again"])


def test_to_reopen_one_shard_leaves_the_others(channel: Channel) -> None:
    channel.send(0, [b"before"])
    channel.reopen(1)
    assert received(channel) == (0, [b"shard 0", b"before"])


def test_close_twice_and_wake_after_it_do_nothing(channel: Channel) -> None:
    channel.close()
    channel.close()
    channel.wake()


def test_large_messages_pass_both_ways_at_once(channel: Channel) -> None:
    """Neither side waits for the other to read."""
    large = [bytes([number]) * (3 << 20) for number in range(8)]
    for part in large:
        for shard in range(NUM_SHARDS):
            assert channel.send(shard, [part])
    found: dict[int, list[bytes]] = {shard: [] for shard in range(NUM_SHARDS)}
    for _ in range(NUM_SHARDS * len(large)):
        shard, parts = received(channel)
        found[shard].append(parts[1])
    assert all(of_shard == large for of_shard in found.values())


def test_what_was_received_stays_as_it_is_while_it_is_held(channel: Channel) -> None:
    held: list[tuple[int, Buffer]] = []
    for number in range(20):
        channel.send(0, [bytes([number]) * (100 if number % 2 else 300_000)])
        message = None
        while message is None:
            message = channel.receive(10.0)
        held.append((number, message[1][1]))
    assert all(set(bytes(part)) == {number} for number, part in held)


# In process: replies that come later than the answer


@pytest.fixture
def in_process() -> Iterator[InProcessChannel]:
    channel = InProcessChannel(NUM_SHARDS, answer)
    yield channel
    channel.close()


def test_what_is_delivered_is_received_once(in_process: InProcessChannel) -> None:
    in_process.deliver(2, [b"late", memoryview(b"rows")])
    assert received(in_process) == (2, [b"late", b"rows"])
    assert in_process.receive(0.0) is None


def test_delivery_ends_a_running_receive(in_process: InProcessChannel) -> None:
    timer = threading.Timer(0.05, in_process.deliver, (1, [b"late"]))
    timer.start()
    begun = time.monotonic()
    assert received(in_process, within_s=60.0) == (1, [b"late"])
    assert time.monotonic() - begun < 30
    timer.join()


# ZeroMQ


@pytest.fixture
def lonely() -> Iterator[Callable[[int], ZmqChannel]]:
    """Opens a channel to one port where perhaps nobody listens."""
    opened: list[ZmqChannel] = []

    def open_to(port: int) -> ZmqChannel:
        opened.append(ZmqChannel([f"127.0.0.1:{port}"], Settings()))
        return opened[-1]

    yield open_to
    for channel in opened:
        channel.close()


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def test_zmq_reaches_an_ipv6_address() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.ipv6 = True
        try:
            port = router.bind_to_random_port("tcp://[::1]")
        except zmq.ZMQError:
            pytest.skip("this machine has no IPv6")
        channel = ZmqChannel([f"[::1]:{port}"], Settings())
        channel.send(0, [b"hello"])
        assert router.poll(10_000)
        channel.close()
        router.linger = 0


def test_zmq_never_blocks_on_a_full_queue(lonely: Callable[[int], ZmqChannel]) -> None:
    channel = lonely(free_port())
    assert not all(channel.send(0, [b"a", b"b"]) for _ in range(100_000))


def test_zmq_to_another_host_leaves_the_machine() -> None:
    with closing(ZmqChannel(["127.0.0.1:9", "192.0.2.1:9"], Settings())) as channel:
        assert [channel.stays_on_machine(0), channel.stays_on_machine(1)] == [True, False]


def test_zmq_connects_to_a_peer_that_comes_back(lonely: Callable[[int], ZmqChannel]) -> None:
    router = Router(0)
    channel = lonely(router.port)
    channel.send(0, [b"one"])
    received(channel)
    router.close()
    again = Router(0, router.port)
    channel.reopen(0)
    channel.send(0, [b"two"])
    assert received(channel) == (0, [b"shard 0", b"two"])
    again.close()


# Streams


@pytest.fixture
def server() -> Iterator[StreamServer]:
    made = stream_server(0, host="127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def stream_to() -> Iterator[Callable[..., StreamChannel]]:
    """Opens a channel to endpoints."""
    opened: list[StreamChannel] = []

    def open_to(*endpoints: str) -> StreamChannel:
        opened.append(StreamChannel(endpoints, Settings()))
        return opened[-1]

    yield open_to
    for channel in opened:
        channel.close()


StreamTo = Callable[..., StreamChannel]


def wait_for(channel: StreamChannel, condition: str) -> None:
    until = time.monotonic() + 10
    while channel.condition(0) != condition:
        assert time.monotonic() < until
        channel.receive(0.01)


@pytest.mark.parametrize("endpoint", ["unix:nobody listens here", "tcp:127.0.0.1:{}"])
def test_stream_without_a_peer_is_not_connected(stream_to: StreamTo, endpoint: str) -> None:
    channel = stream_to(endpoint.format(free_port()))
    assert channel.receive(0.2) is None
    assert channel.condition(0) == "not connected"


def test_stream_to_another_host_leaves_the_machine(stream_to: StreamTo) -> None:
    assert not stream_to("tcp:192.0.2.1:9").stays_on_machine(0)


def test_stream_reaches_an_ipv6_address(stream_to: StreamTo) -> None:
    try:
        server = stream_server(0, host="::1")
    except SettingError:
        pytest.skip("this machine has no IPv6")
    with closing(server):
        channel = stream_to(server.endpoint)
        channel.send(0, [b"hello"])
        assert received(channel) == (0, [b"shard 0", b"hello"])


def test_stream_sends_what_waited_for_the_connection(stream_to: StreamTo) -> None:
    port = free_port()
    channel = stream_to(f"tcp:127.0.0.1:{port}")
    assert channel.receive(0.05) is None
    for number in range(5):
        assert channel.send(0, [str(number).encode()])
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(10)
        received_bytes = b""
        channel.receive(1.0)
        with listener.accept()[0] as end:
            end.settimeout(10)
            while received_bytes.count(b"FSS1") < 6:
                received_bytes += end.recv(1 << 16)
    assert received_bytes.startswith(GREETING)
    assert [received_bytes[16 + 32 * number + 24 : 16 + 32 * number + 25] for number in range(5)] == [
        str(number).encode() for number in range(5)
    ]


def test_stream_says_that_it_was_lost_once() -> None:
    lost: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        endpoints = [f"tcp:127.0.0.1:{free_port()}", f"tcp:127.0.0.1:{listener.getsockname()[1]}"]
        with closing(StreamChannel(endpoints, Settings(), on_lost=lost.append)) as channel:
            with listener.accept()[0]:
                channel.receive(0.1)
            listener.close()
            while not lost:
                channel.receive(0.1)
            channel.receive(0.3)
    assert lost == [1]


def test_stream_says_what_waits_to_be_sent(stream_to: StreamTo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        channel = stream_to(f"tcp:127.0.0.1:{listener.getsockname()[1]}")
        with listener.accept()[0] as end:
            end.settimeout(10)
            wait_for(channel, "connected")
            channel.send(0, [bytes(64 << 20)])
            assert channel.needs_receive
            while channel.needs_receive:
                assert end.recv(1 << 20)
                channel.receive(0.0)


def test_stream_that_cannot_be_opened_now_is_opened_later(
    server: StreamServer, stream_to: StreamTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process has too many files open."""
    channel = stream_to(server.endpoint)

    for name in ("socket_to", "set_up"):

        def refuse(*arguments: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patched:
            patched.setattr(stream_channel, name, refuse)
            channel.reopen(0)
            assert channel.condition(0) == "not connected"
            assert channel.receive(0.1) is None
        channel.send(0, [name.encode()])
        assert received(channel) == (0, [b"shard 0", name.encode()])


def test_stream_never_blocks_on_a_full_queue(stream_to: StreamTo) -> None:
    channel = stream_to("unix:nobody listens here")
    assert not all(channel.send(0, [b"a", b"b"]) for _ in range(10_000))


def test_stream_notices_that_a_peer_went_away(stream_to: StreamTo) -> None:
    server = stream_server(0)
    channel = stream_to(server.endpoint)
    channel.send(0, [b"one"])
    received(channel)
    server.close()
    wait_for(channel, "not connected")


def test_wake_ends_a_receive_in_the_middle_of_a_message(stream_to: StreamTo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        channel = stream_to(f"tcp:127.0.0.1:{listener.getsockname()[1]}")
        with listener.accept()[0] as end:
            channel.receive(0.1)
            for begin in (struct.pack("<4sIQQ", b"FSS1", 1, 200_008, 200_000) + bytes(100_000), bytes(1000)):
                end.sendall(begin)
                channel.wake()
                begun = time.monotonic()
                assert channel.receive(60.0) is None
                assert time.monotonic() - begun < 30


def test_a_peer_that_sends_no_messages_is_ended(server: StreamServer, stream_to: StreamTo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        channel = stream_to(f"tcp:127.0.0.1:{listener.getsockname()[1]}", server.endpoint)
        channel.receive(0.1)
        with listener.accept()[0] as end:
            end.settimeout(10)
            end.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            channel.send(1, [b"x"])
            assert received(channel) == (1, [b"shard 0", b"x"])
            channel.receive(0.1)
            assert end.recv(100) == GREETING
            assert end.recv(100) == b""
