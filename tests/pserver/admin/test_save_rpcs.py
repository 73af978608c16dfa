from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.errors import ProtocolError, SnapshotError
from fleet_sparse.pserver.admin import save_rpcs
from fleet_sparse.pserver.admin.service import Supervised
from fleet_sparse.pserver.admin.snapshot_loader import Loaded, load
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import WorkerPosition
from fleet_sparse.wire import control_pb2 as messages
from support.controls import HeldControl, attendance, num_removed, registration, shrink_request
from support.coordinators import (
    Coordinator,
    SlowWrites,
    connect_and_leave,
    in_loop,
    load_from,
    position,
    run,
    train,
    turns,
    until,
)
from support.saves import store_of
from support.shards import ADAM, SGD, make_shard
from support.steps import SYNC_MODE

ASYNC_MODE = Mode(ASYNC)


# One worker


def test_save_writes_a_snapshot_that_can_be_loaded(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    train(held, 7, 8)
    assert run(Coordinator(held, dirname="a/model").save) == "000001-full"
    rows, told = load_from(tmp_path / "a" / "model")
    assert set(rows) == {7, 8}
    assert (told.manifest.number, told.manifest.kind, told.manifest.save_id) == (1, "full", "x")
    assert told.manifest.tables == ("sgd",)


@pytest.mark.guarantee("V3")
@in_loop
async def test_position_of_the_coordinator_is_in_the_manifest(held: HeldControl, tmp_path: Path) -> None:
    await held.start(registration(SGD))
    coordinator = Coordinator(held)
    await coordinator.begin(step=12, position='{"epoch":1,"batch":2}')
    await coordinator.end(await coordinator.finish(await coordinator.write()))
    _, told = load_from(tmp_path / "model")
    assert told.manifest.workers == (WorkerPosition(0, 12, {"epoch": 1, "batch": 2}),)


@in_loop
async def test_position_of_a_step_past_all_bounds_begins_no_save(held: HeldControl) -> None:
    await held.start(registration(SGD))
    with pytest.raises(ProtocolError, match=str(2**63)):
        await Coordinator(held).begin(step=2**63)
    with pytest.raises(ProtocolError, match=str(2**63)):
        await held.start(position(1, 2**63))


@pytest.mark.parametrize("text", ["a", '{"a": 1', "NaN", "1e999", "[" * 100_000, "9" * 5000])
@in_loop
async def test_position_that_is_not_json_begins_no_save(held: HeldControl, text: str) -> None:
    await held.start(registration(SGD))
    with pytest.raises(ProtocolError):
        await Coordinator(held).begin(position=text)
    with pytest.raises(ProtocolError):
        await held.start(position(1, 6, loader=text))


def test_delta_extends_the_committed_save(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held, "one").save)
    train(held, 8)
    assert run(lambda: Coordinator(held, "two").save("delta")) == "000002-delta"
    assert set(load_from(tmp_path / "model")[0]) == {7, 8}
    assert load_from(tmp_path / "model")[1].manifest.num_rows == 1


def test_delta_without_a_base_is_planned_as_full(held: HeldControl) -> None:
    held.call(registration(SGD))
    assert run(lambda: Coordinator(held).save("delta")) == "000001-full"


def test_shard_without_the_base_needs_a_full_save(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    run(Coordinator(held, "one").save)
    other = HeldControl(tmp_path)
    other.call(registration(SGD))
    assert run(lambda: Coordinator(other, "two").begin("delta")).needs_full
    assert run(lambda: Coordinator(other, "three").save("full")) == "000002-full"


def test_job_continues_from_snapshots_with_all_rows(tmp_path: Path) -> None:
    names: list[str] = []
    held = HeldControl(tmp_path, Supervised(False, has_recovered=False, on_job=lambda: None, on_snapshot=names.append))
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held, "a").save)
    run(Coordinator(held, "b", "base", left_out=[RARE]).save)
    train(held, 8)
    assert run(lambda: Coordinator(held, "c", "base").save("delta")) == "000002-delta"
    assert names == ["model/000001-full"]
    run(Coordinator(held, "d", "base").save)
    train(held, 9)
    run(lambda: Coordinator(held, "e", "base").save("delta"))
    assert names[1:] == ["base/000003-full", "base/000004-delta"]


