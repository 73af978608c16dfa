from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import (
    ErrorCode,
    ProtocolError,
    SettingError,
    ShardUnavailable,
    TableMismatch,
    WorkerLost,
)
from fleet_sparse.pserver.admin.barriers import LAST_BARRIER
from fleet_sparse.pserver.admin.membership import Membership
from fleet_sparse.pserver.admin.service import Supervised
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION
from fleet_sparse.wire.frame_format import Frame, Op
from support.controls import HeldControl, attendance, barrier, registration, visit
from support.coordinators import in_loop, run, turns
from support.shards import ADAM, CLUSTER, INCARNATION, SGD, FrameClient, code_of, floats, ids_of, late_replies, push
from support.steps import SYNC_MODE, Worker

# Register


def test_registration_answers_with_identity_and_addresses(held: HeldControl) -> None:
    reply = held.call(registration(SGD))
    assert (reply.cluster_id, reply.shard, reply.num_shards, reply.incarnation) == (CLUSTER, 0, 1, INCARNATION)
    assert (reply.placement_version, reply.data_endpoint, reply.stream_endpoint) == (1, "127.0.0.1:6001", "unix:a")
    assert [table.name for table in reply.tables] == ["sgd"]


def test_registration_answers_with_the_state_of_known_tables(held: HeldControl) -> None:
    held.call(registration(SGD))
    FrameClient(held.shard).push(push(SGD, ids_of(7), floats([1, 1]), optimizer_step=6))
    (table,) = held.call(registration(SGD, worker=0)).tables
    assert (table.optimizer_step, table.num_rows) == (6, 1)


@pytest.mark.parametrize("version", [CONTROL_VERSION - 1, CONTROL_VERSION + 1])
def test_other_protocol_version_is_refused(held: HeldControl, version: int) -> None:
    with pytest.raises(ProtocolError, match=rf"worker 0: .* {version} .* {CONTROL_VERSION}") as caught:
        held.call(registration(version=version))
    assert caught.value.code is ErrorCode.VERSION


def test_client_id_of_another_length_is_refused(held: HeldControl) -> None:
    with pytest.raises(ProtocolError, match=r"worker 0: .* 3 bytes"):
        held.call(registration(client_id=b"abc"))


# Roles and jobs


@pytest.mark.parametrize("role", [messages.ROLE_READER, messages.ROLE_TOOL])
def test_visitor_is_told_tables_with_specs_and_joins_no_job(held: HeldControl, role: messages.Role) -> None:
    held.call(registration(SGD, num_workers=2))
    reply = held.call(visit(role))
    assert (reply.incarnation, reply.data_endpoint) == (INCARNATION, "127.0.0.1:6001")
    assert [(table.name, table.spec) for table in reply.tables] == [("sgd", SGD.to_json())]
    assert held.call(registration(SGD, worker=1, num_workers=2, client_id=b"v" * 16)).job_id == reply.job_id


@pytest.mark.parametrize("role", [messages.ROLE_READER, messages.ROLE_TOOL])
def test_push_of_a_visitor_is_refused(held: HeldControl, role: messages.Role) -> None:
    held.call(registration(SGD))
    held.call(visit(role))
    visitor, worker = (FrameClient(held.shard, each.client_id) for each in (visit(role), registration()))
    assert code_of(visitor.push(push(SGD, ids_of(7), floats([1, 1])))) is ErrorCode.FORBIDDEN
    assert visitor.rows(SGD, 7) == [[0.5, 0.5]]
    assert worker.push(push(SGD, ids_of(7), floats([1, 1]))).error is None


def test_worker_that_visits_still_pushes(held: HeldControl) -> None:
    request = visit(messages.ROLE_TOOL)
    held.call(registration(SGD, client_id=request.client_id))
    held.call(request)
    client = FrameClient(held.shard, request.client_id)
    assert client.push(push(SGD, ids_of(7), floats([1, 1]))).error is None


def test_visitor_may_come_before_the_first_worker(held: HeldControl) -> None:
    assert held.call(visit(messages.ROLE_READER)).job_id == 0


def test_visitor_declares_no_tables(held: HeldControl) -> None:
    request = visit(messages.ROLE_READER)
    request.table_specs.append(SGD.to_json())
    with pytest.raises(ProtocolError) as caught:
        held.call(request)
    assert caught.value.code is ErrorCode.MALFORMED


