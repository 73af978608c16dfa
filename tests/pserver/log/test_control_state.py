"""What the control plane of a pserver continues from after a crash: its workers and the barriers that they passed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.errors import ErrorCode, LogFailed, LogFull, ProtocolError, WorkerLost
from fleet_sparse.pserver.admin.barriers import LAST_BARRIER
from fleet_sparse.pserver.admin.log_recovery import write_checkpoint
from fleet_sparse.pserver.admin.service import Supervised
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.log.control_state import (
    BarrierOpening,
    ControlChange,
    ControlState,
    RegisteredWorker,
    ReportedProgress,
)
from fleet_sparse.pserver.log.log_format import Kind
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.pserver.log.shard_log import ShardLog
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.wire import control_pb2 as messages
from support.controls import HeldControl, attendance, barrier, registration
from support.coordinators import in_loop, turns
from support.logs import load_into, logged_shard, recovered
from support.shards import SGD, floats, ids_of, push
from support.steps import Worker


def control_of(shard: Shard, *, is_restart: bool = False) -> HeldControl:
    root = shard.log.writer.directory if shard.log is not None else ""
    started = Supervised(is_restart, has_recovered=False, on_job=lambda: None, on_snapshot=lambda name: None)
    return HeldControl(root, started, shard)


def restarted(held: HeldControl) -> HeldControl:
    """Returns the pserver that continues after a crash of this one."""
    return control_of(recovered(held.shard), is_restart=True)


def job_id_of(held: HeldControl) -> int:
    assert held.shard.log is not None
    return held.shard.log.control.job_id


def worker(index: int, *, mode: Mode | None = None, client_id: bytes = b"") -> messages.RegisterRequest:
    return registration(SGD, worker=index, num_workers=2, mode=mode or Mode(ASYNC), client_id=client_id)


def resuming(index: int, *, mode: Mode | None = None) -> messages.RegisterRequest:
    request = worker(index, mode=mode)
    request.resumption.CopyFrom(messages.Resumption())
    return request


async def registered(tmp_path: Path, mode: Mode | None = None) -> HeldControl:
    """Returns a pserver with a log whose two workers have registered."""
    held = control_of(logged_shard(tmp_path / "log"))
    for index in range(2):
        await held.start(worker(index, mode=mode))
    return held


async def meet(held: HeldControl, *requests: Any) -> list[Any]:
    return await asyncio.gather(*map(held.start, requests))


def contributing(index: int, contribution: bytes, sequence: int = 1) -> messages.BarrierRequest:
    request = barrier(index, sequence=sequence)
    request.contribution = contribution
    return request


def once(index: int, name: str = "init_worker") -> messages.BarrierRequest:
    request = barrier(index, name)
    request.once = True
    return request


# Barriers


@pytest.mark.guarantee("W8")
@pytest.mark.parametrize("has_checkpoint", [False, True])
@in_loop
async def test_second_worker_passes_a_barrier_after_a_crash(tmp_path: Path, has_checkpoint: bool) -> None:
    held = await registered(tmp_path)
    await meet(held, contributing(0, b"a"), contributing(1, b"b"))
    if has_checkpoint:
        write_checkpoint(held.shard)
    again = restarted(held)
    await again.start(resuming(1))
    reply = await again.start(contributing(1, b"b"))
    assert list(reply.contributions) == [b"a", b"b"]
    waiting = asyncio.ensure_future(again.start(contributing(1, b"c", 2)))
    await again.start(resuming(0))
    await turns()
    assert not waiting.done()
    reply = await again.start(contributing(0, b"d", 2))
    assert list(reply.contributions) == list((await waiting).contributions) == [b"d", b"c"]


@in_loop
async def test_trained_steps_of_a_barrier_survive_a_crash(tmp_path: Path) -> None:
    held = await registered(tmp_path)
    requests = [barrier(0), barrier(1)]
    for request, num_trained in zip(requests, (3, 5), strict=True):
        request.num_trained = num_trained
    await meet(held, *requests)
    again = restarted(held)
    await again.start(resuming(0))
    assert (await again.start(requests[0])).num_trained == 5


@in_loop
async def test_barrier_is_durable_before_a_worker_is_answered(tmp_path: Path) -> None:
    held = await registered(tmp_path)
    log = held.shard.log
    assert log is not None
    before = log.writer.durable_lsn
    await meet(held, barrier(0), barrier(1))
    assert log.writer.durable_lsn == log.writer.newest_lsn == before + 1


@in_loop
async def test_parts_of_an_exchange_survive_a_crash(tmp_path: Path) -> None:
    held = await registered(tmp_path)
    requests = [
        messages.ExchangeRequest(
            name="e", worker_index=index, client_id=bytes([index]) * 16, sequence=1, parts=[b"%d0" % index, b""]
        )
        for index in range(2)
    ]
    await meet(held, *requests)
    again = restarted(held)
    await again.start(resuming(0))
    assert list((await again.start(requests[0])).parts) == [b"00", b"10"]


@in_loop
async def test_barrier_waits_while_the_log_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = await registered(tmp_path)
    log = held.shard.log
    assert log is not None
    failures = full_times(monkeypatch, log, "note", 2)
    await meet(held, barrier(0), barrier(1))
    assert not failures
    assert log.control.openings


@pytest.mark.guarantee("W6")
@in_loop
async def test_barrier_of_an_ended_job_is_not_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = await registered(tmp_path, Mode(SYNC))
    waiting = await replaced_at_a_barrier(held, monkeypatch, new(1, mode=Mode(SYNC)))
    with pytest.raises(WorkerLost):
        await waiting
    restarted(held)
    assert held.shard.log is not None
    assert not held.shard.log.control.openings


@pytest.mark.guarantee("W6")
@in_loop
async def test_worker_replaced_at_a_barrier_passes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = await registered(tmp_path)
    await (await replaced_at_a_barrier(held, monkeypatch, new(1, job_id=job_id_of(held))))
    again = restarted(held)
    await again.start(resuming(0))
    await again.start(new(1, job_id=job_id_of(held)))
    calls = [asyncio.ensure_future(again.start(barrier(1, client_id=b"n" * 16)))]
    await turns()
    assert not calls[0].done()
    await asyncio.gather(again.start(barrier(0, sequence=2)), *calls)


async def replaced_at_a_barrier(
    held: HeldControl, monkeypatch: pytest.MonkeyPatch, replacement: messages.RegisterRequest
) -> asyncio.Future[Any]:
    """Replaces worker 1 while the log has room for its registration, but not yet for a barrier that has opened.

    Returns the call of worker 0 at the barrier.
    """
    log = held.shard.log
    assert log is not None
    monkeypatch.setattr("fleet_sparse.pserver.admin.log_appends.RETRY_S", 0.001)
    note, has_room = log.note, False

    def note_when_there_is_room(change: ControlChange, body: bytes | None = None) -> None:
        if isinstance(change, BarrierOpening) and not has_room:
            raise LogFull("full")
        note(change, body)

    monkeypatch.setattr(log, "note", note_when_there_is_room)
    attending = asyncio.ensure_future(held.start(attendance(1)))
    await turns()
    requests = [barrier(0), barrier(1)]
    for request in requests:
        request.once = replacement.job_id == 0
    calls = [asyncio.ensure_future(held.start(request)) for request in requests]
    await turns()
    for call in (attending, calls[1]):
        call.cancel()
    await turns()
    await held.start(replacement)
    has_room = True
    return calls[0]


def full_times(monkeypatch: pytest.MonkeyPatch, log: ShardLog, method: str, num_times: int) -> list[Exception]:
    """Makes a method of a log find no room so many times; returns the errors that are still to come."""
    monkeypatch.setattr("fleet_sparse.pserver.admin.log_appends.RETRY_S", 0.001)
    usual = getattr(log, method)
    failures: list[Exception] = [LogFull("full")] * num_times

    def append_when_there_is_room(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return usual(*arguments, **options)

    monkeypatch.setattr(log, method, append_when_there_is_room)
    return failures


@pytest.mark.guarantee("W6")
@in_loop
@pytest.mark.parametrize("method", ["add_table", "join", "note"])
async def test_registration_waits_while_the_log_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    held = control_of(logged_shard(tmp_path / "log"))
    assert held.shard.log is not None
    failures = full_times(monkeypatch, held.shard.log, method, 2)
    for index in range(2):
        await held.start(worker(index, mode=Mode(SYNC)))
    assert not failures
    await meet(held, barrier(0), barrier(1))
    assert set(held.shard.log.control.workers) == {0, 1}


@pytest.mark.guarantee("W6")
@pytest.mark.parametrize("method", ["add_table", "join", "note"])
@in_loop
async def test_registration_without_room_is_answered_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The worker begins a job, with its first call or with a repeated one, and is not lost meanwhile."""
    monkeypatch.setattr("fleet_sparse.pserver.admin.registration_rpcs.LOG_ANSWER_S", 0.02)
    held = control_of(logged_shard(tmp_path / "log"))
    assert held.shard.log is not None
    failures = full_times(monkeypatch, held.shard.log, method, 1_000_000)
    for _ in range(2):
        with pytest.raises(LogFull):
            await held.start(worker(0, mode=Mode(SYNC)))
    failures.clear()
    job_id = (await held.start(worker(0, mode=Mode(SYNC)))).job_id
    second = worker(1, mode=Mode(SYNC))
    second.job_id = job_id
    await held.start(second)
    await meet(held, barrier(0), barrier(1))
    assert [each.job_id for each in held.shard.log.control.workers.values()] == [job_id] * 2


