"""Processes of a job on this machine: pservers that live as long as a `with` block, and commands that run together.

Meant for trials and tests.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import fleet_sparse
from fleet_sparse.errors import FleetSparseError, ShardUnavailable

_READY_S = 120.0
_END_S = 30.0
_POLL_S = 0.02
_ANY_PORT = "127.0.0.1:0"


def child_environment(**variables: str) -> dict[str, str]:
    """Returns the environment of this process with `variables`, and a PYTHONPATH where a child finds this package."""
    environment = {**os.environ, **variables}
    here = str(Path(fleet_sparse.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [environment.get("PYTHONPATH")])])
    return environment


class PserverProcess:
    """A `python -m fleet_sparse.pserver` on ports that the system chooses. It starts with the object.

    Args:
        shard: Index of its shard.
        num_shards: Number of shards of its job.
        arguments: Further command line arguments, which override those of this class.
        cluster_id: u64, the same for all pservers of a job.
        directory: Directory for its files.
        environment: Variables besides those of this process.
        log: Destination of its output: a file to append to, a file descriptor or `subprocess.DEVNULL`; None for that
            of this process.

    Attributes:
        process: The process that runs, or ran last.
        log: The argument `log`.
    """

    def __init__(
        self,
        shard: int,
        num_shards: int,
        *arguments: str,
        cluster_id: int,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        log: Path | int | None = None,
    ) -> None:
        self.log = log
        self._shard = shard
        self._num_shards = num_shards
        self._cluster_id = cluster_id
        self._environment = dict(environment or {})
        self._endpoint_file = Path(tempfile.mkdtemp(prefix=f"pserver-{shard}-", dir=directory)) / "endpoint"
        self.process = self._start(_ANY_PORT, arguments)

    @property
    def endpoint(self) -> str:
        """`host:port` of its control plane, once it is ready.

        Raises:
            ShardUnavailable: It ended before it was ready, or is not ready in time.
        """
        deadline = time.monotonic() + _READY_S
        while not self._endpoint_file.exists():
            if self.process.poll() is not None:
                raise self._unavailable(f"ended with exit code {self.process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise self._unavailable(f"was not ready in {_READY_S:g} s")
            time.sleep(_POLL_S)
        return self._endpoint_file.read_text().strip()

    def suspend(self) -> None:
        """Suspends it; its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes it after `suspend`."""
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Sends SIGTERM, and resumes it if it is suspended. Does not wait."""
        self.process.terminate()
        self.resume()

    def wait(self, timeout_s: float = _END_S) -> int:
        """Returns its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: It did not end in time.
        """
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """Kills it with SIGKILL and waits until it has ended."""
        self.process.kill()
        self.process.wait()

    def restart(self, *arguments: str) -> None:
        """Kills it and starts it at the same address with these arguments; returns when it is ready.

        Raises:
            ShardUnavailable: As `endpoint`.
        """
        endpoint = self.endpoint
        self.kill()
        self._endpoint_file.unlink()
        self.process = self._start(endpoint, arguments)
        _ = self.endpoint

    def _start(self, control: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "fleet_sparse.pserver"]
        command += ["--shard", str(self._shard), "--num-shards", str(self._num_shards)]
        command += ["--control", control, "--servers", ",".join([control] * self._num_shards)]
        command += ["--cluster-id", str(self._cluster_id), "--endpoint-file", str(self._endpoint_file), *arguments]
        environment = child_environment(**self._environment)
        if isinstance(self.log, Path):
            with self.log.open("ab") as output:
                return subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        return subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)

    def _unavailable(self, what: str) -> ShardUnavailable:
        where = f"; its log is {self.log}" if isinstance(self.log, Path) else ""
        return ShardUnavailable(f"shard {self._shard}: its pserver {what}{where}", shard=self._shard, endpoint="")