RARE = messages.LeftOut(table="sgd", criteria=[messages.ShrinkCriterion(name="min_norm", value=1.0)])


class Lifeline:
    """What pservers tell their supervisor."""

    def __init__(self) -> None:
        self.committed: list[str] = []
        self.written: list[tuple[str, str]] = []

    def restarted(self, root: Path, loaded: Loaded | None = None, shard: Shard | None = None) -> HeldControl:
        """Returns a pserver that was started again."""
        started = Supervised(
            True,
            has_recovered=loaded is not None,
            on_job=lambda: None,
            on_snapshot=self.committed.append,
            on_written=lambda snapshot, save_id: self.written.append((snapshot, save_id)),
        )
        return HeldControl(root, started, shard=shard, loaded=loaded)


async def saved_without_an_end(held: HeldControl, coordinator: Coordinator, kind: str = "full") -> Any:
    """Makes a save up to its commit; returns the reply to that."""
    await held.start(registration(SGD))
    train(held, 7)
    await coordinator.begin(kind)
    return await coordinator.finish(await coordinator.write())


@pytest.mark.guarantee("A8")
@in_loop
async def test_next_process_continues_from_an_unknown_save(held: HeldControl, tmp_path: Path) -> None:
    coordinator, lifeline = Coordinator(held), Lifeline()
    finished = await saved_without_an_end(held, coordinator)
    coordinator.move_to(lifeline.restarted(tmp_path))
    with pytest.raises(SnapshotError):
        await coordinator.end(finished)
    assert lifeline.committed == ["model/000001-full"]


@in_loop
async def test_next_process_takes_no_unknown_save_that_lacks_rows(held: HeldControl, tmp_path: Path) -> None:
    coordinator, lifeline = Coordinator(held, left_out=[RARE]), Lifeline()
    finished = await saved_without_an_end(held, coordinator)
    coordinator.move_to(lifeline.restarted(tmp_path))
    with pytest.raises(SnapshotError):
        await coordinator.end(finished)
    assert lifeline.committed == []


@pytest.mark.parametrize("has_base", [True, False])
@in_loop
async def test_next_process_continues_from_a_delta_of_a_known_base(
    held: HeldControl, tmp_path: Path, has_base: bool
) -> None:
    await held.start(registration(SGD))
    await Coordinator(held, "one").save()
    shard, lifeline = make_shard(), Lifeline()
    loaded = load(shard, directory_at(tmp_path / "model")) if has_base else None
    coordinator = Coordinator(held, "two")
    finished = await saved_without_an_end(held, coordinator, "delta")
    coordinator.move_to(lifeline.restarted(tmp_path, loaded, shard))
    with pytest.raises(SnapshotError):
        await coordinator.end(finished)
    assert lifeline.committed == (["model/000002-delta"] if has_base else [])


@in_loop
async def test_process_that_began_with_a_snapshot_knows_its_save(held: HeldControl, tmp_path: Path) -> None:
    coordinator, shard = Coordinator(held), make_shard()
    finished = await saved_without_an_end(held, coordinator)
    loaded = load(shard, directory_at(tmp_path / "model"))
    coordinator.move_to(Lifeline().restarted(tmp_path, loaded, shard))
    await coordinator.end(finished)


