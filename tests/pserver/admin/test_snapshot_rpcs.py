from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleet_sparse.errors import SnapshotError
from fleet_sparse.pserver.admin.snapshot_loader import load
from fleet_sparse.pserver.admin.snapshot_rpcs import resumed_json
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.wire import control_pb2 as messages
from support.askers import Asker, SlowWrites, load_from, run, train
from support.controls import HeldControl, registration
from support.saves import rows_in
from support.shards import SGD


@pytest.mark.parametrize("dirname", ["../model", "/etc/model", ""])
def test_save_and_load_outside_the_root_are_refused(held: HeldControl, dirname: str) -> None:
    with pytest.raises(SnapshotError):
        held.call(messages.PlanSaveRequest(dirname=dirname, save_id="x", kind="full"))
    with pytest.raises(SnapshotError):
        held.call(messages.LoadDraftRequest(dirname=dirname, load_id="x"))


def test_nothing_is_loaded_before_a_save_that_was_given_up_is_over(
    held: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.call(registration(SGD))
    run(Asker(held, "one").save)
    held.call(messages.LoadDraftRequest(dirname="model", load_id="l"))
    slow = SlowWrites(monkeypatch)

    async def load_too_soon() -> None:
        asker = Asker(held, "two")
        await asker.begin()
        writing = asyncio.ensure_future(asker.write())
        ending = asyncio.ensure_future(asker.end())
        await asyncio.sleep(0.02)
        loading = asyncio.ensure_future(held.start(messages.FinishLoadRequest(load_id="l", kept=True)))
        await asyncio.sleep(0.02)
        assert not loading.done()
        slow.go_on.set()
        await asyncio.gather(writing, ending, return_exceptions=True)
        assert (await loading).tables[0].name == "sgd"

    run(load_too_soon)


def test_load_and_shrink_are_refused_while_a_save_is_written(held: HeldControl) -> None:
    held.call(registration(SGD))
    run(Asker(held, "one").save)
    held.call(messages.LoadDraftRequest(dirname="model", load_id="l"))
    run(Asker(held, "two").begin)
    with pytest.raises(SnapshotError, match="load: a snapshot is being written"):
        held.call(messages.FinishLoadRequest(load_id="l", kept=True))
    with pytest.raises(SnapshotError, match="shrink: a snapshot is being written"):
        held.call(messages.ShrinkRequest(max_unseen_days=1))


def test_workers_are_told_what_the_pservers_began_with(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    run(Asker(held).save)
    manifest = load_from(tmp_path / "model")[1].manifest
    assert resumed_json(manifest) == (
        '{"snapshot": "000001-full", "is_whole": true, "tables": ["sgd"], "num_workers": 1, '
        '"workers": [{"worker": 0, "step": 0, "position": null}]}'
    )


def test_a_save_removes_what_this_job_saved_or_began_with_and_nothing_else(held: HeldControl, tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "model").iterdir())

    held.call(registration(SGD))
    run(Asker(held, "one").save)
    other = HeldControl(tmp_path)
    other.call(registration(SGD))
    run(Asker(other, "two").save)
    assert names() == ["000001-full", "000002-full"]
    run(Asker(other, "three").save)
    assert names() == ["000001-full", "000003-full"]
    other.call(messages.LoadDraftRequest(dirname="model/000001-full", load_id="l"))
    other.call(messages.FinishLoadRequest(load_id="l", kept=True))
    run(Asker(other, "four").save)
    assert names() == ["000004-full"]


def test_after_a_load_the_next_delta_is_a_full_save(held: HeldControl) -> None:
    held.call(registration(SGD))
    run(Asker(held).save)
    held.call(messages.LoadDraftRequest(dirname="model", load_id="l"))
    held.call(messages.FinishLoadRequest(load_id="l", kept=True))
    assert run(lambda: Asker(held, "y").begin("delta")).needs_full


# Shrink


def test_rows_that_no_push_touched_for_so_many_days_are_removed(held: HeldControl) -> None:
    held.call(registration(SGD))
    train(held, 7, 8)
    run(lambda: Asker(held, "one").save(ends_day=True))
    train(held, 8)
    run(lambda: Asker(held, "two").save(ends_day=True))
    assert held.call(messages.ShrinkRequest(max_unseen_days=2)).num_removed == 0
    assert held.call(messages.ShrinkRequest(max_unseen_days=1)).num_removed == 1
    assert set(rows_in([held.shard], SGD)) == {8}


def test_days_go_on_after_a_load(held: HeldControl, tmp_path: Path) -> None:
    held.call(registration(SGD))
    train(held, 7, 8)
    run(lambda: Asker(held, "one").save(ends_day=True))
    train(held, 8)
    run(lambda: Asker(held, "two").save(ends_day=True))
    after = HeldControl(tmp_path)
    load(after.shard, directory_at(tmp_path / "model"))
    after.call(registration(SGD))
    assert after.call(messages.ShrinkRequest(max_unseen_days=1)).num_removed == 1
    assert set(rows_in([after.shard], SGD)) == {8}
