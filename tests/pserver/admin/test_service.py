from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.core.table import TableSpec
from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError, SettingError, TableMismatch, WorkerLost
from fleet_sparse.pserver.admin.membership import LAST_BARRIER
from fleet_sparse.pserver.admin.service import TAKEN_FOR_S
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.frames import Frame, Op
from support.controls import HeldControl, barrier, registration
from support.shards import ADAM, CLUSTER, INCARNATION, SGD, FrameClient, code_of, floats, ids_of, late_replies, push
from support.steps import SYNC_MODE, Worker, asks_for

# Register


def test_registration_tells_what_frames_must_carry_and_where_to_send_them(held: HeldControl) -> None:
    reply = held.call(registration(SGD))
    assert (reply.cluster_id, reply.shard, reply.num_shards, reply.incarnation) == (CLUSTER, 0, 1, INCARNATION)
    assert (reply.placement_version, reply.data_endpoint, reply.stream_endpoint) == (1, "127.0.0.1:6001", "unix:a")
    assert [table.name for table in reply.tables] == ["sgd"]


def test_registration_tells_the_optimizer_step_of_a_table_that_is_there(held: HeldControl) -> None:
    held.call(registration(SGD))
    FrameClient(held.shard).push(push(SGD, ids_of(7), floats([1, 1]), optimizer_step=6))
    (table,) = held.call(registration(SGD, worker=0)).tables
    assert (table.optimizer_step, table.num_rows) == (6, 1)


def test_other_spec_of_another_worker_names_both_sides(held: HeldControl) -> None:
    held.call(registration(SGD, worker=0, num_workers=2))
    other = TableSpec(name="sgd", dim=8, rule="sgd", initializer=constant(0.5))
    with pytest.raises(TableMismatch, match="table 'sgd': worker 0 and worker 1 describe it differently: dim 2 and 8"):
        held.call(registration(other, worker=1, num_workers=2))


def test_other_number_of_workers_is_refused(held: HeldControl) -> None:
    held.call(registration(worker=0, num_workers=2))
    with pytest.raises(SettingError, match="worker 1: its job has 3 workers"):
        held.call(registration(worker=1, num_workers=3))


def test_other_protocol_version_is_refused(held: HeldControl) -> None:
    with pytest.raises(ProtocolError, match="worker 0: it speaks protocol version 9, this pserver 1") as caught:
        held.call(registration(version=9))
    assert caught.value.code is ErrorCode.VERSION


def test_client_id_of_another_length_is_refused(held: HeldControl) -> None:
    with pytest.raises(ProtocolError, match="worker 0: its client id has 3 bytes"):
        held.call(registration(client_id=b"abc"))


def test_spec_that_cannot_be_read_is_refused(held: HeldControl) -> None:
    request = registration()
    request.table_specs.append("{")
    with pytest.raises(ProtocolError, match="worker 0: table spec: is no JSON"):
        held.call(request)
    assert held.shard.states() == []


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


def test_mode_that_counts_steps_makes_the_shard_wait_for_all_workers(held: HeldControl) -> None:
    first, second = registered(held, 0, 1)
    assert [push_one(worker).header.op for worker in (first, second)] == [Op.WAIT, Op.ACK]


def test_a_worker_in_another_mode_is_refused_and_both_modes_are_named(held: HeldControl) -> None:
    registered(held, 0)
    with pytest.raises(
        SettingError, match=r"worker 1: its mode is async, that of worker 0 is sync \(avg\); all workers"
    ):
        registered(held, 1, mode=Mode(ASYNC))


def test_worker_that_is_refused_for_its_mode_brings_no_table_and_is_told_of_to_those_that_wait(
    held: HeldControl,
) -> None:
    (first,) = registered(held, 0)
    with pytest.raises(SettingError):
        held.call(registration(ADAM, worker=1, num_workers=2, mode=Mode(ASYNC)))
    assert [state.name for state in held.shard.states()] == ["sgd"]
    reply = push_one(first)
    assert reply.error is not None
    assert "worker 1 is lost, what it registered with was refused: worker 1: its mode is async" in reply.error.message


@pytest.mark.parametrize("text", ["{", '{"kind": "fast"}'])
def test_mode_that_cannot_be_read_is_refused(held: HeldControl, text: str) -> None:
    request = registration()
    request.mode = text
    with pytest.raises(ProtocolError, match="worker 0: mode: ") as caught:
        held.call(request)
    assert caught.value.code is ErrorCode.MALFORMED


def test_mode_may_be_told_with_a_later_registration(held: HeldControl) -> None:
    for worker in (0, 1):
        held.call(registration(SGD, worker=worker, num_workers=2, client_id=bytes([worker + 1]) * 16))
    assert held.shard.job is None
    first, second = registered(held, 0, 1)
    assert [push_one(worker).header.op for worker in (first, second)] == [Op.WAIT, Op.ACK]


