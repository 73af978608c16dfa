"""Counters of ids without a row, saved and loaded with their table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError, TableMismatch
from fleet_sparse.pserver.admin.snapshot_loader import load
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.tools.snapshots.reshard import reshard
from support.admissions import FIRST, CountedJob, count_filter, table
from support.saves import loaded, save
from support.shards import FrameClient, make_shard

KINDS = pytest.mark.parametrize("sketch", [False, True], ids=["exact", "sketch"])
ONCE, TWICE, NEW = np.arange(300), np.arange(300, 600), np.arange(600, 900)


def counted(*, num_shards: int, sketch: bool) -> CountedJob:
    """Ids that were named once, and ids that were named twice; the threshold is 2."""
    job = CountedJob(count_filter(2, sketch=sketch), num_shards=num_shards)
    job.push(np.concatenate([ONCE, TWICE]))
    job.push(TWICE)
    return job


@KINDS
@pytest.mark.parametrize("num_after", [1, 2, 3, 7])
def test_counting_continues_on_any_number_of_shards(tmp_path: Path, sketch: bool, num_after: int) -> None:
    before = counted(num_shards=3, sketch=sketch)
    save(before.shards, tmp_path)
    after = CountedJob(before.spec, loaded(tmp_path, num_after))
    for job in (before, after):
        assert job.num_rows == 0
        assert job.rows(TWICE) == [FIRST] * 300
        job.push(ONCE)
        job.push(ONCE)
        assert job.rows(ONCE) == [FIRST - 0.25] * 300
        assert job.rows(NEW) == [0.0] * 300
        job.close()


@KINDS
def test_a_delta_has_the_counters_that_changed(tmp_path: Path, sketch: bool) -> None:
    before = counted(num_shards=2, sketch=sketch)
    save(before.shards, tmp_path)
    before.push(np.concatenate([ONCE[:5], NEW[:5]]))
    manifest = save(before.shards, tmp_path, kind="delta", save_id="two")
    assert manifest.num_rows == 10
    after = CountedJob(before.spec, loaded(tmp_path, 3))
    for job in (before, after):
        assert job.rows(ONCE[:10]) == [FIRST] * 5 + [0.0] * 5
        job.push(NEW[:10])
        assert job.rows(NEW[:10]) == [FIRST] * 5 + [0.0] * 5
        job.close()


@KINDS
def test_pushes_during_a_save_are_not_in_it(tmp_path: Path, sketch: bool) -> None:
    before = counted(num_shards=2, sketch=sketch)
    save(before.shards, tmp_path, meanwhile=lambda: before.push(ONCE))
    after = CountedJob(before.spec, loaded(tmp_path, 2))
    assert (before.rows(ONCE), after.rows(ONCE)) == ([FIRST] * 300, [0.0] * 300)


@KINDS
def test_counters_are_resharded_with_their_table(tmp_path: Path, sketch: bool) -> None:
    before = counted(num_shards=2, sketch=sketch)
    save(before.shards, tmp_path / "two")
    with open_content(str(tmp_path / "two")) as content:
        manifest = reshard(content, directory_at(str(tmp_path / "five")), 5)
    assert manifest.tables == ("emb",)
    after = CountedJob(before.spec, loaded(tmp_path / "five", 5))
    assert after.rows(TWICE) == [FIRST] * 300
    assert after.rows(ONCE) == [0.0] * 300


def test_counters_are_not_loaded_without_their_table(tmp_path: Path) -> None:
    save(counted(num_shards=2, sketch=False).shards, tmp_path)
    shard = make_shard()
    with pytest.raises(SnapshotError, match="emb@entry"):
        load(shard, directory_at(tmp_path), ["emb@entry"])
    load(shard, directory_at(tmp_path), ["emb"])
    assert CountedJob(count_filter(2), [shard]).rows(TWICE) == [FIRST] * 300


# Another policy than the snapshot's


def test_a_table_that_was_loaded_takes_the_policy_of_the_job(tmp_path: Path) -> None:
    before = CountedJob(table(None))
    before.push(ONCE)
    save(before.shards, tmp_path)
    spec = count_filter(2)
    shards = loaded(tmp_path, 2)
    for shard in shards:
        shard.add_table(spec, declared_by="worker 0")
        assert shard.base is None, "the next delta would have another spec than its base"
    after = CountedJob(spec, shards)
    after.push(np.concatenate([ONCE, NEW]))
    assert after.rows(ONCE) == [FIRST - 0.5] * 300
    assert after.rows(NEW) == [0.0] * 300
    save(shards, tmp_path / "again")
    assert CountedJob(spec, loaded(tmp_path / "again", 3)).rows(ONCE) == [FIRST - 0.5] * 300


def test_another_threshold_keeps_the_counts(tmp_path: Path) -> None:
    save(counted(num_shards=1, sketch=False).shards, tmp_path)
    (shard,) = loaded(tmp_path, 1)
    spec = count_filter(1)
    shard.add_table(spec, declared_by="worker 0")
    job = CountedJob(spec, [shard])
    assert (job.rows(ONCE), job.rows(NEW)) == ([FIRST] * 300, [0.0] * 300)
    save([shard], tmp_path / "again")
    (again,) = loaded(tmp_path / "again", 1)
    assert CountedJob(spec, [again]).rows(ONCE) == [FIRST] * 300


@pytest.mark.parametrize("spec", [table(None), count_filter(2, sketch=True)], ids=["none", "sketch"])
def test_a_policy_that_cannot_use_the_counters_begins_anew(tmp_path: Path, spec: TableSpec) -> None:
    save(counted(num_shards=1, sketch=False).shards, tmp_path)
    (shard,) = loaded(tmp_path, 1)
    shard.add_table(spec, declared_by="worker 0")
    (found,) = FrameClient(shard, b"another client..").rows(spec, int(TWICE[0]))
    assert found[0] == (FIRST if spec.entry is None else 0.0)


def test_workers_must_agree_on_the_policy(tmp_path: Path) -> None:
    save(counted(num_shards=1, sketch=False).shards, tmp_path)
    (shard,) = loaded(tmp_path, 1)
    shard.add_table(count_filter(3), declared_by="worker 0")
    with pytest.raises(TableMismatch, match=r"worker 0 and worker 1.*entry"):
        shard.add_table(count_filter(4), declared_by="worker 1")


def test_a_load_into_a_running_job_keeps_its_policy(tmp_path: Path) -> None:
    save(counted(num_shards=1, sketch=False).shards, tmp_path)
    spec = count_filter(1)
    job = CountedJob(spec)
    (shard,) = job.shards
    (staged,) = loaded(tmp_path, 1)
    shard.swap_in(staged)
    assert (job.rows(ONCE), job.rows(NEW)) == ([FIRST] * 300, [0.0] * 300)
    assert shard.tables[spec.table_id].spec == spec


@KINDS
def test_counts_of_rows_are_saved_and_loaded(tmp_path: Path, sketch: bool) -> None:
    job = counted(num_shards=2, sketch=sketch)
    job.push(TWICE[:10], np.full(10, 5, np.uint32))
    job.push(TWICE[:10])
    save(job.shards, tmp_path)
    save(loaded(tmp_path, 3), tmp_path / "again")
    for where in (tmp_path, tmp_path / "again"):
        with open_content(str(where)) as content:
            found = {
                id_: count
                for rows in content.rows("emb")
                for id_, count in zip(rows.ids.tolist(), rows.columns["counts"].tolist(), strict=True)
            }
        assert found == dict.fromkeys(TWICE[:10].tolist(), 8.0)
    job.close()