@in_loop
async def test_repeated_registration_is_in_the_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.registration_rpcs.LOG_ANSWER_S", 0.02)
    held = control_of(logged_shard(tmp_path / "log"))
    assert held.shard.log is not None
    failures = full_times(monkeypatch, held.shard.log, "join", 1_000_000)
    for _ in range(3):
        with pytest.raises(LogFull):
            await held.start(worker(0))
    failures.clear()
    await held.start(worker(0))
    kinds = [record.head.kind for record in LogReader(held.shard.log.writer.directory).records()]
    assert (kinds.count(Kind.JOIN), kinds.count(Kind.REGISTER)) == (1, 1)


@in_loop
@pytest.mark.parametrize("method", ["join", "note", "commit"])
async def test_worker_returns_while_the_log_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    again = restarted(await registered(tmp_path, Mode(SYNC)))
    assert again.shard.log is not None
    error = Refusal(ErrorCode.LOG_FULL, "full") if method == "commit" else LogFull("full")
    failures = full_times(monkeypatch, again.shard.log, method, 1)
    failures[:] = [error]
    requests = [resuming(index, mode=Mode(SYNC)) for index in range(2)]
    for request in requests:
        request.resumption.push_seq = 3
        await again.start(request)
    assert not failures
    await meet(again, barrier(0), barrier(1))


