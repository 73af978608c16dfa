from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleet_sparse import machine_memory


def test_total_is_at_least_the_physical_memory() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert physical <= machine_memory.total_bytes()


def test_what_is_left_is_less_than_the_total() -> None:
    assert 0 < machine_memory.available_bytes() < machine_memory.total_bytes()


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of control groups, of a process in group `/job` on a machine with nine tenths of its memory free."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n")
    monkeypatch.setattr(machine_memory, "_PROC", proc)
    monkeypatch.setattr(machine_memory, "_CGROUPS", tmp_path / "cgroup")
    return tmp_path


def write_group(root: Path, line: str, group: str, files: dict[str, str]) -> None:
    (root / "proc/self/cgroup").write_text(f"3:cpu:/other\n{line}\n")
    directory = root / "cgroup" / group
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name).write_text(text)


VERSION_1 = {"memory.limit_in_bytes": "1000\n", "memory.usage_in_bytes": "800\n"}
V1_STATISTICS = "active_file 7\ntotal_active_file 20\ntotal_inactive_file 80\n"
VERSION_2 = {"memory.max": "1000\n", "memory.current": "800\n"}


@pytest.mark.parametrize(
    ("line", "group", "files", "share"),
    [
        ("0::/job", "job", VERSION_2 | {"memory.stat": "anon 500\nactive_file 100\ninactive_file 200\n"}, 0.5),
        ("0::/job", "", VERSION_2 | {"memory.stat": "anon 500\nactive_file 0\ninactive_file 300\n"}, 0.5),
        ("4:memory:/job", "memory/job", VERSION_1 | {"memory.stat": V1_STATISTICS}, 0.7),
        ("0::/job", "job", VERSION_2 | {"memory.max": "max\n", "memory.stat": "active_file 0\ninactive_file 0\n"}, 0.1),
        ("0::/job", "job", {}, 0.1),
    ],
    ids=["version 2", "version 2, in a container", "version 1", "without a limit", "without files"],
)
def test_used_share_is_that_of_the_fuller_one(
    cgroups: Path, line: str, group: str, files: dict[str, str], share: float
) -> None:
    write_group(cgroups, line, group, files)
    assert machine_memory.used_share() == pytest.approx(share)


def test_a_system_without_control_groups_has_its_own_share_alone(cgroups: Path) -> None:
    assert machine_memory.used_share() == pytest.approx(0.1)


def test_limit_is_that_of_the_smaller_one(cgroups: Path) -> None:
    assert machine_memory.limit_bytes() == 1000 << 10
    write_group(cgroups, "0::/job", "job", VERSION_2 | {"memory.stat": "active_file 0\ninactive_file 0\n"})
    assert machine_memory.limit_bytes() == 1000
