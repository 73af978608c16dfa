"""What do jobs of a few workers and pservers take? The measured cases of the capacity model.

`python -m benchmarks.scale` from the root of a checkout, a quarter of an hour on a machine that does nothing else. It
measures jobs of 1, 2 and 4 workers with 1, 2 and 4 pserver processes in async and sync: the time of a step, and the CPU
of the workers and of the threads of the pservers. The cases of a job are interleaved, and all jobs are started again in
each pass. A case is the median of all its rounds (`benchmarks/calibration.py`).

There is no Paddle in a worker: it finds the distinct ids of a batch, pulls their rows, multiplies a matrix for a given
time, and pushes. Frames travel on TCP streams and have checksums, as between machines, although there is only one
machine; jobs on one host use Unix sockets. Runs without the option `channel` were measured on ZeroMQ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.options import AT_LEAST_1, AT_LEAST_2
from benchmarks.processes import Worker as WorkerProcess
from benchmarks.processes import all_busy_s, asked, thread_seconds, workers
from benchmarks.record import Record, add_results
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.mode import ASYNC, SYNC, Kind, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded import local_dense
from fleet_sparse.local_pservers import LocalPservers, local_pservers
from fleet_sparse.settings import Settings
from fleet_sparse.tools.capacity.job import PlannedJob
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.net.stream_channel import StreamChannel
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch

RULE = "adagrad"
FILL_IDS = 50_000
WARM_UP_STEPS = 4
MATRIX = (16, 400)
"""Shape of what a program multiplies by a square matrix while it computes."""
REPEATED = 0.5
"""Share of the distinct ids that a batch names twice."""


class ScaleCase(NamedTuple):
    """One kind of step."""

    name: str
    dim: int = 16
    distinct: int = 13_000
    """Number of distinct ids of a step, of all tables."""
    tables: int = 1
    dense: int = 0
    compute_s: float = 0.0
    """CPU time of the program between pull and push."""
    is_fitted: bool = True
    """True if coefficients are fitted to it; held-out cases only check the model."""
    step_factor: int = 1
    """Factor on the number of steps, for steps too short to measure."""

    def specs(self) -> list[TableSpec | DenseSpec]:
        """Returns its tables and, if it has one, its dense array."""
        stem = self.name.replace(" ", "_")
        specs: list[TableSpec | DenseSpec] = [
            TableSpec(name=f"{stem}/{table}", dim=self.dim, rule=RULE, initializer=uniform(-0.01, 0.01))
            for table in range(self.tables)
        ]
        if self.dense:
            specs.append(DenseSpec(f"{stem}/dense", RULE, (), (Segment("values", 0, self.dense, 1.0),)))
        return specs

    def rows(self, max_rows: int) -> int:
        """Returns the number of rows of each table."""
        return max(max_rows * 16 // max(self.dim, 16) // self.tables, 2 * self.distinct // self.tables)


ROWS = ScaleCase("rows")
FEW = ScaleCase("few rows", distinct=64, step_factor=4)
WIDE = ScaleCase("rows of dim 64", dim=64, distinct=6_500)
TABLES = ScaleCase("16 tables", distinct=8_000, tables=16)
DENSE = ScaleCase("dense", distinct=64, dense=500_000)
COMPUTING = ScaleCase("computing", distinct=8_000, compute_s=0.003)
BUSY = ScaleCase("dense computing", distinct=4_000, dense=250_000, compute_s=0.002)
HELD_OUT = (
    ScaleCase("rows of dim 32", dim=32, distinct=6_500, is_fitted=False),
    ScaleCase("mixed", distinct=9_200, dense=100_000, compute_s=0.005, is_fitted=False),
)


class CaseGroup(NamedTuple):
    """Cases of one job."""

    mode: Kind
    workers: int
    pservers: int
    cases: tuple[ScaleCase, ...]

    @property
    def name(self) -> str:
        """Its name in records; options leave out the spaces."""
        return f"{self.mode}, {self.workers} x {self.pservers}"

    def job_of(self, case: ScaleCase, max_rows: int) -> PlannedJob:
        """Returns a case as a job of the capacity model."""
        return PlannedJob(
            rows=case.rows(max_rows) * case.tables,
            dim=case.dim,
            rule=RULE,
            tables=case.tables,
            fields=1,
            batch=round(case.distinct * (1 + REPEATED)),
            distinct=1 / (1 + REPEATED),
            dense=case.dense,
            workers=self.workers,
            compute_s=case.compute_s,
            mode=self.mode,
        )


GROUPS = (
    CaseGroup(ASYNC, 1, 1, (ROWS, FEW, WIDE, TABLES, DENSE, COMPUTING, BUSY, *HELD_OUT)),
    CaseGroup(ASYNC, 1, 2, (ROWS, FEW, WIDE, TABLES, DENSE, COMPUTING, BUSY, *HELD_OUT)),
    CaseGroup(ASYNC, 1, 4, (ROWS, FEW, BUSY, *HELD_OUT)),
    CaseGroup(ASYNC, 2, 1, (ROWS, DENSE, *HELD_OUT)),
    CaseGroup(ASYNC, 2, 2, (ROWS, COMPUTING, BUSY, *HELD_OUT)),
    CaseGroup(ASYNC, 4, 2, HELD_OUT),
    CaseGroup(SYNC, 1, 1, (ROWS, FEW, WIDE, DENSE, *HELD_OUT)),
    CaseGroup(SYNC, 1, 2, HELD_OUT),
    CaseGroup(SYNC, 1, 4, (FEW, BUSY, *HELD_OUT)),
    CaseGroup(SYNC, 2, 1, (ROWS, FEW, WIDE, DENSE, BUSY, *HELD_OUT)),
    CaseGroup(SYNC, 2, 2, (ROWS, FEW, TABLES, COMPUTING, BUSY, *HELD_OUT)),
    CaseGroup(SYNC, 4, 2, HELD_OUT),
)


ELSEWHERE = "192.0.2.1:1"
"""An address of no machine (RFC 5737). A pserver in whose list it is listens on TCP."""


class BetweenMachines(StreamChannel):
    """Streams as they are between machines: every frame has a checksum."""

    def stays_on_machine(self, shard: int) -> bool:
        """Returns False, although the pservers are on this machine."""
        return False


class ScaleWorker:
    """One worker process of a job, which creates its part of all rows.

    Args:
        group: The job.
        options: Command-line options of the process.
    """

    def __init__(self, group: CaseGroup, options: argparse.Namespace) -> None:
        self._num_steps, self._max_rows = options.steps, options.rows
        self._values, self._weights = np.zeros(MATRIX, np.float32), np.zeros((MATRIX[1], MATRIX[1]), np.float32)
        self._rng, settings, mode = np.random.default_rng(options.worker), Settings(), Mode(group.mode)
        specs = [spec for case in group.cases for spec in case.specs()]
        self._control = ControlClient(options.endpoints, settings)  # it sends heartbeats while it lives
        registrations = self._control.register(specs, options.worker, group.workers, mode)
        channel = BetweenMachines([registration.stream_endpoint for registration in registrations], settings)
        placement = Placement.even(group.pservers)
        client = Client(channel, self._control.identity, registrations, placement, settings)
        self._deduplicator = Deduplicator(placement)
        self._training = PserverTraining(client, self._deduplicator, mode, group.workers, local_dense)
        for spec in specs:
            if isinstance(spec, DenseSpec) and options.worker == 0:
                client.assign_dense(spec, np.zeros(spec.num_values, np.float32))
        for case in group.cases:
            part = -(-case.rows(self._max_rows) // group.workers)
            for spec in (each for each in case.specs() if isinstance(each, TableSpec)):
                for begin in range(options.worker * part, (options.worker + 1) * part, FILL_IDS):
                    self._train([spec], [np.arange(begin, min(begin + FILL_IDS, (options.worker + 1) * part))], None, 0)

    def prepare(self, case: ScaleCase) -> Callable[[], dict[str, float]]:
        """Draws batches and warms up; the function that it returns takes the measured steps."""
        num_steps = self._num_steps * case.step_factor
        specs = [spec for spec in case.specs() if isinstance(spec, TableSpec)]
        dense = next((spec for spec in case.specs() if isinstance(spec, DenseSpec)), None)
        num_ids, num_rows = case.distinct // case.tables, case.rows(self._max_rows)

        def batch() -> list[NDArray[np.int64]]:
            distinct = [self._rng.choice(num_rows, num_ids, replace=False) for _ in specs]
            return [np.concatenate([ids, ids[: round(num_ids * REPEATED)]]) for ids in distinct]

        batches = [batch() for _ in range(WARM_UP_STEPS + num_steps)]
        for ids in batches[:WARM_UP_STEPS]:
            self._train(specs, ids, dense, case.compute_s)

        def run() -> dict[str, float]:
            cpu, begun, computed_s = time.process_time(), time.perf_counter(), 0.0
            for ids in batches[WARM_UP_STEPS:]:
                computed_s += self._train(specs, ids, dense, case.compute_s)
            step_s, worker_s = time.perf_counter() - begun, time.process_time() - cpu - computed_s
            times = {"step_s": step_s, "computed_s": computed_s, "worker_s": worker_s}
            return {name: seconds / num_steps for name, seconds in times.items()}

        return run

    def _train(
        self, specs: Sequence[TableSpec], ids: Sequence[NDArray[np.int64]], dense: DenseSpec | None, compute_s: float
    ) -> float:
        """Takes one step, and returns the CPU time of its program."""
        unique = [self._deduplicator.unique([each], spec.salt)[0] for spec, each in zip(specs, ids, strict=True)]
        outs = [np.empty((len(each.ids), spec.dim), np.float32) for spec, each in zip(specs, unique, strict=True)]
        self._training.prefetch([RowBatch(*lookup) for lookup in zip(specs, unique, outs, strict=True)])
        begun = computed = time.thread_time()
        while computed < begun + compute_s:
            np.matmul(self._values, self._weights, out=self._values)
            computed = time.thread_time()
        rows = [RowBatch(*update, 0.05) for update in zip(specs, unique, outs, strict=True)]
        dense_updates = []
        if dense is not None:
            grads = np.full(dense.num_values, 0.01, np.float32)
            dense_updates.append(DenseUpdate(dense, grads, [np.empty_like(grads)], 0.01))
        self._training.update(rows, dense_updates, 1.0)
        return computed - begun


def work(options: argparse.Namespace) -> None:
    """Runs one worker process: for each line with the number of a case it prepares, and for the next one it runs."""
    group = GROUPS[options.group]
    worker = ScaleWorker(group, options)
    for line in sys.stdin:
        run = worker.prepare(group.cases[int(line)])
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(run()), flush=True)
    os._exit(0)  # an orderly end would wait for pservers that are gone


def run_group(number: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rounds of a job: what each case took."""
    group = GROUPS[number]
    command = ["benchmarks.scale", "--group", str(number), "--steps", str(options.steps), "--rows", str(options.rows)]
    with (
        tempfile.TemporaryDirectory() as root,
        local_pservers(
            group.pservers,
            root=Path(root),
            log=subprocess.DEVNULL,
            arguments=["--servers", ",".join([ELSEWHERE] * group.pservers)],
            environment={"FLEET_SPARSE_INSECURE": "1"},
        ) as pservers,
        workers(
            [([*command, "--endpoints", *pservers.endpoints, "--worker", str(n)], {}) for n in range(group.workers)]
        ) as processes,
    ):
        return [
            {
                f"{group.name}: {case.name}": run_case(index, case, processes, pservers, options.steps)
                for index, case in enumerate(group.cases)
            }
            for _ in range(options.rounds)
        ]


