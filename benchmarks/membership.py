"""What do many workers cost a pserver before they train: their registrations at once, and their heartbeats?

`python -m benchmarks.membership` from the root of a checkout. One pserver process, and processes that hold many control
clients each: those of real workers, each with a connection, a registration with a table and a dense array, an open
Attend call and a liveness thread of its own. In each round a pserver starts, and:

- batches of clients register, all of a batch at the same time, until the job has all its workers;
- then nothing happens but heartbeats, at the interval of the settings, each on the connection of another client.

What is measured is CPU time of the pserver process: for each batch until all are registered and the pserver is idle
again, and for each second of heartbeats. An idle pserver's is measured before the first client. Clients run on the same
cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_clock import cpu_seconds
from benchmarks.options import AT_LEAST_1, amount
from benchmarks.processes import Worker, asked, resident_bytes, workers
from benchmarks.record import Record, add_results
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.credentials import Credentials
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.settings import Settings
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.control.control import ControlClient

RULE = "adagrad"
SPECS = (
    TableSpec(name="embedding", dim=16, rule=RULE, initializer=uniform(-0.01, 0.01)),
    DenseSpec("dense", RULE, (), tuple(Segment(f"fc_{n}.w_0", 1000 * n, 1000, 1.0) for n in range(8))),
)
"""What each worker declares."""
IDLE_S = 0.2
IDLE_SHARE = 0.25
"""A pserver is idle if it uses less than this share of a core for `IDLE_S`, heartbeats included."""


class OwnConnection(Credentials):
    """Credentials that give each client a connection of its own, as if it were the only one of its process.

    Otherwise gRPC shares one between all channels of a process to the same address.
    """

    def grpc_channel(self, endpoint: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Opens a channel to the control plane at `host:port`."""
        return super().grpc_channel(endpoint, [*options, ("grpc.use_local_subchannel_pool", 1)])


Round = dict[str, dict[str, float]]
"""Measurements of one pserver by case: each batch, the heartbeats of all workers, and the pserver before the first."""


# A process of clients


def work(options: argparse.Namespace) -> None:
    """Registers the next clients at once for each line of standard input, and prints how many seconds they took."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each connection is one
    settings, clients = Settings.from_environment(), list[ControlClient]()
    indices = range(options.index, options.batch, options.processes)
    with ThreadPoolExecutor(len(indices) or 1) as pool:
        for line in sys.stdin:
            first = int(line)
            joining = [ControlClient(options.endpoints, settings, OwnConnection()) for _ in indices]
            begun_at = time.perf_counter()
            joined = [
                pool.submit(client.register, SPECS, first + index, options.workers, Mode(ASYNC))
                for client, index in zip(joining, indices, strict=True)
            ]
            for each in joined:
                each.result()
            print(json.dumps(time.perf_counter() - begun_at), flush=True)
            clients += joining
    os._exit(0)  # the pserver is gone


# The rounds


def one_round(options: argparse.Namespace) -> Round:
    """Measures one pserver."""
    variables = {"FLEET_SPARSE_HEARTBEAT_S": f"{options.heartbeat_s:g}"}
    command = ["benchmarks.membership", "--batch", str(options.batch), "--workers", str(options.workers)]
    command += ["--processes", str(options.processes)]
    with (
        tempfile.TemporaryDirectory() as root,
        local_pservers(1, root=Path(root), environment=variables, log=subprocess.DEVNULL) as pservers,
        workers(
            [
                ([*command, "--index", str(index), "--endpoints", *pservers.endpoints], variables)
                for index in range(options.processes)
            ]
        ) as processes,
    ):
        pid = pservers.processes[0].process.pid
        idle = {"cpu_share": share(pid, options.seconds / 4), "resident_bytes": resident_bytes(pid)}
        batches = {batch_name(first, options): register(pid, first, processes) for first in batches_of(options)}
        heartbeats = {"cpu_share": share(pid, options.seconds), "resident_bytes": resident_bytes(pid)}
        return {**batches, heartbeats_name(options): heartbeats, "no worker": idle}


def batches_of(options: argparse.Namespace) -> range:
    """Returns the first worker of each batch."""
    return range(0, options.workers, options.batch)


def batch_name(first: int, options: argparse.Namespace) -> str:
    """Returns the name of a batch in records."""
    return f"registrations {first + 1} to {first + options.batch}"


def heartbeats_name(options: argparse.Namespace) -> str:
    """Returns the name of the heartbeats in records."""
    return f"heartbeats of {options.workers} workers"


def register(pid: int, first: int, processes: Sequence[Worker]) -> dict[str, float]:
    """Registers a batch of clients; returns CPU seconds of the pserver, and seconds until all are registered."""
    before = cpu_seconds([pid])
    seconds = max(json.loads(answer) for answer in asked(processes, first))
    while share(pid, IDLE_S) > IDLE_SHARE:
        pass
    return {"cpu_s": cpu_seconds([pid]) - before, "s": seconds}


def share(pid: int, seconds: float) -> float:
    """Returns the share of a core that a process uses for some seconds."""
    before, begun_at = cpu_seconds([pid]), time.perf_counter()
    time.sleep(seconds)
    return (cpu_seconds([pid]) - before) / (time.perf_counter() - begun_at)


def show(options: argparse.Namespace, rounds: Sequence[Round]) -> None:
    """Prints a table of medians."""
    table = Table(title=f"one pserver, a heartbeat every {options.heartbeat_s:g} s")
    for heading in ("", "CPU s", "% of a core", "MB resident"):
        table.add_column(heading, justify="right" if heading else "left")
    for case in rounds[0]:
        medians = {name: float(np.median([each[case][name] for each in rounds])) for name in rounds[0][case]}
        cells = (("cpu_s", 2, 1.0), ("cpu_share", 2, 0.01), ("resident_bytes", 0, 1e6))
        table.add_row(case, *(f"{medians[k] / unit:.{digits}f}" if k in medians else "" for k, digits, unit in cells))
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures registrations and heartbeats, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=AT_LEAST_1, default=4000, help="of the job; a multiple of --batch")
    parser.add_argument("--batch", type=AT_LEAST_1, default=1000, help="workers that register at once")
    parser.add_argument("--processes", type=AT_LEAST_1, default=4, help="that hold the clients")
    parser.add_argument("--seconds", type=amount, default=30.0, help="for which heartbeats are measured")
    parser.add_argument("--heartbeat-s", type=amount, default=Settings().heartbeat_s, help="FLEET_SPARSE_HEARTBEAT_S")
    parser.add_argument("--rounds", type=AT_LEAST_1, default=5)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoints", nargs="+", help=argparse.SUPPRESS)
    add_results(parser)
    options = parser.parse_args(arguments)
    if options.workers % options.batch:
        parser.error(f"argument --workers: {options.workers} should be a multiple of --batch, which is {options.batch}")
    if options.index is not None:
        work(options)
    record = Record("membership", options)
    warm_up()
    rounds = [one_round(options) for _ in range(options.rounds)]
    show(options, rounds)
    record.append(rounds)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
