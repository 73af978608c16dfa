"""A push whose record is larger than the segment ahead waits for room on a full disk; others do not wait for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.log.log_format import HEAD_BYTES, next_segment_name
from fleet_sparse.pserver.log.log_writer import LogWriter
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.wire.frame_format import Action, Block, Op
from support.logs import StraightClient, close, logged_shard
from support.shards import SGD, FrameClient, answer, code_of, floats, ids_of, late_replies, push
from support.steps import SYNC_MODE, Worker, join
from support.waits import wait_until

SEGMENT_BYTES = 4096

pytestmark = pytest.mark.guarantee("W6")


def writer_of(shard: Shard) -> LogWriter:
    assert shard.log is not None
    return shard.log.writer


def wait_for_room(shard: Shard) -> None:
    """Waits until there is room for a large record."""
    wait_until(lambda: writer_of(shard).lacks_room_since(1 << 19) is None)


def rows_of(first_id: int, count: int) -> Block:
    """A push of 16 bytes a row."""
    return push(SGD, np.arange(first_id, first_id + count), np.ones((count, 2), np.float32))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A disk that is full while `num_bytes`, the longest file for which it has room, is 0."""

    class Disk:
        num_bytes = 1 << 30

        def allocate(self, file: int, offset: int, length: int) -> None:
            if length > self.num_bytes:
                raise OSError(errno.ENOSPC, "no space")
            allocate(file, offset, length)

    allocate, made = os.posix_fallocate, Disk()
    monkeypatch.setattr(os, "posix_fallocate", made.allocate)
    return made


@pytest.fixture
def shard(tmp_path: Path, disk: Any) -> Iterator[Shard]:
    """A shard on a full disk, with a segment ahead."""
    made = logged_shard(tmp_path / "log", SGD, segment_bytes=SEGMENT_BYTES, log_sync_s=0.01)
    ahead = tmp_path / "log" / next_segment_name(1)
    wait_until(lambda: ahead.exists() and ahead.stat().st_size == SEGMENT_BYTES)
    disk.num_bytes = 0
    yield made
    close(made)


@pytest.mark.parametrize("client_of", [FrameClient, StraightClient])
def test_a_push_larger_than_the_segment_ahead_waits(
    shard: Shard, disk: Any, client_of: Callable[[Shard], FrameClient[Shard]]
) -> None:
    client = client_of(shard)
    assert client.push(rows_of(0, 600)).header.op is Op.WAIT
    shard.end_waits_for_room()
    assert not shard.take_deferred_replies()
    disk.num_bytes = 1 << 20
    wait_for_room(shard)
    shard.end_waits_for_room()
    (reply,) = shard.take_deferred_replies()
    assert isinstance(reply.outcome, Refusal)
    assert reply.outcome.error.code is ErrorCode.GAP
    client.seq = 0
    assert client.push(rows_of(0, 600)).header.op is Op.ACK
    assert client.rows(SGD, 0, 599) == [[-0.5, -0.5]] * 2


def test_small_pushes_do_not_wait_for_a_large_one(shard: Shard, disk: Any) -> None:
    disk.num_bytes = SEGMENT_BYTES
    client, other = FrameClient(shard), FrameClient(shard, b"another client..")
    assert client.push(rows_of(0, 600)).header.op is Op.WAIT
    for first_id in range(1000, 1000 + 16 * 50, 50):  # of 800 bytes, so that they take more than one segment
        assert other.push(rows_of(first_id, 50)).header.op is Op.ACK
    client.seq = 0
    assert client.push(rows_of(0, 600)).header.op is Op.WAIT


def test_a_push_that_waits_too_long_is_refused(shard: Shard) -> None:
    assert shard.log is not None
    client = FrameClient(shard)
    assert client.push(rows_of(0, 600)).header.op is Op.WAIT
    shard.log._failover_s = 0.0
    client.seq = 0
    assert code_of(client.push(rows_of(0, 600))) is ErrorCode.LOG_FULL


def test_a_shorter_push_without_room_does_not_prolong_the_wait(shard: Shard) -> None:
    client, other = FrameClient(shard), FrameClient(shard, b"another client..")
    assert client.push(rows_of(0, 900)).header.op is Op.WAIT
    since = writer_of(shard).lacks_room_since(1 << 14)
    assert since is not None
    assert other.push(rows_of(0, 600)).header.op is Op.WAIT
    assert writer_of(shard).lacks_room_since(1 << 14) == since


