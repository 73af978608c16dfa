from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.errors import SnapshotError
from fleet_sparse.pserver.admin import save_rpcs
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.snapshot.manifest import WorkerPosition
from fleet_sparse.wire import control_pb2 as messages
from support.askers import Asker, SlowWrites, load_from, mark, run, train
from support.controls import HeldControl, registration
from support.saves import store_of
from support.shards import ADAM, SGD
from support.steps import SYNC_MODE

ASYNC_MODE = Mode(ASYNC)


# One worker


def test_save_writes_a_snapshot_that_can_be_loaded(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    train(held, 7, 8)
    assert run(Asker(held, dirname="a/model").save) == "000001-full"
    rows, told = load_from(tmp_path / "a" / "model")
    assert set(rows) == {7, 8}
    assert (told.manifest.number, told.manifest.kind, told.manifest.save_id) == (1, "full", "x")
    assert told.manifest.tables == ("sgd",)


def test_mark_of_the_asker_is_in_the_manifest(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))

    async def save() -> None:
        asker = Asker(held)
        await asker.begin(step=12, position='{"epoch":1,"batch":2}')
        await asker.end(await asker.finish(await asker.write()))

    run(save)
    _, told = load_from(tmp_path / "model")
    assert told.manifest.workers == (WorkerPosition(0, 12, {"epoch": 1, "batch": 2}),)


