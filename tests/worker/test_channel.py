"""What every channel does; then what only ZeroMQ's does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import zmq

from fleet_sparse.settings import Settings
from fleet_sparse.worker.channel import Buffer, Channel
from fleet_sparse.worker.in_process_channel import InProcessChannel
from fleet_sparse.worker.zmq_channel import ZmqChannel

NUM_SHARDS = 3


def answer(shard: int, parts: Sequence[Buffer]) -> list[Buffer]:
    return [f"shard {shard}".encode(), *parts]


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


@pytest.fixture(params=["in process", "zmq"])
def channel(request: pytest.FixtureRequest) -> Iterator[Channel]:
    opened: Channel
    routers: list[Router] = []
    if request.param == "zmq":
        routers = [Router(shard) for shard in range(NUM_SHARDS)]
        opened = ZmqChannel([f"127.0.0.1:{router.port}" for router in routers], Settings())
    else:
        opened = InProcessChannel(NUM_SHARDS, answer)
    yield opened
    opened.close()
    for router in routers:
        router.close()


def received(channel: Channel, within_s: float = 10.0) -> tuple[int, list[bytes]]:
    """The next message; a wake-up in between is passed over."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        message = channel.receive(until - time.monotonic())
        if message is not None:
            return message[0], [bytes(part) for part in message[1]]
    raise AssertionError("nothing came")


def test_it_knows_its_shards(channel: Channel) -> None:
    assert channel.num_shards == NUM_SHARDS


def test_a_message_is_answered_by_its_shard(channel: Channel) -> None:
    assert channel.send(2, [b"a"])
    assert received(channel) == (2, [b"shard 2", b"a"])


def test_parts_stay_apart(channel: Channel) -> None:
    parts = [b"head", b"", memoryview(bytes(range(256)) * 4096), b"end"]
    assert channel.send(0, parts)
    assert received(channel) == (0, [b"shard 0", *map(bytes, parts)])


def test_messages_of_one_shard_stay_in_order(channel: Channel) -> None:
    for number in range(50):
        assert channel.send(1, [str(number).encode()])
    assert [received(channel)[1][1] for _ in range(50)] == [str(number).encode() for number in range(50)]


def test_all_shards_are_heard(channel: Channel) -> None:
    for shard in range(NUM_SHARDS):
        assert channel.send(shard, [b"x"])
    assert {received(channel)[0] for _ in range(NUM_SHARDS)} == set(range(NUM_SHARDS))


def test_receive_ends_after_its_timeout(channel: Channel) -> None:
    begun = time.monotonic()
    assert channel.receive(0.05) is None
    assert 0.04 < time.monotonic() - begun < 5


def test_receive_without_timeout_does_not_wait(channel: Channel) -> None:
    assert channel.receive(0.0) is None


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


def test_a_reopened_shard_answers(channel: Channel) -> None:
    channel.reopen(1)
    assert channel.send(1, [b"again"])
    assert received(channel) == (1, [b"shard 1", b"again"])


def test_to_reopen_one_shard_leaves_the_others(channel: Channel) -> None:
    channel.send(0, [b"before"])
    channel.reopen(1)
    assert received(channel) == (0, [b"shard 0", b"before"])


def test_condition_is_said_in_words(channel: Channel) -> None:
    channel.send(0, [b"x"])
    received(channel)
    assert channel.condition(0) in ("connected", "in this process")


def test_close_twice_and_wake_after_it_do_nothing(channel: Channel) -> None:
    channel.close()
    channel.close()
    channel.wake()


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


def test_deliveries_stay_in_order_and_answers_are_given_between_them(in_process: InProcessChannel) -> None:
    in_process.send(0, [b"request"])
    for number in range(20):
        in_process.deliver(1, [str(number).encode()])
    messages = [received(in_process) for _ in range(21)]
    assert [parts for shard, parts in messages if shard == 1] == [[str(number).encode()] for number in range(20)]
    assert (0, [b"shard 0", b"request"]) in messages


def test_deliveries_of_many_threads_all_arrive(in_process: InProcessChannel) -> None:
    def deliver(shard: int) -> None:
        for number in range(200):
            in_process.deliver(shard, [str(number).encode()])

    threads = [threading.Thread(target=deliver, args=(shard,)) for shard in range(NUM_SHARDS)]
    for thread in threads:
        thread.start()
    messages = [received(in_process) for _ in range(200 * NUM_SHARDS)]
    for thread in threads:
        thread.join()
    for shard in range(NUM_SHARDS):
        assert [int(parts[0]) for of_shard, parts in messages if of_shard == shard] == list(range(200))


def test_reopened_shard_keeps_what_was_delivered(in_process: InProcessChannel) -> None:
    """As a real one may: what was on its way arrives beside what is sent afterwards."""
    in_process.deliver(1, [b"late"])
    in_process.reopen(1)
    assert received(in_process) == (1, [b"late"])


def test_delivery_after_the_end_is_dropped_in_silence(in_process: InProcessChannel) -> None:
    in_process.close()
    in_process.deliver(1, [b"late"])


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


def test_zmq_without_a_peer_is_not_connected(lonely: Callable[[int], ZmqChannel]) -> None:
    assert lonely(free_port()).condition(0) == "not connected"


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


def test_zmq_takes_messages_again_after_a_full_queue(lonely: Callable[[int], ZmqChannel]) -> None:
    port = free_port()
    channel = lonely(port)
    while channel.send(0, [b"a", b"b"]):
        pass
    channel.reopen(0)
    assert channel.send(0, [b"fresh"])
    router = Router(0, port)
    assert received(channel) == (0, [b"shard 0", b"fresh"])
    router.close()


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


def test_zmq_notices_that_a_peer_went_away(lonely: Callable[[int], ZmqChannel]) -> None:
    router = Router(0)
    channel = lonely(router.port)
    channel.send(0, [b"one"])
    received(channel)
    router.close()
    until = time.monotonic() + 10
    while channel.condition(0) == "connected" and time.monotonic() < until:
        channel.receive(0.01)
    assert channel.condition(0) == "not connected"
