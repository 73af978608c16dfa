from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.ids import NUM_BUCKETS
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import DELTA, Manifest, file_name
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.rows_format import HEADER_BYTES
from fleet_sparse.snapshot.store import SnapshotStore
from fleet_sparse.tools.snapshots.reshard import reshard
from support.snapshots import assert_same, random_model, save, saved_model, write_file

COUNTS = [1, 2, 3, 5, 8]
MARKS = [(Watermark(bytes(16), 1, shard + 7),) for shard in range(3)]


def resharded(source: Path, target: Path, num_shards: int) -> Manifest:
    with open_content(str(source)) as content:
        return reshard(content, directory_at(target), num_shards)


@pytest.mark.parametrize("num_shards", COUNTS)
@pytest.mark.parametrize("num_before", COUNTS)
def test_each_file_is_the_one_that_a_pserver_would_write(tmp_path: Path, num_before: int, num_shards: int) -> None:
    model = random_model(num_before, 300, days=3)
    save(tmp_path / "model", model, num_before)
    manifest = resharded(tmp_path / "model", tmp_path / "other", num_shards)
    expected = directory_at(tmp_path / "expected")
    expected.make()
    for shard in range(num_shards):
        write_file(expected, model, shard=shard, num_shards=num_shards, save_id=manifest.save_id)
        name = file_name(shard, num_shards)
        found = (tmp_path / "other" / manifest.name / name).read_bytes()
        assert found[HEADER_BYTES:] == (tmp_path / "expected" / name).read_bytes()[HEADER_BYTES:]
    assert_same(saved_model(tmp_path / "other"), model)


def test_a_chain_becomes_one_full_snapshot(tmp_path: Path) -> None:
    first, second = random_model(1), random_model(2)
    save(tmp_path / "model", first, 2)
    gone = list(first.tables[0].rows)[:20]
    save(tmp_path / "model", second, 3, kind=DELTA, removed={first.tables[0].spec.name: gone})
    manifest = resharded(tmp_path / "model", tmp_path / "other", 2)
    assert (manifest.name, manifest.base) == ("000001-full", None)
    assert_same(saved_model(tmp_path / "other"), saved_model(tmp_path / "model"))
    assert manifest.num_rows == 400 - 20


def test_a_series_gets_one_snapshot_more(tmp_path: Path) -> None:
    for name in ("model", "other"):
        save(tmp_path / name, random_model(1), 2)
    assert resharded(tmp_path / "model", tmp_path / "other", 3).name == "000002-full"
    assert SnapshotStore(directory_at(tmp_path / "other")).snapshots() == ["000001-full", "000002-full"]


@pytest.mark.parametrize("source", ["", "000001-full"])
def test_a_snapshot_is_not_resharded_into_its_own_directory(tmp_path: Path, source: str) -> None:
    save(tmp_path, random_model(1), 2)
    with pytest.raises(SnapshotError):
        resharded(tmp_path / source, tmp_path, 3)
    assert SnapshotStore(directory_at(tmp_path)).snapshots() == ["000001-full"]


def test_positions_and_completeness_stay(tmp_path: Path) -> None:
    model = random_model(1)
    save(tmp_path / "model", model, 2, is_complete=False)
    manifest = resharded(tmp_path / "model", tmp_path / "other", 3)
    assert (manifest.workers, manifest.is_complete) == (model.workers, False)


def test_marks_of_clients_stay_with_their_shards(tmp_path: Path) -> None:
    save(tmp_path / "model", random_model(1), 3, clients=MARKS)
    assert [file.clients for file in resharded(tmp_path / "model", tmp_path / "same", 3).files] == MARKS
    assert [file.clients for file in resharded(tmp_path / "model", tmp_path / "other", 2).files] == [(), ()]


def test_marks_of_clients_do_not_go_with_other_buckets(tmp_path: Path) -> None:
    uneven = Placement(2, 3, np.arange(NUM_BUCKETS) % 3)
    save(tmp_path / "model", random_model(1), 3, clients=MARKS, placement=uneven)
    assert [file.clients for file in resharded(tmp_path / "model", tmp_path / "same", 3).files] == [()] * 3


# Error paths


def test_nothing_is_left_where_a_source_is_wrong(tmp_path: Path) -> None:
    name = save(tmp_path / "model", random_model(1), 2)
    path = tmp_path / "model" / name / "shard-1-of-2.fss"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(SnapshotCorrupt):
        resharded(tmp_path / "model", tmp_path / "other", 3)
    assert list((tmp_path / "other").iterdir()) == []


def test_no_shards_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "model", random_model(1), 2)
    with pytest.raises(ValueError, match="num_shards is 0, should be 1 to 16384"):
        resharded(tmp_path / "model", tmp_path / "other", 0)
    assert not (tmp_path / "other").exists()
