"""Files of a snapshot, as a load and as a reader of its content open them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.pserver.admin.snapshot_loader import load
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import FULL, Manifest
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.store import SnapshotStore
from support.shards import make_shard
from support.snapshots import SAVED_AT, Model, commit_unchecked, random_model, save, write_file

Read = Callable[[Path], None]


def read_content(path: Path) -> None:
    with open_content(str(path)):
        pass


def read_by_loading(path: Path) -> None:
    shard = make_shard()
    try:
        load(shard, directory_at(path))
    finally:
        shard.close()


@pytest.fixture(params=[read_content, read_by_loading])
def read(request: pytest.FixtureRequest) -> Read:
    made: Read = request.param
    return made


def open_files(under: Path) -> list[str]:
    """Of this process."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [path.name for path in links if path.is_relative_to(under)]


def test_a_file_of_another_save_is_told(read: Read, tmp_path: Path) -> None:
    series = SnapshotStore(directory_at(tmp_path))
    plan = series.plan(FULL, "save")
    file = write_file(series.target(plan, "save"), Model(), shard=0, num_shards=1, save_id="another")
    commit_unchecked(series, plan, Manifest(1, FULL, None, "save", SAVED_AT, (), True, (file,), ()))
    with pytest.raises(SnapshotCorrupt):
        read(tmp_path)


@pytest.mark.parametrize("num_good", [0, 1, 2])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_no_file_stays_open_when_one_is_wrong(
    read: Read, tmp_path: Path, damage: Callable[[Path], None], num_good: int
) -> None:
    damage(tmp_path / save(tmp_path, random_model(1), 3) / f"shard-{num_good}-of-3.fss")
    with pytest.raises(SnapshotError) as caught:
        read(tmp_path)
    assert open_files(tmp_path) == [], caught  # whose traceback has what was opened
