"""A shard that continues from its log equals the one that wrote it, bit by bit."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.criteria import MIN_NORM, UNSEEN_DAYS, Criterion
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.row_bound import NO_VERSION, RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import LogCorrupt, LogFull, PlanError, SettingError, TableMismatch
from fleet_sparse.pserver.admin.log_recovery import log_directory, recover, start_log, write_checkpoint
from fleet_sparse.pserver.admin.staged_rows import StagedRows
from fleet_sparse.pserver.engine import table_map
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.engine.steps import Steps
from fleet_sparse.pserver.log.checkpoint import CHECKPOINT
from fleet_sparse.pserver.log.log_format import Kind, record_ends
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables.mutations import DayEnd
from fleet_sparse.settings import Settings
from fleet_sparse.tools.chaos.power_cut import last_segment
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.frame_format import MAX_BLOCKS, Action, Block, Frame, Op
from support.admissions import count_filter
from support.controls import HeldControl
from support.logs import StraightClient, close, load_into, logged_shard, recovered, state_of
from support.shards import (
    ADAM,
    CLIENT,
    DENSE,
    SGD,
    FrameClient,
    assign,
    code_of,
    floats,
    ids_of,
    make_shard,
    pull,
    push,
    replace,
)
from support.steps import Worker, join

RNG = np.random.default_rng(5)


def check_equal(shard: Shard, **changes: Any) -> Shard:
    """Checks that a recovered shard equals one, and returns it."""
    again = recovered(shard, **changes)
    assert state_of(again) == state_of(shard)
    return again


def grads(n: int, dim: int) -> Any:
    return RNG.standard_normal((n, dim)).astype(np.float32)


@pytest.mark.guarantee("W1")
def test_async_pushes_of_rows_and_dense_values(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM, DENSE)
    client = FrameClient(shard)
    assert client.ask(Op.ASSIGN, assign(DENSE, floats(*range(8)))).error is None
    for step in range(1, 20):
        ids = RNG.integers(-50, 50, 30)
        blocks = push(ADAM, ids, grads(30, 3), optimizer_step=step), push(DENSE, None, grads(8, 1), gradient_scale=0.5)
        assert client.push(*blocks).error is None
        assert client.push(push(SGD, ids, grads(30, 2), learning_rate=0.25)).error is None
    assert client.ask(Op.ASSIGN, replace(DENSE, floats(*range(8)), 7)).error is None
    again = check_equal(shard)
    assert again.ledger.applied(CLIENT) == client.seq == 40
    assert again.incarnation == shard.incarnation
    for each in (shard, again):
        close(each)


def test_plain_frames_are_logged_as_they_lie_in_memory(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM)
    client = StraightClient(shard)
    for step in range(1, 6):
        ids = RNG.permutation(1000)[:31]
        blocks = push(SGD, ids, grads(31, 2)), push(ADAM, ids, grads(31, 3), optimizer_step=step)
        assert client.push(*blocks).error is None
    assert all(client.answers.is_straight)
    check_equal(shard)


@pytest.mark.guarantee("W3")
def test_sync_steps_are_one_record_each(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", ADAM, DENSE)
    workers = sync_workers(shard, 3)
    workers[0].ask(Op.ASSIGN, assign(DENSE, floats(*range(8))), step=0)
    for _ in range(5):
        for worker in workers:
            blocks = push(ADAM, RNG.integers(0, 40, 20), grads(20, 3), gradient_scale=worker.index + 1.0)
            worker.push(blocks, push(DENSE, None, grads(8, 1)))
    assert shard.complete_step == 5
    again = check_equal(shard)
    kinds = [record.head.kind for record in LogReader(again_directory(again)).records()]
    assert kinds.count(Kind.APPLY) == 1 + 5


def again_directory(shard: Shard) -> Path:
    assert shard.log is not None
    return shard.log.writer.directory


def sync_workers(shard: Shard, num_workers: int, mode: Mode | None = None) -> list[Worker[Shard]]:
    workers = [Worker(shard, index) for index in range(num_workers)]
    for worker in workers:
        join(worker, num_workers, mode or Mode(SYNC), begins_job=worker.index == 0)
    return workers


def continues(worker: Worker[Shard], shard: Shard) -> Worker[Shard]:
    """Returns a worker that sends its next requests to another shard, from its state there on."""
    other = Worker(shard, worker.index, step=worker.step)
    other.seq = worker.seq
    return other


@pytest.mark.guarantee("W3")
def test_a_staged_step_is_sent_again_after_a_crash(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    first, second = sync_workers(shard, 2)
    for worker in (first, second):
        worker.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    staged = first.frame(Op.PUSH, push(SGD, ids_of(1), floats([2.0, 0.0])))
    FrameClient(shard, first.client_id).ask(Op.PUSH, *staged.blocks, push_seq=2, step=2)
    again = recovered(shard)
    assert (again.complete_step, again.ledger.newest(first.client_id)) == (1, 1)
    workers = [continues(first, again), continues(second, again)]
    workers[0].seq, workers[0].step = 1, 1
    for worker in workers:
        assert code_of(worker.push(push(SGD, ids_of(1), floats([2.0, 0.0])))) is None
    assert again.complete_step == 2
    # 0.5 - mean(1, 1) - mean(2, 2)
    assert FrameClient(again).rows(SGD, 1) == [[-2.5, 0.5]]


def factors(spec: TableSpec, value: float) -> Block:
    return Block(Action.FACTORS, spec.table_id, spec.schema_hash, 1, 1, None, floats([value]))


@pytest.mark.parametrize("num_phases", [0, 1, 2, 3])
def test_two_phase_clipping_continues_after_each_phase(tmp_path: Path, num_phases: int) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    workers = sync_workers(shard, 2)
    calls: list[tuple[Op, int, Block]] = [
        *((Op.PREPARE, index, push(SGD, ids_of(1, 2), floats([2.0, 4.0], [8.0, 16.0]))) for index in range(2)),
        *((Op.COMMIT, index, factors(SGD, 0.5)) for index in range(2)),
    ]
    for number, (op, index, block) in enumerate(calls):
        if number == num_phases + 1:
            shard = check_equal(shard)
            workers = [continues(worker, shard) for worker in workers]
            if num_phases == 0:  # the first PREPARE was staged alone
                workers[0].seq = 0
                workers[0].ask(calls[0][0], calls[0][2])
        workers[index].ask(op, block)
    assert shard.complete_step == 1
    assert FrameClient(shard).rows(SGD, 1, 2) == [[-0.5, -1.5], [-3.5, -7.5]]


def test_workers_that_left_and_rejoined(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    workers = sync_workers(shard, 2)
    for worker in workers:
        worker.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    workers[0].ask(Op.LEAVE)
    workers[1].push(push(SGD, ids_of(2), floats([1.0, 0.0])))
    assert shard.complete_step == 2
    again = check_equal(shard)
    assert again.job is not None
    assert len(again.job.left) == 1
    other = continues(workers[1], again)
    other.ask(Op.LEAVE)
    assert again.job.left == []
    third = check_equal(again)
    assert third.job is not None
    assert third.job.clock.steps() == [2, 2]


def test_workers_rejoin_if_the_log_ends_before_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    workers = sync_workers(shard, 2)
    for worker in workers:
        worker.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    workers[0].push(push(SGD, ids_of(2), floats([1.0, 0.0])))
    workers[0].ask(Op.LEAVE)
    with monkeypatch.context() as patch:
        patch.setattr(Steps, "rejoin", lambda *_: None)
        workers[1].ask(Op.LEAVE)  # completes step 2
    again = recovered(shard)
    assert again.job is not None
    assert (again.complete_step, again.job.num_left) == (2, 2)
    assert again_asked(workers[0], again).header.op is Op.ACK
    assert again_asked(workers[1], again).header.op is Op.ACK
    assert again.job.clock.steps() == [2, 2]


def again_asked(worker: Worker[Shard], shard: Shard) -> Frame:
    """The answer to the newest request of a worker, a LEAVE, that it sends to another shard."""
    other = continues(worker, shard)
    other.seq -= 1
    return other.ask(Op.LEAVE)


@pytest.mark.parametrize("lag", [0, 3])
def test_steps_of_async_workers_with_a_bounded_lag(tmp_path: Path, lag: int) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    workers = sync_workers(shard, 2, Mode(ASYNC, max_step_lag=lag))
    for _ in range(3):
        workers[1].push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    workers[0].push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    again = check_equal(shard)
    assert again.job is not None
    assert again.job.clock.steps() == [1, 3]


@pytest.mark.parametrize("sketch", [False, True])
def test_counts_of_ids_without_a_row(tmp_path: Path, sketch: bool) -> None:
    spec = count_filter(3, sketch=sketch)
    shard = logged_shard(tmp_path / "log", spec)
    client = FrameClient(shard)
    for number in range(6):
        ids = RNG.permutation(40)[:25]
        counts = RNG.integers(1, 3, 25).astype(np.uint32)
        block = push(spec, ids, grads(25, spec.dim), statistics={"counts": counts})
        assert client.push(block).error is None
        if number == 3:
            write_checkpoint(shard)
    check_equal(shard)


def test_days_and_removed_rows(tmp_path: Path) -> None:
    spec = ADAM
    shard = logged_shard(tmp_path / "log", spec, SGD)
    client = FrameClient(shard)
    for step in range(1, 5):
        client.push(push(spec, RNG.permutation(100)[:30], grads(30, 3), optimizer_step=step))
        shard.commit([], [DayEnd(spec.table_id)])
    before = shard.shrink([Criterion(UNSEEN_DAYS, 2), Criterion(MIN_NORM, 0.5)], tables=[spec.name])
    assert before[spec.name].removals[0].num_removed > 0
    client.push(push(spec, RNG.permutation(100)[:30], grads(30, 3), optimizer_step=6))
    check_equal(shard)


def test_a_push_that_found_no_memory_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    client = FrameClient(shard)
    client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))

    def refuse(self: TableStore, *arguments: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "push", refuse)
        assert code_of(client.push(push(SGD, ids_of(2), floats([1.0, 0.0])))) is not None
    again = check_equal(shard)
    assert again.ledger.applied(CLIENT) == 1
    assert client.push(push(SGD, ids_of(3), floats([1.0, 0.0]))).error is None
    check_equal(shard)


def test_specs_and_clients_that_were_replaced(tmp_path: Path) -> None:
    reads = TableSpec(name="sgd", dim=2, rule="read_only", initializer=constant(0.5))
    shard = logged_shard(tmp_path / "log", reads)
    shard.add_table(SGD, declared_by="worker 1")
    shard.join(0, 2, b"0" * 16, None, begins_job=True)
    shard.join(0, 2, b"1" * 16, None, begins_job=False)
    again = check_equal(shard)
    assert again.tables[SGD.table_id].declared_by == "worker 1"
    assert code_of(FrameClient(again, b"0" * 16).push(push(SGD, ids_of(1), floats([1.0, 0.0])))) is not None
    assert code_of(FrameClient(again, b"1" * 16).push(push(SGD, ids_of(1), floats([1.0, 0.0])))) is None


def test_a_declaration_that_found_no_room_is_logged_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise LogFull("no room")

    shard = logged_shard(tmp_path / "log")
    shard.add_table(SGD, declared_by="a snapshot", is_loaded=True)
    assert shard.log is not None
    with monkeypatch.context() as patch:
        patch.setattr(shard.log.writer, "append", refuse)
        with pytest.raises(LogFull):
            shard.add_tables([SGD], declared_by="worker 0")
    assert shard.tables[SGD.table_id].is_loaded
    shard.add_tables([SGD], declared_by="worker 0")
    assert not check_equal(shard).tables[SGD.table_id].is_loaded


def test_a_table_that_could_not_be_made_is_not_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PlanError("no memory")

    shard = logged_shard(tmp_path / "log", SGD)
    with monkeypatch.context() as patch:
        patch.setattr("fleet_sparse.pserver.engine.table_map.make_table", refuse)
        with pytest.raises(PlanError):
            shard.add_tables([ADAM], declared_by="worker 0")
    assert [each.name for each in check_equal(shard).states()] == ["sgd"]


@pytest.mark.parametrize("error", [PlanError("0.0 GiB left"), MemoryError("the system refused")])
def test_a_log_that_memory_is_too_short_for_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any) -> Any:
        raise error

    shard = logged_shard(tmp_path / "log", SGD)
    monkeypatch.setattr(table_map, "make_table", refuse)
    with pytest.raises(PlanError, match=rf"^log '.*': .* too little memory .*{error}.* free memory"):
        recovered(shard)


def add_two_tables(shard: Shard, monkeypatch: pytest.MonkeyPatch, *, fails: str) -> None:
    """Declares two tables, of which the second one finds no room in the log, or no memory."""
    assert shard.log is not None
    where, name, error = {
        "log": (shard.log.writer, "append", LogFull("no room")),
        "memory": (table_map, "make_table", PlanError("no memory")),
    }[fails]
    real, calls = getattr(where, name), itertools.count(1)

    def refuse_second(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise error
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, refuse_second)
        with pytest.raises(type(error)):
            shard.add_tables([SGD, ADAM], declared_by="worker 0")


@pytest.mark.parametrize("fails", ["log", "memory"])
def test_a_table_of_the_log_stays_if_the_next_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    shard = logged_shard(tmp_path / "log")
    add_two_tables(shard, monkeypatch, fails=fails)
    assert [each.name for each in check_equal(shard).states()] == ["sgd"]


def test_another_spec_of_a_table_of_the_log_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log")
    add_two_tables(shard, monkeypatch, fails="log")
    with pytest.raises(TableMismatch):
        shard.add_tables([dataclasses.replace(SGD, dim=3)], declared_by="worker 0")


def train(shard: Shard) -> None:
    client = FrameClient(shard)
    client.seq = shard.ledger.applied(CLIENT)
    for step in range(1, 4):
        ids = RNG.permutation(200)[:40]
        client.push(push(ADAM, ids, grads(40, 3), optimizer_step=step))


def test_a_checkpoint_replaces_what_is_before_it(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", ADAM, DENSE, segment_bytes=2048)
    FrameClient(shard).ask(Op.ASSIGN, assign(DENSE, floats(*range(8))))
    train(shard)
    shard.commit([], [DayEnd(ADAM.table_id)])
    train(shard)
    write_checkpoint(shard)
    assert len(LogReader(again_directory(shard)).paths) == 1
    again = check_equal(shard)
    train(again)
    write_checkpoint(again)
    train(again)
    third = check_equal(again)
    assert len(list(again_directory(third).glob("checkpoint-*"))) == 1


def test_a_checkpoint_has_jobs_and_workers_that_left(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    workers = sync_workers(shard, 2)
    for worker in workers:
        worker.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    workers[0].ask(Op.LEAVE)
    workers[1].push(push(SGD, ids_of(2), floats([1.0, 0.0])))
    write_checkpoint(shard)
    again = check_equal(shard)
    assert again.tables[SGD.table_id].declared_by == "worker 0"


@pytest.mark.guarantee("W3")
def test_a_step_that_is_staged_at_a_checkpoint_is_sent_again(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    workers = sync_workers(shard, 2)
    for worker in workers:
        worker.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    second = push(SGD, ids_of(1), floats([2.0, 0.0]))
    FrameClient(shard, workers[1].client_id).ask(Op.PUSH, second, push_seq=2, step=2)
    write_checkpoint(shard)
    again = recovered(shard)
    for worker in workers:
        other = Worker(again, worker.index, step=1)
        other.seq = 1
        assert code_of(other.push(second)) is None
    assert again.complete_step == 2
    assert FrameClient(again).rows(SGD, 1) == [[-2.5, 0.5]]


def test_no_checkpoint_begins_inside_a_prepared_step(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD, DENSE)
    workers = sync_workers(shard, 2)
    for worker in workers:
        worker.ask(Op.PREPARE, push(SGD, ids_of(1), floats([1.0, 0.0])))
    assert shard.begin_checkpoint() is None
    for worker in workers:
        worker.ask(Op.COMMIT, factors(SGD, 1.0))
    assert shard.begin_checkpoint() is not None


def test_a_log_whose_checkpoint_is_gone_is_refused(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", ADAM)
    train(shard)
    write_checkpoint(shard)
    train(shard)
    close(shard)
    (tmp_path / "log" / CHECKPOINT).unlink()
    with pytest.raises(LogCorrupt) as caught:
        logged_shard(tmp_path / "log")
    assert caught.value.path == str(tmp_path / "log" / CHECKPOINT)


def test_a_crash_between_cut_and_checkpoint_uses_the_old_one(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", ADAM)
    train(shard)
    write_checkpoint(shard)
    train(shard)
    assert shard.begin_checkpoint() is not None
    train(shard)
    check_equal(shard)


@pytest.mark.guarantee("W14")
@pytest.mark.parametrize("tables", [(ADAM,), (SGD,), (ADAM, SGD)], ids=["one", "new", "both"])
def test_a_load_is_repeated_from_the_log(tmp_path: Path, tables: tuple[TableSpec, ...]) -> None:
    shard = logged_shard(tmp_path / "log", ADAM)
    train(shard)
    staging = make_shard(*tables)
    for spec in tables:
        FrameClient(staging).push(push(spec, ids_of(1), floats([1.0, 2.0])))
    load_into(shard, staging)
    train(shard)
    check_equal(shard)


@pytest.mark.guarantee("W14")
def test_what_was_pushed_behind_a_load_is_kept(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD, segment_bytes=1024)
    client = FrameClient(shard)
    for _ in range(3):
        client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    load_into(shard, make_shard(SGD))
    for _ in range(20):
        client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    again = check_equal(shard)
    assert again.ledger.applied(client.client_id) == 23
    assert FrameClient(again).rows(SGD, 1) == [[-19.5, 0.5]]


def test_the_rows_of_a_load_stay_until_a_checkpoint_has_them(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", ADAM)
    load_into(shard, make_shard(ADAM))
    again = recovered(shard)
    assert again.log is not None
    assert list(again.log.writer.directory.glob("load-*"))
    write_checkpoint(again)
    assert not list(again.log.writer.directory.glob("load-*"))
    for each in (shard, again):
        close(each)


def test_rows_that_no_load_names_are_removed_at_a_start(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", ADAM)
    assert shard.log is not None
    StagedRows(shard.log, make_shard(ADAM), threading.Event())
    assert list((tmp_path / "log").glob("staged-*"))
    close(shard)
    close(logged_shard(tmp_path / "log"))
    assert not list((tmp_path / "log").glob("staged-*"))


def test_a_load_without_room_in_the_log_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log", ADAM)
    train(shard)
    before = state_of(shard)
    assert shard.log is not None
    with monkeypatch.context() as patch:
        patch.setattr(shard.log.writer, "append", refuse_to_append)
        with pytest.raises(LogFull):
            load_into(shard, make_shard(ADAM))
    assert state_of(shard) == before
    train(shard)
    check_equal(shard)


def refuse_to_append(*_: Any, **__: Any) -> int:
    raise LogFull("no room")


@pytest.mark.guarantee("W6")
def test_a_restart_without_any_room_waits_for_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    FrameClient(shard).push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    assert shard.log is not None
    close(shard)
    allocate, num_waits = os.posix_fallocate, 0

    def allocate_later(file: int, offset: int, length: int) -> None:
        if num_waits < 3:
            raise OSError(errno.ENOSPC, "no space")
        allocate(file, offset, length)

    def wait(pause_s: float) -> None:
        nonlocal num_waits
        num_waits += 1

    monkeypatch.setattr(os, "posix_fallocate", allocate_later)
    monkeypatch.setattr("time.sleep", wait)
    again = logged_shard(tmp_path / "log")
    assert num_waits == 3
    assert FrameClient(again).rows(SGD, 1) == [[-0.5, 0.5]]
    close(again)


def test_a_log_of_another_job_is_set_aside(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", ADAM)
    train(shard)
    close(shard)
    other = logged_shard(tmp_path / "log", job_id="another job")
    assert list(other.tables) == []
    assert len(list(tmp_path.glob("log.*"))) == 1


def test_logs_are_set_aside_again_and_again(tmp_path: Path) -> None:
    for job in "ababab":
        shard = logged_shard(tmp_path / "log", SGD, job_id=job)
        assert shard.ledger.applied(CLIENT) == 0
        FrameClient(shard).push(push(SGD, ids_of(1), floats([1.0, 0.0])))
        close(shard)
    logs = [tmp_path / "log", *tmp_path.glob("log.*")]
    assert len(logs) == 6
    assert [recovered_pushes(each) for each in logs] == [1] * 6


def recovered_pushes(directory: Path) -> int:
    shard = make_shard()
    recover(shard, directory)
    return shard.ledger.applied(CLIENT)


@pytest.mark.parametrize("name", ["00000000000000000001.fsl", CHECKPOINT])
def test_a_damaged_log_of_another_job_is_set_aside(tmp_path: Path, name: str) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    FrameClient(shard).push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    assert shard.log is not None
    shard.log.writer.begin_segment()
    close(shard)
    (tmp_path / "log" / name).write_bytes(b"wrong")
    with pytest.raises(LogCorrupt):
        logged_shard(tmp_path / "log")
    other = logged_shard(tmp_path / "log", job_id="another job")
    assert (len(list(tmp_path.glob("log.*"))), list(other.tables)) == (1, [])
    close(other)


def test_a_log_of_an_unknown_job_is_refused(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    close(shard)
    next((tmp_path / "log").glob("0*.fsl")).write_bytes(b"wrong")
    with pytest.raises(LogCorrupt):
        logged_shard(tmp_path / "log", job_id="another job")


def test_a_log_of_other_pservers_is_refused(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", ADAM)
    train(shard)
    close(shard)
    other = make_shard()
    other.cluster_id += 1
    with pytest.raises(LogCorrupt) as caught:
        start_log(other, tmp_path / "log", Settings(durability="log", job_id="a job"))
    assert caught.value.path == str(next((tmp_path / "log").glob("0*.fsl")))
    assert "cluster_id" in str(caught.value)


def test_a_record_that_cannot_be_replayed_is_named(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", ADAM)
    assert shard.log is not None
    shard.log.writer.append(Kind.TABLE, body_bytes=2, parts=[b"{}" + bytes(6)])
    close(shard)
    (path,) = (tmp_path / "log").glob("0*.fsl")
    *_, (head, end) = record_ends(memoryview(path.read_bytes()))
    with pytest.raises(LogCorrupt) as caught:
        logged_shard(tmp_path / "log")
    assert (caught.value.path, caught.value.offset) == (str(path), end - head.end)


def test_a_job_id_and_a_path_are_needed() -> None:
    for values in ({"job_id": ""}, {"log": "s3://bucket/log"}, {"root": "s3://bucket"}):
        with pytest.raises(SettingError):
            log_directory(Settings(**{"durability": "log", "job_id": "a job", **values}), 0, 1)  # type: ignore[arg-type]


@pytest.mark.guarantee("A9")
def test_a_worker_that_took_a_place_keeps_its_steps(tmp_path: Path) -> None:
    shard, mode = logged_shard(tmp_path / "log", SGD), Mode(ASYNC, max_step_lag=1)
    workers = sync_workers(shard, 2, mode)
    for worker in workers:
        worker.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    again = Worker(shard, 1, client_id=b"in its place....")
    join(again, 2, mode)
    for _ in range(2):
        again.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    recovered_shard = check_equal(shard)
    assert [recovered_shard.pushed_step(worker) for worker in range(2)] == [1, 2]


@pytest.mark.guarantee("A9")
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_log_keeps_which_steps_may_be_made_late(tmp_path: Path, has_checkpoint: bool) -> None:
    shard, mode = logged_shard(tmp_path / "log", SGD), Mode(ASYNC, max_step_lag=4)
    workers = sync_workers(shard, 2, mode)
    for _ in range(3):
        workers[0].push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    for worker in workers:
        worker.ask(Op.LEAVE)
    again = Worker(shard, 1, client_id=b"in its place....")
    join(again, 2, mode)
    again.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    if has_checkpoint:
        write_checkpoint(shard)
    recovered_shard = check_equal(shard)
    assert recovered_shard.job is not None
    assert recovered_shard.job.clock.pushed_steps() == [3, 1]


def test_a_step_in_parts_is_in_a_log_as_a_whole(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    workers = sync_workers(shard, 2, Mode(ASYNC, max_step_lag=1))
    block = push(SGD, ids_of(1), floats([1.0, 0.0]))
    for worker, num_parts in zip(workers, (2, 1), strict=True):  # worker 0 pushes the first of its parts only
        worker.push(block, num_parts=num_parts)
    check_equal(shard)
    workers[0].push(block, part=1, num_parts=2)
    check_equal(shard)


def test_steps_resumed_behind_do_not_set_the_clock_back(tmp_path: Path) -> None:
    shard, mode = logged_shard(tmp_path / "log", SGD), Mode(ASYNC, max_step_lag=4)
    workers = sync_workers(shard, 2, mode)
    for _ in range(3):
        workers[0].push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    again = Worker(shard, 0, client_id=b"in its place....")
    join(again, 2, mode)
    shard.resume_worker(0, again.client_id, 1, 1)
    recovered_shard = check_equal(shard)
    assert recovered_shard.job is not None
    assert recovered_shard.job.clock.steps() == [3, 0]


@pytest.mark.guarantee("W10")
def test_assigned_dense_values_are_durable_before_their_ack(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", DENSE)
    assert FrameClient(shard).ask(Op.ASSIGN, assign(DENSE, floats(*range(8)))).error is None
    recovered = after_power_cut(shard)
    assert [state.assigned for state in recovered.states()] == [shard.states()[0].assigned]
    assert shard.states()[0].assigned
    close(recovered)
    close(shard)


@pytest.mark.guarantee("W5")
def test_replies_carry_the_newest_durable_push(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    client, plain = FrameClient(shard), StraightClient(shard, b"another client..")
    floors = []
    for each in (client, plain):
        for _ in range(2):
            floors.append(each.push(push(SGD, ids_of(1), floats([1.0, 0.0]))).header.push_floor)
        assert shard.log is not None
        shard.log.writer.sync()
        floors.append(each.push(push(SGD, ids_of(1), floats([1.0, 0.0]))).header.push_floor)
    assert floors == [0, 0, 2, 0, 0, 2]


def after_power_cut(shard: Shard) -> Shard:
    """Returns the shard that continues without the records of this one that are not durable."""
    assert shard.log is not None
    writer = shard.log.writer
    directory = writer.directory.with_name("after power cut")
    shutil.copytree(writer.directory, directory)
    segment = last_segment(directory)
    ends = [end for head, end in record_ends(memoryview(segment.read_bytes())) if head.lsn <= writer.durable_lsn]
    os.truncate(segment, ends[-1])
    return logged_shard(directory)


@pytest.mark.guarantee("F4")
def test_pushes_called_durable_survive_a_power_cut(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    client = FrameClient(shard)
    for is_synced in (False, True, False, False):
        floor = client.push(push(SGD, ids_of(1), floats([1.0, 0.0]))).header.push_floor
        if is_synced:
            assert shard.log is not None
            shard.log.writer.sync()
    assert floor == 2
    assert after_power_cut(shard).ledger.applied(CLIENT) == 2


class FullDisk:
    """A log whose disk is full for a while."""

    def __init__(self, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
        assert shard.log is not None
        self.writer = shard.log.writer
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.now = 100.0
        self.writer.full_since = 100.0


@pytest.mark.guarantee("W6")
def test_pushes_wait_for_room_and_pulls_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = logged_shard(tmp_path / "log", SGD, failover_s=300.0)
    client = FrameClient(shard)
    client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    disk = FullDisk(shard, monkeypatch)
    disk.now = 399.0
    waiting = client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    assert (waiting.header.op, waiting.header.push_seq) == (Op.WAIT, 1)
    assert client.rows(SGD, 1) == [[-0.5, 0.5]]
    disk.now = 401.0
    assert code_of(client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))).name == "LOG_FULL"  # type: ignore[union-attr]
    disk.writer.full_since = None
    assert client.push(push(SGD, ids_of(1), floats([1.0, 0.0]))).header.op is Op.ACK
    assert client.rows(SGD, 1) == [[-1.5, 0.5]]


# Against a dict

IDS = st.integers(-20, 20)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(IDS, min_size=1, max_size=8, unique=True)),
        st.tuples(st.just("plain"), st.lists(IDS, min_size=1, max_size=8, unique=True)),
        st.tuples(st.sampled_from(["crash", "torn", "checkpoint", "again", "sync"]), st.just([])),
    ),
    max_size=25,
)


@pytest.mark.guarantee("W2")
@settings(max_examples=40)
@given(calls=CALLS)
def test_shard_log_and_crashes_equal_a_dict(tmp_path_factory: pytest.TempPathFactory, calls: Any) -> None:
    shard = logged_shard(tmp_path_factory.mktemp("log") / "log", SGD, segment_bytes=1024)
    model: dict[int, float] = {}
    seq = 0
    for name, ids in calls:
        if name in ("push", "plain"):
            client = StraightClient(shard) if name == "plain" else FrameClient(shard)
            client.seq = seq
            assert client.push(push(SGD, ids_of(*ids), floats(*([1.0, 0.0] for _ in ids)))).error is None
            seq = client.seq
            model.update({id_: model.get(id_, 0.5) - 1.0 for id_ in ids})
        elif name == "again" and seq:  # sent again: applied once
            client = FrameClient(shard)
            client.seq = seq - 1
            client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
        elif name == "checkpoint":
            write_checkpoint(shard)
        elif name == "sync":
            assert shard.log is not None
            shard.log.writer.sync()
        elif name in ("crash", "torn"):
            before, shard = shard, crashed(shard, is_torn=name == "torn")
            close(before)
        rows = FrameClient(shard).rows(SGD, *model) if model else []
        assert [row[0] for row in rows] == [*model.values()]
        assert shard.ledger.applied(CLIENT) == seq
    close(shard)


def crashed(shard: Shard, *, is_torn: bool) -> Shard:
    """Returns the shard after a crash, perhaps one while a record was written."""
    assert shard.log is not None
    source = shard.log.writer.directory
    directory = source.with_name(f"{source.name}x")
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("next-*.fsl"))
    if is_torn:
        reader = LogReader(directory)
        list(reader.records())
        with reader.paths[-1].open("rb+") as file:
            file.seek(reader.end)
            file.write(b"FSLR and half of a record")
    return logged_shard(directory, segment_bytes=1024)


@pytest.mark.parametrize("is_torn", [False, True])
def test_stats_count_what_was_cut_off_the_log(tmp_path: Path, is_torn: bool) -> None:
    held = HeldControl(tmp_path, shard=crashed(logged_shard(tmp_path / "log", SGD), is_torn=is_torn))
    assert (held.call(messages.StatsRequest()).num_torn_bytes > 0) == is_torn


@pytest.mark.parametrize("lag", [None, 3])
def test_a_mark_that_a_worker_skipped_to_survives_the_next_crash(tmp_path: Path, lag: int | None) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    (worker, _) = sync_workers(shard, 2, Mode(ASYNC, max_step_lag=lag))
    worker.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    shard.resume_worker(0, worker.client_id, 5, 0 if lag is None else 5)
    again = check_equal(shard)
    assert again.ledger.applied(worker.client_id) == 5
    assert again.job is None or again.job.clock.steps() == [5, 0]


def test_a_mark_that_is_applied_is_not_appended_again(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    client = FrameClient(shard)
    client.push(push(SGD, ids_of(1), floats([1.0, 0.0])))
    assert shard.log is not None
    newest = shard.log.writer.newest_lsn
    shard.resume_worker(0, CLIENT, 1, 0)
    assert shard.log.writer.newest_lsn == newest


@pytest.mark.guarantee("W3")
@pytest.mark.parametrize("spec", [SGD, ADAM], ids=["without states", "with states"])
def test_changes_of_a_sync_step_are_in_its_record(tmp_path: Path, spec: TableSpec) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM)
    workers = sync_workers(shard, 2, Mode(SYNC, row_bound=RowBound(lag=20)))
    for step in range(1, 6):
        for worker in workers:
            ids, others = np.arange(step, step + 4), np.arange(20, 23)
            blocks = push(spec, ids, grads(4, spec.dim)), change(spec, others, step), change(spec, ids, step)
            worker.push(*blocks, push(SGD if spec is ADAM else ADAM, ids_of(), grads(0, 5 - spec.dim)))
    assert shard.complete_step == 5
    again = check_equal(shard)
    kinds = [record.head.kind for record in LogReader(again_directory(again)).records()]
    assert kinds.count(Kind.APPLY) == 5
    assert again.states()[[SGD, ADAM].index(spec)].num_rows == 11


def test_a_step_may_have_more_blocks_than_a_frame(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    workers = sync_workers(shard, 2, Mode(SYNC, row_bound=RowBound(lag=20)))
    for worker in workers:
        worker.push(*(change(SGD, ids_of(number), 1) for number in range(MAX_BLOCKS // 2 + 1)))
    assert shard.complete_step == 1
    check_equal(shard)


def test_rows_assigned_by_the_only_worker_are_in_the_log(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM)
    (worker,) = sync_workers(shard, 1, Mode(ASYNC, row_bound=RowBound(lag=20)))
    for spec in (SGD, ADAM):
        for ids in (np.arange(9), np.arange(4, 12), np.arange(0)):
            block = push(spec, ids, grads(len(ids), spec.dim), optimizer_step=7)
            block.action = Action.ASSIGN
            if spec is ADAM:
                block.copies = {"states": RNG.random((len(ids), 2, 3)).astype(np.float32)}
            assert worker.push(block, step=0).error is None
    check_equal(shard)


def test_a_job_with_row_caches_continues_without_clocks(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD)
    workers = sync_workers(shard, 2, Mode(ASYNC, row_bound=RowBound(lag=20)))
    none = np.full(1, NO_VERSION, np.uint32)
    for worker in workers:
        worker.push(push(SGD, ids_of(7), grads(1, 2)), step=0)
        worker.pull(pull(SGD, ids_of(7), copies={"versions": none}), step=0)
    for is_checkpoint in (False, True):
        if is_checkpoint:
            write_checkpoint(shard)
        again = check_equal(shard)
        reply = Worker(again, 0).pull(pull(SGD, ids_of(7), copies={"versions": none}), step=0)
        assert reply.blocks[1].copies["versions"].tolist() == [0]


def change(spec: TableSpec, ids: Any, step: int) -> Block:
    block = push(spec, ids, grads(len(ids), spec.dim), learning_rate=0.5, optimizer_step=step)
    block.action, block.statistics = Action.CHANGE, {"counts": np.full(len(ids), 3, np.uint32)}
    if spec.update_rule.num_states:
        states = RNG.random((len(ids), 2, spec.dim)).astype(np.float32)
        block.copies = {"versions": np.arange(1, len(ids) + 1, dtype=np.uint32), "states": states}
    return block
