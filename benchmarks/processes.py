"""Processes of a benchmark: workers that wait for commands, and CPU and memory of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet_sparse.local_pservers import LocalPservers, child_environment

Worker = subprocess.Popen[str]


@contextmanager
def workers(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> Iterator[list[Worker]]:
    """Starts processes that run as long as the block lasts.

    Args:
        commands: For each, a module of this checkout with its arguments, and additional environment variables.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=child_environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for arguments, variables in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def asked(processes: Sequence[Worker], question: Any) -> list[str]:
    """Sends all processes a line at the same time and returns their answers.

    Raises:
        SystemExit: One ended.
    """
    for process in processes:
        assert process.stdin is not None
        print(question, file=process.stdin, flush=True)
    answers = [process.stdout.readline() for process in processes if process.stdout is not None]
    if not all(answers):
        raise SystemExit("a worker ended")
    return answers


NO_STANDBY = {"FLEET_SPARSE_STANDBY": "0"}
"""Variables of pservers without a standby, whose start would count as theirs."""


def with_children(pids: Sequence[int]) -> list[int]:
    """Returns processes and their children: a pserver is the child of its supervisor."""
    children = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in pids]
    return [*pids, *(int(child) for each in children for child in each)]


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def thread_seconds(pservers: LocalPservers) -> list[dict[int, float]]:
    """Returns the CPU seconds of each pserver's threads so far."""
    directories = [Path(f"/proc/{pserver.process.pid}/task") for pserver in pservers.processes]
    return [
        {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9 for task in directory.iterdir()}
        for directory in directories
    ]


def all_busy_s() -> float:
    """Returns the CPU seconds of all processes of this machine so far."""
    with open("/proc/stat") as lines:
        user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(int, lines.readline().split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