def run_case(
    index: int, case: ScaleCase, processes: Sequence[WorkerProcess], pservers: LocalPservers, num_steps: int
) -> dict[str, float]:
    """Returns what a case takes, in seconds of one worker's step, and the cores that other processes used.

    The busiest thread of a pserver is its data thread.
    """
    asked(processes, index)
    before, begun, busy_s = thread_seconds(pservers), time.perf_counter(), all_busy_s()
    results = [json.loads(answer) for answer in asked(processes, "go")]
    busy_s, seconds = all_busy_s() - busy_s, time.perf_counter() - begun
    spent = [
        {task: used - old.get(task, 0.0) for task, used in new.items()}
        for old, new in zip(before, thread_seconds(pservers), strict=True)
    ]
    pservers_s = sum(sum(tasks.values()) for tasks in spent)
    data_s = sum(max(tasks.values()) for tasks in spent)
    times = {name: float(np.mean([result[name] for result in results])) for name in results[0]}
    steps = num_steps * case.step_factor * len(processes)
    others = (busy_s - pservers_s - steps * (times["computed_s"] + times["worker_s"])) / seconds
    return {**times, "data_s": data_s / steps, "io_s": (pservers_s - data_s) / steps, "others": max(others, 0.0)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the jobs and records them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=AT_LEAST_1, default=80, help="of a case in a round")
    parser.add_argument("--passes", type=AT_LEAST_1, default=5, help="over all jobs, which are started again in each")
    parser.add_argument("--rounds", type=AT_LEAST_1, default=2, help="of each case in a pass")
    parser.add_argument("--rows", type=AT_LEAST_2, default=1_000_000, help="of a table of dim 16")
    names = [group.name.replace(" ", "") for group in GROUPS]
    parser.add_argument("--jobs", nargs="+", choices=names, default=names, metavar="JOB", help=", ".join(names))
    for option in ("--group", "--worker"):
        parser.add_argument(option, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoints", nargs="+", help=argparse.SUPPRESS)
    parser.set_defaults(channel="stream")
    add_results(parser)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        work(options)
    record, console = Record("scale", options), Console()
    warm_up()
    numbers, rounds = [names.index(name) for name in options.jobs], []
    for number in [number for _ in range(options.passes) for number in numbers]:
        with console.status(names[number]):
            rounds += run_group(number, options)
    checks = [
        {
            "name": f"{group.name}: {case.name}",
            "job": asdict(group.job_of(case, options.rows)),
            "pservers": group.pservers,
            "is_fitted": case.is_fitted,
        }
        for group in (GROUPS[number] for number in numbers)
        for case in group.cases
    ]
    for check in checks:
        steps_s = [each[check["name"]]["step_s"] for each in rounds if check["name"] in each]
        console.print(f"{check['name']}: {1e6 * np.median(steps_s):.0f} us")
    record.append(rounds, checks=checks)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
