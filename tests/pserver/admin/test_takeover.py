"""A pserver that begins with the log of another one, whose workers may still run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.errors import SettingError
from fleet_sparse.pserver.admin.service import Supervised
from fleet_sparse.wire import control_pb2 as messages
from support.controls import HeldControl, barrier, registration
from support.coordinators import in_loop, train, turns
from support.logs import logged_shard, recovered
from support.shards import SGD, FrameClient, floats, ids_of, push

BLOCK = push(SGD, ids_of(7), floats([1, 1]))
STARTED = Supervised(False, has_recovered=False, on_job=lambda: None, on_snapshot=lambda name: None)
OLD, NEW = bytes(16), b"n" * 16


@pytest.fixture
def before(tmp_path: Path) -> HeldControl:
    """A pserver with a log, whose one worker has trained one step."""
    held = HeldControl(tmp_path, STARTED, logged_shard(tmp_path / "log", only_registered=True))
    held.call(of_worker(OLD))
    train(held, 7)
    return held


@pytest.fixture
def after(tmp_path: Path, before: HeldControl) -> HeldControl:
    """The pserver that another supervisor starts on that log."""
    return HeldControl(tmp_path, STARTED, recovered(before.shard, only_registered=True))


def of_worker(client_id: bytes, *, job_id: int = 0) -> messages.RegisterRequest:
    request = registration(SGD, client_id=client_id, mode=Mode(ASYNC))
    request.job_id = job_id
    return request


def job_of(held: HeldControl) -> int:
    """Returns the id of the job, which a worker that registers again is told, too."""
    return held.call(of_worker(OLD)).job_id


def returning(push_seq: int = 1) -> messages.RegisterRequest:
    request = of_worker(OLD)
    request.resumption.CopyFrom(messages.Resumption(push_seq=push_seq))
    return request


def test_worker_of_the_log_continues_after_its_newest_push(before: HeldControl, after: HeldControl) -> None:
    reply = after.call(returning())
    assert (reply.is_restart, reply.restored_seq, reply.job_id) == (True, 1, job_of(before))
    client = FrameClient(after.shard, client_id=OLD)
    for _ in range(2):
        client.push(BLOCK, push_seq=2)
    assert client.rows(SGD, 7) == [[-1.5, -1.5]], "the push was applied once"


def test_worker_whose_job_another_shard_names_continues(before: HeldControl, after: HeldControl) -> None:
    """A process that was started again learns the job from shard 0, and has nothing to resume here."""
    reply = after.call(of_worker(NEW, job_id=job_of(before)))
    assert (reply.is_restart, reply.job_id) == (True, job_of(before))


def test_new_worker_begins_a_job_with_the_rows_of_the_log(before: HeldControl, after: HeldControl) -> None:
    reply = after.call(of_worker(NEW))
    assert not reply.is_restart
    assert reply.job_id != job_of(before)
    assert FrameClient(after.shard, client_id=NEW).rows(SGD, 7) == [[-0.5, -0.5]]


def test_worker_of_the_job_before_is_refused_once_another_began(after: HeldControl) -> None:
    after.call(of_worker(NEW))
    with pytest.raises(SettingError):
        after.call(returning())


@in_loop
async def test_barrier_waits_for_a_worker_of_the_log(after: HeldControl) -> None:
    waiting = asyncio.ensure_future(after.start(barrier(0)))
    await turns()
    await after.start(returning())
    await waiting
