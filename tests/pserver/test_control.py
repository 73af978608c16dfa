from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.core.table import TableSpec
from fleet_sparse.errors import (
    ErrorCode,
    FleetSparseError,
    ProtocolError,
    SettingError,
    SnapshotError,
    TableMismatch,
    WorkerLost,
)
from fleet_sparse.pserver import snapshot
from fleet_sparse.pserver.control import TAKEN_FOR_S, Control
from fleet_sparse.pserver.membership import LAST_BARRIER
from fleet_sparse.pserver.requests import Traffic
from fleet_sparse.pserver.rows_file import ShardFile
from fleet_sparse.pserver.shard import Shard
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.frames import PROTOCOL_VERSION, Frame, Op
from support.shards import ADAM, CLUSTER, INCARNATION, SGD, FrameClient, code_of, floats, ids_of, make_shard, push
from support.steps import SYNC_MODE, Worker, asks_for


class Held:
    """A Control whose tasks run at once, unless they are held back, and whose clock is set by hand."""

    def __init__(self, root: Path) -> None:
        self.now = 0.0
        self.num_stops = 0
        self.holds_back = False
        self.cancels = False
        self.shard = make_shard()
        self.control = Control(
            self.shard,
            post=self._post,
            traffic=Traffic(5, 6),
            data_endpoint="127.0.0.1:6001",
            root=root,
            worker_lost_s=30.0,
            connect_s=60.0,
            stop=self._stop,
            clock=lambda: self.now,
        )

    def _post(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.cancels:
            future.cancel()
        elif not self.holds_back:
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)
        return future

    def _stop(self) -> None:
        self.num_stops += 1

    def start(self, request: Any) -> Any:
        return self.control.call(type(request).__name__.removesuffix("Request"), request)

    def call(self, request: Any) -> Any:
        return asyncio.run(self.start(request))


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


def registration(
    *specs: TableSpec,
    worker: int = 0,
    num_workers: int = 1,
    version: int = PROTOCOL_VERSION,
    client_id: bytes = b"",
    mode: Mode | None = None,
) -> messages.RegisterRequest:
    return messages.RegisterRequest(
        protocol_version=version,
        worker_index=worker,
        num_workers=num_workers,
        client_id=client_id or bytes([worker]) * 16,
        client_epoch=1,
        table_specs=[spec.to_json() for spec in specs],
        mode="" if mode is None else mode.to_json(),
    )


def barrier(worker: int, num_workers: int = 2, sequence: int = 1) -> messages.BarrierRequest:
    return messages.BarrierRequest(name="b", worker_index=worker, num_workers=num_workers, sequence=sequence)


# Register


def test_registration_tells_what_frames_must_carry_and_where_to_send_them(held: Held) -> None:
    reply = held.call(registration(SGD))
    assert (reply.cluster_id, reply.shard, reply.num_shards, reply.incarnation) == (CLUSTER, 0, 1, INCARNATION)
    assert (reply.placement_version, reply.data_endpoint) == (1, "127.0.0.1:6001")
    assert [table.name for table in reply.tables] == ["sgd"]


def test_registration_tells_the_optimizer_step_of_a_table_that_is_there(held: Held) -> None:
    held.call(registration(SGD))
    FrameClient(held.shard).push(push(SGD, ids_of(7), floats([1, 1]), optimizer_step=6))
    (table,) = held.call(registration(SGD, worker=0)).tables
    assert (table.optimizer_step, table.num_rows) == (6, 1)


def test_other_spec_of_another_worker_names_both_sides(held: Held) -> None:
    held.call(registration(SGD, worker=0, num_workers=2))
    other = TableSpec(name="sgd", dim=8, rule="sgd", initializer=constant(0.5))
    with pytest.raises(TableMismatch, match="table 'sgd': worker 0 and worker 1 describe it differently: dim 2 and 8"):
        held.call(registration(other, worker=1, num_workers=2))


def test_other_number_of_workers_is_refused(held: Held) -> None:
    held.call(registration(worker=0, num_workers=2))
    with pytest.raises(SettingError, match="worker 1: its job has 3 workers"):
        held.call(registration(worker=1, num_workers=3))


