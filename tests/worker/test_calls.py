"""Who sends and receives; what calls do is tested by those of the client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.worker.batch import Deduplicator
from fleet_sparse.worker.client import Client
from support.in_process import InProcessCluster


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    cluster = InProcessCluster(2)
    yield cluster
    cluster.close()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels as those to other processes: shards compute whoever receives."""
    monkeypatch.setattr("support.in_process.LossyChannel.answers_in_receive", False)


def receivers(cluster: InProcessCluster) -> list[int]:
    """The threads that take messages from the newest client's channel, from now on."""
    channel, threads = cluster.channel, list[int]()
    receive = channel.receive

    def noting(timeout_s: float):
        message = receive(timeout_s)
        if message is not None:
            threads.append(threading.get_ident())
        return message

    channel.receive = noting
    return threads


def pull(cluster: InProcessCluster, client: Client) -> None:
    unique, _ = Deduplicator(cluster.placement).unique([np.arange(10)], cluster.table.salt)
    client.pull([(cluster.table, unique, np.empty((10, 4), np.float32))])


def push(cluster: InProcessCluster, client: Client) -> None:
    unique, _ = Deduplicator(cluster.placement).unique([np.arange(10)], cluster.table.salt)
    client.push([(cluster.table, unique, np.ones((10, 4), np.float32))], learning_rate=0.1, optimizer_step=1)


def test_a_caller_that_waits_receives_by_itself(cluster: InProcessCluster) -> None:
    client = cluster.client()
    threads = receivers(cluster)
    for _ in range(20):
        pull(cluster, client)
    assert threads == [threading.get_ident()] * 40


@pytest.mark.usefixtures("remote")
def test_acks_that_nobody_waits_for_are_received_by_the_io_thread(cluster: InProcessCluster) -> None:
    client = cluster.client()
    threads = receivers(cluster)
    push(cluster, client)
    until = time.monotonic() + 10
    while any(link.has_unacked for link in client._calls.links) and time.monotonic() < until:
        time.sleep(0.001)
    assert threads == [client._calls._thread.ident] * 2


@pytest.mark.usefixtures("remote")
def test_the_io_thread_leaves_the_wheel_when_all_is_acked(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client)
    wheel, links = client._calls._wheel, client._calls.links
    until = time.monotonic() + 10
    while (any(link.has_unacked for link in links) or wheel.locked()) and time.monotonic() < until:
        time.sleep(0.001)
    assert not wheel.locked()
    threads = receivers(cluster)
    pull(cluster, client)
    assert threads == [threading.get_ident()] * 2


@pytest.mark.usefixtures("remote")
def test_a_pull_takes_in_the_acks_before_it(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.worker.calls._UNTENDED_S", 10.0)
    client = cluster.client()
    threads = receivers(cluster)
    push(cluster, client)
    pull(cluster, client)
    assert threads == [threading.get_ident()] * 4
    assert not any(link.has_unacked for link in client._calls.links)


def test_shards_of_this_process_apply_a_push_that_nobody_waits_for_at_once(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_sparse.worker.calls._UNTENDED_S", 1000.0)
    client = cluster.client()
    push(cluster, client)
    until = time.monotonic() + 10
    while any(link.has_unacked for link in client._calls.links) and time.monotonic() < until:
        time.sleep(0.001)
    assert not any(link.has_unacked for link in client._calls.links)


def test_a_call_is_answered_while_another_thread_waits_at_the_wheel(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    waits = threading.Thread(target=pull, args=(cluster, client))
    waits.start()
    until = time.monotonic() + 10
    while not client._calls._wheel.locked() and time.monotonic() < until:
        time.sleep(0.001)
    cluster.channel.loses_request = lambda shard: False
    pull(cluster, client)
    waits.join(10)
    assert not waits.is_alive()


def test_a_call_that_is_interrupted_as_it_is_handed_over_is_never_sent(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = cluster.client()

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client._calls, "_drive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            push(cluster, client)
    num_sent = list(cluster.channel.num_sent)
    pull(cluster, client)
    assert [now - before for now, before in zip(cluster.channel.num_sent, num_sent, strict=True)] == [1, 1]
    assert sum(state.num_rows for shard in cluster.shards for state in shard.states()) == 0


def test_a_fault_ends_the_calls_of_threads_that_wait(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    errors = []

    def wait() -> None:
        try:
            pull(cluster, client)
        except FleetSparseError as error:
            errors.append(str(error))

    others = [threading.Thread(target=wait) for _ in range(3)]
    for other in others:
        other.start()
    until = time.monotonic() + 10
    while len(client._calls._waiting) < 2 and time.monotonic() < until:
        time.sleep(0.001)

    def broken(timeout_s: float) -> None:
        raise OSError("a broken cable")

    cluster.channel.receive = broken
    cluster.channel.wake()
    for other in others:
        other.join(10)
    assert errors == ["client: its I/O failed: OSError: a broken cable"] * 3


def test_close_ends_a_call_that_another_thread_waits_for(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    errors = []

    def wait() -> None:
        try:
            pull(cluster, client)
        except FleetSparseError as error:
            errors.append(str(error))

    other = threading.Thread(target=wait)
    other.start()
    until = time.monotonic() + 10
    while not client._calls._wheel.locked() and time.monotonic() < until:
        time.sleep(0.001)
    client._calls.close()
    other.join(10)
    assert errors == ["client: it is closed"]
