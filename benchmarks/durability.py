"""What does each `FLEET_SPARSE_DURABILITY` cost a step of a click model?

`python -m benchmarks.durability` from the root of a checkout. The click model of `benchmarks/step.py`, batch 512 a
worker, trained by 2 worker processes on 2 supervised pserver processes, async and sync, once with each durability; the
logs lie under `--root`. Dense parameters are on the pservers, so the log has their gradients, too. All jobs of a mode
take turns, a round of steps each, and each round another job begins. A worker has the same batches in every round, and
trained them once before, so that their rows are there. The time of a step is compared with that of durability `none`
in the same round; a second job with `none` shows what the machine adds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import NUM_WARM_UP, ready, worker_command
from benchmarks.cpu_clock import cpu_seconds
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, PSERVERS
from benchmarks.processes import NO_STANDBY, Worker, asked, with_children, workers
from benchmarks.record import Record, add_results
from benchmarks.step import BATCH
from fleet_sparse.core.mode import ASYNC, SYNC
from fleet_sparse.local_pservers import LocalPservers, local_pservers

NONE, AGAIN = "none", "none again"
DURABILITIES = (NONE, AGAIN, "snapshot", "log", "sync")


class Job(NamedTuple):
    """Worker processes, and the pservers that they train on."""

    processes: Sequence[Worker]
    pservers: LocalPservers


class Round(NamedTuple):
    """Measurements of one round of a job.

    Attributes:
        seconds: Time of a step, of the slowest worker.
        worker_cpu_s: CPU of a worker's step.
        pservers_cpu_s: CPU of all pservers and their supervisors for it.
    """

    seconds: float
    worker_cpu_s: float
    pservers_cpu_s: float


def job_name(mode: str, durability: str) -> str:
    """Returns the name of a job in tables."""
    return f"{mode}, {durability}"


def started(mode: str, durability: str, options: argparse.Namespace, stack: ExitStack) -> Job:
    """Starts a job; it ends with the stack."""
    root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.root)))
    of_job = {"FLEET_SPARSE_JOB_ID": "benchmark"}
    variables = {"FLEET_SPARSE_DURABILITY": durability.partition(" ")[0], **of_job, **NO_STANDBY}
    pservers = stack.enter_context(
        local_pservers(
            options.pservers, root=root, arguments=["--supervised"], environment=variables, log=subprocess.DEVNULL
        )
    )
    commands = [
        (
            worker_command(options, mode, index, options.workers),
            {**pservers.environment(index, options.workers), **of_job},
        )
        for index in range(options.workers)
    ]
    processes = stack.enter_context(workers(commands))
    ready(processes)
    return Job(processes, pservers)


def one_round(job: Job, num_steps: int) -> Round:
    """Runs the steps of all workers of a job at the same time."""
    pids = with_children([pserver.process.pid for pserver in job.pservers.processes])
    before = cpu_seconds(pids)
    seconds, cpu_s, _ = np.array([json.loads(answer) for answer in asked(job.processes, "go")]).T
    num_all = num_steps * len(seconds)
    return Round(float(seconds.max()) / num_steps, float(cpu_s.sum()) / num_all, (cpu_seconds(pids) - before) / num_all)


def measure(options: argparse.Namespace) -> list[dict[str, Round]]:
    """Returns the rounds of each job, by round and name."""
    rounds: list[dict[str, Round]] = [{} for _ in range(options.rounds + NUM_WARM_UP)]
    for mode in options.modes:
        with ExitStack() as stack, Console().status(mode):
            jobs = [(job_name(mode, each), started(mode, each, options, stack)) for each in options.durabilities]
            for number, of_round in enumerate(rounds):
                turn = number % len(jobs)
                for name, job in jobs[turn:] + jobs[:turn]:
                    of_round[name] = one_round(job, options.steps)
    names = [job_name(*each) for each in product(options.modes, options.durabilities)]
    return [{name: of_round[name] for name in names} for of_round in rounds[NUM_WARM_UP:]]


def show(rounds: Sequence[Mapping[str, Round]]) -> None:
    """Prints a table of medians."""
    table = Table("job", "ms a step", "over none", "worker CPU ms", "pservers' CPU ms")
    for name in rounds[0]:
        base = job_name(name.partition(",")[0], NONE)
        seconds, worker_s, pservers_s = 1e3 * np.median([each[name] for each in rounds], axis=0)
        ratio = np.median([each[name].seconds / each[base].seconds for each in rounds])
        table.add_row(name, f"{seconds:.2f}", f"{ratio:.3f}", f"{worker_s:.2f}", f"{pservers_s:.2f}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the jobs, prints a table and records them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=(ASYNC, SYNC), default=[ASYNC, SYNC], help="modes of training")
    parser.add_argument(
        "--durabilities", nargs="+", choices=DURABILITIES, default=[*DURABILITIES], help="jobs; `none` is needed"
    )
    parser.add_argument("--workers", type=AT_LEAST_1, default=2, help="processes of a job")
    parser.add_argument("--pservers", type=PSERVERS, default=2, help="processes of a job")
    parser.add_argument("--steps", type=AT_LEAST_1, default=50, help="steps of each worker in a round")
    parser.add_argument("--rounds", type=AT_LEAST_2, default=21, help="rounds of each job; one before does not count")
    parser.add_argument("--root", type=Path, help="where the logs lie; default: the system's directory for files")
    add_results(parser)
    options = parser.parse_args(arguments)
    if NONE not in options.durabilities:
        parser.error(f"--durabilities: needs {NONE}, with which the others are compared")
    record = Record("durability", options)
    rounds = measure(options)
    show(rounds)
    record.append([{name: each._asdict() for name, each in of_round.items()} for of_round in rounds], batch=BATCH)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
