"""With `sync` a thread of the log releases replies to pushes, many a sync; and what a disk that fails does to them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.errors import ErrorCode, LogFailed
from fleet_sparse.pserver.log.log_format import HEAD_BYTES, HEADER_BYTES, RECORD_MAGIC, Kind
from fleet_sparse.pserver.log.log_writer import LogWriter
from fleet_sparse.pserver.net.data_plane import DataPlane
from fleet_sparse.pserver.net.held_replies import HeldReplies
from fleet_sparse.pserver.net.streams import Streams
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Frame, Op
from support.logs import close, logged_shard, recovered, small_writer, state_of
from support.shards import CLIENT, SGD, FrameClient, answer, code_of, floats, ids_of, late_replies, pull, push
from support.steps import SYNC_MODE, asks_for, make_job, one
from support.streams import StreamSocket

MAX_BYTES = 1 << 20
NUM_CLIENTS = 6


class Disk:
    """Lets syncs of one file through, one after the other.

    Attributes:
        num_syncs: Those that were begun.
        error: What a sync ends with; None if it succeeds.
    """

    def __init__(self, writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_syncs = 0
        self.error: OSError | None = None
        self._begun, self._may_end = threading.Semaphore(0), threading.Semaphore(0)
        real = os.fdatasync

        def sync(file: int) -> None:
            if file != writer._segment:
                real(file)
                return
            self.num_syncs += 1
            self._begun.release()
            assert self._may_end.acquire(timeout=60)
            if self.error is not None:
                raise self.error
            real(file)

        monkeypatch.setattr(os, "fdatasync", sync)

    def await_sync(self) -> None:
        assert self._begun.acquire(timeout=60)

    def end_syncs(self, number: int = 1000) -> None:
        self._may_end.release(number)


class Served:
    """A shard with a log that is served on streams."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shard = logged_shard(directory, SGD, durability="sync")
        assert self.shard.log is not None
        self.writer = self.shard.log.writer
        self.writer.sync()
        self.disk = Disk(self.writer, monkeypatch)
        self.streams = Streams(max_frame_bytes=MAX_BYTES)
        self.plane = DataPlane(self.shard, max_frame_bytes=MAX_BYTES, streams=self.streams)
        self.fault: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._sockets: list[StreamSocket] = []

    def _run(self) -> None:
        try:
            self.plane.run()
        except LogFailed as error:
            self.fault = error

    def dial(self) -> StreamSocket:
        self._sockets.append(StreamSocket(self.streams.endpoint, timeout_s=60.0))
        return self._sockets[-1]

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def applied(self, client_id: bytes) -> int:
        return self.plane.post(lambda: self.shard.ledger.applied(client_id)).result(60)

    def close(self) -> None:
        self.disk.end_syncs()
        self.plane.stop()
        self.join()
        for each in self._sockets:
            each.close()
        close(self.shard)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    made = Served(tmp_path / "log", monkeypatch)
    yield made
    made.close()


class Pusher:
    """A client that pushes to row 1 without waiting for acks."""

    def __init__(self, served: Served, number: int) -> None:
        self.client_id = bytes([number + 1]) * 16
        self._served = served
        self._client = FrameClient(served.shard, self.client_id)
        self._socket = served.dial()

    def send(self, *, is_plain: bool = True) -> None:
        """Sends a push, and returns once it is applied."""
        blocks = [push(SGD, ids_of(1), floats([1.0, 0.0]))]
        if not is_plain:
            blocks.append(pull(SGD, ids_of(1)))
        op = Op.PUSH if is_plain else Op.PUSH_PULL
        self._socket.send_multipart(encode(self._client.frame(op, *blocks)))
        self._client.seq += 1
        while self._served.applied(self.client_id) < self._client.seq:
            pass

    def pull(self) -> Frame:
        self._socket.send_multipart(encode(self._client.frame(Op.PULL, pull(SGD, ids_of(1)))))
        return self.receive()

    def receive(self) -> Frame:
        return decode(self._socket.recv_multipart(), max_bytes=MAX_BYTES)


def acked(pusher: Pusher) -> int:
    reply = pusher.receive()
    assert reply.error is None
    return reply.header.push_seq


@pytest.mark.guarantee("W5")
@pytest.mark.parametrize("is_plain", [True, False])
def test_pushes_of_several_clients_share_a_sync(served: Served, is_plain: bool) -> None:
    clients = [Pusher(served, number) for number in range(NUM_CLIENTS)]
    clients[0].send(is_plain=is_plain)
    served.disk.await_sync()
    for each in clients[1:]:  # they are applied while the disk is busy
        each.send(is_plain=is_plain)
    served.disk.end_syncs()
    assert [acked(each) for each in clients] == [1] * NUM_CLIENTS
    assert served.disk.num_syncs == 2
    assert served.writer.durable_lsn == served.writer.newest_lsn


