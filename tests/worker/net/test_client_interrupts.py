"""Signals that come while a client waits."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.channel import Buffer
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.deferred_interrupt import DeferredInterrupt
from fleet_sparse.worker.net.io_loop import IoLoop
from fleet_sparse.worker.net.shard_link import ClientIdentity
from fleet_sparse.worker.net.stream_channel import StreamChannel
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.client_calls import pulled, push, rows_push, shard_with, unique_of
from support.forks import in_child
from support.in_process import QUICK, InProcessCluster
from support.streams import StreamServer
from support.waits import wait_until

pytestmark = pytest.mark.usefixtures("default_handler")

Quick = Callable[..., Settings]


def interrupt() -> None:
    """Ctrl-C: to the main thread, as the kernel does when it can."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextmanager
def when(is_so: Callable[[], object], *acts: Callable[[], object]) -> Iterator[None]:
    """During the block another thread waits until it is so, and acts."""

    def work() -> None:
        wait_until(is_so)
        for act in acts:
            act()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def waits(client: Client) -> Callable[[], bool]:
    """Whether a pull of a client was sent since."""
    before = client.num_pulled_rows
    return lambda: client.num_pulled_rows > before


def is_answered(client: Client) -> Callable[[], bool]:
    """Whether an answer has arrived since."""
    before = client.bytes_received
    return lambda: client.bytes_received > before


def retries(cluster: InProcessCluster, num_sent: int = 6) -> Callable[[], bool]:
    """Returns whether `num_sent` requests were sent, retries included: a call behind them has long begun to wait."""
    return lambda: sum(cluster.channel.num_sent) >= num_sent


def is_within(function: Callable[..., object]) -> Callable[[], bool]:
    """Whether the main thread runs a function."""

    def is_so() -> bool:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        return frame is not None

    return is_so


def lose(cluster: InProcessCluster, *, everything: bool) -> None:
    cluster.channel.loses_request = lambda shard: everything


# Ctrl-C as Python has it


def test_a_push_interrupted_before_it_was_accepted_is_sent_once(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1))
    number = shard_with(cluster, cluster.table, 0)
    lose(cluster, everything=True)
    push(cluster, client, cluster.table, [number])
    with when(retries(cluster), interrupt), pytest.raises(KeyboardInterrupt):
        push(cluster, client, cluster.table, [number], step=2)
    lose(cluster, everything=False)
    assert pulled(cluster, client, cluster.table, [number]) == {number: [0.5] * 4}


# Handlers that do not raise


@pytest.fixture(params=[signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def handled(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """A signal, and then what a program's own handler of it noted."""
    seen: list[int] = [request.param]
    before = signal.signal(request.param, lambda number, _: seen.append(number))
    yield seen
    signal.signal(request.param, before)


@contextmanager
def signalled(cluster: InProcessCluster, is_so: Callable[[], bool], handled: list[int]) -> Iterator[None]:
    """In the block nothing arrives until it is so, the signal was sent, and its handler has run."""
    number = handled.pop()
    lose(cluster, everything=True)
    acts = (
        lambda: os.kill(os.getpid(), number),
        lambda: wait_until(lambda: handled),
        lambda: lose(cluster, everything=False),
    )
    with when(is_so, *acts):
        yield
    assert handled == [number]


def test_a_pull_continues_after_a_quiet_handler(cluster: InProcessCluster, handled: list[int]) -> None:
    client = cluster.client()
    with signalled(cluster, waits(client), handled):
        assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


def test_a_push_that_waits_continues_after_a_quiet_handler(
    cluster: InProcessCluster, quick: Quick, handled: list[int]
) -> None:
    client = cluster.client(quick(max_inflight_pushes=1))
    number = shard_with(cluster, cluster.table, 0)
    with signalled(cluster, retries(cluster), handled):
        for step in (1, 2, 3):
            push(cluster, client, cluster.table, [number], step=step)
    assert pulled(cluster, client, cluster.table, [number]) == {number: [0.25] * 4}


def test_ctrl_c_ends_a_wait_for_acceptance(cluster: InProcessCluster, quick: Quick) -> None:
    """Also one in which it is deferred. The push is sent when there is room."""
    client = cluster.client(quick(max_inflight_pushes=1))
    number = shard_with(cluster, cluster.table, 0)
    cluster.channel.loses_reply = lambda shard: True
    push(cluster, client, cluster.table, [number])
    call = client.start_update([rows_push(cluster, cluster.table, [number])], [])
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt(), when(retries(cluster), interrupt):
        call.wait_accepted()
    cluster.channel.loses_reply = lambda shard: False
    client.flush()
    assert pulled(cluster, client, cluster.table, [number]) == {number: [0.5] * 4}


# Over Unix sockets


class Gate:
    """Holds back the answers of streams' shards, until it is opened."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self._cluster = cluster
        self._open = threading.Event()
        self.open = self._open.set
        self.close = self._open.clear
        self.open()

    def answer(self, shard: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        self._open.wait()
        return self._cluster.answer(shard, parts)


@pytest.fixture
def gate(cluster: InProcessCluster) -> Gate:
    return Gate(cluster)


@pytest.fixture
def streamed(cluster: InProcessCluster, gate: Gate) -> Iterator[Client]:
    """A client of the cluster's shards over Unix sockets."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(closing(StreamServer(partial(gate.answer, shard))))
            for shard in range(len(cluster.shards))
        ]
        channel = StreamChannel([server.endpoint for server in servers], QUICK)
        identity = ClientIdentity(b"over Unix socket", 1)
        client = Client(channel, identity, cluster.registrations(), cluster.placement, QUICK)
        yield stack.enter_context(client)
        gate.open()


def test_after_an_interrupt_on_a_socket_the_client_works(
    cluster: InProcessCluster, gate: Gate, streamed: Client
) -> None:
    push(cluster, streamed, cluster.table, range(50))
    streamed.flush()
    for _ in range(3):
        gate.close()
        with when(waits(streamed), interrupt), pytest.raises(KeyboardInterrupt):
            pulled(cluster, streamed, cluster.table, range(50))
        answered = is_answered(streamed)
        gate.open()
        wait_until(answered)
        push(cluster, streamed, cluster.table, range(50))
    assert set(map(tuple, pulled(cluster, streamed, cluster.table, range(50)).values())) == {(0.0,) * 4}


def test_a_wait_after_an_interrupted_one_raises_at_once(
    cluster: InProcessCluster, gate: Gate, streamed: Client
) -> None:
    gate.close()
    rows = RowBatch.empty(cluster.table, unique_of(cluster, cluster.table, range(50)))
    pending = streamed.start_pull([rows])
    with when(is_within(IoLoop.wait), interrupt), pytest.raises(KeyboardInterrupt):
        pending.wait()
    answered = is_answered(streamed)
    gate.open()
    wait_until(answered)
    begun = time.monotonic()
    for _ in range(2):
        with pytest.raises(FleetSparseError):
            pending.wait()
    assert time.monotonic() - begun < 5
    assert len(pulled(cluster, streamed, cluster.table, range(50))) == 50


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_during_a_wait_is_interrupted_at_once(
    cluster: InProcessCluster, gate: Gate, streamed: Client
) -> None:
    told: list[str] = []
    gate.close()
    with when(waits(streamed), lambda: told.append(in_child(signal_itself)), gate.open):
        assert len(pulled(cluster, streamed, cluster.table, range(50))) == 50
    assert told == ["KeyboardInterrupt"]


def signal_itself() -> None:
    signal.raise_signal(signal.SIGINT)