def test_unknown_role_is_refused(held: HeldControl) -> None:
    with pytest.raises(ProtocolError) as caught:
        held.call(visit(messages.ROLE_UNSPECIFIED))
    assert caught.value.code is ErrorCode.MALFORMED


# Modes


def registered(held: HeldControl, *workers: int, mode: Mode = SYNC_MODE, num_workers: int = 2) -> list[Worker[Shard]]:
    """Workers with these indexes, as their frames come after they registered."""
    made = [Worker(held.shard, worker, client_id=bytes([worker + 1]) * 16) for worker in workers]
    for worker in made:
        held.call(
            registration(SGD, worker=worker.index, num_workers=num_workers, client_id=worker.client_id, mode=mode)
        )
    return made


def push_one(worker: Worker[Shard]) -> Frame:
    return worker.push(push(SGD, ids_of(7), floats([1, 1])))


def test_worker_refused_for_its_mode_declares_no_table(
    held: HeldControl,
) -> None:
    (first,) = registered(held, 0)
    with pytest.raises(SettingError):
        held.call(registration(ADAM, worker=1, num_workers=2, mode=Mode(ASYNC)))
    assert [state.name for state in held.shard.states()] == ["sgd"]
    reply = push_one(first)
    assert reply.error is not None
    assert (reply.error.code, reply.error.number) == (ErrorCode.WORKER_LOST, 1)


def test_refused_registration_leaves_no_table(held: HeldControl) -> None:
    held.call(registration(ADAM))
    other = replace(ADAM, dim=ADAM.dim + 1)
    with pytest.raises(TableMismatch):
        held.call(registration(SGD, other, worker=0))
    assert [state.name for state in held.shard.states()] == ["adam"]


@pytest.mark.parametrize("text", ["{", '{"kind": "fast"}'])
def test_mode_that_cannot_be_read_is_refused(held: HeldControl, text: str) -> None:
    request = registration()
    request.mode = text
    with pytest.raises(ProtocolError, match="worker 0: ") as caught:
        held.call(request)
    assert caught.value.code is ErrorCode.MALFORMED


def test_next_job_counts_its_steps_from_1(held: HeldControl) -> None:
    for worker in registered(held, 0, 1):
        push_one(worker)

    async def end() -> None:
        calls = [held.start(barrier(worker, LAST_BARRIER, client_id=bytes([worker + 1]) * 16)) for worker in (0, 1)]
        await asyncio.gather(*calls)

    run(end)
    held.call(registration(SGD, client_id=bytes([9]) * 16, mode=SYNC_MODE))
    assert push_one(Worker(held.shard, 0, client_id=bytes([9]) * 16)).header.step == 1


# Connections and lost workers


@asynccontextmanager
async def connected(held: HeldControl, *workers: int) -> AsyncIterator[dict[int, asyncio.Task[Any]]]:
    """The open connections of workers, by index; they end with the block."""
    calls = {worker: asyncio.ensure_future(held.start(attendance(worker))) for worker in workers}
    await turns()
    yield calls
    for call in calls.values():
        call.cancel()
    await asyncio.gather(*calls.values(), return_exceptions=True)


async def registered_workers(held: HeldControl, num_workers: int, *workers: int, mode: Mode | None = None) -> None:
    for worker in workers or range(num_workers):
        await held.start(registration(SGD, worker=worker, num_workers=num_workers, mode=mode))


def test_worker_is_alive_as_long_as_its_connection(held: HeldControl) -> None:
    async def live() -> tuple[int, int]:
        await registered_workers(held, 2, mode=SYNC_MODE)
        async with connected(held, 0, 1) as connections:
            worker = Worker(held.shard, 0, client_id=bytes(16))
            assert push_one(worker).header.op is Op.WAIT
            held.now = 1e6
            held.service.find_lost_workers()
            before = len(late_replies(held.shard))
            connections[1].cancel()
            await turns()
            held.now += 3.0
            held.service.find_lost_workers()
            (reply,) = late_replies(held.shard)
            assert reply.error is not None
            assert reply.error.code is ErrorCode.WORKER_LOST
            return before, reply.error.number

    assert run(live) == (0, 1)