@in_loop
async def test_worker_is_not_lost_because_the_log_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = restarted(await registered(tmp_path, Mode(SYNC)))
    assert again.shard.log is not None
    await again.start(resuming(0, mode=Mode(SYNC)))
    waiting = asyncio.ensure_future(again.start(barrier(0)))
    await turns()
    full_times(monkeypatch, again.shard.log, "join", 1)[:] = [LogFailed("a broken disk")]
    with pytest.raises(LogFailed):
        await again.start(resuming(1, mode=Mode(SYNC)))
    await turns()
    assert not waiting.done()
    await again.start(resuming(1, mode=Mode(SYNC)))
    await meet(again, barrier(1))
    await waiting


@pytest.mark.guarantee("W6")
@in_loop
async def test_worker_is_not_lost_while_the_log_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.registration_rpcs.LOG_ANSWER_S", 0.02)
    again = restarted(await registered(tmp_path, Mode(SYNC)))
    assert again.shard.log is not None
    await again.start(resuming(0, mode=Mode(SYNC)))
    waiting = asyncio.ensure_future(again.start(barrier(0)))
    await turns()
    failures = full_times(monkeypatch, again.shard.log, "join", 1_000_000)
    with pytest.raises(LogFull):
        await again.start(resuming(1, mode=Mode(SYNC)))
    await turns()
    assert not waiting.done()
    failures.clear()
    await again.start(resuming(1, mode=Mode(SYNC)))
    await meet(again, barrier(1))
    await waiting


