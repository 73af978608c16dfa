"""A second user of the machine floods every socket of a training pserver: nothing is done, and training stays exact."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fleet_sparse.control_socket import socket_path
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.local_pservers import PserverProcess, child_environment
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.job_keys import make_keys
from support.pserver_job import connected
from support.shards import CLUSTER, SGD

TESTS = Path(__file__).parent.parent
NUM_ROWS = 5_000
MAX_GROWTH_BYTES = 64 << 20
MAX_LOG_BYTES = 1 << 20
IDS, _ = Deduplicator(Placement.even(2)).unique([np.arange(NUM_ROWS)], SGD.salt)


class Target(NamedTuple):
    """A pserver, and where strangers reach it."""

    process: PserverProcess
    log: Path
    data: str
    control: str

    def memory(self) -> tuple[int, int]:
        """Returns resident bytes now, and their peak since `forget_peak`."""
        status = Path(f"/proc/{self.process.process.pid}/status").read_text()
        now, peak = (re.search(rf"{name}:\s+(\d+)", status) for name in ("VmRSS", "VmHWM"))
        assert now is not None
        assert peak is not None
        return int(now.group(1)) << 10, int(peak.group(1)) << 10

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.process.pid}/clear_refs").write_text("5")


def start(stack: ExitStack, kind: str, directory: Path, settings: Settings, shard: int = 0) -> Target:
    """Starts one of two pservers of a job; unless `kind` is unix, other machines can reach it."""
    directory.mkdir(exist_ok=True)
    log = directory / f"pserver-{shard}.log"
    environment = {"FLEET_SPARSE_ROOT": str(directory)}
    arguments = () if kind == "unix" else ("--servers", "127.0.0.1:0,203.0.113.77:0")
    if kind == "insecure":
        environment["FLEET_SPARSE_INSECURE"] = "1"
    if kind == "keys":
        environment["FLEET_SPARSE_KEYS"] = settings.keys
    process = PserverProcess(
        shard, 2, *arguments, cluster_id=CLUSTER, directory=directory, environment=environment, log=log
    )
    stack.callback(process.kill)
    address = Address.parse(process.endpoint)
    deadline = time.monotonic() + 20
    while not (found := re.search(r"data plane ((?:unix|tcp):[^\s,]+)", log.read_text())):  # behind the endpoint file
        assert time.monotonic() < deadline
        time.sleep(0.01)
    data = found[1]
    return Target(process, log, data, str(socket_path(address.port)) if kind != "keys" else process.endpoint)


@contextmanager
def flooded(target: Target, seconds: float, *, calls: bool) -> Iterator[subprocess.Popen[str]]:
    """A second user floods a pserver meanwhile."""
    command = [sys.executable, "-m", "support.flood", "--data", target.data, "--control", target.control]
    command += ["--seconds", str(seconds), *(["--calls"] if calls else [])]
    with subprocess.Popen(command, cwd=TESTS, env=child_environment(), stdout=subprocess.PIPE, text=True) as flood:
        try:
            yield flood
        finally:
            flood.kill()


def train_until(client: Client, flood: subprocess.Popen[str], num_steps: int) -> tuple[int, list[float]]:
    """Trains, and checks every row, until a flood has ended; returns the steps in all, and the seconds of each."""
    rows, took_s = np.empty((NUM_ROWS, SGD.dim), np.float32), []
    while flood.poll() is None or len(took_s) < 20:
        begun_at = time.perf_counter()
        num_steps += 1
        client.push([RowBatch(SGD, IDS, np.ones_like(rows), 1.0, num_steps)])
        client.pull([RowBatch(SGD, IDS, rows)])
        took_s.append(time.perf_counter() - begun_at)
        assert (rows == 0.5 - num_steps).all()
    return num_steps, took_s


def percentile_ms(took_s: Sequence[float], percent: float) -> float:
    return float(np.percentile(took_s, percent)) * 1000


@pytest.mark.parametrize("kind", ["unix", "keys", pytest.param("insecure", marks=pytest.mark.slow)])
def test_floods_of_another_user_change_nothing(kind: str, tmp_path: Path) -> None:
    check_flood(kind, 1.0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unix", "keys", "insecure"])
def test_floods_of_10_s_delay_little_more_than_elsewhere(kind: str, tmp_path: Path) -> None:
    check_flood(kind, 10.0, tmp_path, compares=True)


def check_flood(kind: str, seconds: float, tmp_path: Path, *, compares: bool = False) -> None:
    """Trains while a second user floods a pserver, and perhaps before that another one, for comparison."""
    if kind == "unix" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    settings = Settings(keys=str(make_keys(tmp_path / "keys")) if kind == "keys" else "")
    with ExitStack() as stack:
        target, other = (start(stack, kind, tmp_path / "job", settings, shard) for shard in range(2))
        endpoints = [each.process.endpoint for each in (target, other)]
        _, client = stack.enter_context(connected(endpoints, [SGD], settings, mode=Mode()))
        num_steps, before_s = 0, [float("nan")]
        if compares:
            elsewhere = start(stack, kind, tmp_path / "elsewhere", settings)
            with flooded(elsewhere, seconds, calls=False) as flood:
                num_steps, before_s = train_until(client, flood, num_steps)
        resident, _ = target.memory()
        target.forget_peak()
        with flooded(target, seconds, calls=kind != "insecure") as flood:  # without keys everyone is a trainer
            num_steps, took_s = train_until(client, flood, num_steps)
            assert flood.stdout is not None
            found: dict[str, Any] = json.loads(flood.stdout.read())
        _, peak = target.memory()
        assert target.process.process.poll() is None
    ratio = percentile_ms(took_s, 99) / percentile_ms(before_s, 99)
    num_tries, num_connected, num_answered = np.sum(list(found["attacks"].values()), axis=0).tolist()
    print(
        f"flood {kind}: {seconds:g} s, {num_tries} connections, {num_connected} taken, {num_answered} bytes answered; "
        f"{len(took_s)} steps, p99 {percentile_ms(took_s, 99):.2f} ms, {ratio:.2f} x elsewhere; "
        f"+{(peak - resident) >> 20} MB, log {target.log.stat().st_size} bytes"
    )
    assert num_tries > 100
    assert found["calls"] == 0
    if kind == "unix":
        assert num_answered == 0
    assert peak - resident < MAX_GROWTH_BYTES
    assert target.log.stat().st_size < MAX_LOG_BYTES
    assert "Traceback" not in target.log.read_text()
