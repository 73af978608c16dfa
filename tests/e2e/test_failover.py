"""A pserver of a job that dies and is started again: real fleetrun, real pservers, real Paddle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.placement import Placement
from support.jobs import SCRIPTS, TIMEOUT_S, environment

SCRIPT = "counting.py"
NUM_IDS = 8


class RunningJob:
    """A fleetrun of 2 pservers and 2 workers, and its logs."""

    def __init__(self, launcher: subprocess.Popen[str], directory: Path) -> None:
        self.launcher = launcher
        self._directory = directory

    def log(self, name: str) -> str:
        path = self._directory / "log" / name
        return path.read_text() if path.exists() else ""

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = {path.name: path.read_text()[-3000:] for path in (self._directory / "log").glob("*log.*")}
            assert time.monotonic() < deadline and self.launcher.poll() is None, logs
            time.sleep(0.05)

    def steps(self, worker: int) -> int:
        return max(map(int, re.findall(r"^step (\d+)", self.log(f"workerlog.{worker}"), re.M)), default=0)

    def wait_for_steps(self, num_steps: int) -> None:
        """Waits until each worker has made so many more steps."""
        targets = [self.steps(worker) + num_steps for worker in range(2)]
        self.wait_for(lambda: all(self.steps(worker) >= target for worker, target in enumerate(targets)))

    def pserver_pid(self, shard: int) -> int:
        return int(re.findall(r"starts: pid (\d+)", self.log(f"serverlog.{shard}"))[-1])

    def finish(self) -> None:
        (self._directory / "finish").touch()
        self.wait_for(lambda: all("ended well" in self.log(f"workerlog.{worker}") for worker in range(2)))
        self.launcher.wait(TIMEOUT_S)


@contextmanager
def running_job(directory: Path, **variables: str) -> Iterator[RunningJob]:
    command = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", "log"]
    command += ["--server_num", "2", "--worker_num", "2", str(SCRIPTS / SCRIPT)]
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment(**variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            yield RunningJob(launcher, directory)
        finally:
            # A signal ends fleetrun but not its children, which are in its process group.
            with suppress(ProcessLookupError):  # all of them ended by themselves
                os.killpg(launcher.pid, signal.SIGKILL)


def lost_pushes(log: str) -> dict[int, int]:
    """Pushes that a worker reported as lost, by shard."""
    lost = {0: 0, 1: 0}
    for shard, count in re.findall(r"shard (\d) at .*: (\d+) of \d+ pushes of this worker are lost", log):
        lost[int(shard)] += int(count)
    return lost


def check_counts(job: RunningJob) -> None:
    """Checks that each row has exactly the steps of its worker that were not reported as lost."""
    placement = Placement.even(2)
    for worker in range(2):
        log = job.log(f"workerlog.{worker}")
        lost = lost_pushes(log)
        num_steps, *counts = map(int, re.findall(r"^counted (.*)", log, re.M)[0].split())
        ids = np.arange(100 * worker, 100 * worker + NUM_IDS)
        shards = placement.shards_of(ids)
        assert counts == [num_steps - lost[int(shard)] for shard in shards], log


@pytest.mark.parametrize("mode", ["async"])
def test_killed_pserver_costs_the_reported_pushes_only(tmp_path: Path, mode: str) -> None:
    with running_job(tmp_path, MODE=mode) as job:
        job.wait_for(lambda: "saved" in job.log("workerlog.0"))
        job.wait_for_steps(100)
        for shard in (1, 0):
            os.kill(job.pserver_pid(shard), signal.SIGKILL)
            job.wait_for_steps(100)
        job.finish()
        assert job.launcher.returncode == 0
        for worker in range(2):
            assert all(lost_pushes(job.log(f"workerlog.{worker}")).values()), job.log(f"workerlog.{worker}")
        check_counts(job)