@pytest.mark.parametrize("left_out", [[], [RARE]], ids=["all rows", "not all rows"])
@in_loop
async def test_save_with_all_rows_is_named_before_its_commit(tmp_path: Path, left_out: list[messages.LeftOut]) -> None:
    lifeline = Lifeline()
    held = lifeline.restarted(tmp_path)
    await held.start(registration(SGD))
    train(held, 7)
    coordinator = Coordinator(held, "x", left_out=left_out)
    await coordinator.begin()
    assert lifeline.written == []
    await coordinator.write()
    assert (lifeline.written, lifeline.committed) == ([] if left_out else [("model/000001-full", "x")], [])


@in_loop
async def test_repeated_calls_join_the_earlier_ones(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    await held.start(registration(SGD))
    num_written = 0
    write = Save.write

    def count(self: Save, *arguments: Any) -> Any:
        nonlocal num_written
        num_written += 1
        return write(self, *arguments)

    monkeypatch.setattr(Save, "write", count)
    coordinator = Coordinator(held)
    await coordinator.begin()
    assert not (await coordinator.begin()).needs_full
    first = asyncio.ensure_future(coordinator.write())
    await turns()
    first.cancel()
    file = await coordinator.write()
    finished = await coordinator.finish(file)
    assert await coordinator.finish(file) == finished
    await coordinator.end(finished)
    await coordinator.end(finished)
    assert num_written == 1


# A save that ends early


@pytest.mark.guarantee("V6")
@in_loop
async def test_save_that_is_not_committed_leaves_nothing(held: HeldControl, tmp_path: Path) -> None:
    await held.start(registration(SGD))
    train(held, 7)
    coordinator = Coordinator(held)
    await coordinator.begin()
    await coordinator.write()
    await coordinator.end()
    assert not list((tmp_path / "model").iterdir())
    assert await Coordinator(held, "y").save() == "000001-full"


def test_call_for_an_ended_save_is_refused(held: HeldControl) -> None:
    held.call(registration(SGD))
    coordinator = Coordinator(held)
    run(coordinator.save)
    with pytest.raises(SnapshotError, match="save x"):
        run(coordinator.write)
    with pytest.raises(SnapshotError, match="save x"):
        run(coordinator.begin)


def test_save_that_is_ended_before_it_begins_is_refused(held: HeldControl) -> None:
    held.call(registration(SGD))
    coordinator = Coordinator(held)
    run(coordinator.end)
    with pytest.raises(SnapshotError, match="save x"):
        run(coordinator.begin)


def test_call_for_an_unknown_save_is_refused(held: HeldControl) -> None:
    with pytest.raises(SnapshotError, match="save x"):
        run(Coordinator(held).write)


@in_loop
async def test_new_save_ends_the_one_before(held: HeldControl, tmp_path: Path) -> None:
    await held.start(registration(SGD))
    train(held, 7)
    first = Coordinator(held, "one")
    await first.begin()
    assert await Coordinator(held, "two").save() == "000001-full"
    with pytest.raises(SnapshotError, match="save one"):
        await first.write()
    assert load_from(tmp_path / "model")[1].manifest.save_id == "two"


@in_loop
async def test_save_ends_with_its_coordinator(held: HeldControl) -> None:
    await held.start(registration(SGD))
    coordinator = Coordinator(held)
    await coordinator.begin()
    held.now += 31
    watching = asyncio.ensure_future(held.service.watch_workers())
    with pytest.raises(SnapshotError, match="save x"):
        while True:
            await coordinator.begin()
            await asyncio.sleep(0)
    watching.cancel()


async def watch(held: HeldControl, after_s: float = 0.0) -> None:
    """Has the pserver look at its saves once, later."""
    held.now += after_s
    watching = asyncio.ensure_future(held.service.watch_workers())
    await turns()
    watching.cancel()


async def begun_by_a_worker_that_stays(held: HeldControl) -> tuple[Coordinator, asyncio.Future[Any]]:
    """Begins a save; returns its coordinator, and the call that lasts as long as its connection."""
    await held.start(registration(SGD))
    attending = asyncio.ensure_future(held.start(attendance(0)))
    await turns()
    coordinator = Coordinator(held)
    await coordinator.begin()
    return coordinator, attending


ABANDONED_S = 2 * (1800.0 + 300.0)
"""As of the settings by default."""


@pytest.mark.parametrize("is_written", [False, True], ids=["cut", "written"])
@in_loop
async def test_save_whose_end_was_lost_is_given_up(held: HeldControl, is_written: bool) -> None:
    coordinator, _attending = await begun_by_a_worker_that_stays(held)
    if is_written:
        await coordinator.write()
    await watch(held)
    await watch(held, ABANDONED_S + 1)
    assert num_removed(await held.start(shrink_request(1))) == 0


@in_loop
async def test_late_end_of_a_save_that_was_given_up_is_refused(held: HeldControl) -> None:
    coordinator, _attending = await begun_by_a_worker_that_stays(held)
    finished = await coordinator.finish(await coordinator.write())
    await watch(held)
    await watch(held, ABANDONED_S + 1)
    with pytest.raises(SnapshotError, match="does not know it"):
        await coordinator.end(finished)


@in_loop
async def test_save_that_waits_for_other_shards_is_not_given_up(held: HeldControl) -> None:
    coordinator, _attending = await begun_by_a_worker_that_stays(held)
    await watch(held)
    await watch(held, ABANDONED_S - 1)
    written = await coordinator.write()
    await watch(held, ABANDONED_S - 1)
    await watch(held, ABANDONED_S - 1)
    await coordinator.end(await coordinator.finish(written))


@in_loop
async def test_save_that_writes_for_long_is_not_given_up(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowWrites(monkeypatch)
    coordinator, _attending = await begun_by_a_worker_that_stays(held)
    writing = asyncio.ensure_future(coordinator.write())
    await until(slow.begun.is_set)
    await watch(held)
    await watch(held, ABANDONED_S + 1)
    slow.go_on.set()
    await coordinator.end(await coordinator.finish(await writing))


@in_loop
async def test_save_ends_though_the_call_that_ends_it_is_cancelled(
    held: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    await held.start(registration(SGD))
    slow = SlowWrites(monkeypatch)
    coordinator = Coordinator(held, "one")
    await coordinator.begin()
    writing = asyncio.ensure_future(coordinator.write())
    await until(slow.begun.is_set)
    ending = asyncio.ensure_future(coordinator.end())
    await turns()
    ending.cancel()
    slow.go_on.set()
    await asyncio.gather(writing, ending, return_exceptions=True)
    assert await Coordinator(held, "two").save() == "000001-full"
    assert num_removed(await held.start(shrink_request(1))) == 0


@in_loop
async def test_repeated_begin_waits_for_the_last_save_and_begins_once(
    held: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    await held.start(registration(SGD))
    slow = SlowWrites(monkeypatch)
    first, second = Coordinator(held, "one"), Coordinator(held, "two")
    await first.begin()
    writing = asyncio.ensure_future(first.write())
    await until(slow.begun.is_set)
    await second.plan_save()
    begun = [asyncio.ensure_future(second.begin_planned()) for _ in range(2)]
    await turns()
    assert not any(one.done() for one in begun)
    slow.go_on.set()
    await asyncio.gather(*begun)
    with pytest.raises(SnapshotError, match="save one"):
        await writing
    finished = await second.finish(await second.write())
    await second.end(finished)
    assert Path(finished.snapshot).name == "000001-full"
    assert num_removed(await held.start(shrink_request(1))) == 0


@in_loop
async def test_save_ends_if_its_coordinator_starts_again(held: HeldControl) -> None:
    await held.start(registration(SGD))
    await Coordinator(held, "one").save()
    coordinator = Coordinator(held, "two")
    await coordinator.begin()
    await connect_and_leave(held, 0)
    await held.start(registration(SGD, client_id=b"another, as new!"))
    with pytest.raises(SnapshotError, match="save two"):
        await coordinator.write()
    await held.start(messages.StageLoadRequest(dirname="model", load_id="l"))
    await held.start(messages.FinishLoadRequest(load_id="l", keep=True))


@in_loop
async def test_repeated_end_ends_one_day(held: HeldControl) -> None:
    await held.start(registration(SGD))
    coordinator = Coordinator(held)
    await coordinator.begin(ends_day=True)
    finished = await coordinator.finish(await coordinator.write())
    await asyncio.gather(*(coordinator.end(finished) for _ in range(2)))
    await coordinator.end(finished)
    assert store_of(held.shard, SGD).num_days == 1


# Several workers


async def job_of(held: HeldControl, num_workers: int, mode: Mode) -> None:
    for worker in range(num_workers):
        await held.start(registration(SGD, worker=worker, num_workers=num_workers, mode=mode))


@pytest.mark.guarantee("V2")
@in_loop
async def test_async_shard_is_cut_once_all_workers_reported(held: HeldControl, tmp_path: Path) -> None:
    await job_of(held, 3, ASYNC_MODE)
    train(held, 7)
    coordinator = Coordinator(held)
    await coordinator.plan_save()
    begun = asyncio.ensure_future(coordinator.begin_planned(step=5))
    first = asyncio.ensure_future(held.start(position(1, 6)))
    await turns()
    assert not begun.done()
    assert not first.done()
    train(held, 8, seq_of=b"2" * 16)
    await held.start(position(2, 7))
    await first
    await begun
    train(held, 9, seq_of=b"2" * 16)
    await coordinator.end(await coordinator.finish(await coordinator.write()))
    rows, told = load_from(tmp_path / "model")
    assert set(rows) == {7, 8}
    assert told.manifest.workers == (WorkerPosition(0, 5, None), WorkerPosition(1, 6, None), WorkerPosition(2, 7, None))


@pytest.mark.guarantee("V6")
def test_missing_position_ends_the_save_and_names_the_worker(held: HeldControl) -> None:
    run(lambda: job_of(held, 2, ASYNC_MODE))
    coordinator = Coordinator(held)
    with pytest.raises(SnapshotError, match="worker 1 "):
        run(coordinator.begin)
    with pytest.raises(SnapshotError, match="save x"):
        run(coordinator.write)
    train(held, 7)


def test_position_for_an_ended_save_is_answered_at_once(held: HeldControl) -> None:
    run(lambda: job_of(held, 2, ASYNC_MODE))
    run(Coordinator(held).end)
    run(lambda: held.start(position(1, 6)), timeout_s=0.1)


def test_position_for_a_save_that_never_begins_is_answered(held: HeldControl) -> None:
    run(lambda: job_of(held, 2, ASYNC_MODE))
    run(lambda: held.start(position(1, 6)))


@in_loop
async def test_save_that_ends_while_it_begins_is_refused(held: HeldControl) -> None:
    await job_of(held, 2, ASYNC_MODE)
    begun = asyncio.ensure_future(Coordinator(held).begin())
    assert (await held.start(messages.AwaitSaveRequest(worker_index=1))).save_id == "x"
    await Coordinator(held).end()
    with pytest.raises(SnapshotError, match="save x"):
        await begun


@in_loop
async def test_worker_is_not_told_of_a_save_that_is_ending(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_rpcs, "AWAIT_S", 0.05)
    await held.start(registration(SGD))
    slow = SlowWrites(monkeypatch)
    coordinator = Coordinator(held)
    await coordinator.begin()
    writing = asyncio.ensure_future(coordinator.write())
    await until(slow.begun.is_set)
    ending = asyncio.ensure_future(coordinator.end())
    await turns()
    assert (await held.start(messages.AwaitSaveRequest(worker_index=1))).save_id == ""
    slow.go_on.set()
    await asyncio.gather(writing, ending, return_exceptions=True)


@in_loop
async def test_position_that_waits_too_long_for_the_cut_is_an_error(held: HeldControl) -> None:
    await job_of(held, 2, ASYNC_MODE)
    coordinator = Coordinator(held)
    await coordinator.plan_save()
    begun = asyncio.ensure_future(coordinator.begin_planned())
    await turns()
    reported = asyncio.ensure_future(held.start(position(1, 6)))
    held.holds_back = True
    with pytest.raises(SnapshotError, match=r"save x: shard 0 .* worker 1 "):
        await reported
    held.let_go()
    await asyncio.gather(begun, return_exceptions=True)


@in_loop
async def test_repeated_position_outlives_the_first_call(held: HeldControl) -> None:
    await job_of(held, 3, ASYNC_MODE)
    coordinator = Coordinator(held)
    await coordinator.plan_save()
    begun = asyncio.ensure_future(coordinator.begin_planned())
    first = asyncio.ensure_future(held.start(position(1, 6)))
    await turns()
    second = asyncio.ensure_future(held.start(position(1, 6)))
    await turns()
    first.cancel()
    await asyncio.gather(first, second, held.start(position(2, 7)), return_exceptions=True)
    assert not (await begun).needs_full


@in_loop
async def test_position_withdrawn_while_the_shard_is_busy_is_missing(held: HeldControl) -> None:
    await job_of(held, 2, ASYNC_MODE)
    coordinator = Coordinator(held)
    await coordinator.plan_save()
    held.holds_back = True
    begun = asyncio.ensure_future(coordinator.begin_planned())
    first = asyncio.ensure_future(held.start(position(1, 6)))
    await turns()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    held.let_go()
    with pytest.raises(SnapshotError, match="worker 1 "):
        await begun


@in_loop
async def test_position_reported_before_the_save_begins_counts(held: HeldControl) -> None:
    await job_of(held, 2, ASYNC_MODE)
    reported = asyncio.ensure_future(held.start(position(1, 6)))
    await turns()
    needs_full = (await Coordinator(held).begin()).needs_full
    await reported
    assert not needs_full


@in_loop
async def test_sync_shard_is_cut_at_once_with_positions_of_that_step(held: HeldControl, tmp_path: Path) -> None:
    await job_of(held, 3, SYNC_MODE)
    coordinator = Coordinator(held)
    await coordinator.begin(step=5)
    history = [messages.WorkerPosition(worker_index=1, step=step, position=str(10 * step)) for step in (4, 5, 6)]
    await held.start(messages.ReportPositionRequest(save_id="x", positions=history))
    await held.start(position(2, 9))
    await coordinator.end(await coordinator.finish(await coordinator.write()))
    workers = load_from(tmp_path / "model")[1].manifest.workers
    assert workers == (WorkerPosition(0, 5, None), WorkerPosition(1, 5, 50), WorkerPosition(2, 5, None))


async def save_at_step_7(held: HeldControl, num_untrained: tuple[int, int]) -> None:
    """Saves in a sync job of two workers, in which so many steps of each trained nothing."""
    await job_of(held, 2, SYNC_MODE)
    coordinator = Coordinator(held)
    await coordinator.begin(step=7, num_untrained=num_untrained[0])
    history = [
        messages.WorkerPosition(worker_index=1, step=step, position=str(10 * step), num_untrained=num_untrained[1])
        for step in (6, 7, 8)
    ]
    await held.start(messages.ReportPositionRequest(save_id="x", positions=history))
    await coordinator.end(await coordinator.finish(await coordinator.write()))


@in_loop
async def test_steps_that_trained_nothing_are_not_in_the_manifest(held: HeldControl, tmp_path: Path) -> None:
    await save_at_step_7(held, num_untrained=(2, 2))
    assert load_from(tmp_path / "model")[1].manifest.workers == (WorkerPosition(0, 5, None), WorkerPosition(1, 5, 70))


@in_loop
async def test_steps_that_one_worker_trained_are_in_the_manifest(held: HeldControl, tmp_path: Path) -> None:
    """Worker 1 trained in the steps in which worker 0 sent what it held; its position 8 is after the cut."""
    await save_at_step_7(held, num_untrained=(3, 1))
    assert load_from(tmp_path / "model")[1].manifest.workers == (WorkerPosition(0, 6, None), WorkerPosition(1, 6, 70))


@in_loop
async def test_more_untrained_steps_than_steps_begin_no_save(held: HeldControl) -> None:
    await held.start(registration(SGD))
    with pytest.raises(ProtocolError, match="3 of its 2 steps"):
        await Coordinator(held).begin(step=2, num_untrained=3)


@in_loop
async def test_position_after_the_files_are_written_is_in_time(held: HeldControl, tmp_path: Path) -> None:
    await job_of(held, 2, SYNC_MODE)
    coordinator = Coordinator(held)
    await coordinator.begin(step=5)
    finishing = asyncio.ensure_future(coordinator.finish(await coordinator.write()))
    await turns()
    assert not finishing.done()
    await held.start(position(1, 5, loader="50"))
    await coordinator.end(await finishing)
    assert load_from(tmp_path / "model")[1].manifest.workers[1] == WorkerPosition(1, 5, 50)


@in_loop
async def test_save_ended_while_it_waits_for_positions_is_no_snapshot(held: HeldControl, tmp_path: Path) -> None:
    await job_of(held, 2, SYNC_MODE)
    coordinator = Coordinator(held)
    await coordinator.begin(step=5)
    finishing = asyncio.ensure_future(coordinator.finish(await coordinator.write()))
    await turns()
    await coordinator.end()
    with pytest.raises(SnapshotError, match="save x"):
        await finishing
    assert not list((tmp_path / "model").iterdir())


@in_loop
async def test_worker_that_left_the_step_group_keeps_its_position(held: HeldControl, tmp_path: Path) -> None:
    await job_of(held, 2, SYNC_MODE)
    coordinator = Coordinator(held)
    await coordinator.begin(step=9)
    await held.start(position(1, 4, loader="40"))
    await coordinator.end(await coordinator.finish(await coordinator.write()))
    assert load_from(tmp_path / "model")[1].manifest.workers[1] == WorkerPosition(1, 9, 40)


def test_sync_save_finishes_without_missing_positions(
    held: HeldControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_rpcs, "LATE_POSITIONS_S", 0.05)
    run(lambda: job_of(held, 2, SYNC_MODE))
    run(Coordinator(held).save)
    assert load_from(tmp_path / "model")[1].manifest.workers == (WorkerPosition(0, 0, None), WorkerPosition(1, 0, None))


@in_loop
async def test_waiting_worker_is_told_when_a_save_begins(held: HeldControl) -> None:
    await job_of(held, 2, ASYNC_MODE)
    waiting = asyncio.ensure_future(held.start(messages.AwaitSaveRequest(worker_index=1)))
    own = asyncio.ensure_future(held.start(messages.AwaitSaveRequest(worker_index=0)))
    begun = asyncio.ensure_future(Coordinator(held).begin())
    assert (await waiting).save_id == "x"
    again = asyncio.ensure_future(held.start(messages.AwaitSaveRequest(worker_index=1, last_save_id="x")))
    await held.start(position(1, 0))
    await begun
    assert not again.done()
    assert not own.done()
    again.cancel()
    own.cancel()


def test_worker_that_waits_in_vain_is_answered(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_rpcs, "AWAIT_S", 0.05)
    assert held.call(messages.AwaitSaveRequest(worker_index=1)).save_id == ""


# Some tables


def test_one_table_is_saved_alone(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD, ADAM))
    train(held, 7)
    run(Coordinator(held, tables=("sgd",)).save)
    manifest = load_from(tmp_path / "model")[1].manifest
    assert (manifest.tables, manifest.is_complete) == (("sgd",), False)
