"""What do keys cost a step, and a registration?

`python -m benchmarks.keys` from the root of a checkout, with the extra `keys` installed. Three jobs run at once, each
with a worker and pservers of its own: on plain TCP, with `FLEET_SPARSE_INSECURE=1`; on TLS, with keys; and on Unix
sockets, as on one host. On TCP the pservers serve as they do other machines. Every worker trains the click model of
`benchmarks.compare` from the same ids, and all rows exist before anything is timed. Blocks of steps are interleaved.

After each block clients register, one after the other, with a further pserver that serves nobody else: each opens a
connection of its own and declares a table and a dense array. All processes share `--cores` cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.baselines import BaselineProcess
from benchmarks.cpu_clock import cpu_seconds
from benchmarks.interleaved import interleaved
from benchmarks.membership import SPECS, OwnConnection
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, PSERVERS
from benchmarks.programs import PLAIN_TCP, TLS, UNIX_SOCKETS
from benchmarks.record import ROOT, Record, add_results
from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.credentials import Credentials
from fleet_sparse.keys import ROLES
from fleet_sparse.local_pservers import LocalPservers, child_environment, local_pservers
from fleet_sparse.settings import Settings
from fleet_sparse.tools.authority import new_authority, write_keys
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.control.control import ControlClient

ELSEWHERE = "192.0.2.1:0"
"""An address of no machine: a pserver that finds it in the list of all pservers serves other machines."""
HOST = "127.0.0.2"
"""Address of pservers on TCP: on 127.0.0.1 pservers of one host would have Unix sockets."""
BATCH = 512
MOST_WORKERS = 65_536


class Way(NamedTuple):
    """A way to reach pservers."""

    settings: Settings
    variables: Mapping[str, str]
    """Variables of pservers and workers."""
    is_exposed: bool
    """True if pservers listen for other machines."""

    def arguments(self, num_pservers: int) -> list[str]:
        """Returns further arguments of pservers."""
        return ["--control", f"{HOST}:0", "--servers", ",".join([ELSEWHERE] * num_pservers)] if self.is_exposed else []


class Job(NamedTuple):
    """A worker with its pservers, and a pserver to register with."""

    trainer: BaselineProcess
    worker: int
    """Process id."""
    pservers: Sequence[int]
    """Process ids."""
    way: Way
    registers_with: str
    """`host:port` of the further pserver."""
    clients: list[ControlClient]
    """Clients that have registered with it."""


def ways(keys: Path) -> dict[str, Way]:
    """Returns the ways that are compared, by name."""
    write_keys(keys, new_authority(), ROLES, 30)
    return {
        PLAIN_TCP: Way(Settings(insecure=True), {"FLEET_SPARSE_INSECURE": "1"}, is_exposed=True),
        TLS: Way(Settings(keys=str(keys)), {"FLEET_SPARSE_KEYS": str(keys)}, is_exposed=True),
        UNIX_SOCKETS: Way(Settings(), {}, is_exposed=False),
    }


@contextmanager
def job(way: Way, options: argparse.Namespace) -> Iterator[Job]:
    """Runs the processes of a way for as long as the block lasts."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def pservers(count: int) -> LocalPservers:
            started = local_pservers(
                count,
                root=root,
                arguments=way.arguments(count),
                environment=way.variables,
                log=subprocess.DEVNULL,
            )
            return stack.enter_context(started)

        of_worker, further = pservers(options.pservers), pservers(1)
        log = stack.enter_context((root / "log").open("w+", errors="replace"))
        script = str(Path(__file__).with_name("compare_job.py"))
        # -P keeps the script's directory off the path: its modules have the names of others.
        command = [sys.executable, "-P", script, "--model", "step", "--mode", options.mode]
        worker = subprocess.Popen(
            [*command, "--batches", str(options.batches)],
            env=child_environment(**of_worker.environment(), **way.variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
        stack.callback(worker.wait)
        stack.callback(worker.kill)
        trainer = BaselineProcess(worker, "the worker", log)
        trainer.told()
        pids = [each.process.pid for each in of_worker.processes]
        clients: list[ControlClient] = []
        yield Job(trainer, worker.pid, pids, way, further.endpoints[0], clients)
        for each in clients:
            each.close()


def block(of: Job, steps: int, registrations: int) -> dict[str, Any]:
    """Runs steps, and registrations of clients; returns seconds, and the CPU seconds of the steps."""
    before = cpu_seconds([of.worker]), cpu_seconds(of.pservers)
    seconds = of.trainer.ask(steps)
    cpu = cpu_seconds([of.worker]) - before[0], cpu_seconds(of.pservers) - before[1]
    register_s = [register(of) for _ in range(registrations)]
    return {"seconds": seconds, "worker_cpu_s": cpu[0], "pservers_cpu_s": cpu[1], "register_s": register_s}


def register(of: Job) -> float:
    """Registers the next client; returns the seconds from its first connection on."""
    settings = of.way.settings
    credentials = OwnConnection(*_fields_of(Credentials.of(settings)))
    begun_at = time.perf_counter()
    client = ControlClient([of.registers_with], settings, credentials)
    registrations = client.register(SPECS, len(of.clients), MOST_WORKERS, Mode(ASYNC))
    seconds = time.perf_counter() - begun_at
    if registrations[0].stream_endpoint.startswith("tcp:") is not of.way.is_exposed:
        raise SystemExit(f"{of.registers_with}: frames would go to {registrations[0].stream_endpoint}")
    of.clients.append(client)
    return seconds


def _fields_of(credentials: Credentials) -> tuple[Any, ...]:
    return credentials.keys, credentials.role, credentials.has_control_sockets


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts everything and returns every round but the first."""
    with ExitStack() as stack:
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys"
        jobs = {name: stack.enter_context(job(way, options)) for name, way in ways(keys).items()}
        for each in jobs.values():
            each.trainer.ask(options.batches)  # the rows are there from now on
        blocks = {name: partial(block, each, options.steps, options.registrations) for name, each in jobs.items()}
        return [interleaved(blocks, number) for number in range(options.rounds)][1:]


def show(measured: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table of medians."""
    table = Table(title="a step of the click model, and a registration")
    for heading in ("", "ms a step", "over plain TCP", "ms to register"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in measured[0]:
        of_all = {key: np.concatenate([each[name][key] for each in measured]) for key in ("seconds", "register_s")}
        ratios = [np.median(each[name]["seconds"]) / np.median(each[PLAIN_TCP]["seconds"]) for each in measured]
        cells = (1e3 * np.median(of_all["seconds"]), np.median(ratios), 1e3 * np.median(of_all["register_s"]))
        table.add_row(name, *(f"{each:.2f}" for each in cells))
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all ways and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("async", "sync"), default="async", help="mode of training")
    parser.add_argument("--pservers", type=PSERVERS, default=2, help="processes of each worker")
    parser.add_argument("--steps", type=AT_LEAST_1, default=20, help="steps of a block")
    parser.add_argument("--batches", type=AT_LEAST_1, default=100, help="batches that are fed again and again")
    parser.add_argument("--registrations", type=AT_LEAST_1, default=10, help="registrations after a block")
    parser.add_argument("--rounds", type=AT_LEAST_2, default=21, help="the first is not timed")
    parser.add_argument("--cores", type=AT_LEAST_1, default=2, help="that all processes run on")
    add_results(parser)
    options = parser.parse_args(arguments)
    record = Record("keys", options)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    warm_up()
    measured = run(options)
    show(measured)
    record.append(measured, batch=BATCH)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
