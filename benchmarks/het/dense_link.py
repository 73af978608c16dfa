"""How many bytes do dense parameters send over the busiest link of a sync job? As the kernel counts them.

Each worker is on a host of its own (`benchmarks/het/network.py`). Either a pserver for dense ranges is on each of these
hosts, too, and one for rows on another (`FLEET_SPARSE_ROW_SHARDS=1`), or the workers add gradients up among themselves,
as with `PserverStrategy(dense="all_reduce")`. The counters of all legs are read while every worker waits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.het.network import Host, hosts, pservers_on, worker_environment
from benchmarks.options import AT_LEAST_1
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate

BESIDE, ALL_REDUCE = "dense ranges beside the workers", 'dense="all_reduce"'
WAYS = (BESIDE, ALL_REDUCE)
FLOAT_BYTES = 4
_RATE = "10gbit"
_FIRST_STEPS = 3
_PORT = 7001
_READY = "ready"

Step = Callable[[], None]


def bytes_over_ring(way: str, num_workers: int, num_values: int, num_steps: int) -> float:
    """Returns the bytes that a step sends over the busiest direction of a link, over `2 D (W - 1) / W` of a ring."""
    with hosts(num_workers + 1, _RATE) as all_hosts, ExitStack() as stack:
        own, endpoints = all_hosts[1:], ""
        if way == BESIDE:
            endpoints = stack.enter_context(pservers_on(all_hosts, FLEET_SPARSE_ROW_SHARDS="1"))
        workers = [_start(stack, way, own, endpoints, worker, num_values) for worker in range(num_workers)]
        _run(workers, 0)  # all are connected, and worker 0 has assigned the values
        _run(workers, _FIRST_STEPS)
        before = [host.bytes_of_leg() for host in own]
        _run(workers, num_steps)
        num_bytes = np.subtract([host.bytes_of_leg() for host in own], before)
    of_ring = 2 * FLOAT_BYTES * num_values * (num_workers - 1) / num_workers
    return float(num_bytes.max() / num_steps / of_ring)


def _start(
    stack: ExitStack, way: str, own: Sequence[Host], endpoints: str, worker: int, num_values: int
) -> subprocess.Popen[str]:
    host, num_workers = own[worker], len(own)
    environment: Mapping[str, str] = {
        **worker_environment(endpoints, worker, num_workers, host.address),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"{each.address}:{_PORT}" for each in own),
        "GLOO_SOCKET_IFNAME": host.leg,
        "FLEET_SPARSE_ROW_SHARDS": "1" if way == BESIDE else "0",
        "OMP_NUM_THREADS": "1",
    }
    command = host.command(sys.executable, "-m", "benchmarks.het.dense_link", "--values", str(num_values))
    process = stack.enter_context(
        subprocess.Popen(
            [*command, *(["--all-reduce"] if way == ALL_REDUCE else [])],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.kill)
    return process


def _run(workers: Sequence[subprocess.Popen[str]], num_steps: int) -> None:
    """Has all workers make steps; returns when every one of them has."""
    for worker in workers:
        assert worker.stdin is not None
        print(num_steps, file=worker.stdin, flush=True)
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stderr is not None
        if worker.stdout.readline().strip() != _READY:
            raise SystemExit(worker.stderr.read())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a worker: reads numbers of steps, and answers each once they are made. It ends with its standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=AT_LEAST_1, required=True)
    parser.add_argument("--all-reduce", action="store_true")
    options = parser.parse_args(arguments)
    worker, num_workers = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    settings = Settings.from_environment()
    grads = np.random.default_rng(worker).standard_normal(options.values).astype(np.float32)
    connect = all_reduce_step if options.all_reduce else pserver_step
    kept, step = connect(settings, worker, num_workers, grads)
    for line in sys.stdin:
        for _ in range(int(line)):
            step()
        print(_READY, flush=True)
    del kept
    os._exit(0)  # there is nothing to save


def pserver_step(settings: Settings, worker: int, num_workers: int, grads: NDArray[np.float32]) -> tuple[Any, Step]:
    """Returns a connection, to be kept, and a step that sends gradients to the pservers and receives values."""
    spec = DenseSpec("dense", "sgd", (), (Segment("values", 0, len(grads), 1.0),))
    control = ControlClient(os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(","), settings)
    registrations = control.register([spec], worker, num_workers, Mode(SYNC))
    channel = open_channel(registrations, settings)
    placement = Placement.even(len(registrations), registrations[0].placement_version)
    client = Client(channel, control.identity, registrations, placement, settings)
    if worker == 0:
        client.assign_dense(spec, np.zeros(len(grads), np.float32))
    out, number = np.empty(len(grads), np.float32), 0

    def step() -> None:
        nonlocal number
        number += 1
        pending = client.start_update([], [DenseUpdate(spec, grads, [out], 0.01, number)], weight=1.0, step=number)
        assert pending is not None, "it pulls"
        pending.wait()

    return (control, client), step


def all_reduce_step(settings: Settings, worker: int, num_workers: int, grads: NDArray[np.float32]) -> tuple[Any, Step]:
    """Returns the group of the workers, to be kept, and a step that adds up gradients among them."""
    from fleet_sparse.plugin.all_reduce import PaddleGroup

    endpoints = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")
    group = PaddleGroup(endpoints, worker, num_workers, settings.connect_s, insecure=settings.insecure)
    shared = group.share(len(grads))

    def step() -> None:
        shared.values[:] = grads
        shared.sum()

    return group, step


if __name__ == "__main__":
    main()