def test_next_job_counts_its_steps_from_1(held: HeldControl) -> None:
    for worker in registered(held, 0, 1):
        push_one(worker)

    async def end() -> None:
        calls = [
            held.start(messages.BarrierRequest(name=LAST_BARRIER, worker_index=worker, num_workers=2, sequence=1))
            for worker in (0, 1)
        ]
        await asyncio.wait_for(asyncio.gather(*calls), 20)

    asyncio.run(end())
    held.call(registration(SGD, client_id=bytes([9]) * 16, mode=SYNC_MODE))
    assert push_one(Worker(held.shard, 0, client_id=bytes([9]) * 16)).header.step == 1


# Workers that are lost to those that wait for their pushes


def is_alive(held: HeldControl, worker: Worker[Shard]) -> None:
    held.call(messages.HeartbeatRequest(worker_index=worker.index, client_id=worker.client_id))


def test_worker_without_heartbeat_fails_the_step_of_those_that_wait_with_its_name(held: HeldControl) -> None:
    first, _ = registered(held, 0, 1)
    push_one(first)
    first.pull(asks_for(SGD, 7))
    held.now = 31.0
    is_alive(held, first)
    held.control.find_lost_workers()
    replies = late_replies(held.shard)
    assert [code_of(reply) for reply in replies] == [ErrorCode.WORKER_LOST] * 2
    assert replies[0].error is not None
    assert replies[0].error.number == 1
    assert "worker 1 is lost, it gave no sign of life for 30 s" in replies[0].error.message


def test_worker_that_is_alive_and_does_not_push_is_waited_for(held: HeldControl) -> None:
    workers = registered(held, 0, 1)
    push_one(workers[0])
    for _ in range(20):
        held.now += 25.0
        for worker in workers:
            is_alive(held, worker)
        held.control.find_lost_workers()
    assert late_replies(held.shard) == []
    assert push_one(workers[1]).header.op is Op.ACK


def test_worker_whose_tables_are_refused_fails_the_step_of_those_that_wait(held: HeldControl) -> None:
    first, _ = registered(held, 0, 1)
    push_one(first)
    other = TableSpec(name="sgd", dim=8, rule="sgd", initializer=constant(0.5))
    with pytest.raises(TableMismatch):
        held.call(registration(other, worker=1, num_workers=2, client_id=bytes([2]) * 16, mode=SYNC_MODE))
    (reply,) = late_replies(held.shard)
    assert reply.error is not None
    assert (reply.error.code, reply.error.number) == (ErrorCode.WORKER_LOST, 1)
    assert "worker 1 is lost, what it registered with was refused: table 'sgd': " in reply.error.message


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_job_that_is_started_again_after_a_lost_worker_trains_whoever_comes_first(
    held: HeldControl, order: tuple[int, int]
) -> None:
    first, _ = registered(held, 0, 1)
    held.now = 31.0
    is_alive(held, first)
    held.control.find_lost_workers()
    assert code_of(push_one(first)) is ErrorCode.WORKER_LOST
    held.now = 31.0 + TAKEN_FOR_S  # the first one has ended, and is not lost yet
    again = {}
    for index in order:
        again[index] = Worker(held.shard, index, client_id=bytes([index + 101]) * 16)
        request = registration(SGD, worker=index, num_workers=2, client_id=again[index].client_id, mode=SYNC_MODE)
        held.call(request)
    assert [push_one(again[index]).header.op for index in (0, 1)] == [Op.WAIT, Op.ACK]


# Heartbeat


def test_heartbeat_tells_incarnation_and_tables(held: HeldControl) -> None:
    held.call(registration(SGD, ADAM))
    reply = held.call(messages.HeartbeatRequest(worker_index=0, client_id=bytes(16)))
    assert reply.incarnation == INCARNATION
    assert [table.name for table in reply.tables] == ["sgd", "adam"]