@in_loop
async def test_progress_takes_no_room_of_a_full_log(tmp_path: Path) -> None:
    held = await registered(tmp_path)
    log = held.shard.log
    assert log is not None
    log.writer.full_since = 100.0
    newest_lsn = log.writer.newest_lsn
    position = messages.WorkerPosition(worker_index=1, step=5)
    await held.start(messages.ReportProgressRequest(position=position, client_id=bytes([1]) * 16))
    assert log.writer.newest_lsn == newest_lsn


@in_loop
async def test_large_parts_of_an_exchange_are_not_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.barrier_rpcs.MAX_RECORDED_BYTES", 3)
    held = await registered(tmp_path)
    requests = [
        messages.ExchangeRequest(
            name="e", worker_index=index, client_id=bytes([index]) * 16, sequence=1, parts=[b"%d0" % index, b""]
        )
        for index in range(2)
    ]
    await meet(held, *requests)
    assert held.shard.log is not None
    assert [each.contributions for each in held.shard.log.control.openings if each.name == "e"] == [()]
    again = restarted(held)
    await again.start(resuming(0))
    with pytest.raises(ProtocolError, match="dropped"):
        await again.start(requests[0])


@pytest.mark.guarantee("W8")
@in_loop
async def test_contributions_above_1_mib_are_an_error_after_a_crash(tmp_path: Path) -> None:
    """As of `all_gather` and `all_reduce`: the answer of worker 0 was lost with the pserver."""
    held = await registered(tmp_path)
    calls = [contributing(index, bytes([index]) * (700 << 10)) for index in range(2)]
    replies = await meet(held, *calls)
    assert [[len(each) for each in reply.contributions] for reply in replies] == [[700 << 10] * 2] * 2
    again = restarted(held)
    await again.start(resuming(0))
    with pytest.raises(ProtocolError) as caught:
        await again.start(calls[0])
    assert caught.value.code is ErrorCode.MALFORMED


@pytest.mark.guarantee("W8")
@in_loop
async def test_parts_above_1_mib_are_an_error_after_a_crash(tmp_path: Path) -> None:
    held = await registered(tmp_path)
    calls = [
        messages.ExchangeRequest(
            name="e", worker_index=index, client_id=bytes([index]) * 16, sequence=1, parts=[bytes(350 << 10)] * 2
        )
        for index in range(2)
    ]
    await meet(held, *calls)
    again = restarted(held)
    await again.start(resuming(0))
    with pytest.raises(ProtocolError) as caught:
        await again.start(calls[0])
    assert caught.value.code is ErrorCode.MALFORMED


@in_loop
async def test_barrier_that_opened_alone_says_so_after_a_crash(tmp_path: Path) -> None:
    held = await registered(tmp_path)
    ends = barrier(0, "ends")
    ends.alone = True
    elsewhere = asyncio.ensure_future(held.start(barrier(1, "elsewhere")))
    await turns()
    assert (await held.start(ends)).others_wait
    again = restarted(held)
    await again.start(resuming(0))
    assert (await again.start(ends)).others_wait
    elsewhere.cancel()


@in_loop
async def test_finished_worker_stays_finished_after_a_crash(tmp_path: Path) -> None:
    held = await registered(tmp_path)
    await meet(held, barrier(0, LAST_BARRIER), barrier(1, LAST_BARRIER))
    again = restarted(held)
    job_id = (await again.start(resuming(0))).job_id
    assert (await again.start(resuming(1))).job_id == job_id
    await again.start(barrier(1, LAST_BARRIER))
    again.now = 1000.0
    again.service.find_lost_workers()
    await again.start(barrier(0, LAST_BARRIER))


