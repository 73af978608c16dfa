from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode, SnapshotError
from fleet_sparse.pserver.admin.snapshot_loader import load
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.snapshot import rows_format
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.store import SnapshotStore
from support.cow_views import everything
from support.saves import (
    ADAGRAD,
    ADAM,
    EMPTY,
    Trained,
    array_in,
    at_once,
    loaded,
    loads,
    rows_in,
    save,
    store_of,
    trained,
)
from support.shards import CLIENT, READS, SGD, FrameClient, code_of, make_shard, push

NUMBERS = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("num_before", NUMBERS)
@pytest.mark.guarantee("V8")
def test_rows_and_state_come_back_on_any_number_of_shards(tmp_path: Path, num_before: int) -> None:
    before = trained(num_before)
    save(before, tmp_path)
    for num_after in NUMBERS:
        after = loaded(tmp_path, num_after)
        for spec in (ADAGRAD, ADAM, EMPTY):
            assert rows_in(after, spec) == rows_in(before, spec)
        assert len(rows_in(after, ADAM)) > 250
        assert array_in(after) == array_in(before)


@pytest.mark.parametrize(("num_before", "num_after"), [(2, 5), (5, 2), (1, 8), (8, 3)])
@pytest.mark.guarantee("V8")
def test_a_shard_reads_only_the_blocks_that_hold_its_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_before: int, num_after: int
) -> None:
    monkeypatch.setattr(rows_format, "MAX_BLOCK_BYTES", 4096)
    manifest = save(trained(num_before, num_ids=20_000, num_steps=1), tmp_path)
    num_bytes = sum(file.num_bytes for file in manifest.files)
    for _, told in loads(tmp_path, num_after):
        # Headers and indexes of all files, its share of the blocks, and of each file a block too much at both ends.
        entries = num_bytes // 4096 * 48 + num_before * 4096
        assert told.num_bytes_read < num_bytes / num_after * 1.1 + entries + num_before * 4 * 4096


def test_optimizer_step_comes_back(tmp_path: Path) -> None:
    save(trained(2), tmp_path)
    states = {state.name: state for state in loaded(tmp_path, 3)[0].states()}
    assert (states["adam"].optimizer_step, states["dense"].optimizer_step, states["empty"].optimizer_step) == (3, 3, 0)
    assert states["dense"].assigned


def test_array_that_nobody_assigned_stays_unassigned(tmp_path: Path) -> None:
    save(trained(2, assigned=False), tmp_path)
    assert not any(state.assigned for shard in loaded(tmp_path, 3) for state in shard.states())


@pytest.mark.parametrize(("num_shards", "num_files"), [(4, 1), (2, 2), (1, 4), (8, 1)])
def test_only_files_with_rows_or_values_of_the_shard_are_opened(
    tmp_path: Path, num_shards: int, num_files: int
) -> None:
    save(trained(4, assigned=False), tmp_path)
    assert [told.num_files for _, told in loads(tmp_path, num_shards)] == [num_files] * num_shards


def test_applied_pushes_come_back_on_as_many_shards(tmp_path: Path) -> None:
    save(trained(2), tmp_path)
    assert [shard.ledger.watermarks() for shard in loaded(tmp_path, 2)] == [[Watermark(CLIENT, 1, 10)]] * 2
    assert [shard.ledger.watermarks() for shard in loaded(tmp_path, 3)] == [[]] * 3
    save(loaded(tmp_path, 3), tmp_path, kind="delta", save_id="two")
    assert [shard.ledger.watermarks() for shard in loaded(tmp_path, 2)] == [[], []], "those of the newest snapshot"


def test_push_that_is_sent_again_after_a_restore_is_applied_once(tmp_path: Path) -> None:
    job = Trained(1)
    job.step()
    (client,) = job.clients
    save(job.shards, tmp_path)
    (shard,) = loaded(tmp_path, 1)
    before = rows_in([shard], ADAM)
    again = FrameClient(shard)
    block = push(ADAM, job.ids[:3], np.ones((3, 17), np.float32))
    assert again.push(block, push_seq=client.seq).error is None
    assert rows_in([shard], ADAM) == before
    assert again.push(block, push_seq=client.seq + 1).error is None
    assert rows_in([shard], ADAM) != before


def test_reader_may_load_what_a_trainer_saved(tmp_path: Path) -> None:
    client = FrameClient(make_shard(SGD))
    client.push(push(SGD, np.array([7]), np.ones((1, 2), np.float32)))
    save([client.shard], tmp_path)
    (shard,) = loaded(tmp_path, 1)
    shard.add_table(READS, declared_by="worker 0")
    assert FrameClient(shard).rows(READS, 7) == [[-0.5, -0.5]]
    assert (
        code_of(FrameClient(shard, b"another client..").push(push(READS, np.array([7]), np.ones((1, 2), np.float32))))
        is ErrorCode.SCHEMA
    )


def test_one_table_may_be_loaded(tmp_path: Path) -> None:
    before = trained(2)
    save(before, tmp_path)
    shard = make_shard()
    told = load(shard, directory_at(tmp_path), ["adam"])
    assert [(state.name, state.num_rows) for state in shard.states()] == [("adam", told.num_rows)]
    assert rows_in([shard], ADAM) == rows_in(before, ADAM)
    with pytest.raises(SnapshotError):
        load(shard, directory_at(tmp_path), ["C1"])


def test_shard_that_loaded_all_knows_the_base_of_a_delta(tmp_path: Path) -> None:
    manifest = save(trained(1), tmp_path)
    whole, part = make_shard(), make_shard()
    load(whole, directory_at(tmp_path))
    load(part, directory_at(tmp_path), ["adam"])
    assert (whole.base, part.base) == (manifest.checksum, None)


def test_snapshot_of_some_tables_is_the_base_of_no_delta(tmp_path: Path) -> None:
    (before,) = trained(1)
    series = SnapshotStore(directory_at(tmp_path))
    plan, one = series.plan("full", "one"), Save(before, "one", base=None, tables=["adam"])
    assert one.cut()
    files = (one.write(series.target(plan, "one"), at_once),)
    series.commit(plan, Manifest(plan.number, plan.kind, None, "one", "", one.table_names, False, files, ()))
    one.end(None)
    (after,) = loaded(tmp_path, 1)
    assert rows_in([after], ADAM) == rows_in([before], ADAM)
    assert after.base is None


def test_load_that_is_given_up_ends_with_an_error(tmp_path: Path) -> None:
    save(trained(1), tmp_path)
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(SnapshotError):
        load(make_shard(), directory_at(tmp_path), given_up=given_up)


@pytest.mark.parametrize("ahead", [0, 1])
def test_shards_that_disagree_about_the_day_have_the_later_one(tmp_path: Path, ahead: int) -> None:
    before = trained(2)
    store_of(before[ahead], ADAM).end_day()
    save(before, tmp_path)
    (after,) = loaded(tmp_path, 1)
    store = store_of(after, ADAM)
    assert store.num_days == 1
    assert {row.last_day for row in everything(store).values()} == {0}
    assert rows_in([after], ADAM) == rows_in(before, ADAM)