class LocalPservers(NamedTuple):
    """Running pservers, in the order of their shards."""

    endpoints: tuple[str, ...]
    """`host:port` of each control plane."""
    processes: tuple[PserverProcess, ...]

    def environment(self, worker_index: int = 0, num_workers: int = 1) -> dict[str, str]:
        """Returns the variables that fleetrun would set for a worker of these pservers."""
        return {
            "TRAINING_ROLE": "TRAINER",
            "PADDLE_TRAINER_ID": str(worker_index),
            "PADDLE_TRAINERS_NUM": str(num_workers),
            "PADDLE_TRAINER_ENDPOINTS": ",".join([_ANY_PORT] * num_workers),
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(self.endpoints),
            "POD_IP": "127.0.0.1",
            "PADDLE_PORT": "0",
        }


@contextmanager
def local_pservers(
    num_shards: int,
    *,
    root: Path,
    load_dirname: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log: int | None = None,
) -> Iterator[LocalPservers]:
    """Starts pservers on ports that the system chooses and waits until all are ready; ends them with the block.

    Args:
        num_shards: Number of pservers.
        root: Directory under which they save and load.
        load_dirname: Snapshot that they load at their start; None for none.
        arguments: Further command line arguments, as of `PserverProcess`.
        environment: Variables besides those of this process.
        log: File descriptor for their output, or `subprocess.DEVNULL`; None for the output of this process.

    Raises:
        ShardUnavailable: One ended, or is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="fleet_sparse-") as directory:
        variables = {"FLEET_SPARSE_ROOT": str(root), **(environment or {})}
        arguments = [*arguments] if load_dirname is None else [*arguments, "--load", load_dirname]
        cluster_id = secrets.randbits(64)
        processes: list[PserverProcess] = []
        try:
            for shard in range(num_shards):
                processes.append(
                    PserverProcess(
                        shard,
                        num_shards,
                        *arguments,
                        cluster_id=cluster_id,
                        directory=Path(directory),
                        environment=variables,
                        log=log,
                    )
                )
            yield LocalPservers(tuple(process.endpoint for process in processes), tuple(processes))
        finally:
            _end(processes)


def _end(processes: Sequence[PserverProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait()
        except subprocess.TimeoutExpired:
            process.kill()


class Child(NamedTuple):
    """A command that runs together with others."""

    name: str
    """Name in messages, as `worker 1`."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """Variables besides those of this process."""


def run_together(children: Sequence[Child], *, limit_s: float) -> list[str]:
    """Runs commands at the same time and returns the standard output of each, once all have succeeded.

    None outlives this call: if one fails, the others, which may be waiting for it, are killed.

    Args:
        children: The commands, at least one.
        limit_s: Seconds that they may run.

    Raises:
        FleetSparseError: One ended with another exit code than 0; the message ends with the last line of its standard
            error. Or some still ran after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="fleet_sparse-") as directory, ExitStack() as end:
        started = [_Started(child, Path(directory) / str(number), end) for number, child in enumerate(children)]
        while True:
            exit_codes = [each.process.poll() for each in started]
            for each, code in zip(started, exit_codes, strict=True):
                if code:
                    raise FleetSparseError(f"{each.name}: ended with exit code {code}: {each.last_words()}")
            if None not in exit_codes:
                return [each.output.read_text() for each in started]
            if time.monotonic() > deadline:
                late = ", ".join(each.name for each, code in zip(started, exit_codes, strict=True) if code is None)
                raise FleetSparseError(f"{late}: still running after {limit_s:g} s, and was killed. Allow more time")
            time.sleep(_POLL_S)


class _Started:
    """A child that runs until it ends or `end` closes, with its output in files that begin with `path`."""

    def __init__(self, child: Child, path: Path, end: ExitStack) -> None:
        self.name = child.name
        self.output = path.with_suffix(".out")
        self._errors = path.with_suffix(".err")
        with self.output.open("wb") as output, self._errors.open("wb") as errors:
            environment = child_environment(**child.environment)
            self.process = subprocess.Popen(child.command, env=environment, stdout=output, stderr=errors)
        end.callback(self._kill)

    def last_words(self) -> str:
        """The last line of its standard error."""
        lines = self._errors.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()