def test_other_protocol_version_is_refused(held: Held) -> None:
    with pytest.raises(ProtocolError, match="worker 0: it speaks protocol version 9, this pserver 1") as caught:
        held.call(registration(version=9))
    assert caught.value.code is ErrorCode.VERSION


def test_client_id_of_another_length_is_refused(held: Held) -> None:
    with pytest.raises(ProtocolError, match="worker 0: its client id has 3 bytes"):
        held.call(registration(client_id=b"abc"))


def test_spec_that_cannot_be_read_is_refused(held: Held) -> None:
    request = registration()
    request.table_specs.append("{")
    with pytest.raises(ProtocolError, match="worker 0: table spec: is no JSON"):
        held.call(request)
    assert held.shard.states() == []


# Modes


def registered(held: Held, *workers: int, mode: Mode = SYNC_MODE, num_workers: int = 2) -> list[Worker[Shard]]:
    """Workers with these indexes, as their frames come after they registered."""
    made = [Worker(held.shard, worker, client_id=bytes([worker + 1]) * 16) for worker in workers]
    for worker in made:
        held.call(
            registration(
                SGD, worker=worker.index, num_workers=num_workers, client_id=worker.client.client_id, mode=mode
            )
        )
    return made


def push_one(worker: Worker[Shard]) -> Frame:
    return worker.push(push(SGD, ids_of(7), floats([1, 1])))


def test_mode_that_counts_steps_makes_the_shard_wait_for_all_workers(held: Held) -> None:
    first, second = registered(held, 0, 1)
    assert [push_one(worker).header.op for worker in (first, second)] == [Op.WAIT, Op.ACK]


def test_a_worker_in_another_mode_is_refused_and_both_modes_are_named(held: Held) -> None:
    registered(held, 0)
    with pytest.raises(
        SettingError, match=r"worker 1: its mode is async, that of worker 0 is sync \(avg\); all workers"
    ):
        registered(held, 1, mode=Mode(ASYNC))


def test_worker_that_is_refused_for_its_mode_brings_no_table_and_is_told_of_to_those_that_wait(held: Held) -> None:
    (first,) = registered(held, 0)
    with pytest.raises(SettingError):
        held.call(registration(ADAM, worker=1, num_workers=2, mode=Mode(ASYNC)))
    assert [state.name for state in held.shard.states()] == ["sgd"]
    reply = push_one(first)
    assert reply.error is not None
    assert "worker 1 is lost, what it registered with was refused: worker 1: its mode is async" in reply.error.message


@pytest.mark.parametrize("text", ["{", '{"kind": "fast"}'])
def test_mode_that_cannot_be_read_is_refused(held: Held, text: str) -> None:
    request = registration()
    request.mode = text
    with pytest.raises(ProtocolError, match="worker 0: mode: ") as caught:
        held.call(request)
    assert caught.value.code is ErrorCode.MALFORMED


def test_mode_may_be_told_with_a_later_registration(held: Held) -> None:
    for worker in (0, 1):
        held.call(registration(SGD, worker=worker, num_workers=2, client_id=bytes([worker + 1]) * 16))
    assert held.shard.job is None
    first, second = registered(held, 0, 1)
    assert [push_one(worker).header.op for worker in (first, second)] == [Op.WAIT, Op.ACK]


def test_next_job_counts_its_steps_from_1(held: Held) -> None:
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


def is_alive(held: Held, worker: Worker[Shard]) -> None:
    held.call(messages.HeartbeatRequest(worker_index=worker.index, client_id=worker.client.client_id))


def test_worker_without_heartbeat_fails_the_step_of_those_that_wait_with_its_name(held: Held) -> None:
    first, _ = registered(held, 0, 1)
    push_one(first)
    first.pull(asks_for(SGD, 7))
    held.now = 31.0
    is_alive(held, first)
    held.control.find_lost_workers()
    replies = held.shard.take_released()
    assert [code_of(reply) for reply in replies] == [ErrorCode.WORKER_LOST] * 2
    assert replies[0].error is not None
    assert replies[0].error.number == 1
    assert "worker 1 is lost, it gave no sign of life for 30 s" in replies[0].error.message