@in_loop
async def test_connection_that_returns_in_time_loses_nobody(held: HeldControl) -> None:
    await registered_workers(held, 2, mode=SYNC_MODE)
    async with connected(held, 0):
        async with connected(held, 1):
            pass
        held.now += 1.0
        held.service.find_lost_workers()
        async with connected(held, 1):
            held.now += 1000.0
            held.service.find_lost_workers()
            waiting = asyncio.ensure_future(held.start(barrier(0)))
            await asyncio.gather(waiting, held.start(barrier(1)))


def test_connection_to_another_incarnation_is_answered_at_once(held: HeldControl) -> None:
    assert held.call(attendance(0, incarnation=INCARNATION + 1)).incarnation == INCARNATION


@in_loop
async def test_connections_end_when_the_pserver_stops(held: HeldControl) -> None:
    call = asyncio.ensure_future(held.start(attendance(0, incarnation=INCARNATION)))
    await turns()
    held.service.release_waiting()
    assert (await call).incarnation == INCARNATION


@in_loop
async def test_worker_takes_the_place_of_one_whose_connection_ends(held: HeldControl) -> None:
    await registered_workers(held, 2)
    async with connected(held, 0, 1) as connections:
        again = asyncio.ensure_future(held.start(registration(worker=0, num_workers=2, client_id=b"x" * 16)))
        await turns()
        assert not again.done()
        connections[0].cancel()
        await again


