"""The small disk of a chaos job, which is filled and emptied."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.tools.chaos.log_disk import filled, log_disk

NUM_BYTES = 4 << 20


def room(disk: Path) -> int:
    state = os.statvfs(disk)
    return state.f_bavail * state.f_frsize


def test_a_filled_disk_has_room_again_behind_the_block(tmp_path: Path) -> None:
    try:
        with log_disk(tmp_path / "disk", NUM_BYTES):
            before = room(tmp_path / "disk")
            (tmp_path / "disk" / "a").write_bytes(bytes(1 << 20))
            with filled(tmp_path / "disk") as fill:
                assert room(tmp_path / "disk") == 0
                (tmp_path / "disk" / "a").unlink()
                assert room(tmp_path / "disk") == 1 << 20
                fill()
                with pytest.raises(OSError, match="space") as caught, (tmp_path / "disk" / "b").open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 1)
                assert caught.value.errno == errno.ENOSPC
            (tmp_path / "disk" / "b").unlink()
            assert room(tmp_path / "disk") == before == NUM_BYTES
    except FleetSparseError as error:
        pytest.skip(f"mounting is not permitted here: {error}")
    assert list((tmp_path / "disk").iterdir()) == []


def test_files_of_a_block_that_fails_are_kept(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with pytest.raises((KeyError, FleetSparseError)) as caught, log_disk(disk, NUM_BYTES):
        (disk / "a").write_bytes(b"1" + bytes(1 << 20))
        raise KeyError
    if caught.type is not KeyError:
        pytest.skip(f"mounting is not permitted here: {caught.value}")
    assert not disk.is_mount()
    assert (disk / "a").read_bytes() == b"1" + bytes(1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]
