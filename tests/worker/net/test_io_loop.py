"""Who sends and receives; what calls do is tested by those of the client."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from fleet_sparse.errors import FleetSparseError, ShardUnavailable
from fleet_sparse.settings import Settings
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import UNCHECKED_COLUMNS, Buffer, Frame, Header, Op
from fleet_sparse.worker.net.call import Call
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.io_loop import _LAST_RECEIVE_S, IoLoop
from fleet_sparse.worker.net.request import Request
from fleet_sparse.worker.net.shard_link import ClientIdentity, Registration
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.in_process import InProcessCluster
from support.in_process_channel import InProcessChannel
from support.waits import wait_until


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    cluster = InProcessCluster(2)
    yield cluster
    cluster.close()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels as those to other processes: shards compute whoever receives."""
    monkeypatch.setattr("support.in_process.LossyChannel.needs_receive", False)


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
    client.pull([RowBatch(cluster.table, unique, np.empty((10, 4), np.float32))])


def push(cluster: InProcessCluster, client: Client) -> None:
    unique, _ = Deduplicator(cluster.placement).unique([np.arange(10)], cluster.table.salt)
    client.push([RowBatch(cluster.table, unique, np.ones((10, 4), np.float32), 0.1, 1)])


@contextmanager
def pulls_of_other_threads(cluster: InProcessCluster, client: Client, count: int) -> Iterator[list[str]]:
    """Pulls that nobody answers; at the end of the block they have ended, and the list has their errors."""
    cluster.channel.loses_request = lambda shard: True
    errors: list[str] = []

    def wait() -> None:
        try:
            pull(cluster, client)
        except FleetSparseError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield errors
    for thread in threads:
        thread.join(10)


def test_a_caller_that_waits_receives_by_itself(cluster: InProcessCluster) -> None:
    client = cluster.client()
    threads = receivers(cluster)
    for _ in range(20):
        pull(cluster, client)
    assert threads == [threading.get_ident()] * 40


@pytest.mark.usefixtures("remote")
def test_the_io_thread_receives_acks_nobody_waits_for(cluster: InProcessCluster) -> None:
    client = cluster.client()
    threads = receivers(cluster)
    push(cluster, client)
    wait_until(lambda: len(threads) == 2)
    assert threading.get_ident() not in threads


def test_embedded_shards_apply_a_push_at_once(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.worker.net.io_loop._UNATTENDED_S", 1000.0)
    client = cluster.client()
    threads = receivers(cluster)
    push(cluster, client)
    wait_until(lambda: len(threads) == 2)


def test_a_call_is_answered_while_another_thread_does_the_io(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    waits = threading.Thread(target=pull, args=(cluster, client))
    waits.start()
    wait_until(lambda: sum(cluster.channel.num_sent) == 2)
    cluster.channel.loses_request = lambda shard: False
    pull(cluster, client)
    waits.join(10)
    assert not waits.is_alive()


def test_a_fault_ends_the_calls_of_threads_that_wait(cluster: InProcessCluster) -> None:
    client = cluster.client()

    def broken(timeout_s: float) -> None:
        raise OSError("a broken cable")

    with pulls_of_other_threads(cluster, client, 3) as errors:
        wait_until(lambda: sum(cluster.channel.num_sent) >= 6)
        cluster.channel.receive = broken
        cluster.channel.wake()
    assert errors == ["client: its I/O failed: OSError: a broken cable"] * 3


def test_close_ends_a_call_that_another_thread_waits_for(cluster: InProcessCluster) -> None:
    client = cluster.client()
    with pulls_of_other_threads(cluster, client, 1) as errors:
        wait_until(lambda: sum(cluster.channel.num_sent) == 2)
        client.abandon()
    assert errors == ["client: it is closed"]


@pytest.mark.parametrize("stays", [True, False])
def test_columns_that_leave_the_machine_are_checked(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    monkeypatch.setattr("support.in_process.LossyChannel.stays_on_machine", lambda *_: stays)
    client = cluster.client()
    flags = set[int]()

    def note_flags(shard: int, request: Sequence[Buffer], reply: Sequence[Buffer]) -> Sequence[Buffer]:
        flags.update(decode(each, max_bytes=1 << 20).header.flags for each in (request, reply))
        return reply

    cluster.channel.changes_reply = note_flags
    pull(cluster, client)
    assert flags == {UNCHECKED_COLUMNS if stays else 0}


KEEPS = Registration(1, 0, 1, 1 << 32, 1, "pserver:1", is_supervised=True, has_log=True, acks_precede_durability=True)


class AckingShard:
    """Acks each push, which no power cut survives.

    Attributes:
        incarnation: That of its replies.
        pushed: Seq of each push, in order.
    """

    def __init__(self) -> None:
        self.incarnation = KEEPS.incarnation
        self.pushed: list[int] = []

    def answer(self, shard: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        request = decode(parts, max_bytes=1 << 20).header
        self.pushed.append(request.push_seq)
        header = Header(Op.ACK, 0, 1, 0, self.incarnation, 1, request.client_id, 1, request.request_id)
        header.push_seq, header.step = request.push_seq, request.step
        return encode(Frame(header, []))


class NotingChannel(InProcessChannel):
    """Notes for how long a receive with nothing to receive may wait."""

    waits_s: list[float]

    def receive(self, timeout_s: float) -> tuple[int, list[Buffer]] | None:
        if not self.needs_receive:
            self.waits_s.append(timeout_s)
        return super().receive(timeout_s)


def test_a_restart_that_is_not_noted_in_time_may_be_tried_again() -> None:
    shard = AckingShard()
    io_loop = IoLoop(InProcessChannel(1, shard.answer), ClientIdentity(b"c" * 16), [KEEPS], Settings(deadline_s=0.05))
    with io_loop._io_lock, pytest.raises(ShardUnavailable) as caught:
        io_loop.expect(0, 2 << 32)
    assert caught.value.shard == 0
    io_loop.close()


def test_pushes_that_a_pserver_lost_count_as_failed() -> None:
    shard = AckingShard()
    io_loop = IoLoop(InProcessChannel(1, shard.answer), ClientIdentity(b"c" * 16), [KEEPS], Settings(deadline_s=20.0))
    shard.incarnation = 2 << 32
    io_loop.expect(0, shard.incarnation)
    io_loop.rejoin(0, KEEPS._replace(incarnation=shard.incarnation), 3)
    wait_until(lambda: io_loop.num_rejoins == 1)
    io_loop.close()
    assert io_loop.num_failed_pushes == 3


def test_replayed_steps_wait_for_nothing_but_their_acks() -> None:
    shard = AckingShard()
    channel = NotingChannel(1, shard.answer)
    channel.waits_s = []
    io_loop = IoLoop(channel, ClientIdentity(b"c" * 16), [KEEPS], Settings(deadline_s=20.0))
    for step in range(1, 21):
        io_loop.start(Call([Request(Op.PUSH, step)], wants_answers=False))
        io_loop.flush(10.0)
    shard.incarnation = 2 << 32
    assert io_loop.expect(0, shard.incarnation).push_seq == 0
    channel.waits_s.clear()
    io_loop.rejoin(0, KEEPS._replace(incarnation=shard.incarnation), 0)
    wait_until(lambda: len(shard.pushed) == 40)
    io_loop.flush(10.0)
    waits_s = list(channel.waits_s)
    io_loop.close()
    assert shard.pushed == [*range(1, 21)] * 2
    assert [wait_s for wait_s in waits_s if wait_s == _LAST_RECEIVE_S] == []