@pytest.mark.parametrize("has_checkpoint", [False, True])
@in_loop
async def test_loads_of_the_running_job_are_counted_on_after_a_crash(tmp_path: Path, has_checkpoint: bool) -> None:
    held = await registered(tmp_path)
    load_into(held.shard, held.shard.clone_empty())
    if has_checkpoint:
        write_checkpoint(held.shard)
    again = restarted(held)
    await again.start(resuming(0))
    again_1 = again.start(barrier(1))
    assert [reply.num_loads for reply in await asyncio.gather(again.start(barrier(0)), again_1)] == [1, 1]


# Workers


def new(index: int, *, mode: Mode | None = None, job_id: int = 0, num_workers: int = 2) -> messages.RegisterRequest:
    """Returns the registration of a process that takes the place of a worker."""
    request = registration(SGD, worker=index, num_workers=num_workers, mode=mode or Mode(ASYNC), client_id=b"n" * 16)
    request.job_id = job_id
    return request


@in_loop
async def test_new_process_joins_the_job_before_the_others_are_back(tmp_path: Path) -> None:
    held = await registered(tmp_path)
    job_id = (await held.start(worker(0))).job_id
    await meet(held, once(0), once(1))
    await held.start(progress(1, 7))
    again = restarted(held)
    reply = await again.start(new(1))
    assert (reply.job_id, reply.progress.step, list(reply.open_barriers)) == (job_id, 7, ["init_worker"])
    assert (await again.start(resuming(0))).job_id == job_id
    request = barrier(1, client_id=b"n" * 16)
    await meet(again, barrier(0), request)


def progress(index: int, step: int) -> messages.ReportProgressRequest:
    position = messages.WorkerPosition(worker_index=index, step=step, position="{}")
    return messages.ReportProgressRequest(position=position, client_id=bytes([index]) * 16)


@in_loop
async def test_new_process_ends_a_sync_job_before_the_others_are_back(tmp_path: Path) -> None:
    mode = Mode(SYNC)
    held = await registered(tmp_path, mode)
    await meet(held, once(0), once(1))
    for index in range(2):
        Worker(held.shard, index, client_id=bytes([index]) * 16).push(push(SGD, ids_of(7), floats([1, 1])))
    again = restarted(held)
    waiting = asyncio.ensure_future(again.start(barrier(0)))
    await turns()
    assert (await again.start(new(1, mode=mode))).job_id != job_id_of(held)
    with pytest.raises(WorkerLost) as caught:
        await again.start(resuming(0, mode=mode))
    assert caught.value.worker_index == 1
    with pytest.raises(WorkerLost):
        await waiting
    reply = Worker(again.shard, 0, client_id=bytes(16), step=1).push(push(SGD, ids_of(7), floats([1, 1])))
    assert reply.error is not None
    assert (reply.error.code, reply.error.number) == (ErrorCode.WORKER_LOST, 1)
    third = restarted(again)  # the end of the job survives, too
    with pytest.raises(WorkerLost):
        await third.start(resuming(0, mode=mode))


@pytest.mark.parametrize("changes", [{"job_id": 99}, {"num_workers": 3}])
@in_loop
async def test_process_of_another_job_begins_it_before_any_is_back(tmp_path: Path, changes: Any) -> None:
    held = await registered(tmp_path)
    again = restarted(held)
    job_id = (await again.start(new(1, **changes))).job_id
    assert job_id not in (0, job_id_of(held))
    with pytest.raises(WorkerLost):
        await again.start(resuming(0))


@in_loop
async def test_worker_that_never_comes_back_is_lost(tmp_path: Path) -> None:
    held = await registered(tmp_path, Mode(SYNC))
    again = restarted(held)
    await again.start(resuming(0, mode=Mode(SYNC)))
    waiting = asyncio.ensure_future(again.start(barrier(0)))
    await turns()
    attending = asyncio.ensure_future(again.start(attendance(0)))
    await turns()
    again.now = 29.0
    again.service.find_lost_workers()
    await turns()
    assert not waiting.done()
    again.now = 31.0
    again.service.find_lost_workers()
    with pytest.raises(WorkerLost) as caught:
        await waiting
    assert caught.value.worker_index == 1
    attending.cancel()


