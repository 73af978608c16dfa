"""Leases in a directory whose disk is full, or whose former holder is suspended."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.pserver.lease import directory as of_directory
from fleet_sparse.pserver.lease.coordinator import this_process
from fleet_sparse.pserver.lease.directory import LEASES, DirectoryCoordinator, writer_of
from fleet_sparse.tools.chaos.log_disk import filled, log_disk

TTL_S = 30.0


def test_leases_are_taken_on_a_full_disk(tmp_path: Path) -> None:
    try:
        with log_disk(tmp_path / "disk", 4 << 20):
            coordinator = DirectoryCoordinator(tmp_path / "disk" / "leases", "job")
            assert coordinator.lease("shard", TTL_S) == 1
            coordinator.close()
            with filled(tmp_path / "disk") as fill:
                for generation in (2, 3, 4):
                    coordinator = DirectoryCoordinator(tmp_path / "disk" / "leases", "job")
                    assert coordinator.lease("shard", TTL_S) == generation
                    assert coordinator.renew("shard")
                    coordinator.close()
                    fill()
    except FleetSparseError as error:
        pytest.skip(f"mounting is not permitted here: {error}")


def test_the_file_of_a_suspended_holder_is_not_used_again(tmp_path: Path) -> None:
    former, later, last = (DirectoryCoordinator(tmp_path, "job") for _ in range(3))
    former.lease("shard", 0.01)
    while later.lease("shard", TTL_S) != 2:  # the former one still has its lock
        pass
    assert (tmp_path / "shard.spare").exists()
    later.close()
    assert last.lease("shard", TTL_S) == 3
    modified_ns = os.stat(tmp_path / "shard.3").st_mtime_ns
    assert not former.renew("shard")
    assert os.stat(tmp_path / "shard.3").st_mtime_ns == modified_ns


def test_nothing_of_a_longer_lease_stays_in_a_spare_file(tmp_path: Path) -> None:
    for generation, ttl_s in enumerate((10.25, 10.25, 10.0, 10.0), 1):
        coordinator = DirectoryCoordinator(tmp_path, "job" * 200)
        assert coordinator.lease("shard", ttl_s) == generation
        coordinator.close()


@pytest.mark.parametrize(
    ("left_s", "is_locked", "stays"), [(-1.0, False, False), (-1.0, True, True), (60.0, False, True)]
)
def test_unfinished_files_of_dead_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, is_locked: bool, stays: bool
) -> None:
    monkeypatch.setattr(of_directory, "_LEFT_S", left_s)
    unfinished, of_other = tmp_path / "shard.new-0123", tmp_path / "shard1.new-0123"
    for path in (unfinished, of_other):
        path.touch()
    coordinator = DirectoryCoordinator(tmp_path, "job")
    with unfinished.open() as file:
        if is_locked:
            fcntl.flock(file, fcntl.LOCK_EX)
        coordinator.lease("shard", TTL_S)
    coordinator.close()
    assert unfinished.exists() is stays
    assert of_other.exists()


def test_the_writer_of_a_log_is_who_holds_its_newest_lease(tmp_path: Path) -> None:
    log = tmp_path / "shard-0-of-1"
    assert writer_of(log) is None
    coordinator = DirectoryCoordinator(tmp_path / LEASES, "job")
    coordinator.lease(log.name, TTL_S)
    writer = writer_of(log)
    assert writer is not None
    assert writer.process == this_process()
    coordinator.close()
    assert writer_of(log) is None


def test_to_look_for_a_writer_does_not_take_the_lease(tmp_path: Path) -> None:
    coordinator = DirectoryCoordinator(tmp_path / LEASES, "job")
    assert coordinator.lease("shard", TTL_S) == 1
    coordinator.close()
    assert writer_of(tmp_path / "shard") is None
    assert coordinator.lease("shard", TTL_S) == 2
    coordinator.close()
