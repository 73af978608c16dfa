"""The pservers of a job as real processes, and workers connected to them. Ports are the system's choice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table import DenseSpec, TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.worker.client import Client
from fleet_sparse.worker.control import ControlClient
from fleet_sparse.worker.zmq_channel import ZmqChannel

START_S = 60.0
ROOT = Path(__file__).parent.parent.parent


class PserverProcess:
    """One process of `python -m fleet_sparse.pserver`.

    Attributes:
        log: The file that it writes to.
    """

    def __init__(
        self, shard: int, num_shards: int, directory: Path, *, control: str, arguments: Sequence[str], **variables: str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._shard = shard
        self.log = directory / f"pserver-{shard}-{time.monotonic_ns()}.log"
        self._endpoint_file = self.log.with_suffix(".endpoint")
        command = [sys.executable, "-m", "fleet_sparse.pserver", "--shard", str(shard), "--num-shards", str(num_shards)]
        command += ["--control", control, "--servers", ",".join([control] * num_shards), "--cluster-id", "1"]
        command += ["--endpoint-file", str(self._endpoint_file), *arguments]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env={**os.environ, "PYTHONPATH": path, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def endpoint(self) -> str:
        """`host:port` of its control plane; waits until the process is ready."""
        until = time.monotonic() + START_S
        while not self._endpoint_file.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"pserver {self._shard} did not start:\n{self.log.read_text()}")
            time.sleep(0.01)
        return self._endpoint_file.read_text().strip()

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def suspend(self) -> None:
        """Stops it where it is, with all its connections."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)


class PserverJob:
    """The pservers of one job; `job[0]` is the process of shard 0.

    Attributes:
        directory: Their working directory, and so their root for snapshots.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._all: list[PserverProcess] = []
        self._running: list[PserverProcess] = []
        self._variables: dict[str, str] = {}

    def start(self, num_shards: int, *arguments: str, **variables: str) -> PserverJob:
        """Starts the processes with these arguments and environment variables; waits until all are ready."""
        self._variables = variables
        self._running = [self._start(shard, num_shards, "127.0.0.1:0", arguments) for shard in range(num_shards)]
        for process in self._running:
            assert process.endpoint
        return self

    def restart(self, shard: int, *arguments: str) -> PserverProcess:
        """Kills a pserver and starts it again at the same address; waits until it is ready."""
        endpoint = self._running[shard].endpoint
        self._running[shard].kill()
        self._running[shard] = self._start(shard, len(self._running), endpoint, arguments)
        assert self._running[shard].endpoint == endpoint
        return self._running[shard]

    def __getitem__(self, shard: int) -> PserverProcess:
        return self._running[shard]

    @property
    def endpoints(self) -> list[str]:
        """Addresses of the control planes, in the order of the shards."""
        return [process.endpoint for process in self._running]

    def close(self) -> None:
        """Kills all that were ever started."""
        for process in self._all:
            if process.process.poll() is None:
                process.kill()

    def _start(self, shard: int, num_shards: int, control: str, arguments: Sequence[str]) -> PserverProcess:
        process = PserverProcess(
            shard, num_shards, self.directory, control=control, arguments=arguments, **self._variables
        )
        self._all.append(process)
        return process


@pytest.fixture
def pserver_job(tmp_path: Path) -> Iterator[PserverJob]:
    """Pservers to be started, `pserver_job.start(2)`; killed at the end of the test."""
    job = PserverJob(tmp_path / "pservers")
    try:
        yield job
    finally:
        job.close()


@contextmanager
def connected(
    endpoints: Sequence[str],
    specs: Sequence[TableSpec | DenseSpec],
    settings: Settings,
    worker_index: int = 0,
    num_workers: int = 1,
) -> Iterator[tuple[ControlClient, Client]]:
    """A worker's connection to pservers."""
    with ControlClient(endpoints, settings) as control:
        registrations = control.register(specs, worker_index, num_workers)
        channel = ZmqChannel([registration.data_endpoint for registration in registrations], settings)
        placement = Placement.even(len(registrations), registrations[0].placement_version)
        client = Client(channel, control.identity, registrations, placement, settings)
        control.watch_heartbeats(lambda beat: client.observe_incarnation(beat.shard, beat.incarnation))
        with client:
            yield control, client
