"""A save of a job becomes the checkpoint of the log: what that leaves, and which saves do not."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.criteria import MIN_NORM, Criterion
from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.errors import LogFull, SnapshotError
from fleet_sparse.pserver.admin.checkpoint_link import link_of
from fleet_sparse.pserver.admin.log_recovery import at_once, write_checkpoint
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.log.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    checkpoint_name,
    may_be_checkpoint,
    read_checkpoint,
)
from fleet_sparse.pserver.log.log_format import Kind
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.pserver.log.log_writer import LogWriter
from fleet_sparse.pserver.tables.mutations import DayEnd
from fleet_sparse.snapshot.checksum import Checksum
from fleet_sparse.snapshot.directory import LocalDirectory, directory_at
from fleet_sparse.snapshot.manifest import ShardFile
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.frame_format import Action, Block, Op
from support.admissions import count_filter
from support.controls import HeldControl, registration
from support.coordinators import Coordinator, SlowWrites, run, turns, until
from support.logs import close, linked_save, logged_shard, recovered, state_of
from support.shards import ADAM, DENSE, SGD, FrameClient, assign, floats, ids_of, push
from support.steps import Worker, make_job

COUNTED = count_filter(3)
FILE = ShardFile(0, "shard-0-of-1.fss", 1, 1, 0, Checksum(1))


def held_job(directory: Path) -> HeldControl:
    """A job of one worker, with rows, counters and dense values in its log."""
    held = HeldControl(directory, shard=logged_shard(directory / "log", SGD, ADAM, COUNTED, DENSE))
    held.call(registration(SGD, ADAM, COUNTED))
    assert FrameClient(held.shard).ask(Op.ASSIGN, assign(DENSE, floats(*range(8)))).error is None
    train(held.shard, 1, 2, 3)
    return held


def train(shard: Shard, *ids: int) -> None:
    client = FrameClient(shard)
    client.seq = shard.ledger.applied(client.client_id)
    for spec in (SGD, ADAM, COUNTED):
        grads = np.full((len(ids), spec.dim), 0.5, np.float32)
        statistics = {"counts": np.ones(len(ids), np.uint32)} if spec.statistics else {}
        block = push(spec, ids_of(*ids), grads, statistics=statistics, optimizer_step=client.seq + 1)
        assert client.push(block, push(DENSE, None, np.ones((8, 1), np.float32))).error is None


def saved(held: HeldControl, kind: str = "full", save_id: str = "x", **changes: Any) -> str:
    name: str = run(lambda: Coordinator(held, save_id, **changes).save(kind))
    return name


def checkpoint_of(shard: Shard) -> Checkpoint | None:
    return read_checkpoint(log_of(shard))


def log_of(shard: Shard) -> Path:
    assert shard.log is not None
    return shard.log.writer.directory


def files_of(shard: Shard) -> list[Path]:
    """The rows files of the checkpoint, in the order in which they are loaded."""
    checkpoint = checkpoint_of(shard)
    assert checkpoint is not None
    return [log_of(shard) / checkpoint_name(each.first_lsn) / each.file.file for each in checkpoint.files]


def check_continues(shard: Shard, ids: tuple[int, ...] = (2, 9)) -> None:
    """Checks that a killed pserver continues bit by bit with a push behind the checkpoint, and trains on as before."""
    train(shard, *ids)
    again = recovered(shard)
    assert state_of(again) == state_of(shard)
    assert again.base == shard.base
    for each in (shard, again):
        train(each, *ids)
    assert state_of(again) == state_of(shard)
    close(again)


# What is linked


@pytest.mark.guarantee("W1")
def test_a_killed_pserver_continues_from_the_file_of_a_save(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held)
    (file,) = files_of(held.shard)
    assert file.samefile(tmp_path / "model" / "000001-full" / file.name)
    check_continues(held.shard)


@pytest.mark.guarantee("W1")
def test_pushes_during_a_save_are_replayed_on_its_file(tmp_path: Path) -> None:
    held, coordinator = held_job(tmp_path), None

    async def save() -> None:
        nonlocal coordinator
        coordinator = Coordinator(held)
        await coordinator.begin()
        train(held.shard, 3, 4)
        file = await coordinator.write()
        train(held.shard, 4, 5)
        await coordinator.end(await coordinator.finish(file))

    run(save)
    assert len(files_of(held.shard)) == 1
    check_continues(held.shard)


def test_segments_before_a_linked_checkpoint_are_removed(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held)
    reader = LogReader(log_of(held.shard), None)
    checkpoint = checkpoint_of(held.shard)
    assert checkpoint is not None
    assert [path.name for path in reader.paths] == [f"{checkpoint.first_lsn:020d}.fsl"]
    kinds = [record.head.kind for record in reader.records()]
    assert kinds[0] is Kind.STATE
    assert not {Kind.APPLY, Kind.CHANGED} & set(kinds)


@pytest.mark.parametrize("removes", [shutil.rmtree, lambda path: os.truncate(path / "MANIFEST.json", 0)])
def test_a_removed_snapshot_leaves_the_checkpoint(tmp_path: Path, removes: Any) -> None:
    held = held_job(tmp_path)
    removes(tmp_path / "model" / saved(held))
    check_continues(held.shard)


def test_a_second_save_replaces_the_checkpoint_of_the_first(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held)
    train(held.shard, 4)
    saved(held, save_id="y")
    assert len(list(log_of(held.shard).glob("checkpoint-*"))) == 1
    check_continues(held.shard)


@pytest.mark.guarantee("W9")
def test_deltas_are_linked_above_the_full_snapshot(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held)
    for number in range(2):
        train(held.shard, 3, 10 + number)
        held.shard.commit([], [DayEnd(SGD.table_id)])
        held.shard.shrink([Criterion(MIN_NORM, 0.1)], tables=["adam"])
        assert saved(held, "delta", f"delta{number}").endswith("delta")
    assert len(files_of(held.shard)) == 3
    shutil.rmtree(tmp_path / "model")
    check_continues(held.shard)


@pytest.mark.guarantee("W9")
def test_a_delta_after_a_restart_is_linked(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held)
    train(held.shard, 5)
    again = recovered(held.shard)
    assert linked_save(again, tmp_path / "model", "delta")
    assert len(files_of(again)) == 2
    check_continues(again)


def test_a_linked_file_has_no_clients(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held)
    checkpoint = checkpoint_of(held.shard)
    assert checkpoint is not None
    assert checkpoint.file.clients == ()
    assert checkpoint.snapshot == held.shard.base


@pytest.mark.guarantee("W3")
def test_a_save_of_a_sync_job_is_linked_without_staged_pushes(tmp_path: Path) -> None:
    shard, workers = make_job(Mode(SYNC), 2, shard=logged_shard(tmp_path / "log", SGD))
    for worker in workers:
        assert worker.push(push(SGD, ids_of(1), floats([1.0, 0.0]))).error is None
    complete = state_of(shard)
    workers[0].push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    assert linked_save(shard, tmp_path / "model")
    again = recovered(shard)
    assert state_of(again) == complete
    for index in range(2):
        worker = Worker(again, index, step=1)
        worker.seq = 1
        assert worker.push(push(SGD, ids_of(1), floats([1.0, 0.0]))).error is None
    assert again.complete_step == 2
    close(again)


# What is not


def test_a_save_inside_a_prepared_step_is_not_linked(tmp_path: Path) -> None:
    shard, workers = make_job(Mode(SYNC), 2, shard=logged_shard(tmp_path / "log", SGD))
    for worker in workers:
        worker.ask(Op.PREPARE, push(SGD, ids_of(1), floats([1.0, 0.0])))
    assert not linked_save(shard, tmp_path / "model")
    for worker in workers:
        worker.ask(Op.COMMIT, Block(Action.FACTORS, SGD.table_id, SGD.schema_hash, 1, 1, None, floats([0.5])))
    assert linked_save(shard, tmp_path / "model")
    again = recovered(shard)
    assert state_of(again) == state_of(shard)
    close(again)


@pytest.mark.parametrize(
    ("snapshot", "base", "changes", "expected"),
    [
        (None, None, {}, True),
        (5, None, {}, True),
        (5, 5, {}, True),
        (5, 6, {}, False),
        (None, 5, {}, False),
        (None, None, {"is_complete": False}, False),
        (None, None, {"ends_day": True}, False),
        (None, None, {"lacks_rows": True}, False),
        (5, 5, {"ends_day": True}, False),
    ],
)
def test_which_saves_have_what_a_checkpoint_needs(
    snapshot: int | None, base: int | None, changes: dict[str, bool], expected: bool
) -> None:
    newest = Checkpoint(1, FILE, snapshot=None if snapshot is None else Checksum(snapshot))
    flags = {"is_complete": True, "ends_day": False, "lacks_rows": False, **changes}
    assert may_be_checkpoint(newest, base=base, **flags) is expected
    if base is not None:
        assert not may_be_checkpoint(None, base=base, **flags)


def test_a_save_that_ends_a_day_is_not_linked(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    run(lambda: Coordinator(held).save(ends_day=True))
    assert checkpoint_of(held.shard) is None
    check_continues(held.shard)


def test_a_save_of_some_tables_is_not_linked(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held, tables=("sgd",))
    assert checkpoint_of(held.shard) is None
    check_continues(held.shard)


def test_a_save_without_some_rows_is_not_linked(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    criteria = [messages.ShrinkCriterion(name=MIN_NORM, value=0.1)]
    saved(held, left_out=[messages.LeftOut(table="sgd", criteria=criteria)])
    assert checkpoint_of(held.shard) is None
    check_continues(held.shard)


def test_a_delta_above_another_checkpoint_is_not_linked(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held)
    write_checkpoint(held.shard)
    before = checkpoint_of(held.shard)
    train(held.shard, 4)
    assert saved(held, "delta", "y").endswith("delta")
    assert checkpoint_of(held.shard) == before
    check_continues(held.shard)


def test_a_delta_is_not_linked_if_its_base_is_replaced(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held)
    train(held.shard, 4)
    save = Save(held.shard, "y", base=held.shard.base, is_logged=True)
    target = directory_at(tmp_path / "other")
    target.make()
    link = link_of(held.shard, save, target)
    assert link is not None
    write_checkpoint(held.shard)  # as one that was being written when the save began
    before = checkpoint_of(held.shard)
    link.cut()
    link.link(save.write(target, at_once))
    save.end(7)
    assert not link.adopt(7)
    assert checkpoint_of(held.shard) == before
    check_continues(held.shard)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.ENOTSUP])
def test_a_save_whose_link_is_refused_is_a_snapshot_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    held = held_job(tmp_path)
    assert saved(held) == "000001-full"
    assert checkpoint_of(held.shard) is None
    assert not list(log_of(held.shard).glob("checkpoint-*"))
    check_continues(held.shard)


def test_a_save_to_another_file_system_begins_no_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.snapshot.directory.LocalDirectory.shares_files_with", lambda *_: False)
    held = held_job(tmp_path)
    saved(held)
    assert Kind.STATE not in {record.head.kind for record in LogReader(log_of(held.shard)).records()}


@pytest.mark.guarantee("W9")
def test_a_failed_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    held = held_job(tmp_path)
    saved(held)
    before = checkpoint_of(held.shard)
    train(held.shard, 4)

    async def fail() -> None:
        coordinator = Coordinator(held, "y")
        await coordinator.begin()
        await coordinator.write()
        await coordinator.end()

    run(fail)
    assert checkpoint_of(held.shard) == before
    assert len(list(log_of(held.shard).glob("checkpoint-*"))) == 1
    check_continues(held.shard)


def test_a_save_whose_end_is_not_in_the_log_is_not_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = LogWriter.append

    def fill(writer: LogWriter, kind: Kind, **parts: Any) -> int:
        if kind is Kind.END_SAVE:
            raise LogFull("the disk has no room")
        return append(writer, kind, **parts)

    held = held_job(tmp_path)
    monkeypatch.setattr(LogWriter, "append", fill)
    saved(held)
    assert checkpoint_of(held.shard) is None


def test_no_room_for_the_segment_of_a_save_leaves_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: LogWriter, __: int = 0) -> int:
        raise LogFull("the disk has no room")

    held = held_job(tmp_path)
    monkeypatch.setattr(LogWriter, "begin_segment", fill)
    assert saved(held) == "000001-full"
    assert checkpoint_of(held.shard) is None


@pytest.mark.guarantee("W11")
def test_a_pserver_that_lost_its_lease_removes_no_file(tmp_path: Path) -> None:
    former = logged_shard(tmp_path / "log", SGD)
    target = LocalDirectory(tmp_path / "model")
    target.make()
    save = Save(former, "x", base=None, is_logged=True)
    link = link_of(former, save, target)
    assert link is not None
    assert link.cut()
    file = save.write(target, at_once)
    later = logged_shard(tmp_path / "log")
    link.link(file)  # as the later one may do at the same lsn
    (path,) = (tmp_path / "log").glob("checkpoint-*/*")
    link.drop()
    assert path.exists()
    save.end(None)
    for each in (former, later):
        close(each)


def test_a_start_removes_what_the_end_of_a_job_left(tmp_path: Path) -> None:
    (tmp_path / "log.ended" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "log.ended" / "00000000000000000007.fsl").touch()
    close(logged_shard(tmp_path / "log", SGD))
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_restart_removes_what_crashes_left_of_checkpoints(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    close(shard)
    (tmp_path / "log" / f".{CHECKPOINT}.0123.draft").touch()
    (tmp_path / "log" / checkpoint_name(99)).mkdir()
    again = logged_shard(tmp_path / "log")
    assert {path.suffix for path in (tmp_path / "log").iterdir() if path.name != "LOCK"} == {".fsl"}
    close(again)


# Saves that follow one another faster than checkpoints are written


def overdue_job(directory: Path) -> HeldControl:
    held = HeldControl(directory, shard=logged_shard(directory / "log", SGD), checkpoint_bytes=1000)
    held.call(registration(SGD))
    while held.shard.log is not None and held.shard.log.writer.size.num_bytes < 2000:
        push_sgd(held.shard)
    return held


def push_sgd(shard: Shard) -> None:
    client = FrameClient(shard)
    client.seq = shard.ledger.applied(client.client_id)
    assert client.push(push(SGD, ids_of(1, 2), np.ones((2, 2), np.float32))).error is None


def test_an_unlinked_save_waits_for_an_overdue_checkpoint(tmp_path: Path) -> None:
    held = overdue_job(tmp_path)
    run(lambda: Coordinator(held, tables=("sgd",)).begin())
    checkpoint = checkpoint_of(held.shard)
    assert checkpoint is not None
    assert checkpoint.snapshot is None


def test_a_save_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, slow, given_up = overdue_job(tmp_path), SlowWrites(monkeypatch), []
    monkeypatch.setattr(Save, "give_up", lambda save: given_up.append(save.save_id))

    async def begin_during_a_checkpoint() -> None:
        watch = asyncio.ensure_future(held.service.watch_workers())
        await until(slow.begun.is_set)
        begun = asyncio.ensure_future(Coordinator(held, tables=("sgd",)).begin())
        await turns()
        slow.go_on.set()
        await begun
        watch.cancel()

    run(begin_during_a_checkpoint)
    assert not given_up
    assert checkpoint_of(held.shard) is not None


def test_a_linked_save_does_not_wait_for_an_overdue_checkpoint(tmp_path: Path) -> None:
    held = overdue_job(tmp_path)
    run(lambda: Coordinator(held).begin())
    assert checkpoint_of(held.shard) is None


def test_after_a_failed_link_a_save_waits_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = overdue_job(tmp_path)
    monkeypatch.setattr("fleet_sparse.snapshot.directory.LocalDirectory.link", _refused)
    saved(held)
    assert checkpoint_of(held.shard) is None
    run(lambda: Coordinator(held, "y").begin())
    assert checkpoint_of(held.shard) is not None


def test_a_linked_save_is_no_more_log_for_the_next_checkpoint(tmp_path: Path) -> None:
    held = overdue_job(tmp_path)
    saved(held)
    run(lambda: Coordinator(held, "y", tables=("sgd",)).begin())
    checkpoint = checkpoint_of(held.shard)
    assert checkpoint is not None
    assert checkpoint.snapshot == held.shard.base


def _refused(*_: Any) -> None:
    raise SnapshotError("not linked")
