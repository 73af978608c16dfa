from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import LogFull, SnapshotError, TableMismatch
from fleet_sparse.pserver.admin import checkpoints, load_rpcs, save_rpcs
from fleet_sparse.pserver.admin.service import Supervised
from fleet_sparse.pserver.admin.snapshot_loader import Loaded, load
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.log.log_format import Kind
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.wire import control_pb2 as messages
from support.controls import HeldControl, barrier, registration
from support.coordinators import Coordinator, in_loop, run, train, turns, until
from support.logs import close as close_shard
from support.logs import logged_shard, recovered, state_of
from support.saves import rows_in
from support.shards import INCARNATION, SGD, FrameClient


def test_loaded_rows_replace_those_of_the_shard(held: HeldControl) -> None:
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held).save)
    train(held, 7, 8)
    before = held.shard.ledger.watermarks()
    reply = held.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    assert reply.num_rows == 1
    assert set(rows_in([held.shard], SGD)) == {7, 8}
    (table,) = held.call(messages.FinishLoadRequest(load_id="l", keep=True)).tables
    assert (table.name, table.num_rows) == ("sgd", 1)
    assert FrameClient(held.shard).rows(SGD, 7, 8) == [[-0.5, -0.5], [0.5, 0.5]]
    assert held.shard.ledger.watermarks() == before
    assert held.call(messages.FinishLoadRequest(load_id="l", keep=True)).tables[0] == table


def test_discarded_load_changes_nothing(held: HeldControl) -> None:
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held).save)
    train(held, 7, 8)
    before = rows_in([held.shard], SGD)
    held.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    held.call(messages.FinishLoadRequest(load_id="l", keep=False))
    assert rows_in([held.shard], SGD) == before
    with pytest.raises(SnapshotError, match="load l"):
        held.call(messages.FinishLoadRequest(load_id="l", keep=True))


def test_load_of_a_missing_snapshot_may_be_no_error(held: HeldControl) -> None:
    held.call(registration(SGD))
    reply = held.call(messages.StageLoadRequest(dirname="model", load_id="l", missing_ok=True))
    assert reply.is_missing
    with pytest.raises(SnapshotError):
        held.call(messages.FinishLoadRequest(load_id="l", keep=True))


@pytest.mark.parametrize("resumes", [True, False])
def test_later_registrations_continue_from_a_resumed_load(held: HeldControl, resumes: bool) -> None:
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held).save)
    held.call(messages.StageLoadRequest(dirname="model", load_id="l", missing_ok=True))
    held.call(messages.FinishLoadRequest(load_id="l", keep=True, resumes=resumes))
    resumed = held.call(registration(SGD)).resumed
    assert (json.loads(resumed)["snapshot"] if resumed else "") == ("000001-full" if resumes else "")