@in_loop
async def test_worker_waits_for_its_place_while_heartbeats_decide(
    held: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.registration_rpcs.ADMISSION_S", 0.0)
    await registered_workers(held, 2)
    async with connected(held, 0, 1) as connections:
        other_job = registration(worker=0, num_workers=3, client_id=b"y" * 16)
        with pytest.raises(SettingError):
            await held.start(other_job)
        again = asyncio.ensure_future(held.start(registration(worker=0, num_workers=2, client_id=b"x" * 16)))
        await turns()
        assert not again.done()
        connections[0].cancel()
        await again


@in_loop
async def test_worker_takes_the_place_of_one_that_never_connected(held: HeldControl) -> None:
    await registered_workers(held, 2)
    async with connected(held, 1):
        again = asyncio.ensure_future(held.start(registration(worker=0, num_workers=2, client_id=b"x" * 16)))
        await turns()
        assert not again.done()
        held.now += held.settings.worker_lost_s + 1.0
        held.service.find_lost_workers()
        await turns()
        assert again.done()
        await again


@in_loop
async def test_a_place_that_stays_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.registration_rpcs.PLACE_SHARE", 0.001)
    held = HeldControl(tmp_path)
    await registered_workers(held, 2)
    async with connected(held, 0, 1):
        with pytest.raises(SettingError):
            await held.start(registration(worker=0, num_workers=2, client_id=b"x" * 16))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@in_loop
async def test_job_that_starts_again_after_a_lost_worker_trains(held: HeldControl, order: tuple[int, int]) -> None:
    await registered_workers(held, 2, mode=SYNC_MODE)
    async with connected(held, 0, 1) as connections:
        connections[1].cancel()
        await turns()
        held.now += 3.0
        held.service.find_lost_workers()
        assert code_of(push_one(Worker(held.shard, 0, client_id=bytes(16)))) is ErrorCode.WORKER_LOST
    for index in order:
        request = registration(SGD, worker=index, num_workers=2, client_id=bytes([index + 101]) * 16, mode=SYNC_MODE)
        await held.start(request)
    again = [Worker(held.shard, index, client_id=bytes([index + 101]) * 16) for index in (0, 1)]
    assert [push_one(worker).header.op for worker in again] == [Op.WAIT, Op.ACK]


@in_loop
async def test_pserver_whose_workers_all_died_ends_after_a_while(held: HeldControl) -> None:
    await registered_workers(held, 1)
    num_stops = []
    async with connected(held, 0):
        held.now += 2 * held.settings.orphaned_s
        held.service.find_lost_workers()
        num_stops.append(held.num_stops)
    for _ in range(3):
        held.now += 0.6 * held.settings.orphaned_s
        held.service.find_lost_workers()
        num_stops.append(held.num_stops)
    assert num_stops == [0, 0, 1, 1]


def test_pserver_without_workers_waits_for_the_first(held: HeldControl) -> None:
    held.now = 1e9
    held.service.find_lost_workers()
    assert held.num_stops == 0


# Barriers


@in_loop
async def test_repeated_barrier_call_counts_once_and_is_answered(held: HeldControl) -> None:
    await registered_workers(held, 2)
    calls = [asyncio.ensure_future(held.start(barrier(0))) for _ in range(2)]
    await turns()
    assert not any(call.done() for call in calls)
    calls[0].cancel()
    await asyncio.gather(calls[1], held.start(barrier(1)))
    await held.start(barrier(0))


@in_loop
async def test_cancelled_barrier_call_is_not_counted(held: HeldControl) -> None:
    await registered_workers(held, 2)
    given_up = asyncio.ensure_future(held.start(barrier(0)))
    await turns()
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    waiting = asyncio.ensure_future(held.start(barrier(1)))
    await turns()
    assert not waiting.done()
    await asyncio.gather(waiting, held.start(barrier(0, sequence=2)))


@in_loop
async def test_start_of_a_large_job_wakes_each_worker_once(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    num_arrivals = 0
    arrive = Membership.arrive

    def count(*arguments: Any, **more: Any) -> bool:
        nonlocal num_arrivals
        num_arrivals += 1
        return arrive(*arguments, **more)

    monkeypatch.setattr(Membership, "arrive", count)
    num_workers = 500

    async def begin(worker: int) -> None:
        client_id = worker.to_bytes(16, "little")
        await held.start(registration(worker=worker, num_workers=num_workers, client_id=client_id))
        await held.start(barrier(worker, client_id=client_id))

    tasks = []
    for worker in range(num_workers):
        tasks.append(asyncio.ensure_future(begin(worker)))
        await turns()  # it waits at the barrier before the next one registers
    await asyncio.gather(*tasks)
    assert num_arrivals <= 2 * num_workers


@in_loop
async def test_large_job_wakes_no_worker_that_waits_for_a_save(held: HeldControl) -> None:
    num_workers = 50
    await registered_workers(held, num_workers)
    waiting = [
        asyncio.ensure_future(held.start(messages.AwaitSaveRequest(worker_index=worker)))
        for worker in range(1, num_workers)
    ]
    await turns()
    calls = [asyncio.ensure_future(held.start(barrier(worker))) for worker in range(num_workers)]
    await asyncio.gather(*calls)
    num_done = sum(call.done() for call in waiting)
    for call in waiting:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert num_done == 0


@pytest.mark.parametrize(
    ("present", "now", "lost"), [((0, 1), 31.0, 2), ((0, 2), 60.5, 1)], ids=["lost", "never registered"]
)
def test_lost_worker_ends_the_barrier_of_the_others(held: HeldControl, present: Any, now: float, lost: int) -> None:
    async def meet() -> list[Any]:
        await registered_workers(held, 3, *(range(3) if now < 60 else present))
        async with connected(held, *present):
            waiting = [asyncio.ensure_future(held.start(barrier(worker))) for worker in present]
            await turns()
            held.now = now
            watcher = asyncio.ensure_future(held.service.watch_workers())
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            watcher.cancel()
            return errors

    errors = run(meet)
    assert [(type(error), error.worker_index) for error in errors] == [(WorkerLost, lost)] * 2


@in_loop
async def test_a_pause_of_the_pserver_loses_no_worker(held: HeldControl) -> None:
    held.service._lost_check_s = 0.0
    await registered_workers(held, 2, mode=SYNC_MODE)
    async with connected(held, 0):
        async with connected(held, 1):
            pass
        watcher = asyncio.ensure_future(held.service.watch_workers())
        await turns()
        held.now += 10.0
        await turns()
        waiting = asyncio.ensure_future(held.start(barrier(0)))
        async with connected(held, 1):
            await asyncio.gather(waiting, held.start(barrier(1)))
        watcher.cancel()


# Exchanges


def exchange(worker: int, *parts: bytes, sequence: int = 1, client_id: bytes = b"") -> messages.ExchangeRequest:
    at = barrier(worker, sequence=sequence, client_id=client_id)
    return messages.ExchangeRequest(
        name=at.name, worker_index=worker, sequence=sequence, client_id=at.client_id, parts=parts
    )


@in_loop
async def test_each_worker_gets_the_parts_that_are_for_it(held: HeldControl) -> None:
    await registered_workers(held, 2)
    for sequence in (1, 2):
        replies = await asyncio.gather(
            held.start(exchange(1, b"1-0", b"1-1", sequence=sequence)),
            held.start(exchange(0, b"0-0", b"0-1", sequence=sequence)),
        )
        assert [list(reply.parts) for reply in replies] == [[b"0-1", b"1-1"], [b"0-0", b"1-0"]]
        again = await held.start(exchange(0, b"0-0", b"0-1", sequence=sequence))
        assert list(again.parts) == [b"0-0", b"1-0"]


def test_exchange_without_a_part_for_each_worker_is_refused(held: HeldControl) -> None:
    run(lambda: registered_workers(held, 2))
    with pytest.raises(ProtocolError) as caught:
        held.call(exchange(0, b"part"))
    assert caught.value.code == ErrorCode.MALFORMED


@in_loop
async def test_exchange_whose_parts_are_dropped_is_refused(held: HeldControl) -> None:
    await registered_workers(held, 2)
    for sequence in (1, 2):
        await asyncio.gather(*(held.start(exchange(worker, b"", b"", sequence=sequence)) for worker in (0, 1)))
    with pytest.raises(ProtocolError):
        await held.start(exchange(0, b"", b"", sequence=1))


@in_loop
async def test_lost_worker_ends_the_exchange_of_the_others(held: HeldControl) -> None:
    await registered_workers(held, 2)
    async with connected(held, 0):
        waiting = asyncio.ensure_future(held.start(exchange(0, b"", b"")))
        await turns()
        held.now = 31.0
        held.service.find_lost_workers()
        with pytest.raises(WorkerLost) as caught:
            await waiting
    assert caught.value.worker_index == 1


@in_loop
async def test_parts_of_an_exchange_that_ended_are_dropped(held: HeldControl) -> None:
    await registered_workers(held, 3)
    async with connected(held, 0, 1, 2):
        ended = [asyncio.ensure_future(held.start(exchange(worker, b"", b"", b"old"))) for worker in (1, 2)]
        await turns()
        for call in ended:
            call.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
    for worker in range(2):
        await held.start(registration(SGD, worker=worker, num_workers=2, client_id=client_of_new_job(worker)))
    calls = [exchange(worker, b"a", b"b", client_id=client_of_new_job(worker)) for worker in range(2)]
    replies = await asyncio.gather(*map(held.start, calls))
    assert [list(reply.parts) for reply in replies] == [[b"a", b"a"], [b"b", b"b"]]


def client_of_new_job(worker: int) -> bytes:
    return bytes([100 + worker]) * 16


@in_loop
async def test_worker_whose_tables_are_refused_wakes_those_that_wait(held: HeldControl) -> None:
    other = TableSpec(name="sgd", dim=8, rule="sgd", initializer=constant(0.5))
    await registered_workers(held, 2, 0)
    waiting = asyncio.ensure_future(held.start(barrier(0)))
    await turns()
    with pytest.raises(TableMismatch):
        await held.start(registration(other, worker=1, num_workers=2))
    (error,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(error, WorkerLost)
    assert error.worker_index == 1
    assert "worker 0 and worker 1" in str(error)


def test_worker_whose_tables_cannot_be_read_is_lost(held: HeldControl) -> None:
    held.call(registration(worker=0, num_workers=2))
    request = registration(worker=1, num_workers=2)
    request.table_specs.append("{")
    with pytest.raises(ProtocolError):
        held.call(request)
    assert held.shard.states() == []
    with pytest.raises(WorkerLost) as caught:
        held.call(barrier(0))
    assert caught.value.worker_index == 1


# Stats and stop


def test_stats_count(held: HeldControl) -> None:
    held.call(registration(SGD))
    client = FrameClient(held.shard)
    client.push(push(SGD, ids_of(7, 8), np.ones((2, 2), np.float32)))
    client.rows(SGD, 7)
    stats = held.call(messages.StatsRequest())
    assert (stats.num_requests, stats.num_pushed_rows, stats.num_pulled_rows) == (2, 2, 1)
    assert (stats.bytes_received, stats.bytes_sent, stats.tables[0].num_rows) == (5, 6, 2)
    assert stats.resident_bytes > 1 << 20


def test_call_that_the_end_overtakes_is_refused(held: HeldControl) -> None:
    held.cancels = True
    with pytest.raises(ConnectionAbortedError):
        held.call(messages.StatsRequest())


# A pserver that was started again


BLOCK = push(SGD, ids_of(7), floats([1, 1]))


def supervised(*, is_restart: bool, on_job: Callable[[], None] = lambda: None) -> Supervised:
    return Supervised(is_restart, has_recovered=False, on_job=on_job, on_snapshot=lambda snapshot: None)


@pytest.fixture
def restarted(tmp_path: Path) -> HeldControl:
    return HeldControl(tmp_path, supervised(is_restart=True))


def resuming(push_seq: int, *open_barriers: str, worker: int = 0, num_workers: int = 1) -> messages.RegisterRequest:
    request = registration(SGD, worker=worker, num_workers=num_workers)
    request.resumption.CopyFrom(messages.Resumption(push_seq=push_seq, open_barriers=open_barriers))
    return request


def test_worker_continues_after_its_newest_acked_push(restarted: HeldControl) -> None:
    reply = restarted.call(resuming(5))
    assert (reply.is_supervised, reply.is_restart, reply.restored_seq) == (True, True, 0)
    client = FrameClient(restarted.shard, client_id=bytes(16))
    assert code_of(client.push(BLOCK, push_seq=7)) is ErrorCode.GAP
    assert client.push(BLOCK, push_seq=6).header.op is Op.ACK


def test_only_a_restarted_pserver_skips_pushes(held: HeldControl) -> None:
    reply = held.call(resuming(5))
    assert (reply.is_supervised, reply.is_restart) == (False, False)
    client = FrameClient(held.shard, client_id=bytes(16))
    assert client.push(BLOCK, push_seq=1).header.op is Op.ACK


@in_loop
async def test_barrier_that_opened_before_the_restart_stays_open(restarted: HeldControl) -> None:
    await restarted.start(resuming(5, "init_worker", num_workers=2))
    await restarted.start(registration(worker=1, num_workers=2))
    request = barrier(1, "init_worker")
    request.once = True
    await restarted.start(request)


@in_loop
async def test_registration_names_the_barriers_that_stay_open(restarted: HeldControl) -> None:
    reply = await restarted.start(resuming(5, "init_worker", "resume", num_workers=2))
    assert list(reply.open_barriers) == ["init_worker", "resume"]
    assert list((await restarted.start(registration(worker=1, num_workers=2))).open_barriers) == [*reply.open_barriers]


@in_loop
async def test_barrier_waits_for_workers_that_register_again(restarted: HeldControl) -> None:
    waiting = [asyncio.ensure_future(restarted.start(barrier(worker))) for worker in range(2)]
    await turns()
    for worker in range(2):
        await restarted.start(resuming(0, worker=worker, num_workers=2))
    await asyncio.gather(*waiting)


@in_loop
async def test_barrier_waits_for_a_worker_that_registers_late(
    restarted: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.registration_rpcs.ADMISSION_S", 0.0)
    waiting = asyncio.ensure_future(restarted.start(barrier(0)))
    await turns()
    await restarted.start(resuming(0))
    await waiting


@in_loop
async def test_barrier_of_a_worker_that_stays_away_fails(tmp_path: Path) -> None:
    restarted = HeldControl(tmp_path, supervised(is_restart=True), failover_s=0.05)
    with pytest.raises(ShardUnavailable, match="FLEET_SPARSE_FAILOVER_S"):
        await restarted.start(barrier(0))


@in_loop
async def test_barrier_of_a_process_whose_place_was_taken_fails(restarted: HeldControl) -> None:
    await restarted.start(resuming(0))
    with pytest.raises(SettingError):
        await restarted.start(barrier(0, client_id=b"another" + bytes(9)))


def resuming_at(opening: int, worker: int) -> messages.RegisterRequest:
    """The resumption of a worker of two that has passed so many openings of barrier b."""
    request = resuming(0, worker=worker, num_workers=2)
    request.resumption.openings.add(barrier="b", number=opening)
    return request


@in_loop
async def test_barriers_tell_their_openings(held: HeldControl) -> None:
    for worker in range(2):
        await held.start(registration(worker=worker, num_workers=2))
    for sequence in (1, 2):
        replies = await asyncio.gather(*(held.start(barrier(worker, sequence=sequence)) for worker in range(2)))
        assert [reply.opening for reply in replies] == [sequence, sequence]
    (known,) = (await held.start(registration(worker=1, num_workers=2))).openings
    assert (known.barrier, known.number) == ("b", 2)


@pytest.mark.parametrize("waits_first", [True, False])
@in_loop
async def test_worker_passes_whose_answer_was_lost(restarted: HeldControl, *, waits_first: bool) -> None:
    repeated = barrier(1, sequence=5)
    if waits_first:
        await restarted.start(resuming_at(4, 1))
        waiting = asyncio.ensure_future(restarted.start(repeated))
        await turns()
        assert not waiting.done()
        await restarted.start(resuming_at(5, 0))
        assert (await waiting).opening == 5
    else:
        await restarted.start(resuming_at(5, 0))
        await restarted.start(resuming_at(4, 1))
        assert (await restarted.start(repeated)).opening == 5
    replies = await asyncio.gather(*(restarted.start(barrier(worker, sequence=6)) for worker in range(2)))
    assert [reply.opening for reply in replies] == [6, 6]


@in_loop
async def test_worker_that_missed_no_opening_waits(restarted: HeldControl) -> None:
    await restarted.start(resuming_at(5, 0))
    await restarted.start(resuming_at(5, 1))
    waiting = asyncio.ensure_future(restarted.start(barrier(1, sequence=6)))
    await turns()
    assert not waiting.done()
    await asyncio.gather(restarted.start(barrier(0, sequence=6)), waiting)


@in_loop
async def test_contributions_that_were_lost_are_an_error(restarted: HeldControl) -> None:
    await restarted.start(resuming_at(5, 0))
    await restarted.start(resuming_at(4, 1))
    request = barrier(1, sequence=5)
    request.contribution = b"1"
    with pytest.raises(ProtocolError):
        await restarted.start(request)


JOB = 0x1234


def surviving(mode: Mode | None = None, *open_barriers: str) -> messages.RegisterRequest:
    """The registration of worker 0 of two, which goes on."""
    request = resuming(5, *open_barriers, num_workers=2)
    request.job_id, request.mode = JOB, "" if mode is None else mode.to_json()
    return request


@pytest.mark.guarantee("A6")
@in_loop
async def test_new_process_joins_the_job_of_workers_that_come_later(restarted: HeldControl) -> None:
    started_again = asyncio.ensure_future(restarted.start(registration(worker=1, num_workers=2)))
    await turns()
    assert not started_again.done()
    first = await restarted.start(surviving(None, "init_worker"))
    second = await started_again
    assert (first.job_id, second.job_id, list(second.open_barriers)) == (JOB, JOB, ["init_worker"])


@in_loop
async def test_new_processes_of_all_workers_begin_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.registration_rpcs.SURVIVORS_S", 0.01)
    restarted = HeldControl(tmp_path, supervised(is_restart=True))
    begun = [restarted.start(registration(worker=worker, num_workers=2)) for worker in range(2)]
    first, second = await asyncio.gather(*begun)
    assert first.job_id == second.job_id != 0


@pytest.mark.parametrize(("lag", "begins"), [(RowBound(lag=8), True), (None, False)], ids=["row caches", "none"])
@in_loop
async def test_new_process_ends_a_restarted_job_that_needs_all_steps(
    restarted: HeldControl, lag: RowBound | None, begins: bool
) -> None:
    mode = Mode(ASYNC, max_step_lag=4, row_bound=lag)
    await restarted.start(surviving(mode, "init_worker"))
    reply = await restarted.start(registration(worker=1, num_workers=2, mode=mode))
    assert (reply.job_id != JOB) == begins


def test_pserver_has_a_job_once_a_worker_registered(tmp_path: Path) -> None:
    calls: list[str] = []
    held = HeldControl(tmp_path, supervised(is_restart=False, on_job=lambda: calls.append("job")))
    held.call(visit(messages.ROLE_TOOL))
    assert calls == []
    held.call(registration())
    assert calls == ["job"]


def test_restarted_pserver_whose_workers_are_gone_ends(restarted: HeldControl) -> None:
    restarted.now = restarted.settings.orphaned_s + 1.0
    restarted.service.find_lost_workers()
    assert restarted.num_stops == 1