def test_what_is_pushed_after_the_beginning_is_not_saved(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    train(held, 7)

    async def save() -> None:
        asker = Asker(held)
        await asker.begin()
        train(held, 8)
        await asker.end(await asker.finish(await asker.write()))

    run(save)
    rows, told = load_from(tmp_path / "model")
    assert set(rows) == {7}
    assert [clients.watermark for clients in told.manifest.files[0].clients] == [1]


def test_delta_is_on_top_of_the_save_that_was_committed(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    train(held, 7)
    run(Asker(held, "one").save)
    train(held, 8)
    assert run(lambda: Asker(held, "two").save("delta")) == "000002-delta"
    assert set(load_from(tmp_path / "model")[0]) == {7, 8}
    assert load_from(tmp_path / "model")[1].manifest.num_rows == 1


def test_delta_without_a_base_is_planned_as_full(held: HeldControl) -> None:
    held.call(registration(SGD))
    assert run(lambda: Asker(held).save("delta")) == "000001-full"


def test_shard_that_does_not_know_the_base_asks_for_a_full_save(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    run(Asker(held, "one").save)
    other = HeldControl(tmp_path)
    other.call(registration(SGD))
    assert run(lambda: Asker(other, "two").begin("delta")).needs_full
    assert run(lambda: Asker(other, "three").save("full")) == "000002-full"


def test_repeated_calls_join_those_that_came_before(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    held.call(registration(SGD))
    num_written = 0
    write = Save.write

    def count(self: Save, *arguments: Any) -> Any:
        nonlocal num_written
        num_written += 1
        return write(self, *arguments)

    monkeypatch.setattr(Save, "write", count)

    async def save() -> None:
        asker = Asker(held)
        await asker.begin()
        assert not (await asker.begin()).needs_full
        first = asyncio.ensure_future(asker.write())
        await asyncio.sleep(0)
        first.cancel()
        file = await asker.write()
        finished = await asker.finish(file)
        assert await asker.finish(file) == finished
        await asker.end(finished)
        await asker.end(finished)

    run(save)
    assert num_written == 1


# A save that ends early


def test_save_that_is_not_committed_leaves_nothing(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    train(held, 7)

    async def give_up() -> None:
        asker = Asker(held)
        await asker.begin()
        await asker.write()
        await asker.end()

    run(give_up)
    assert not list((tmp_path / "model").iterdir())
    assert run(Asker(held, "y").save) == "000001-full"


def test_call_for_a_save_that_ended_is_refused(held: HeldControl) -> None:
    held.call(registration(SGD))
    asker = Asker(held)
    run(asker.save)
    with pytest.raises(SnapshotError, match="save x: it was given up, or has ended"):
        run(asker.write)
    with pytest.raises(SnapshotError, match="save x: it was given up, or has ended"):
        run(asker.begin)


def test_end_that_comes_before_the_beginning_counts(held: HeldControl) -> None:
    held.call(registration(SGD))
    asker = Asker(held)
    run(asker.end)
    with pytest.raises(SnapshotError, match="given up"):
        run(asker.begin)


def test_call_for_a_save_that_never_began_is_refused(held: HeldControl) -> None:
    with pytest.raises(SnapshotError, match="save x: it has not begun here"):
        run(Asker(held).write)


def test_save_that_begins_ends_the_one_before(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    train(held, 7)

    async def save() -> str:
        first = Asker(held, "one")
        await first.begin()
        name = await Asker(held, "two").save()
        with pytest.raises(SnapshotError, match="save one: it was given up"):
            await first.write()
        return name

    assert run(save) == "000001-full"
    assert load_from(tmp_path / "model")[1].manifest.save_id == "two"


def test_save_of_a_worker_that_is_lost_ends(held: HeldControl) -> None:
    held.call(registration(SGD))

    async def lose() -> None:
        asker = Asker(held)
        await asker.begin()
        held.now += 31
        watching = asyncio.ensure_future(held.control.watch_workers())
        with pytest.raises(SnapshotError, match="given up"):
            while True:
                await asker.begin()
                await asyncio.sleep(0)
        watching.cancel()

    run(lose)


def test_save_comes_to_its_end_though_who_ended_it_is_gone(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    held.call(registration(SGD))
    slow = SlowWrites(monkeypatch)

    async def save() -> str:
        asker = Asker(held, "one")
        await asker.begin()
        writing = asyncio.ensure_future(asker.write())
        ending = asyncio.ensure_future(asker.end())
        await asyncio.sleep(0.02)
        ending.cancel()
        slow.go_on.set()
        await asyncio.gather(writing, ending, return_exceptions=True)
        return await Asker(held, "two").save()

    assert run(save) == "000001-full"
    assert held.call(messages.ShrinkRequest(max_unseen_days=1)).num_removed == 0


def test_save_that_is_asked_for_twice_begins_once_when_the_one_before_is_over(
    held: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.call(registration(SGD))
    slow = SlowWrites(monkeypatch)

    async def save() -> str:
        first, second = Asker(held, "one"), Asker(held, "two")
        await first.begin()
        writing = asyncio.ensure_future(first.write())
        begun = [asyncio.ensure_future(second.begin()) for _ in range(2)]
        await asyncio.sleep(0.02)
        assert not any(one.done() for one in begun)
        slow.go_on.set()
        await asyncio.gather(*begun)
        with pytest.raises(SnapshotError, match="save one: given up"):
            await writing
        finished = await second.finish(await second.write())
        await second.end(finished)
        return Path(finished.snapshot).name

    assert run(save) == "000001-full"
    assert held.call(messages.ShrinkRequest(max_unseen_days=1)).num_removed == 0


def test_save_of_a_worker_that_was_started_again_ends(held: HeldControl) -> None:
    held.call(registration(SGD))
    run(Asker(held, "one").save)

    async def start_again() -> None:
        asker = Asker(held, "two")
        await asker.begin()
        held.now += 6  # too soon for a heartbeat to be missed
        await held.start(registration(SGD, client_id=b"another, as new!"))
        with pytest.raises(SnapshotError, match="save two: it was given up"):
            await asker.write()
        await held.start(messages.LoadDraftRequest(dirname="model", load_id="l"))
        await held.start(messages.FinishLoadRequest(load_id="l", kept=True))

    run(start_again)


def test_end_that_is_repeated_ends_one_day(held: HeldControl) -> None:
    held.call(registration(SGD))

    async def save() -> None:
        asker = Asker(held)
        await asker.begin(ends_day=True)
        finished = await asker.finish(await asker.write())
        await asyncio.gather(*(asker.end(finished) for _ in range(2)))
        await asker.end(finished)

    run(save)
    assert store_of(held.shard, SGD).num_days == 1


# Several workers


def job_of(held: HeldControl, num_workers: int, mode: Mode) -> None:
    for worker in range(num_workers):
        held.call(registration(SGD, worker=worker, num_workers=num_workers, mode=mode))


def test_async_shard_is_cut_when_all_workers_brought_their_marks(held: HeldControl, tmp_path: Path) -> None:
    job_of(held, 3, ASYNC_MODE)
    train(held, 7)

    async def save() -> None:
        asker = Asker(held)
        begun = asyncio.ensure_future(asker.begin(step=5))
        first = asyncio.ensure_future(held.start(mark(1, 6)))
        await asyncio.sleep(0.05)
        assert not begun.done()
        assert not first.done()
        train(held, 8, seq_of=b"2" * 16)
        await held.start(mark(2, 7))
        await first
        await begun
        train(held, 9, seq_of=b"2" * 16)
        await asker.end(await asker.finish(await asker.write()))

    run(save)
    rows, told = load_from(tmp_path / "model")
    assert set(rows) == {7, 8}
    assert told.manifest.workers == (WorkerPosition(0, 5, None), WorkerPosition(1, 6, None), WorkerPosition(2, 7, None))


def test_worker_that_brings_no_mark_ends_the_save_with_its_name(held: HeldControl) -> None:
    job_of(held, 2, ASYNC_MODE)
    asker = Asker(held)
    with pytest.raises(SnapshotError, match=r"worker 1 did not say where it stands within 0\.2 s"):
        run(asker.begin)
    with pytest.raises(SnapshotError, match="given up"):
        run(asker.write)
    train(held, 7)


def test_mark_for_a_save_that_has_ended_is_answered_at_once(held: HeldControl) -> None:
    job_of(held, 2, ASYNC_MODE)
    run(Asker(held).end)
    run(lambda: held.start(mark(1, 6)), timeout_s=0.1)


def test_mark_for_a_save_that_never_begins_is_answered_after_a_while(held: HeldControl) -> None:
    job_of(held, 2, ASYNC_MODE)
    run(lambda: held.start(mark(1, 6)))


def test_beginning_of_a_save_that_ends_meanwhile_is_refused(held: HeldControl) -> None:
    job_of(held, 2, ASYNC_MODE)

    async def end() -> None:
        begun = asyncio.ensure_future(Asker(held).begin())
        assert (await held.start(messages.AwaitSaveRequest(worker_index=1))).save_id == "x"
        await Asker(held).end()
        with pytest.raises(SnapshotError, match="save x: it was given up"):
            await begun

    run(end)


def test_worker_is_told_of_no_save_that_ends(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_rpcs, "AWAIT_S", 0.05)
    held.call(registration(SGD))
    slow = SlowWrites(monkeypatch)

    async def end() -> None:
        asker = Asker(held)
        await asker.begin()
        writing, ending = asyncio.ensure_future(asker.write()), asyncio.ensure_future(asker.end())
        await asyncio.sleep(0.02)
        assert (await held.start(messages.AwaitSaveRequest(worker_index=1))).save_id == ""
        slow.go_on.set()
        await asyncio.gather(writing, ending, return_exceptions=True)

    run(end)


def test_mark_that_waits_too_long_for_the_cut_is_an_error(held: HeldControl) -> None:
    job_of(held, 2, ASYNC_MODE)

    async def wait() -> None:
        begun = asyncio.ensure_future(Asker(held).begin())
        await asyncio.sleep(0.02)
        marked = asyncio.ensure_future(held.start(mark(1, 6)))
        held.holds_back = True
        with pytest.raises(SnapshotError, match=r"save x: shard 0 was not cut within 0\.2 s of the mark of worker 1"):
            await marked
        held.let_go()
        await asyncio.gather(begun, return_exceptions=True)

    run(wait)


def test_mark_counts_that_is_repeated_before_the_first_call_ends(held: HeldControl) -> None:
    job_of(held, 3, ASYNC_MODE)

    async def save() -> bool:
        begun = asyncio.ensure_future(Asker(held).begin())
        first = asyncio.ensure_future(held.start(mark(1, 6)))
        await asyncio.sleep(0.02)
        second = asyncio.ensure_future(held.start(mark(1, 6)))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.gather(first, second, held.start(mark(2, 7)), return_exceptions=True)
        return bool((await begun).needs_full)

    assert not run(save)


def test_mark_that_is_withdrawn_while_the_shard_is_busy_counts_no_more(held: HeldControl) -> None:
    job_of(held, 2, ASYNC_MODE)

    async def save() -> None:
        plan = await held.start(messages.PlanSaveRequest(dirname="model", save_id="x", kind="full"))
        held.holds_back = True
        own = messages.WorkerMark(worker_index=0)
        begun = asyncio.ensure_future(held.start(messages.BeginSaveRequest(plan=plan, mark=own)))
        first = asyncio.ensure_future(held.start(mark(1, 6)))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        held.let_go()
        await begun

    with pytest.raises(SnapshotError, match=r"worker 1 did not say where it stands"):
        run(save)


def test_mark_that_comes_before_the_beginning_counts(held: HeldControl) -> None:
    job_of(held, 2, ASYNC_MODE)

    async def save() -> bool:
        marked = asyncio.ensure_future(held.start(mark(1, 6)))
        await asyncio.sleep(0)
        needs_full = (await Asker(held).begin()).needs_full
        await marked
        return needs_full

    assert not run(save)


def test_sync_shard_is_cut_at_once_and_takes_the_position_of_that_step(held: HeldControl, tmp_path: Path) -> None:
    job_of(held, 3, SYNC_MODE)

    async def save() -> None:
        asker = Asker(held)
        await asker.begin(step=5)
        history = [messages.WorkerMark(worker_index=1, step=step, position=str(10 * step)) for step in (4, 5, 6)]
        await held.start(messages.MarkRequest(save_id="x", marks=history))
        await held.start(mark(2, 9))
        await asker.end(await asker.finish(await asker.write()))

    run(save)
    workers = load_from(tmp_path / "model")[1].manifest.workers
    assert workers == (WorkerPosition(0, 5, None), WorkerPosition(1, 5, 50), WorkerPosition(2, 5, None))


def test_position_that_comes_when_the_files_are_written_is_in_time(held: HeldControl, tmp_path: Path) -> None:
    job_of(held, 2, SYNC_MODE)

    async def save() -> None:
        asker = Asker(held)
        await asker.begin(step=5)
        finishing = asyncio.ensure_future(asker.finish(await asker.write()))
        await asyncio.sleep(0.02)
        assert not finishing.done()
        await held.start(mark(1, 5, position="50"))
        await asker.end(await finishing)

    run(save)
    assert load_from(tmp_path / "model")[1].manifest.workers[1] == WorkerPosition(1, 5, 50)


def test_save_that_ends_while_it_waits_for_positions_is_not_finished(held: HeldControl, tmp_path: Path) -> None:
    job_of(held, 2, SYNC_MODE)

    async def save() -> None:
        asker = Asker(held)
        await asker.begin(step=5)
        finishing = asyncio.ensure_future(asker.finish(await asker.write()))
        await asyncio.sleep(0.02)
        await asker.end()
        with pytest.raises(SnapshotError, match="save x: it was given up"):
            await finishing

    run(save)
    assert not list((tmp_path / "model").iterdir())


def test_worker_that_rests_in_sync_keeps_its_last_position(held: HeldControl, tmp_path: Path) -> None:
    job_of(held, 2, SYNC_MODE)

    async def save() -> None:
        asker = Asker(held)
        await asker.begin(step=9)
        await held.start(mark(1, 4, position="40"))
        await asker.end(await asker.finish(await asker.write()))

    run(save)
    assert load_from(tmp_path / "model")[1].manifest.workers[1] == WorkerPosition(1, 9, 40)


def test_mark_of_a_worker_that_waits_no_more_counts_no_more(held: HeldControl) -> None:
    job_of(held, 3, ASYNC_MODE)

    async def save() -> None:
        begun = asyncio.ensure_future(Asker(held).begin())
        first = asyncio.ensure_future(held.start(mark(1, 6)))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.gather(first, held.start(mark(2, 7)), return_exceptions=True)
        await begun

    with pytest.raises(SnapshotError, match=r"worker 1 did not say where it stands"):
        run(save)


def test_sync_save_does_without_positions_that_do_not_come(
    held: HeldControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_rpcs, "LATE_MARKS_S", 0.05)
    job_of(held, 2, SYNC_MODE)
    run(Asker(held).save)
    assert load_from(tmp_path / "model")[1].manifest.workers == (WorkerPosition(0, 0, None), WorkerPosition(1, 0, None))


def test_worker_that_waits_for_a_save_is_told_when_one_begins(held: HeldControl) -> None:
    job_of(held, 2, ASYNC_MODE)

    async def wait() -> None:
        waiting = asyncio.ensure_future(held.start(messages.AwaitSaveRequest(worker_index=1)))
        own = asyncio.ensure_future(held.start(messages.AwaitSaveRequest(worker_index=0)))
        begun = asyncio.ensure_future(Asker(held).begin())
        assert (await waiting).save_id == "x"
        again = asyncio.ensure_future(held.start(messages.AwaitSaveRequest(worker_index=1, last_save_id="x")))
        await held.start(mark(1, 0))
        await begun
        assert not again.done()
        assert not own.done()
        again.cancel()
        own.cancel()

    run(wait)


def test_worker_that_waits_for_a_save_in_vain_is_answered(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_rpcs, "AWAIT_S", 0.05)
    assert held.call(messages.AwaitSaveRequest(worker_index=1)).save_id == ""


# Some tables


def test_one_table_is_saved_alone(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD, ADAM))
    train(held, 7)
    run(Asker(held, tables=("sgd",)).save)
    manifest = load_from(tmp_path / "model")[1].manifest
    assert (manifest.tables, manifest.is_whole) == (("sgd",), False)
