"""Leases in a directory whose disk is full, or whose former holder is suspended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.pserver.lease.directory import DirectoryCoordinator
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