def test_a_merged_step_larger_than_the_segment_ahead_waits(shard: Shard, disk: Any) -> None:
    workers = [Worker(shard, index) for index in range(2)]
    for worker in workers:
        join(worker, 2, Mode(SYNC), begins_job=worker.index == 0)
    workers[0].push(rows_of(0, 200))
    waiting = workers[1].frame(Op.PUSH, rows_of(1000, 200))
    client = FrameClient(shard, workers[1].client_id)
    numbers = {"push_seq": waiting.header.push_seq, "step": waiting.header.step}
    assert client.ask(Op.PUSH, *waiting.blocks, **numbers).header.op is Op.WAIT
    assert shard.job is not None
    assert (shard.job.failure, shard.complete_step) == (None, 0)
    disk.num_bytes = 1 << 20
    wait_for_room(shard)
    assert code_of(client.ask(Op.PUSH, *waiting.blocks, **numbers)) is None
    assert (shard.job.failure, shard.complete_step) == (None, 1)
    assert client.rows(SGD, 0, 1199) == [[0.0, 0.0]] * 2


def test_a_small_push_goes_on_in_the_segment_ahead(shard: Shard) -> None:
    client = FrameClient(shard)
    for _ in range(3):
        assert client.push(push(SGD, ids_of(1), floats([1.0, 0.0]))).header.op is Op.ACK


def members_of(shard: Shard, mode: Mode) -> list[Worker[Shard]]:
    """The two workers of a job."""
    workers = [Worker(shard, index) for index in range(2)]
    for worker in workers:
        join(worker, 2, mode, begins_job=worker.index == 0)
    return workers


def use_up(shard: Shard) -> None:
    """Leaves room for no record of a worker, neither in the segment nor in one ahead."""
    writer = writer_of(shard)
    with writer._lock:
        writer._ahead.close()
        writer._end = writer._offset + 100


def make_room(shard: Shard, disk: Any) -> None:
    """Makes room again, and has those that waited for it send again."""
    disk.num_bytes = 1 << 20
    wait_until(lambda: writer_of(shard).full_since is None)
    shard.end_waits_for_room()
    assert {code_of(reply) for reply in late_replies(shard)} == {ErrorCode.GAP}


def has_failed(shard: Shard) -> bool:
    assert shard.job is not None
    return shard.job.failure is not None


@pytest.mark.parametrize("mode", [SYNC_MODE, Mode(ASYNC, max_step_lag=1)], ids=str)
def test_workers_that_leave_wait_for_room(shard: Shard, disk: Any, mode: Mode) -> None:
    workers = members_of(shard, mode)
    use_up(shard)
    leaves = [worker.frame(Op.LEAVE) for worker in workers]
    assert [answer(shard, frame).header.op for frame in leaves] == [Op.WAIT] * 2
    make_room(shard, disk)
    replies = [answer(shard, frame) for frame in leaves]
    assert [reply.header.op for reply in [*replies, *late_replies(shard)]] == [Op.WAIT, Op.ACK, Op.ACK]


def test_a_leave_without_room_fails_no_sync_job(shard: Shard) -> None:
    workers = members_of(shard, SYNC_MODE)
    use_up(shard)
    for worker in workers:
        worker.ask(Op.LEAVE)
    assert not has_failed(shard)


def test_a_commit_waits_for_room(shard: Shard, disk: Any) -> None:
    workers = members_of(shard, SYNC_MODE)
    for worker in workers:
        worker.ask(Op.PREPARE, rows_of(0, 1))
    late_replies(shard)
    use_up(shard)
    factor = Block(Action.FACTORS, SGD.table_id, SGD.schema_hash, 1, 1, None, np.ones((1, 1), np.float32))
    commits = [worker.frame(Op.COMMIT, factor) for worker in workers]
    assert [answer(shard, frame).header.op for frame in commits] == [Op.WAIT] * 2
    assert not has_failed(shard)
    make_room(shard, disk)
    assert [answer(shard, frame).header.op for frame in commits] == [Op.WAIT, Op.ROWS]
    assert shard.complete_step == 1


def test_all_workers_that_left_have_room_to_rejoin(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = members_of(shard, SYNC_MODE)
    workers[0].push(rows_of(0, 1))
    workers[0].ask(Op.LEAVE)
    use_up(shard)
    writer, leave = writer_of(shard), workers[1].frame(Op.LEAVE)  # completes the step, and then all rejoin
    monkeypatch.setattr(
        writer, "has_room", lambda num_bytes: num_bytes + 2 * HEAD_BYTES <= writer._end - writer._offset
    )
    for _ in range(100):
        if answer(shard, leave).header.op is not Op.WAIT:
            break
        writer._end += 8
    assert [reply.header.op for reply in late_replies(shard)] == [Op.ACK] * 2  # to the push and the LEAVE of worker 0
    assert not has_failed(shard)
