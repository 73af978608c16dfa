"""Frames without an object each, and rows that are received where the caller wants them."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.errors import ProtocolError, ShardUnavailable
from fleet_sparse.settings import Settings
from fleet_sparse.wire import stream as wire_stream
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Buffer, Op
from fleet_sparse.wire.stream import FrameMemory, FrameReader
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.shard_link import ClientIdentity
from fleet_sparse.worker.net.stream_channel import StreamChannel
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.client_calls import dense_push, pulled, rows_push, unique_of
from support.in_process import QUICK, InProcessCluster
from support.streams import StreamServer

MAX_BYTES = 64 << 20


def batch_of(cluster: InProcessCluster, spec: Any, ids: Sequence[int]) -> RowBatch:
    return RowBatch.empty(spec, unique_of(cluster, spec, ids))


# Bytes


def sent_by(cluster: InProcessCluster, client: Client) -> list[list[bytes]]:
    """The frames that the newest client sends from now on."""
    frames: list[list[bytes]] = []
    send = cluster.channel.send

    def noted(shard: int, parts: Sequence[Buffer]) -> bool:
        frames.append([bytes(part) for part in parts])
        return send(shard, parts)

    cluster.channel.send = noted  # type: ignore[method-assign]
    return frames


def is_as_encoded(parts: Sequence[Buffer]) -> bool:
    return [bytes(part) for part in encode(decode(parts, max_bytes=MAX_BYTES))] == list(parts)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_frame_bytes", [1 << 20, 600])
def test_frames_of_steps_are_as_encode_makes_them(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, stays: bool, rows_dtype: Any, max_frame_bytes: int
) -> None:
    monkeypatch.setattr("support.in_process.LossyChannel.stays_on_machine", lambda *_: stays)
    client = cluster.client(replace(QUICK, rows_dtype=rows_dtype, max_frame_bytes=max_frame_bytes))
    frames = sent_by(cluster, client)
    client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    for ids in (range(100), [7], []):
        tables = [batch_of(cluster, spec, ids) for spec in (cluster.table, cluster.other)]
        pushes = [rows_push(cluster, cluster.table, ids), rows_push(cluster, cluster.other, [3])]
        pushes[1] = pushes[1]._replace(values=np.ones((1, 3), np.float32))
        client.pull(tables)
        client.push(pushes)
        client.start_update(pushes, [dense_push(cluster)], tables, weight=0.5).wait()
        with suppress(ProtocolError):  # a shard accepts it in a job that counts steps only
            client.start_pull(tables, early=True).wait()
    client.flush()
    ops = {decode(parts, max_bytes=MAX_BYTES).header.op for parts in frames}
    assert ops == {Op.ASSIGN, Op.PULL, Op.PUSH, Op.PUSH_PULL, Op.PULL_EARLY}
    assert all(map(is_as_encoded, frames))


def test_frames_of_clipped_steps_are_as_encode_makes_them(cluster: InProcessCluster) -> None:
    client = cluster.worker(0, 1, Mode(SYNC))
    frames = sent_by(cluster, client)
    push = rows_push(cluster, cluster.table, range(20))
    client.start_prepare([push], [], weight=1.0, step=1).wait()
    client.start_commit([(cluster.table, np.ones(1, np.float32))], [], [batch_of(cluster, cluster.table, [1])], step=1)
    client.leave()
    assert {decode(parts, max_bytes=MAX_BYTES).header.op for parts in frames} == {Op.PREPARE, Op.COMMIT, Op.LEAVE}
    assert all(map(is_as_encoded, frames))


# In place


class Server:
    """Answers on a Unix socket for one shard, and stops in the middle of replies as it is told.

    Attributes:
        stops: For each reply to come, the number of its bytes to send before `stop` is called; None to send all.
        stop: Returns whether the rest is sent.
        endpoint: Address of the socket.
    """

    def __init__(self, answer: Callable[[Sequence[Buffer]], Sequence[Buffer]]) -> None:
        self._answer = answer
        self.stops: list[int | None] = []
        self.stop: Callable[[], bool] = lambda: False
        self._listener = socket.socket(socket.AF_UNIX)
        name = f"fleet-sparse-test-{id(self)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self.endpoint = f"unix:{name}"
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        try:
            while True:
                end = self._listener.accept()[0]
                self._ends.append(end)
                self._threads.append(threading.Thread(target=self._serve, args=(end,)))
                self._threads[-1].start()
        except OSError:
            pass

    def _serve(self, end: socket.socket) -> None:
        reader = FrameReader(MAX_BYTES, FrameMemory())
        try:
            while True:
                request = reader.receive(end)
                if request is None:
                    continue
                reply = [bytes(part) for part in self._answer(request)]
                body = b"".join(part + bytes(-len(part) % 8) for part in reply)
                lengths = struct.pack(f"<{len(reply)}Q", *map(len, reply))
                message = struct.pack("<4sIQ", b"FSS1", len(reply), len(lengths + body)) + lengths + body
                first = self.stops.pop(0) if self.stops else None
                if first is None:
                    end.sendall(message)
                    continue
                end.sendall(message[:first])
                if not self.stop():
                    break
                end.sendall(message[first:])
        except OSError:
            pass
        end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@pytest.fixture
def alone() -> Iterator[InProcessCluster]:
    """One shard."""
    cluster = InProcessCluster(1)
    yield cluster
    cluster.close()


def client_of(cluster: InProcessCluster, endpoints: Sequence[str], settings: Settings = QUICK) -> Client:
    channel = StreamChannel(endpoints, settings)
    identity = ClientIdentity(b"on a real stream", 1)
    return Client(channel, identity, cluster.registrations(), cluster.placement, settings)


@pytest.mark.parametrize("host", [{}, {"host": "127.0.0.1"}], ids=["unix", "tcp"])
@pytest.mark.parametrize("num_ids", [0, 1, 5, 1000, 60_001])
def test_rows_on_streams_are_those_of_other_channels(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, host: dict[str, Any], num_ids: int
) -> None:
    other = cluster.client()
    ids = range(num_ids)
    for spec in (cluster.table, cluster.other):
        grads = np.random.default_rng(1).normal(size=(num_ids, spec.dim)).astype(np.float32)
        other.push([RowBatch(spec, unique_of(cluster, spec, ids), grads, 0.5, 1)])
    expected = [batch_of(cluster, spec, ids) for spec in (cluster.table, cluster.other)]
    other.pull(expected)

    def lend(memory: FrameMemory, num_bytes: int) -> memoryview:
        raise AssertionError(f"{num_bytes} bytes were not received in place")

    with pytest.MonkeyPatch.context() as patched:
        servers = [StreamServer(partial(cluster.answer, shard), **host) for shard in range(len(cluster.shards))]
        lends = wire_stream.FrameMemory.lend
        main = threading.get_ident()
        patched.setattr(
            wire_stream.FrameMemory,
            "lend",
            lambda memory, size: lend(memory, size) if threading.get_ident() == main else lends(memory, size),
        )
        with client_of(cluster, [server.endpoint for server in servers]) as client:
            found = [batch_of(cluster, spec, ids) for spec in (cluster.table, cluster.other)]
            client.pull(found)
        for server in servers:
            server.close()
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one.values, two.values)


def test_rows_are_received_into_arrays_with_gaps(cluster: InProcessCluster) -> None:
    servers = [StreamServer(partial(cluster.answer, shard)) for shard in range(len(cluster.shards))]
    whole = np.zeros((20_000, 8), np.float32)
    with client_of(cluster, [server.endpoint for server in servers]) as client:
        client.pull([RowBatch(cluster.table, unique_of(cluster, cluster.table, range(20_000)), whole[:, :4])])
    for server in servers:
        server.close()
    assert (set(whole[:, :4].flat), set(whole[:, 4:].flat)) == ({1.0}, {0.0})


def test_a_reply_cut_at_any_byte_is_asked_for_again(alone: InProcessCluster) -> None:
    settings = replace(QUICK, retry_s=0.005, deadline_s=20.0)
    with (
        closing(Server(partial(alone.answer, 0))) as server,
        client_of(alone, [server.endpoint], settings) as client,
    ):
        reply_bytes = 16 + 16 + 128 + 64 + 2 * 16
        for num_bytes in range(reply_bytes):
            server.stops = [num_bytes]
            assert pulled(alone, client, alone.table, [1, 2]) == {1: [1.0] * 4, 2: [1.0] * 4}
            assert not server.stops


@pytest.mark.parametrize("num_bytes", [0, 10, 100, 230, 20_000, 100_000])
def test_a_shard_that_dies_in_its_replies_is_unavailable(alone: InProcessCluster, num_bytes: int) -> None:
    settings = replace(QUICK, retry_s=0.05, deadline_s=0.3)
    with closing(Server(partial(alone.answer, 0))) as server:
        server.stops = [num_bytes] * 1000
        client = client_of(alone, [server.endpoint], settings)
        begun = time.monotonic()
        with pytest.raises(ShardUnavailable):
            pulled(alone, client, alone.table, range(10_000))
        assert time.monotonic() - begun < 10
        client.abandon()


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("num_bytes", [0, 100, 230, 20_000, 100_000])
def test_nothing_is_written_after_an_interrupt(alone: InProcessCluster, num_bytes: int) -> None:
    """Not even if half of the rows are in the caller's array."""
    goes_on = threading.Event()

    def interrupt() -> bool:
        time.sleep(0.05)  # the client reads what was sent
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return goes_on.wait(20)

    settings = replace(QUICK, retry_s=20.0, deadline_s=20.0)
    with (
        closing(Server(partial(alone.answer, 0))) as server,
        client_of(alone, [server.endpoint], settings) as client,
    ):
        server.stops, server.stop = [num_bytes], interrupt
        batch = batch_of(alone, alone.table, range(10_000))
        with pytest.raises(KeyboardInterrupt):
            client.pull([batch])
        batch.values.fill(7.0)
        goes_on.set()
        assert set(map(tuple, pulled(alone, client, alone.table, range(10_000)).values())) == {(1.0,) * 4}
        assert set(batch.values.flat) == {7.0}


def test_damaged_rows_from_another_machine_are_asked_for_again(
    alone: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamChannel, "stays_on_machine", lambda *_: False)
    damaged = iter([True])

    def answer(parts: Sequence[Buffer]) -> Sequence[Buffer]:
        head, *columns = alone.answer(0, parts)
        if next(damaged, False):
            columns[0] = bytes(len(columns[0]))
        return [head, *columns]

    with closing(Server(answer)) as server, client_of(alone, [server.endpoint]) as client:
        assert set(map(tuple, pulled(alone, client, alone.table, range(10_000)).values())) == {(1.0,) * 4}
        assert next(damaged, None) is None
