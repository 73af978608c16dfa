"""A pserver that begins with the log of another one, whose workers may still run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleet_sparse.core.mode import ASYNC, SYNC, Mode
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


@pytest.fixture
def before_of_two(tmp_path: Path) -> HeldControl:
    """A pserver with a log, whose two workers have registered and met."""
    held = HeldControl(tmp_path, STARTED, logged_shard(tmp_path / "log", only_registered=True))

    async def meet() -> None:
        for worker in range(2):
            await held.start(of_two(worker))
        await asyncio.gather(held.start(once(0)), held.start(once(1)))
        position = messages.WorkerPosition(worker_index=1, step=5)
        await held.start(messages.ReportProgressRequest(position=position, client_id=client_of(1)))

    asyncio.run(meet())
    return held


def client_of(worker: int) -> bytes:
    return bytes([worker]) * 16


def of_two(worker: int, *, client_id: bytes = b"", mode: Mode | None = None) -> messages.RegisterRequest:
    return registration(SGD, worker=worker, num_workers=2, client_id=client_id, mode=mode or Mode(ASYNC))


def once(worker: int) -> messages.BarrierRequest:
    request = barrier(worker, "init_worker")
    request.once = True
    return request


def returning_of_two(worker: int) -> messages.RegisterRequest:
    request = of_two(worker)
    request.resumption.CopyFrom(messages.Resumption())
    return request


@in_loop
async def test_new_process_of_the_job_waits_for_a_worker_of_the_log(before_of_two: HeldControl) -> None:
    after = HeldControl("", STARTED, recovered(before_of_two.shard, only_registered=True))
    started_again = asyncio.ensure_future(after.start(of_two(1, client_id=NEW)))
    await turns()
    assert not started_again.done()
    first = await after.start(returning_of_two(0))
    second = await started_again
    log = before_of_two.shard.log
    assert log is not None
    assert (first.job_id, second.job_id) == (log.control.job_id,) * 2
    assert (second.is_restart, second.progress.step, list(second.open_barriers)) == (True, 5, ["init_worker"])


@in_loop
async def test_job_of_new_workers_begins_after_a_moment(
    before_of_two: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.registration_rpcs.TAKEOVER_S", 0.01)
    after = HeldControl("", STARTED, recovered(before_of_two.shard, only_registered=True))
    replies = await asyncio.gather(
        *(after.start(of_two(worker, client_id=bytes([9 + worker]) * 16)) for worker in (0, 1))
    )
    log = before_of_two.shard.log
    assert log is not None
    assert len({reply.job_id for reply in replies} | {log.control.job_id}) == 2
    assert not any(reply.is_restart for reply in replies)


@in_loop
async def test_barriers_of_the_log_are_passed(before_of_two: HeldControl) -> None:
    after = HeldControl("", STARTED, recovered(before_of_two.shard, only_registered=True))
    waiting = asyncio.ensure_future(after.start(once(1)))
    await turns()
    assert not waiting.done()
    for worker in range(2):
        await after.start(returning_of_two(worker))
    await waiting


@pytest.mark.parametrize("mode", [Mode(ASYNC), Mode(SYNC)])
def test_pserver_without_a_supervisor_takes_over_as_well(tmp_path: Path, mode: Mode) -> None:
    before = HeldControl(tmp_path, STARTED, logged_shard(tmp_path / "log", only_registered=True))
    job_id = before.call(registration(SGD, mode=mode)).job_id
    step = 1 if mode.kind == SYNC else 0
    assert FrameClient(before.shard, client_id=OLD).push(BLOCK, step=step).error is None
    after = HeldControl(tmp_path, None, recovered(before.shard, only_registered=True))
    request = registration(SGD, mode=mode)
    request.resumption.CopyFrom(messages.Resumption(push_seq=1, step=step))
    reply = after.call(request)
    assert (reply.is_restart, reply.is_supervised, reply.restored_seq, reply.job_id) == (True, False, 1, job_id)