def test_heartbeat_is_answered_while_the_data_thread_is_busy(
    held: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.service.STATES_TIMEOUT_S", 0.01)
    held.call(registration(SGD))
    heartbeat = messages.HeartbeatRequest(worker_index=0, client_id=bytes(16))
    held.call(heartbeat)
    held.holds_back = True
    assert [table.name for table in held.call(heartbeat).tables] == ["sgd"]


# Barrier


def test_barrier_ends_when_all_workers_are_there(held: HeldControl) -> None:
    async def meet() -> tuple[Any, Any]:
        for worker in (0, 1):
            await held.start(registration(worker=worker, num_workers=2))
        first = asyncio.ensure_future(held.start(barrier(0)))
        await asyncio.sleep(0)
        assert not first.done()
        return await asyncio.wait_for(asyncio.gather(first, held.start(barrier(1))), 20)

    assert len(asyncio.run(meet())) == 2


def test_repeated_barrier_call_meets_no_one_and_is_answered_afterwards(held: HeldControl) -> None:
    async def meet() -> None:
        for worker in (0, 1):
            await held.start(registration(worker=worker, num_workers=2))
        calls = [asyncio.ensure_future(held.start(barrier(0))) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls)
        calls[0].cancel()
        await asyncio.wait_for(asyncio.gather(calls[1], held.start(barrier(1))), 20)
        await asyncio.wait_for(held.start(barrier(0)), 20)

    asyncio.run(meet())


def test_worker_without_heartbeat_wakes_those_that_wait_with_its_name(
    held: HeldControl, caplog: pytest.LogCaptureFixture
) -> None:
    async def meet() -> list[Any]:
        for worker in (0, 1, 2):
            await held.start(registration(worker=worker, num_workers=3))
        waiting = [asyncio.ensure_future(held.start(barrier(worker, 3))) for worker in (0, 1)]
        await asyncio.sleep(0)
        held.now = 31.0
        for worker in (0, 1):
            await held.start(messages.HeartbeatRequest(worker_index=worker, client_id=bytes([worker]) * 16))
        held.control.find_lost_workers()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)

    errors = asyncio.run(meet())
    assert [type(error) for error in errors] == [WorkerLost, WorkerLost]
    assert [error.worker_index for error in errors] == [2, 2]
    assert "worker 2 is lost" in caplog.text


def test_heartbeats_are_watched(held: HeldControl) -> None:
    async def watch() -> Any:
        await held.start(registration(worker=0, num_workers=2))
        await held.start(registration(worker=1, num_workers=2))
        waiting = asyncio.ensure_future(held.start(barrier(0)))
        await asyncio.sleep(0)
        held.now = 31.0
        watcher = asyncio.ensure_future(held.control.watch_workers())
        try:
            return await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 20)
        finally:
            watcher.cancel()

    (error,) = asyncio.run(watch())
    assert isinstance(error, WorkerLost)


def test_worker_whose_tables_are_refused_wakes_those_that_wait_with_the_reason(held: HeldControl) -> None:
    other = TableSpec(name="sgd", dim=8, rule="sgd", initializer=constant(0.5))

    async def meet() -> Any:
        await held.start(registration(SGD, worker=0, num_workers=2))
        waiting = asyncio.ensure_future(held.start(barrier(0)))
        await asyncio.sleep(0)
        with pytest.raises(TableMismatch):
            await held.start(registration(other, worker=1, num_workers=2))
        return await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 20)

    (error,) = asyncio.run(meet())
    assert isinstance(error, WorkerLost)
    assert error.worker_index == 1
    assert "worker 1 is lost, what it registered with was refused: table 'sgd': worker 0 and" in str(error)


def test_worker_whose_tables_cannot_be_read_is_lost(held: HeldControl) -> None:
    held.call(registration(worker=0, num_workers=2))
    request = registration(worker=1, num_workers=2)
    request.table_specs.append("{")
    with pytest.raises(ProtocolError):
        held.call(request)
    with pytest.raises(WorkerLost, match="worker 1 is lost, what it registered with was refused: worker 1: table spec"):
        held.call(barrier(0))


def test_worker_that_never_registers_wakes_those_that_wait_with_its_index(
    held: HeldControl, caplog: pytest.LogCaptureFixture
) -> None:
    async def meet() -> list[Any]:
        for worker in (0, 2):
            await held.start(registration(worker=worker, num_workers=3))
        waiting = [asyncio.ensure_future(held.start(barrier(worker, 3))) for worker in (0, 2)]
        await asyncio.sleep(0)
        held.now = 60.5
        for worker in (0, 2):
            await held.start(messages.HeartbeatRequest(worker_index=worker, client_id=bytes([worker]) * 16))
        held.control.find_lost_workers()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)

    errors = asyncio.run(meet())
    assert [type(error) for error in errors] == [WorkerLost, WorkerLost]
    assert [error.worker_index for error in errors] == [1, 1]
    assert "worker 1 never registered" in caplog.text


def test_worker_whose_call_is_cancelled_is_not_counted(held: HeldControl) -> None:
    async def meet() -> None:
        for worker in (0, 1):
            await held.start(registration(worker=worker, num_workers=2))
        given_up = asyncio.ensure_future(held.start(barrier(0)))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        waiting = asyncio.ensure_future(held.start(barrier(1)))
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.wait_for(asyncio.gather(waiting, held.start(barrier(0, sequence=2))), 20)

    asyncio.run(meet())


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


def test_stop_stops(held: HeldControl) -> None:
    held.call(messages.StopRequest())
    assert held.num_stops == 1


def test_call_that_the_end_overtakes_is_told_so(held: HeldControl) -> None:
    held.cancels = True
    with pytest.raises(FleetSparseError, match="the pserver is stopping"):
        held.call(messages.StatsRequest())
