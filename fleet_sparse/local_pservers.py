"""Pserver processes on this machine, for as long as a `with` block lasts: to try things out, and for tests."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import fleet_sparse
from fleet_sparse.errors import ShardUnavailable

_READY_S = 120.0
_END_S = 10.0
_POLL_S = 0.02


class LocalPservers(NamedTuple):
    """Running pservers, in the order of their shards."""

    endpoints: tuple[str, ...]
    """`host:port` of each control plane."""
    processes: tuple[subprocess.Popen[bytes], ...]

    def environment(self, worker_index: int = 0, num_workers: int = 1) -> dict[str, str]:
        """The variables that fleetrun would give a worker of these pservers."""
        return {
            "TRAINING_ROLE": "TRAINER",
            "PADDLE_TRAINER_ID": str(worker_index),
            "PADDLE_TRAINERS_NUM": str(num_workers),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(["127.0.0.1:0"] * num_workers),
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
    environment: Mapping[str, str] | None = None,
    log: int | None = None,
) -> Iterator[LocalPservers]:
    """Starts pservers on ports the system gives and waits until all are ready; ends them at the end of the block.

    Args:
        num_shards: How many.
        root: Directory under which they save and load.
        load_dirname: Snapshot to begin with.
        environment: Variables besides those of this process.
        log: Where their output goes, a file descriptor or `subprocess.DEVNULL`; with this process's when left out.

    Raises:
        ShardUnavailable: One ended, or is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="fleet_sparse-") as directory:
        files = [Path(directory) / f"endpoint-{shard}" for shard in range(num_shards)]
        variables = {**os.environ, "PYTHONPATH": _path(), "FLEET_SPARSE_ROOT": str(root), **(environment or {})}
        cluster_id = secrets.randbits(64)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for shard, file in enumerate(files):
                command = _command(shard, num_shards, cluster_id, file, load_dirname)
                processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
            yield LocalPservers(tuple(_wait_until_ready(processes, files)), tuple(processes))
        finally:
            _end(processes)


def _command(shard: int, num_shards: int, cluster_id: int, file: Path, load_dirname: str | None) -> list[str]:
    command = [sys.executable, "-m", "fleet_sparse.pserver", "--shard", str(shard), "--num-shards", str(num_shards)]
    command += ["--control", "127.0.0.1:0", "--servers", ",".join(["127.0.0.1:0"] * num_shards)]
    command += ["--cluster-id", str(cluster_id), "--endpoint-file", str(file)]
    return command if load_dirname is None else [*command, "--load", load_dirname]


def _wait_until_ready(processes: Sequence[subprocess.Popen[bytes]], files: Sequence[Path]) -> Iterator[str]:
    deadline = time.monotonic() + _READY_S
    for shard, (process, file) in enumerate(zip(processes, files, strict=True)):
        while not file.exists():
            if process.poll() is not None:
                what = f"ended with exit code {process.returncode} before it was ready"
                raise ShardUnavailable(f"shard {shard}: its pserver {what}", shard=shard, endpoint="")
            if time.monotonic() > deadline:
                what = f"was not ready in {_READY_S:g} s"
                raise ShardUnavailable(f"shard {shard}: its pserver {what}", shard=shard, endpoint="")
            time.sleep(_POLL_S)
        yield file.read_text().strip()


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _path() -> str:
    """A PYTHONPATH on which a child finds this very package."""
    here = str(Path(fleet_sparse.__file__).resolve().parent.parent)
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