class SlowLoads:
    """Loads that do not end before they are given up, or `go_on` is set; `begun` is set once one begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.num_begun = 0

        def slow(shard: Any, directory: Any, tables: Any, *, given_up: threading.Event) -> Loaded:
            self.num_begun += 1
            self.begun.set()
            while not given_up.wait(0.01) and not self.go_on.is_set():
                pass
            return load(shard, directory, tables, given_up=given_up)

        monkeypatch.setattr(load_rpcs, "load", slow)


async def saved_rows(held: HeldControl) -> None:
    await held.start(registration(SGD))
    train(held, 7)
    await Coordinator(held).save()


async def discard(held: HeldControl) -> None:
    await held.start(messages.FinishLoadRequest(load_id="l", keep=False))


async def lose_the_worker(held: HeldControl) -> None:
    held.now += 31
    held.service.find_lost_workers()


async def close(held: HeldControl) -> None:
    held.service.close()


@pytest.mark.parametrize("end", [discard, lose_the_worker, close])
@in_loop
async def test_load_ends_while_it_reads(held: HeldControl, monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    await saved_rows(held)
    slow = SlowLoads(monkeypatch)
    loading = asyncio.ensure_future(held.start(messages.StageLoadRequest(dirname="model", load_id="l")))
    await until(slow.begun.is_set)
    await end(held)
    with pytest.raises(SnapshotError):
        await loading


@in_loop
async def test_new_load_ends_the_one_before(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved_rows(held)
    slow = SlowLoads(monkeypatch)
    first = asyncio.ensure_future(held.start(messages.StageLoadRequest(dirname="model", load_id="one")))
    await until(slow.begun.is_set)
    second = asyncio.ensure_future(held.start(messages.StageLoadRequest(dirname="model", load_id="two")))
    with pytest.raises(SnapshotError):
        await first
    slow.go_on.set()
    assert (await second).num_rows == 1
    await held.start(messages.FinishLoadRequest(load_id="two", keep=True))


@in_loop
async def test_repeated_load_is_made_once(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved_rows(held)
    slow = SlowLoads(monkeypatch)
    request = messages.StageLoadRequest(dirname="model", load_id="l")
    first = asyncio.ensure_future(held.start(request))
    await until(slow.begun.is_set)
    first.cancel()
    second = asyncio.ensure_future(held.start(request))
    await turns()
    slow.go_on.set()
    assert (await second).num_rows == 1
    await asyncio.gather(*(held.start(messages.FinishLoadRequest(load_id="l", keep=True)) for _ in range(2)))
    assert slow.num_begun == 1


def test_snapshot_of_another_table_is_refused_naming_both(held: HeldControl, tmp_path: Path) -> None:
    other = HeldControl(tmp_path)
    other.call(registration(TableSpec(name="sgd", dim=8, rule="sgd", initializer=constant(0.5))))
    run(Coordinator(other).save)
    held.call(registration(SGD))
    with pytest.raises(TableMismatch, match=r"table 'sgd': .*/model .* 2 and 8"):
        held.call(messages.StageLoadRequest(dirname="model", load_id="l"))


def test_new_process_of_a_worker_begins_to_count_loads(held: HeldControl) -> None:
    held.call(registration(SGD))
    run(Coordinator(held).save)
    held.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    held.call(messages.FinishLoadRequest(load_id="l", keep=True))
    reply = held.call(barrier(0))
    assert (reply.num_loads, reply.copies_epoch) == (1, INCARNATION + 1)
    held.call(registration(SGD))  # the same process
    assert held.call(barrier(0, sequence=2)).num_loads == 1
    held.now += 31
    held.service.find_lost_workers()
    assert held.call(registration(SGD, client_id=b"n" * 16)).num_loads_before == 1
    assert held.call(barrier(0, client_id=b"n" * 16)).num_loads == 0


# Loads before a pserver without a log was started again


@pytest.fixture
def restarted(tmp_path: Path) -> HeldControl:
    started = Supervised(True, has_recovered=False, on_job=lambda: None, on_snapshot=lambda name: None)
    return HeldControl(tmp_path, started)


def rejoining(num_loads: int, num_before: int = 0, *, worker: int = 0, num_workers: int = 1) -> Any:
    request = registration(SGD, worker=worker, num_workers=num_workers)
    request.resumption.CopyFrom(messages.Resumption(num_loads=num_loads, num_loads_before=num_before))
    return request


def test_restarted_pserver_counts_on_from_the_loads_of_workers(restarted: HeldControl) -> None:
    restarted.call(rejoining(3, 1))
    assert restarted.call(barrier(0)).num_loads == 2
    run(Coordinator(restarted).save)
    restarted.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    restarted.call(messages.FinishLoadRequest(load_id="l", keep=True))
    assert restarted.call(barrier(0, sequence=2)).num_loads == 3


@in_loop
async def test_worker_hears_of_a_load_that_only_worker_0_knows(restarted: HeldControl) -> None:
    await restarted.start(rejoining(4, 4, worker=1, num_workers=2))
    await restarted.start(rejoining(5, num_workers=2))
    replies = await asyncio.gather(*(restarted.start(barrier(worker)) for worker in range(2)))
    assert [reply.num_loads for reply in replies] == [5, 1]


# The log


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[HeldControl]:
    """A control plane with a log, a snapshot with row 7, and pushes to rows 7 and 8 since then."""
    held = HeldControl(tmp_path, shard=logged_shard(tmp_path / "log"))
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held).save)
    train(held, 7, 8)
    yield held
    close_log(held)


def close_log(held: HeldControl) -> None:
    assert held.shard.log is not None
    held.shard.log.writer.close()


STAGE = messages.StageLoadRequest(dirname="model", load_id="l")
KEEP = messages.FinishLoadRequest(load_id="l", keep=True)


@pytest.mark.guarantee("W14")
def test_a_load_is_durable_before_it_is_answered(logged: HeldControl) -> None:
    logged.call(STAGE)
    logged.call(KEEP)
    assert logged.shard.log is not None
    records = {record.head.kind: record.head.lsn for record in LogReader(logged.shard.log.writer.directory).records()}
    assert logged.shard.log.writer.durable_lsn >= records[Kind.LOAD]
    again = recovered(logged.shard)
    assert rows_in([again], SGD) == rows_in([logged.shard], SGD)
    close_shard(again)


@pytest.mark.guarantee("W14")
def test_a_load_whose_rows_are_not_written_changes_nothing(
    logged: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(save: Save, *arguments: Any) -> None:
        raise SnapshotError("the disk is full")

    before = state_of(logged.shard)
    with monkeypatch.context() as patch:
        patch.setattr(Save, "write", refuse)
        with pytest.raises(SnapshotError):
            logged.call(STAGE)
    with pytest.raises(SnapshotError):
        logged.call(KEEP)
    assert state_of(logged.shard) == before
    for _ in range(5):
        train(logged, 7)
    again = recovered(logged.shard)
    assert state_of(again) == state_of(logged.shard)
    close_shard(again)


@pytest.mark.guarantee("W14")
def test_pushes_behind_a_load_stay_if_no_checkpoint_is_written(
    logged: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise SnapshotError("the disk is full")

    monkeypatch.setattr(checkpoints, "finish_checkpoint", refuse)
    logged.call(STAGE)
    logged.call(KEEP)
    train(logged, 7)
    again = recovered(logged.shard)
    assert state_of(again) == state_of(logged.shard)
    close_shard(again)


def write_due_checkpoint(held: HeldControl) -> None:
    async def write() -> None:
        held.service._checkpoints.begin_if_due()
        running = held.service._checkpoints._running
        assert running is not None
        assert await running.done

    run(write)


def test_a_load_makes_a_checkpoint_due(logged: HeldControl) -> None:
    logged.call(STAGE)
    logged.call(KEEP)
    write_due_checkpoint(logged)
    assert not loaded_directories(logged.shard)


def loaded_directories(shard: Shard) -> list[str]:
    assert shard.log is not None
    return [path.name for path in shard.log.writer.directory.glob("load-*")]


def test_a_load_makes_a_checkpoint_due_in_the_next_process(logged: HeldControl, tmp_path: Path) -> None:
    logged.call(STAGE)
    logged.call(KEEP)
    again = HeldControl(tmp_path, shard=recovered(logged.shard))
    assert len(loaded_directories(again.shard)) == 1
    write_due_checkpoint(again)
    assert not loaded_directories(again.shard)
    close_log(again)


def test_a_start_removes_the_rows_that_no_load_names(logged: HeldControl) -> None:
    logged.call(STAGE)
    logged.call(KEEP)
    assert logged.shard.log is not None
    named = loaded_directories(logged.shard)
    (logged.shard.log.writer.directory / "load-3-ab").mkdir()
    again = recovered(logged.shard)
    assert loaded_directories(again) == named
    close_shard(again)


class FullLog:
    """A log without room while `is_full`."""

    def __init__(self, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
        assert shard.log is not None
        self.is_full = True
        self.num_refused = 0
        append = shard.log.writer.append
        monkeypatch.setattr("fleet_sparse.pserver.admin.log_appends.RETRY_S", 0.001)

        def append_or_refuse(*arguments: Any, **options: Any) -> int:
            if self.is_full:
                self.num_refused += 1
                raise LogFull("no room")
            return append(*arguments, **options)

        monkeypatch.setattr(shard.log.writer, "append", append_or_refuse)


def test_a_save_that_begins_during_a_load_waits(logged: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load_and_save() -> None:
        await logged.start(STAGE)
        full = FullLog(logged.shard, monkeypatch)
        load = asyncio.ensure_future(logged.start(KEEP))
        await until(lambda: full.num_refused > 0)
        save = asyncio.ensure_future(Coordinator(logged, "y").save())
        await turns()
        full.is_full = False
        await asyncio.gather(load, save)

    run(load_and_save)
    again = recovered(logged.shard)
    assert state_of(again) == state_of(logged.shard)
    assert set(rows_in([again], SGD)) == {7}
    close_shard(again)


def test_a_save_does_not_wait_long_for_a_load(logged: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_rpcs, "HELD_S", 0.02)

    async def load_and_save() -> None:
        await logged.start(STAGE)
        full = FullLog(logged.shard, monkeypatch)
        load = asyncio.ensure_future(logged.start(KEEP))
        await until(lambda: full.num_refused > 0)
        with pytest.raises(SnapshotError, match="load"):
            await Coordinator(logged, "y").begin()
        full.is_full = False
        await load
        assert await Coordinator(logged, "z").save() == "000002-full"

    run(load_and_save)


def test_a_load_that_a_save_refuses_stays_staged(logged: HeldControl) -> None:
    async def load_and_save() -> None:
        await logged.start(STAGE)
        coordinator = Coordinator(logged, "y")
        await coordinator.begin()
        with pytest.raises(SnapshotError, match="load"):
            await logged.start(KEEP)
        await coordinator.end()
        await logged.start(KEEP)

    run(load_and_save)
    assert set(rows_in([logged.shard], SGD)) == {7}


def test_a_load_waits_for_room_in_the_log(logged: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load() -> None:
        await logged.start(STAGE)
        full = FullLog(logged.shard, monkeypatch)
        load = asyncio.ensure_future(logged.start(KEEP))
        await until(lambda: full.num_refused >= 2)
        full.is_full = False
        await load

    run(load)
    assert set(rows_in([logged.shard], SGD)) == {7}


@in_loop
async def test_a_discarded_load_leaves_no_file(tmp_path: Path) -> None:
    held = HeldControl(tmp_path, shard=logged_shard(tmp_path / "log"))
    await saved_rows(held)
    await held.start(STAGE)
    assert list((tmp_path / "log").glob("staged-*"))
    await discard(held)
    assert not list((tmp_path / "log").glob("staged-*"))
    close_log(held)


def test_a_load_is_answered_again_by_the_next_process(logged: HeldControl, tmp_path: Path) -> None:
    logged.call(STAGE)
    states = logged.call(KEEP).tables
    train(logged, 8)
    again = HeldControl(tmp_path, shard=recovered(logged.shard))
    assert [each.name for each in again.call(KEEP).tables] == [each.name for each in states]
    assert state_of(again.shard) == state_of(logged.shard)
    close_log(again)


def test_the_next_process_refuses_a_load_that_was_not_done(logged: HeldControl, tmp_path: Path) -> None:
    logged.call(STAGE)
    again = HeldControl(tmp_path, shard=recovered(logged.shard))
    with pytest.raises(SnapshotError, match="load again"):
        again.call(KEEP)
    assert state_of(again.shard) == state_of(logged.shard)
    close_log(again)