@pytest.mark.guarantee("W5")
def test_no_push_is_acked_before_it_is_durable(served: Served) -> None:
    first, second = Pusher(served, 0), Pusher(served, 1)
    first.send()
    served.disk.await_sync()
    second.send()
    served.disk.end_syncs(1)
    assert acked(first) == 1
    served.disk.await_sync()  # which is that of the second client
    assert second.pull().header.push_seq == 0
    served.disk.end_syncs()
    assert acked(second) == 1


def test_acks_of_a_client_come_in_order(served: Served) -> None:
    client = Pusher(served, 0)
    for _ in range(3):
        client.send()
    served.disk.end_syncs()
    assert [acked(client) for _ in range(3)] == [1, 2, 3]


def test_a_pull_waits_for_no_sync_and_acknowledges_nothing(served: Served) -> None:
    client, other = Pusher(served, 0), Pusher(served, 1)
    client.send()
    for each in (client, other):
        reply = each.pull()
        assert reply.blocks[0].rows is not None
        assert (reply.blocks[0].rows.tolist(), reply.header.push_seq) == ([[-0.5, 0.5]], 0)
    served.disk.end_syncs()
    assert acked(client) == 1
    assert client.pull().header.push_seq == 1


def test_a_push_that_is_sent_again_is_not_acked_earlier(served: Served) -> None:
    client, again = Pusher(served, 0), Pusher(served, 0)
    client.send()
    served.disk.await_sync()
    again.send()
    assert client.pull().header.push_seq == 0
    served.disk.end_syncs()
    assert (acked(client), acked(again)) == (1, 1)
    np.testing.assert_array_equal(client.pull().blocks[0].rows, [[-0.5, 0.5]])


def test_held_replies_are_sent_at_the_end(served: Served) -> None:
    client = Pusher(served, 0)
    client.send()
    served.disk.await_sync()
    served.plane.stop()
    served.disk.end_syncs()
    assert acked(client) == 1


def test_no_more_replies_are_held_than_the_bound(tmp_path: Path) -> None:
    writer = small_writer(tmp_path)
    held, sent = HeldReplies(writer), []
    writer.append(Kind.LOAD)
    held.add(lambda: sent.append(1), (256 << 20) - 1)
    assert not held.are_too_many
    held.add(lambda: sent.append(2), 1)
    assert held.are_too_many
    writer.sync()
    for send in held.take_due():
        send()
    assert (sent, held.are_too_many) == ([1, 2], False)
    writer.close()


# A disk that fails


def test_a_failed_sync_ends_the_data_plane_and_acks_nothing(served: Served) -> None:
    client = Pusher(served, 0)
    client.send()
    served.disk.await_sync()
    served.disk.error = OSError(errno.EIO, "input/output error")
    served.disk.end_syncs()
    with pytest.raises(ConnectionError):
        client.receive()
    served.join()
    assert isinstance(served.fault, LogFailed)
    with pytest.raises(LogFailed):
        served.writer.append(Kind.LOAD)


@pytest.mark.guarantee("W13")
def test_a_log_continues_before_what_a_failed_sync_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    client = FrameClient(shard)
    client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    assert shard.log is not None
    shard.log.writer.sync()
    state = state_of(shard)
    client.push(push(SGD, ids_of(2), floats([1.0, 0.0])))

    def refuse(file: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        with pytest.raises(LogFailed):
            shard.log.writer.sync()
    close(shard)
    again = logged_shard(tmp_path / "log")
    assert state_of(again) == state
    close(again)


def push_without_memory(shard: Any, monkeypatch: pytest.MonkeyPatch) -> Frame:
    """Pushes what finds no memory, while the disk refuses to say so in the log."""

    def refuse(self: TableStore, *arguments: Any) -> None:
        raise MemoryError("no room")

    real = os.pwritev

    def write(file: int, parts: Any, offset: int) -> int:
        if bytes(parts[0])[:6] == RECORD_MAGIC + Kind.VOID.to_bytes(2, "little"):
            raise OSError(errno.EIO, "input/output error")
        return real(file, parts, offset)

    client = FrameClient(shard)
    client.seq = shard.ledger.applied(CLIENT)
    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "push", refuse)
        patch.setattr(os, "pwritev", write)
        return client.push(push(SGD, ids_of(2), floats([1.0, 0.0])))


