"""What do more workers and more pservers cost on the same cores?

`python -m benchmarks.cluster` from the root of a checkout. The click model of `benchmarks/step.py`, batch 512 a worker,
trained by 1, 2 and 4 worker processes on 1, 2 and 4 pserver processes, async and sync. Beside them as many trainers of
plain Paddle, which know nothing of each other: the same program with its rows fed from memory and its dense parameters
its own. A worker has the same batches in every round, and trained them once before, so that their rows are there. All
jobs of as many workers and one mode, and the plain trainers, take turns, a round of steps each; jobs of more workers
come after them. What is compared is examples/s of all workers, and CPU of a step: of the worker, and of all pservers
for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_clock import cpu_seconds
from benchmarks.options import AT_LEAST_1, PSERVERS
from benchmarks.processes import Worker, all_busy_s, asked, workers
from benchmarks.record import Record, add_results
from fleet_sparse.core.mode import ASYNC, SYNC
from fleet_sparse.local_pservers import LocalPservers, local_pservers

PLAIN = "plain"
NUM_WARM_UP = 1  # rounds


class Job(NamedTuple):
    """Worker processes that run the same program, and their pservers."""

    name: str
    processes: Sequence[Worker]
    pservers: LocalPservers | None


class Round(NamedTuple):
    """Measurements of one round of a job.

    Attributes:
        examples_per_s: Examples a second of all workers, over the time of the slowest.
        worker_ms: CPU of a worker's step.
        pservers_ms: CPU of all pservers for it.
        others: Cores that all other processes of the machine used during the round.
    """

    examples_per_s: float
    worker_ms: float
    pservers_ms: float
    others: float


def job_name(mode: str, num_workers: int, num_pservers: int) -> str:
    """Returns the name of a job in tables; 0 pservers are plain Paddle's trainers beside the jobs of that mode."""
    return f"{mode}, {num_workers} x {num_pservers or PLAIN}"


# A worker process


def work(options: argparse.Namespace) -> None:
    """Runs a round of steps for each line of standard input, and prints seconds and CPU."""
    from benchmarks import step

    feeds, run = trainer(options)
    print("ready", flush=True)
    for _ in sys.stdin:
        batches = list(islice(feeds, options.steps))
        cpu_s, begun_at = time.process_time(), time.perf_counter()
        for feed in batches:
            run(feed)
        seconds, cpu_s = time.perf_counter() - begun_at, time.process_time() - cpu_s
        print(json.dumps([seconds, cpu_s, options.steps * step.BATCH]), flush=True)
    os._exit(0)  # there is nothing to save


def trainer(options: argparse.Namespace) -> tuple[Iterator[dict[str, NDArray[Any]]], Any]:
    """Returns the batches of a worker, and a function that trains one."""
    import paddle
    from paddle.distributed import fleet

    import fleet_sparse
    from benchmarks import step

    is_plain = options.job == PLAIN
    paddle.enable_static()
    if not is_plain:
        fleet_sparse.install()
        fleet.init()
    executor = paddle.static.Executor(paddle.CPUPlace())
    program, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(program, startup):
        loss = step.floor(step.click_loss) if is_plain else step.flagged(options.job, step.click_loss)
    executor.run(startup)
    if not is_plain:
        fleet.init_worker()
    feeds = islice(step.batches(options.steps * options.of), options.index, None, options.of)
    made = [step.with_rows(feed) if is_plain else feed for feed in feeds]
    return cycle(made), lambda feed: executor.run(program, feed=feed, fetch_list=[loss])


# The jobs


def worker_command(options: argparse.Namespace, job: str, index: int, num_workers: int) -> list[str]:
    """Returns the command line of one worker process."""
    command = ["benchmarks.cluster", "--job", job, "--index", str(index), "--of", str(num_workers)]
    return [*command, "--steps", str(options.steps)]


def jobs(
    mode: str, num_workers: int, plain: Sequence[Worker], options: argparse.Namespace, stack: ExitStack
) -> list[Job]:
    """Returns a job for each number of pservers, and one of equally many plain trainers."""
    found = [Job(job_name(mode, num_workers, 0), plain[:num_workers], None)]
    for num_pservers in options.pservers:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pservers = stack.enter_context(local_pservers(num_pservers, root=root, log=subprocess.DEVNULL))
        commands = [
            (worker_command(options, mode, index, num_workers), pservers.environment(index, num_workers))
            for index in range(num_workers)
        ]
        processes = stack.enter_context(workers(commands))
        ready(processes)
        found.append(Job(job_name(mode, num_workers, num_pservers), processes, pservers))
    return found


