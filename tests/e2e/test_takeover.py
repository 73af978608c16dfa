"""A pserver of another place takes a shard over from one that is suspended, while a worker trains."""

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


@pytest.mark.slow
@pytest.mark.guarantee("W11")
@pytest.mark.guarantee("W12")
@pytest.mark.parametrize(
    ("coordinator", "mode"),
    [("directory", "async"), ("directory", "sync"), ("zookeeper", "async"), ("etcd", "sync")],
)
def test_a_job_continues_with_the_pserver_that_waited(tmp_path: Path, coordinator: str, mode: str) -> None:
    with ExitStack() as stack:
        variables = {**JOB, "FLEET_SPARSE_ROOT": str(tmp_path)}
        if coordinator != "directory":
            server = {"zookeeper": zookeeper, "etcd": etcd}[coordinator]
            endpoint = stack.enter_context(server(tmp_path / coordinator))
            variables["FLEET_SPARSE_COORDINATOR"] = f"{coordinator}://{endpoint}/a/job"

        def start(name: str) -> PserverProcess:
            pserver = PserverProcess(
                *(0, 1, "--supervised"),
                cluster_id=5,
                directory=tmp_path,
                environment=variables,
                log=tmp_path / f"{name}.log",
            )
            stack.callback(pserver.kill)  # its pserver ends with it
            return pserver

        def log(name: str) -> str:
            return (tmp_path / f"{name}.log").read_text()

        first = start("first")
        proxy = CuttingProxy(first.endpoint)
        stack.callback(proxy.close)
        second = start("second")
        of_worker = LocalPservers((proxy.endpoint,), ()).environment()
        with (tmp_path / "worker.log").open("wb") as output:
            worker = subprocess.Popen(
                [sys.executable, str(SCRIPTS / "counting.py")],
                cwd=tmp_path,
                env=environment(MODE=mode, **{**JOB, **of_worker}),
                stdout=output,
                stderr=output,
            )
        stack.callback(worker.wait)
        stack.callback(worker.kill)

        def wait_for_steps() -> None:
            begun_with = log("worker").count("step")
            wait_until(lambda: log("worker").count("step") > begun_with + 1)

        def wait_until(is_true: Callable[[], bool]) -> None:
            deadline = time.monotonic() + TIMEOUT_S
            while not is_true():
                assert time.monotonic() < deadline, [log(name) for name in ("first", "second", "worker")]
                time.sleep(0.05)

        wait_until(lambda: "step 100" in log("worker"))
        wait_until(lambda: "waits for the lease" in log("second"))
        pid = int(re.findall(r"starts: pid (\d+)", log("first"))[-1])
        os.kill(pid, signal.SIGSTOP)
        try:
            proxy.move(second.endpoint)  # which serves once it has the lease
            wait_until(lambda: "was started again; no push of this worker is lost" in log("worker"))
            wait_for_steps()
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: "LeaseLost" in log("first") and "waits for the lease" in log("first"))
        wait_for_steps()
        (tmp_path / "finish").touch()
        assert worker.wait(TIMEOUT_S) == 0, log("worker")
        num_steps, *counts = map(int, re.findall(r"^counted (.*)", log("worker"), re.M)[0].split())
        assert set(counts) == {num_steps}
        assert second.wait() == 0