def test_worker_that_is_alive_and_does_not_push_is_waited_for(held: Held) -> None:
    workers = registered(held, 0, 1)
    push_one(workers[0])
    for _ in range(20):
        held.now += 25.0
        for worker in workers:
            is_alive(held, worker)
        held.control.find_lost_workers()
    assert held.shard.take_released() == []
    assert push_one(workers[1]).header.op is Op.ACK


def test_worker_whose_tables_are_refused_fails_the_step_of_those_that_wait(held: Held) -> None:
    first, _ = registered(held, 0, 1)
    push_one(first)
    other = TableSpec(name="sgd", dim=8, rule="sgd", initializer=constant(0.5))
    with pytest.raises(TableMismatch):
        held.call(registration(other, worker=1, num_workers=2, client_id=bytes([2]) * 16, mode=SYNC_MODE))
    (reply,) = held.shard.take_released()
    assert reply.error is not None
    assert (reply.error.code, reply.error.number) == (ErrorCode.WORKER_LOST, 1)
    assert "worker 1 is lost, what it registered with was refused: table 'sgd': " in reply.error.message


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_job_that_is_started_again_after_a_lost_worker_trains_whoever_comes_first(
    held: Held, order: tuple[int, int]
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
        request = registration(
            SGD, worker=index, num_workers=2, client_id=again[index].client.client_id, mode=SYNC_MODE
        )
        held.call(request)
    assert [push_one(again[index]).header.op for index in (0, 1)] == [Op.WAIT, Op.ACK]


# Heartbeat


def test_heartbeat_tells_incarnation_and_tables(held: Held) -> None:
    held.call(registration(SGD, ADAM))
    reply = held.call(messages.HeartbeatRequest(worker_index=0, client_id=bytes(16)))
    assert reply.incarnation == INCARNATION
    assert [table.name for table in reply.tables] == ["sgd", "adam"]


def test_heartbeat_is_answered_while_the_data_thread_is_busy(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.control.STATES_TIMEOUT_S", 0.01)
    held.call(registration(SGD))
    heartbeat = messages.HeartbeatRequest(worker_index=0, client_id=bytes(16))
    held.call(heartbeat)
    held.holds_back = True
    assert [table.name for table in held.call(heartbeat).tables] == ["sgd"]


# Barrier


def test_barrier_ends_when_all_workers_are_there(held: Held) -> None:
    async def meet() -> tuple[Any, Any]:
        for worker in (0, 1):
            await held.start(registration(worker=worker, num_workers=2))
        first = asyncio.ensure_future(held.start(barrier(0)))
        await asyncio.sleep(0)
        assert not first.done()
        return await asyncio.wait_for(asyncio.gather(first, held.start(barrier(1))), 20)

    assert len(asyncio.run(meet())) == 2


def test_repeated_barrier_call_meets_no_one_and_is_answered_afterwards(held: Held) -> None:
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
    held: Held, caplog: pytest.LogCaptureFixture
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


def test_heartbeats_are_watched(held: Held) -> None:
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


def test_worker_whose_tables_are_refused_wakes_those_that_wait_with_the_reason(held: Held) -> None:
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


def test_worker_whose_tables_cannot_be_read_is_lost(held: Held) -> None:
    held.call(registration(worker=0, num_workers=2))
    request = registration(worker=1, num_workers=2)
    request.table_specs.append("{")
    with pytest.raises(ProtocolError):
        held.call(request)
    with pytest.raises(WorkerLost, match="worker 1 is lost, what it registered with was refused: worker 1: table spec"):
        held.call(barrier(0))


def test_worker_that_never_registers_wakes_those_that_wait_with_its_index(
    held: Held, caplog: pytest.LogCaptureFixture
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


def test_worker_whose_call_is_cancelled_is_not_counted(held: Held) -> None:
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


# Save


def test_save_writes_a_snapshot_that_can_be_loaded(held: Held, tmp_path: Path) -> None:
    held.call(registration(SGD))
    FrameClient(held.shard).push(push(SGD, ids_of(7, 8), floats([1, 1], [2, 2])))
    file = held.call(messages.SaveRequest(dirname="a/model", save_id="x"))
    assert (file.shard, file.file, file.num_rows) == (0, "shard-0-of-1.x.fss", 2)
    manifest = held.call(messages.FinishSaveRequest(dirname="a/model", save_id="x", shards=[file])).manifest
    assert manifest == str(tmp_path / "a" / "model" / "MANIFEST.json")
    loaded = make_shard()
    snapshot.load(loaded, tmp_path / "a" / "model")
    assert FrameClient(loaded, epoch=2).rows(SGD, 7, 8) == [[-0.5, -0.5], [-1.5, -1.5]]


def test_repeated_save_joins_the_one_that_is_not_ended(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, goes_on = snapshot.publish, threading.Event()

    def held_up(directory: Path, file: ShardFile) -> None:
        assert goes_on.wait(20)
        publish(directory, file)

    monkeypatch.setattr(snapshot, "publish", held_up)
    client = FrameClient(held.shard)
    request = messages.SaveRequest(dirname="model", save_id="x")

    async def save_twice() -> Any:
        await held.start(registration(SGD))
        client.push(push(SGD, ids_of(7), floats([1, 1])))
        first = asyncio.ensure_future(held.start(request))
        while not list(tmp_path.glob("model/*.tmp")):
            await asyncio.sleep(0)
        first.cancel()
        client.push(push(SGD, ids_of(7, 8), floats([1, 1], [2, 2]), optimizer_step=2))
        second = asyncio.ensure_future(held.start(request))
        await asyncio.sleep(0)
        goes_on.set()
        return await asyncio.wait_for(second, 20)

    file = asyncio.run(save_twice())
    assert file.num_rows == 1
    held.call(messages.FinishSaveRequest(dirname="model", save_id="x", shards=[file]))
    assert snapshot.load(make_shard(), tmp_path / "model").num_rows == 1


def test_save_that_ended_can_be_repeated(held: Held, tmp_path: Path) -> None:
    request = messages.SaveRequest(dirname="model", save_id="x")
    held.call(registration(SGD))
    held.call(request)
    FrameClient(held.shard).push(push(SGD, ids_of(7), floats([1, 1])))
    file = held.call(request)
    held.call(messages.FinishSaveRequest(dirname="model", save_id="x", shards=[file]))
    assert snapshot.load(make_shard(), tmp_path / "model").num_rows == 1


@pytest.mark.parametrize("dirname", ["../model", "/etc/model", ""])
def test_save_outside_the_root_is_refused(held: Held, dirname: str) -> None:
    with pytest.raises(SnapshotError):
        held.call(messages.SaveRequest(dirname=dirname, save_id="x"))
    with pytest.raises(SnapshotError):
        held.call(messages.FinishSaveRequest(dirname=dirname, save_id="x"))


# Stats and stop


def test_stats_count(held: Held) -> None:
    held.call(registration(SGD))
    client = FrameClient(held.shard)
    client.push(push(SGD, ids_of(7, 8), np.ones((2, 2), np.float32)))
    client.rows(SGD, 7)
    stats = held.call(messages.StatsRequest())
    assert (stats.num_requests, stats.num_pushed_rows, stats.num_pulled_rows) == (2, 2, 1)
    assert (stats.bytes_received, stats.bytes_sent, stats.tables[0].num_rows) == (5, 6, 2)
    assert stats.resident_bytes > 1 << 20


def test_stop_stops(held: Held) -> None:
    held.call(messages.StopRequest())
    assert held.num_stops == 1


def test_call_that_the_end_overtakes_is_told_so(held: Held) -> None:
    held.cancels = True
    with pytest.raises(FleetSparseError, match="the pserver is stopping"):
        held.call(messages.StatsRequest())