def ready(processes: Sequence[Worker]) -> None:
    """Waits until all workers have built their programs."""
    for process in processes:
        assert process.stdout is not None
        if not any(line == "ready\n" for line in process.stdout):
            raise SystemExit("a worker ended before it was ready")


def one_round(job: Job, num_steps: int) -> Round:
    """Runs the steps of all workers of a job at the same time."""
    before, busy_s, begun_at = pserver_seconds(job), all_busy_s(), time.perf_counter()
    told = np.array([json.loads(answer) for answer in asked(job.processes, "go")])
    pservers_s, busy_s = pserver_seconds(job) - before, all_busy_s() - busy_s
    seconds, cpu_s, num_examples = told.T
    num_all = num_steps * len(told)
    others = (busy_s - pservers_s - cpu_s.sum()) / (time.perf_counter() - begun_at)
    rate = float(num_examples.sum() / seconds.max())
    return Round(rate, 1e3 * float(cpu_s.sum()) / num_all, 1e3 * pservers_s / num_all, max(float(others), 0.0))


def pserver_seconds(job: Job) -> float:
    """Returns the CPU seconds of the job's pservers so far."""
    if job.pservers is None:
        return 0.0
    return cpu_seconds(pserver.process.pid for pserver in job.pservers.processes)


def measure(options: argparse.Namespace) -> list[dict[str, Round]]:
    """Returns the rounds of each job, by round and name."""
    rounds: list[dict[str, Round]] = [{} for _ in range(options.rounds + NUM_WARM_UP)]
    most = max(options.workers)
    alone = [(worker_command(options, PLAIN, index, most), dict[str, str]()) for index in range(most)]
    with workers(alone) as plain:
        ready(plain)
        for mode, num_workers in product(options.modes, options.workers):
            with ExitStack() as stack, Console().status(f"{mode}, {num_workers} workers"):
                found = jobs(mode, num_workers, plain, options, stack)
                for number, of_round in enumerate(rounds):
                    turn = number % len(found)
                    for job in found[turn:] + found[:turn]:
                        of_round[job.name] = one_round(job, options.steps)
    return rounds[NUM_WARM_UP:]


def cpu_ms(of_round: Round) -> float:
    """Returns the CPU ms of a step: of the worker, and of all pservers for it."""
    return of_round.worker_ms + of_round.pservers_ms


def show(rounds: Sequence[Mapping[str, Round]]) -> None:
    """Prints a table of medians."""
    table = Table(title=f"CTR, workers x pservers, OMP {os.environ['OMP_NUM_THREADS']}")
    for heading in (
        "job",
        "examples/s",
        "over plain",
        "worker CPU ms",
        "over plain, ms",
        "pservers' CPU ms",
        "both over plain",
        "others",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in rounds[0]:
        beside = f"{name.rpartition(' ')[0]} {PLAIN}"
        middle = np.median([each[name] for each in rounds], axis=0)
        faster = np.median([each[name].examples_per_s / each[beside].examples_per_s for each in rounds])
        dearer = np.median([cpu_ms(each[name]) / cpu_ms(each[beside]) for each in rounds])
        more_ms = np.median([each[name].worker_ms - each[beside].worker_ms for each in rounds])
        rate, worker, pservers, others = middle
        cells = (f"{rate:.0f}", f"{faster:.2f}", f"{worker:.1f}", f"{more_ms:.1f}", f"{pservers:.1f}", f"{dearer:.2f}")
        table.add_row(name, *cells, f"{others:.2f}")
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the jobs and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=AT_LEAST_1, nargs="+", default=[1, 2, 4], help="processes of a job")
    parser.add_argument("--pservers", type=PSERVERS, nargs="+", default=[1, 2, 4], help="processes of a job")
    parser.add_argument("--modes", nargs="+", choices=(ASYNC, SYNC), default=[ASYNC, SYNC], help="modes of training")
    parser.add_argument("--steps", type=AT_LEAST_1, default=20, help="steps of each worker in a round")
    parser.add_argument(
        "--rounds", type=AT_LEAST_1, default=5, help="rounds of each job; one before them does not count"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    add_results(parser)
    options = parser.parse_args(arguments)
    if options.job is not None:
        work(options)
    record = Record("cluster", options)
    rounds = measure(options)
    show(rounds)
    record.append([{name: each._asdict() for name, each in of_round.items()} for of_round in rounds])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
