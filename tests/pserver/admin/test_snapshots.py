from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleet_sparse.errors import SnapshotError
from fleet_sparse.wire import control_pb2 as messages
from support.controls import HeldControl, num_removed, registration, shrink_request
from support.coordinators import Coordinator, SlowWrites, in_loop, run, train, turns, until
from support.saves import rows_in
from support.shards import SGD


@pytest.mark.parametrize("dirname", ["../model", "/etc/model", ""])
def test_save_and_load_outside_the_root_are_refused(held: HeldControl, dirname: str) -> None:
    with pytest.raises(SnapshotError):
        held.call(messages.PlanSaveRequest(dirname=dirname, save_id="x", kind="full"))
    with pytest.raises(SnapshotError):
        held.call(messages.StageLoadRequest(dirname=dirname, load_id="x"))


@in_loop
async def test_load_waits_until_an_ending_save_has_ended(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    await held.start(registration(SGD))
    await Coordinator(held, "one").save()
    await held.start(messages.StageLoadRequest(dirname="model", load_id="l"))
    slow = SlowWrites(monkeypatch)
    coordinator = Coordinator(held, "two")
    await coordinator.begin()
    writing = asyncio.ensure_future(coordinator.write())
    await until(slow.begun.is_set)
    ending = asyncio.ensure_future(coordinator.end())
    await turns()
    loading = asyncio.ensure_future(held.start(messages.FinishLoadRequest(load_id="l", keep=True)))
    await turns()
    assert not loading.done()
    slow.go_on.set()
    await asyncio.gather(writing, ending, return_exceptions=True)
    assert (await loading).tables[0].name == "sgd"


def test_load_and_shrink_are_refused_while_a_save_is_written(held: HeldControl) -> None:
    held.call(registration(SGD))
    run(Coordinator(held, "one").save)
    held.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    run(Coordinator(held, "two").begin)
    with pytest.raises(SnapshotError, match="load"):
        held.call(messages.FinishLoadRequest(load_id="l", keep=True))
    with pytest.raises(SnapshotError, match="shrink"):
        held.call(messages.ShrinkRequest(decay=1.0))


def test_save_removes_only_snapshots_of_its_job(held: HeldControl, tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "model").iterdir())

    held.call(registration(SGD))
    run(Coordinator(held, "one").save)
    other = HeldControl(tmp_path)
    other.call(registration(SGD))
    run(Coordinator(other, "two").save)
    assert names() == ["000001-full", "000002-full"]
    run(Coordinator(other, "three").save)
    assert names() == ["000001-full", "000003-full"]
    other.call(messages.StageLoadRequest(dirname="model/000001-full", load_id="l"))
    other.call(messages.FinishLoadRequest(load_id="l", keep=True))
    run(Coordinator(other, "four").save)
    assert names() == ["000004-full"]


def test_after_a_load_the_next_delta_is_a_full_save(held: HeldControl) -> None:
    held.call(registration(SGD))
    run(Coordinator(held).save)
    held.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    held.call(messages.FinishLoadRequest(load_id="l", keep=True))
    assert run(lambda: Coordinator(held, "y").begin("delta")).needs_full


# Shrink


def test_rows_unseen_for_max_unseen_days_are_removed(held: HeldControl) -> None:
    held.call(registration(SGD))
    train(held, 7, 8)
    run(lambda: Coordinator(held, "one").save(ends_day=True))
    train(held, 8)
    run(lambda: Coordinator(held, "two").save(ends_day=True))
    assert num_removed(held.call(shrink_request(2))) == 0
    assert num_removed(held.call(shrink_request(1))) == 1
    assert set(rows_in([held.shard], SGD)) == {8}
