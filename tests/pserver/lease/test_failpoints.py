"""A process that dies at any storage call while it takes a lease leaves one that the next process gets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fleet_sparse.pserver.lease.directory import DirectoryCoordinator
from support.failpoints import AFTER, BEFORE, Failpoint

SHARD = "shard-0-of-1"
CALLS = ("pwrite", "fsync", "link", "rename", "unlink", "mkdir")
NUM_LEASES = 4


class Life:
    """A process that takes a lease several times.

    Attributes:
        granted: Generations so far.
    """

    def __init__(self, directory: Path) -> None:
        self.granted = [0]
        self._directory = directory

    def run(self) -> None:
        for _ in range(NUM_LEASES):
            coordinator = DirectoryCoordinator(self._directory, "a job")
            generation = coordinator.lease(SHARD, 10.0)
            assert isinstance(generation, int)
            self.granted.append(generation)
            coordinator.close()


def num_calls(directory: Path, call: str) -> int:
    failpoint = Failpoint()
    failpoint.run(Life(directory).run)
    return failpoint.counts[call]


@pytest.mark.guarantee("W11")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("call", CALLS)
def test_the_next_lease_has_a_larger_generation(tmp_path: Path, call: str, when: str) -> None:
    number_of_calls = num_calls(tmp_path / "counted", call)
    assert number_of_calls > 0
    for number in range(number_of_calls):
        directory, left = tmp_path / f"{number}", tmp_path / f"{number}-left"
        life, failpoint = Life(directory), Failpoint(call, number, when)
        # Nobody has a lock on the copies, as after the end of the process.
        failpoint.run(life.run, lambda directory=directory, left=left: _copy(directory, left))
        assert failpoint.has_crashed
        coordinator = DirectoryCoordinator(left, "a job")
        generation = coordinator.lease(SHARD, 10.0)
        assert isinstance(generation, int)
        assert generation > max(life.granted)
        coordinator.close()


def _copy(directory: Path, left: Path) -> None:
    if directory.exists():
        shutil.copytree(directory, left)