@pytest.mark.guarantee("W13")
def test_nothing_follows_a_record_that_could_not_be_made_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    client = FrameClient(shard)
    client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    state = state_of(shard)
    assert code_of(push_without_memory(shard, monkeypatch)) is ErrorCode.INTERNAL
    assert shard.fault
    assert code_of(client.push(push(SGD, ids_of(3), floats([1.0, 0.0])))) is ErrorCode.INTERNAL
    with pytest.raises(LogFailed):
        shard.join(0, 1, CLIENT, None, begins_job=True)
    close(shard)
    again = logged_shard(tmp_path / "log")
    assert state_of(again) == state
    close(again)


@pytest.mark.guarantee("W13")
def test_a_record_that_was_written_in_part_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    client = FrameClient(shard)
    client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    state, real = state_of(shard), os.pwritev

    def write_half(file: int, parts: Any, offset: int) -> int:
        real(file, [b"".join(map(bytes, parts))[:100]], offset)
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "pwritev", write_half)
    assert code_of(client.push(push(SGD, ids_of(2), floats([1.0, 0.0])))) is ErrorCode.INTERNAL
    monkeypatch.undo()
    assert shard.log is not None
    assert shard.log.writer.fault is not None
    close(shard)
    again = logged_shard(tmp_path / "log")
    assert state_of(again) == state
    close(again)


def test_there_is_always_room_for_a_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = small_writer(tmp_path, segment_bytes=512)
    writer.begin_segment()

    def refuse(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    sizes = [writer.append(Kind.TABLE, parts=[bytes(512 - HEADER_BYTES - 2 * HEAD_BYTES)])]
    writer.append(Kind.VOID)
    assert (sizes, writer.newest_lsn) == ([1], 2)
    writer.close()


def test_a_void_push_is_not_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    client = FrameClient(shard)

    def refuse(self: TableStore, *arguments: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "push", refuse)
        client.push(push(SGD, ids_of(2), floats([1.0, 0.0])))
    assert shard.log is not None
    shard.log.writer.sync()
    assert shard.durable_push(CLIENT) == 0
    close(shard)


def test_after_a_restart_the_pushes_of_the_log_are_durable(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    FrameClient(shard).push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    again = recovered(shard, durability="sync")
    reply = FrameClient(again).ask(Op.PULL, pull(SGD, ids_of(1)))
    assert (reply.header.push_seq, reply.header.push_floor) == (1, 1)
    for each in (shard, again):
        close(each)


# A disk that was full


@pytest.mark.guarantee("W6")
def test_a_push_that_waited_is_asked_for_once_there_is_room(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    assert shard.log is not None
    shard.log.writer.full_since = 0.0
    shard.log._failover_s = 1e9
    client = FrameClient(shard)
    assert client.push(push(SGD, ids_of(1), floats([1.0, 0.0]))).header.op is Op.WAIT
    shard.end_waits_for_room()
    assert late_replies(shard) == []
    shard.log.writer.full_since = None
    shard.end_waits_for_room()
    (reply,) = late_replies(shard)
    assert reply.error is not None
    assert (reply.error.code, reply.error.number, reply.header.request_id) == (ErrorCode.GAP, 1, 9)
    shard.end_waits_for_room()
    assert late_replies(shard) == []
    close(shard)


def test_a_push_that_was_taken_meanwhile_is_not_asked_for(tmp_path: Path) -> None:
    shard, (worker, _) = make_job(SYNC_MODE, 2, shard=logged_shard(tmp_path / "log", SGD))
    assert shard.log is not None
    shard.log.writer.full_since = 0.0
    shard.log._failover_s = 1e9
    frame = worker.frame(Op.PUSH_PULL, one(1.0), asks_for(SGD, 7))
    assert answer(shard, frame).header.op is Op.WAIT
    shard.log.writer.full_since = None
    assert answer(shard, frame).header.op is Op.WAIT  # for the other worker
    shard.end_waits_for_room()
    assert late_replies(shard) == []
    close(shard)


@pytest.mark.guarantee("W6")
def test_the_thread_of_the_log_ends_the_wait_for_room(served: Served) -> None:
    assert served.shard.log is not None
    served.shard.log._failover_s = 1e9
    served.writer.full_since = 0.0
    client = FrameClient(served.shard)
    socket = served.dial()
    request = encode(client.frame(Op.PUSH, push(SGD, ids_of(1), floats([1.0, 0.0]))))
    socket.send_multipart(request)
    assert decode(socket.recv_multipart(), max_bytes=MAX_BYTES).header.op is Op.WAIT
    served.writer.full_since = None
    served.writer.on_change()
    assert code_of(decode(socket.recv_multipart(), max_bytes=MAX_BYTES)) is ErrorCode.GAP
    served.disk.end_syncs()
    socket.send_multipart(request)
    assert decode(socket.recv_multipart(), max_bytes=MAX_BYTES).header.push_seq == 1
