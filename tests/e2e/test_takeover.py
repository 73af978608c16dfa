"""A pserver of another place takes a shard over, while a worker trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from fleet_sparse.local_pservers import LocalPservers, PserverProcess
from support.jobs import SCRIPTS, TIMEOUT_S, environment
from support.lease_servers import etcd, zookeeper
from support.proxies import CuttingProxy

JOB = {
    "FLEET_SPARSE_CHANNEL": "zmq",  # so that control planes listen on TCP, as between machines
    "FLEET_SPARSE_DURABILITY": "log",
    "FLEET_SPARSE_JOB_ID": "a",
    "FLEET_SPARSE_LEASE_S": "5",
    "FLEET_SPARSE_STALL_S": "1000",
}
RESUMED = "was started again; no push of this worker is lost"


class Job:
    """A worker that counts its steps, and pservers of one shard behind one address."""

    def __init__(self, stack: ExitStack, directory: Path, mode: str, **variables: str) -> None:
        self.directory = directory
        self._stack = stack
        self._variables = {**JOB, "FLEET_SPARSE_ROOT": str(directory), **variables}
        self.first = self.start_pserver("first")
        self.proxy = CuttingProxy(self.first.endpoint)
        stack.callback(self.proxy.close)
        of_worker = LocalPservers((self.proxy.endpoint,), ()).environment()
        with (directory / "worker.log").open("wb") as output:
            self._worker = subprocess.Popen(
                [sys.executable, str(SCRIPTS / "counting.py")],
                cwd=directory,
                env=environment(MODE=mode, **{**JOB, **of_worker}),
                stdout=output,
                stderr=output,
            )
        stack.callback(self._worker.wait)
        stack.callback(self._worker.kill)

    def start_pserver(self, name: str) -> PserverProcess:
        """Starts a supervisor and its pserver."""
        pserver = PserverProcess(
            *(0, 1, "--supervised"),
            cluster_id=5,
            directory=self.directory,
            environment=self._variables,
            log=self.directory / f"{name}.log",
        )
        self._stack.callback(pserver.kill)  # its pserver ends with it
        return pserver

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_true():
            assert time.monotonic() < deadline, [each.read_text() for each in self.directory.glob("*.log")]
            time.sleep(0.05)

    def wait_for_steps(self) -> None:
        begun_with = self.log("worker").count("step")
        self.wait_until(lambda: self.log("worker").count("step") > begun_with + 1)

    def check_counts(self) -> None:
        """Ends the worker, and checks that each of its steps is in the rows once."""
        (self.directory / "finish").touch()
        assert self._worker.wait(TIMEOUT_S) == 0, self.log("worker")
        num_steps, *counts = map(int, re.findall(r"^counted (.*)", self.log("worker"), re.M)[0].split())
        assert set(counts) == {num_steps}


@pytest.mark.slow
@pytest.mark.guarantee("W11")
@pytest.mark.guarantee("W12")
@pytest.mark.parametrize(
    ("coordinator", "mode"),
    [("directory", "async"), ("directory", "sync"), ("zookeeper", "async"), ("etcd", "sync")],
)
def test_a_job_continues_with_the_pserver_that_waited(tmp_path: Path, coordinator: str, mode: str) -> None:
    with ExitStack() as stack:
        variables = {}
        if coordinator != "directory":
            server = {"zookeeper": zookeeper, "etcd": etcd}[coordinator]
            endpoint = stack.enter_context(server(tmp_path / coordinator))
            variables["FLEET_SPARSE_COORDINATOR"] = f"{coordinator}://{endpoint}/a/job"
        job = Job(stack, tmp_path, mode, **variables)
        second = job.start_pserver("second")
        job.wait_until(lambda: "step 100" in job.log("worker"))
        job.wait_until(lambda: "waits for the lease" in job.log("second"))
        pid = int(re.findall(r"starts: pid (\d+)", job.log("first"))[-1])
        os.kill(pid, signal.SIGSTOP)
        try:
            job.proxy.move(second.endpoint)  # which serves once it has the lease
            job.wait_until(lambda: RESUMED in job.log("worker"))
            job.wait_for_steps()
        finally:
            os.kill(pid, signal.SIGCONT)
        job.wait_until(lambda: "LeaseLost" in job.log("first") and "waits for the lease" in job.log("first"))
        job.wait_for_steps()
        job.check_counts()
        assert second.wait() == 0


@pytest.mark.guarantee("W12")
@pytest.mark.parametrize(
    ("end", "mode"),
    [
        (signal.SIGKILL, "async"),
        pytest.param(signal.SIGTERM, "async", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "sync", marks=pytest.mark.slow),
    ],
)
def test_a_job_continues_with_a_pserver_that_is_started_later(tmp_path: Path, end: signal.Signals, mode: str) -> None:
    """The first one and its supervisor are gone, as with their machine, and the lease is free."""
    with ExitStack() as stack:
        job = Job(stack, tmp_path, mode)
        job.wait_until(lambda: "step 100" in job.log("worker"))
        job.first.process.send_signal(end)
        job.first.wait()
        second = job.start_pserver("second")
        job.proxy.move(second.endpoint)
        job.wait_until(lambda: RESUMED in job.log("worker"))
        job.wait_for_steps()
        job.check_counts()
        assert second.wait() == 0