@pytest.mark.guarantee("F6")
@pytest.mark.parametrize("has_checkpoint", [False, True])
@in_loop
async def test_supervised_worker_with_a_lag_has_the_failover_time(tmp_path: Path, has_checkpoint: bool) -> None:
    """Worker 1 died with the pserver, and its supervisor starts it again."""
    mode = Mode(ASYNC, max_step_lag=4)
    held = control_of(logged_shard(tmp_path / "log"))
    for index in range(2):
        request = worker(index, mode=mode)
        request.is_supervised = True
        await held.start(request)
    if has_checkpoint:
        write_checkpoint(held.shard)
    again = restarted(held)
    await again.start(resuming(0, mode=mode))
    waiting = asyncio.ensure_future(again.start(barrier(0)))
    attending = asyncio.ensure_future(again.start(attendance(0)))
    await turns()
    again.now = again.settings.failover_s - 1.0
    again.service.find_lost_workers()
    await turns()
    assert not waiting.done()
    again.now = again.settings.failover_s + 1.0
    again.service.find_lost_workers()
    with pytest.raises(WorkerLost) as caught:
        await waiting
    assert caught.value.worker_index == 1
    attending.cancel()


# The state


def registered_worker(index: int, client_id: bytes, **changes: Any) -> RegisteredWorker:
    values = {"client_epoch": 1, "mode": None, "job_id": 5, "launch": ("", "", ""), "begins_job": False, "num_loads": 0}
    return RegisteredWorker(index, 2, client_id, **{"is_supervised": False, **values, **changes})


def test_state_keeps_the_newest_opening_of_each_worker() -> None:
    state = ControlState()
    for opening in (
        BarrierOpening("a", {0: 1, 1: 1}, contributions=((b"x",), (b"y",))),
        BarrierOpening("b", {0: 1, 1: 1}, once=True),
        BarrierOpening("a", {0: 2}, is_alone=True),
    ):
        state.apply(opening)
    assert [(each.name, each.passed) for each in state.openings] == [("a", {1: 1}), ("b", {0: 1, 1: 1}), ("a", {0: 2})]
    state.apply(BarrierOpening("a", {0: 3, 1: 2}))
    assert [(each.name, each.passed) for each in state.openings] == [("b", {0: 1, 1: 1}), ("a", {0: 3, 1: 2})]
    assert ControlState.parse(state.to_builtins()) == state


def test_new_client_has_passed_no_barrier() -> None:
    state = ControlState()
    state.apply(registered_worker(0, b"a"))
    state.apply(BarrierOpening("a", {0: 1}))
    state.apply(BarrierOpening("b", {0: 1}, once=True))
    state.apply(registered_worker(0, b"a", mode="{}"))
    assert len(state.openings) == 2
    state.apply(registered_worker(0, b"b"))
    assert [(each.name, each.passed) for each in state.openings] == [("b", {})]


def test_workers_of_the_job_before_have_ended() -> None:
    state = ControlState()
    for each in (registered_worker(0, b"a"), registered_worker(1, b"b"), registered_worker(1, b"c", begins_job=True)):
        state.apply(each)
    assert (state.ended, state.ended_by, [*state.workers]) == ([b"a", b"b"], 1, [1])
    state.apply(registered_worker(0, b"a"))
    assert state.ended == [b"b"]


def test_process_in_the_place_of_a_lone_worker_has_its_progress() -> None:
    state = ControlState()
    alone = msgspec.structs.replace(registered_worker(0, b"a"), num_workers=1)
    state.apply(alone)
    state.apply(ReportedProgress(0, 7, ""))
    state.apply(msgspec.structs.replace(alone, client_id=b"b", begins_job=True))
    assert state.progress[0].step == 7
    state.apply(msgspec.structs.replace(alone, client_id=b"c", begins_job=True, launch=("", "", "other")))
    assert not state.progress
