"""Jobs of the scale benchmark: their cases, their worker processes, and rounds of steps."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.processes import Worker as WorkerProcess
from benchmarks.processes import all_busy_s, asked, resident_bytes, thread_seconds, workers
from benchmarks.yardstick import Yardstick
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table import DenseSpec, Segment, TableSpec
from fleet_sparse.costs import Work
from fleet_sparse.embedded import local_dense
from fleet_sparse.local_pservers import LocalPservers, local_pservers
from fleet_sparse.plan import Job, work_of
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.net.zmq_channel import ZmqChannel
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch

RULE = "adagrad"
FILL_IDS = 50_000
WARM_UP = 4
COMPUTED = (16, 400)  # times a matrix of as many columns, what a program computes
REPEATED = 0.5  # of the distinct ids, named once more
DISTURBED = 0.1  # cores that others use
TURNS = 4  # of a round, each between two readings of the yardstick

_work_of = lru_cache(work_of)
"""A fit asks for it thousands of times."""


class Case(NamedTuple):
    """A step that is measured."""

    name: str
    dim: int = 16
    distinct: int = 13_000
    """Distinct ids of a step, of all tables."""
    tables: int = 1
    dense: int = 0
    compute_s: float = 0.0
    """That the worker's thread computes between pull and push."""
    is_fitted: bool = True
    """Whether costs are fitted to it, beside its being checked."""
    longer: int = 1
    """How many times as many steps it takes as others: a round of few steps is too short to tell who was busy."""

    def specs(self) -> list[TableSpec | DenseSpec]:
        """Its tables and its dense array."""
        rows: list[TableSpec | DenseSpec] = [
            TableSpec(name=f"{self._stem}/{table}", dim=self.dim, rule=RULE, initializer=uniform(-0.01, 0.01))
            for table in range(self.tables)
        ]
        segments = (Segment("values", 0, self.dense, 1.0),)
        return [*rows, DenseSpec(f"{self._stem}/dense", RULE, (), segments)] if self.dense else rows

    @property
    def _stem(self) -> str:
        return self.name.replace(" ", "_")

    def rows(self, most: int) -> int:
        """Of each table."""
        return max(most * 16 // max(self.dim, 16) // self.tables, 2 * self.distinct // self.tables)


MAIN = Case("rows")
SMALL = Case("few rows", distinct=64, longer=4)
WIDE = Case("rows of dim 64", dim=64, distinct=6_500)
MANY = Case("16 tables", distinct=8_000, tables=16)
DENSE = Case("dense", distinct=64, dense=500_000)
COMPUTING = Case("computing", distinct=8_000, compute_s=0.003)
BUSY = Case("dense computing", distinct=4_000, dense=250_000, compute_s=0.002)
HELD_OUT_WIDE = Case("rows of dim 32", dim=32, distinct=6_500, is_fitted=False)
HELD_OUT_MIXED = Case("mixed", distinct=9_200, dense=100_000, compute_s=0.005, is_fitted=False)
HELD_OUT = (HELD_OUT_WIDE, HELD_OUT_MIXED)


class Group(NamedTuple):
    """Cases of one job. The first one shows which thread is the data thread."""

    mode: str
    workers: int
    pservers: int
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        """As tables show it; without its spaces, as options name it."""
        return f"{self.mode}, {self.workers} x {self.pservers}"


GROUPS = (
    Group(ASYNC, 1, 1, (MAIN, SMALL, WIDE, MANY, DENSE, COMPUTING, BUSY, *HELD_OUT)),
    Group(ASYNC, 1, 2, (MAIN, SMALL, WIDE, MANY, DENSE, COMPUTING, BUSY, *HELD_OUT)),
    Group(ASYNC, 1, 4, (MAIN, SMALL, BUSY, *HELD_OUT)),
    Group(ASYNC, 2, 1, (MAIN, DENSE, *HELD_OUT)),
    Group(ASYNC, 2, 2, (MAIN, COMPUTING, BUSY, *HELD_OUT)),
    Group(ASYNC, 4, 2, HELD_OUT),
    Group(SYNC, 1, 1, (MAIN, SMALL, WIDE, DENSE, *HELD_OUT)),
    Group(SYNC, 1, 2, HELD_OUT),
    Group(SYNC, 1, 4, (SMALL, BUSY, *HELD_OUT)),
    Group(SYNC, 2, 1, (MAIN, SMALL, WIDE, DENSE, BUSY, *HELD_OUT)),
    Group(SYNC, 2, 2, (MAIN, SMALL, MANY, COMPUTING, BUSY, *HELD_OUT)),
    Group(SYNC, 4, 2, HELD_OUT),
)


class Round(NamedTuple):
    """What a case took in one round; seconds of one step of one worker."""

    step_s: float
    computed_s: float
    """What the program computes."""
    worker_s: float
    """CPU, without that."""
    data_s: float
    """CPU of the data threads of all pservers."""
    io_s: float
    """CPU of their other threads."""
    others: float
    """Cores that processes of no job of ours used meanwhile."""
    yardstick_s: float
    """What the yardstick took, on average over its turns."""

    def at_speed(self, yardstick_s: float) -> Round:
        """What it would have taken at the speed at which the yardstick takes so long."""
        factor = yardstick_s / self.yardstick_s
        brought = Round(*(factor * seconds for seconds in self))
        return brought._replace(others=self.others, yardstick_s=yardstick_s)


class Measured(NamedTuple):
    """A case that ran."""

    group: Group
    case: Case
    job: Job
    rounds: tuple[Round, ...]

    @property
    def middle(self) -> Round:
        """Medians of the rounds that were quiet; without any, of the quietest round."""
        return medians(self.rounds)

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.group.name}: {self.case.name}"

    @property
    def is_fitted(self) -> bool:
        """Whether costs are fitted to it."""
        return self.case.is_fitted

    def at_speed(self, yardstick_s: float) -> Measured:
        """What it would have been at the speed at which the yardstick takes so long; so a program takes other times."""
        brought = self._replace(rounds=tuple(each.at_speed(yardstick_s) for each in self.rounds))
        return brought._replace(job=replace(self.job, compute_s=brought.middle.computed_s))

    @property
    def work(self) -> Work:
        """Of a worker's step, as the model has it."""
        return _work_of(self.job, self.group.pservers)


# A worker process


class BetweenMachines(ZmqChannel):
    """ZeroMQ as it is between machines: all that is sent has a checksum."""

    def stays_on_machine(self, shard: int) -> bool:
        """As `Channel`; though it does."""
        return False


class Worker:
    """One worker of a job.

    Args:
        endpoints: Of the pservers.
        group: Its job.
        index: Among its workers.
        most_rows: Of a table of dim 16.
        num_steps: Of a turn.
    """

    def __init__(self, endpoints: Sequence[str], group: Group, index: int, most_rows: int, num_steps: int) -> None:
        self._group, self._index, self._most_rows, self._num_steps = group, index, most_rows, num_steps
        self._values = np.zeros(COMPUTED, np.float32)
        self._weights = np.zeros((COMPUTED[1], COMPUTED[1]), np.float32)
        settings = Settings()
        control = ControlClient(endpoints, settings)
        specs = [spec for case in group.cases for spec in case.specs()]
        mode = Mode(group.mode)
        registrations = control.register(specs, index, group.workers, mode)
        # The channel between machines, which the model is about, whatever `open_channel` would take here.
        channel = BetweenMachines([registration.data_endpoint for registration in registrations], settings)
        placement = Placement.even(group.pservers)
        self._control = control  # its heartbeat
        client = Client(channel, control.identity, registrations, placement, settings)
        self._deduplicator = Deduplicator(placement)
        self._training = PserverTraining(client, self._deduplicator, mode, group.workers, local_dense)
        self._rng = np.random.default_rng(index)
        if index == 0:
            for spec in specs:
                if isinstance(spec, DenseSpec):
                    client.assign_dense(spec, np.zeros(spec.num_values, np.float32))

    def fill(self, case: Case) -> None:
        """Creates this worker's part of the rows; all take as many steps."""
        rows = case.rows(self._most_rows)
        part = -(-rows // self._group.workers)
        for spec in case.specs():
            if isinstance(spec, TableSpec):
                for begin in range(self._index * part, (self._index + 1) * part, FILL_IDS):
                    end = min(begin + FILL_IDS, (self._index + 1) * part)
                    self._train([spec], [np.arange(begin, end)], None, 0.0)

    def turn(self, case: Case) -> Callable[[], dict[str, float]]:
        """Takes some steps to warm up; what is returned takes those that count."""
        num_steps = self._num_steps * case.longer
        specs = [spec for spec in case.specs() if isinstance(spec, TableSpec)]
        dense = next((spec for spec in case.specs() if isinstance(spec, DenseSpec)), None)
        each, rows = case.distinct // case.tables, case.rows(self._most_rows)
        repeated = round(each * REPEATED)

        def batch() -> list[NDArray[np.int64]]:
            distinct = [self._rng.choice(rows, each, replace=False) for _ in specs]
            return [np.concatenate([ids, ids[:repeated]]) for ids in distinct]

        batches = [batch() for _ in range(WARM_UP + num_steps)]
        for ids in batches[:WARM_UP]:
            self._train(specs, ids, dense, case.compute_s)

        def run() -> dict[str, float]:
            cpu, begun, computed_s = time.process_time(), time.perf_counter(), 0.0
            for ids in batches[WARM_UP:]:
                computed_s += self._train(specs, ids, dense, case.compute_s)
            return {
                "step_s": (time.perf_counter() - begun) / num_steps,
                "computed_s": computed_s / num_steps,
                "worker_s": (time.process_time() - cpu - computed_s) / num_steps,
            }

        return run

    def _train(
        self, specs: Sequence[TableSpec], ids: Sequence[NDArray[np.int64]], dense: DenseSpec | None, compute_s: float
    ) -> float:
        """One step; what was computed in it."""
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
    """One worker process: takes a turn of steps for each two lines that it reads, the first with the case's number."""
    group = GROUPS[options.group]
    worker = Worker(options.endpoints, group, options.worker, options.rows, options.steps)
    for case in group.cases:
        worker.fill(case)
    for line in sys.stdin:
        run = worker.turn(group.cases[int(line)])
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(run()), flush=True)
    os._exit(0)  # nothing of this is worth an orderly end


# The jobs


def commands(number: int, pservers: LocalPservers, options: argparse.Namespace) -> list[tuple[list[str], Any]]:
    """Of the worker processes of a group."""
    command = ["benchmarks.scale", "--group", str(number), "--steps", str(options.steps)]
    command += ["--rows", str(options.rows), "--endpoints", *pservers.endpoints]
    return [([*command, "--worker", str(worker)], {}) for worker in range(GROUPS[number].workers)]


class Running(NamedTuple):
    """A job."""

    processes: Sequence[WorkerProcess]
    pservers: LocalPservers
    data_threads: list[int]
    """Of each pserver, once it is known."""


def run_group(number: int, options: argparse.Namespace, yardstick: Yardstick) -> tuple[list[Measured], float]:
    """Its cases, by turns, and the memory of one of its pservers before there are rows."""
    group = GROUPS[number]
    rounds: list[list[Round]] = [[] for _ in group.cases]
    with (
        tempfile.TemporaryDirectory() as root,
        local_pservers(
            group.pservers,
            root=Path(root),
            log=subprocess.DEVNULL,
            environment={"FLEET_SPARSE_CHANNEL": "zmq"},
        ) as pservers,
        workers(commands(number, pservers, options)) as processes,
    ):
        idle_bytes = resident_bytes(pservers.processes[0].process.pid)
        running = Running(processes, pservers, [])
        for attempt in range(options.rounds + options.retries):
            for index, (case, of_case) in enumerate(zip(group.cases, rounds, strict=True)):
                if attempt < options.rounds or len(quiet(of_case)) < options.rounds:
                    of_case.append(one_round(index, running, yardstick, options.steps * case.longer))
    measured = [
        Measured(group, case, job_of(group, case, options.rows), tuple(of_case))
        for case, of_case in zip(group.cases, rounds, strict=True)
    ]
    return measured, idle_bytes


def one_round(index: int, running: Running, yardstick: Yardstick, num_steps: int) -> Round:
    """Of one case, on average over its turns."""
    turns = [one_turn(index, running, yardstick, num_steps) for _ in range(TURNS)]
    of_all = Round(*np.mean(turns, axis=0).tolist())
    return of_all._replace(others=max(of_all.others, 0.0))


def one_turn(index: int, running: Running, yardstick: Yardstick, num_steps: int) -> Round:
    """So many steps of a case; the first of all tells which threads of the pservers are the data threads."""
    read_s = yardstick.read()
    asked(running.processes, index)  # after the reading, which takes the caches
    before, begun, busy_s = thread_seconds(running.pservers), time.perf_counter(), all_busy_s()
    results = [json.loads(answer) for answer in asked(running.processes, "go")]
    busy_s, seconds = all_busy_s() - busy_s, time.perf_counter() - begun
    spent = spent_since(before, thread_seconds(running.pservers))
    read_s = (read_s + yardstick.read()) / 2
    if not running.data_threads:
        running.data_threads.extend(max(tasks, key=tasks.__getitem__) for tasks in spent)
    all_s = sum(sum(tasks.values()) for tasks in spent)
    data_s = sum(tasks[thread] for tasks, thread in zip(spent, running.data_threads, strict=True))
    step_s, computed_s, worker_s = np.mean([list(result.values()) for result in results], axis=0).tolist()
    steps = num_steps * len(running.processes)
    others = (busy_s - all_s - steps * (computed_s + worker_s)) / seconds
    return Round(step_s, computed_s, worker_s, data_s / steps, (all_s - data_s) / steps, others, read_s)


@lru_cache
def medians(rounds: tuple[Round, ...]) -> Round:
    """Of those that were quiet; without any, of the quietest."""
    kept = quiet(rounds) or [min(rounds, key=lambda each: each.others)]
    return Round(*np.median(np.array(kept), axis=0).tolist())


def quiet(rounds: Sequence[Round]) -> list[Round]:
    """Those that no other processes disturbed."""
    return [each for each in rounds if each.others <= DISTURBED]


def spent_since(before: Sequence[dict[int, float]], after: Sequence[dict[int, float]]) -> list[dict[int, float]]:
    """Of each pserver, what each thread used in between."""
    return [
        {task: seconds - old.get(task, 0.0) for task, seconds in new.items()}
        for old, new in zip(before, after, strict=True)
    ]


def job_of(group: Group, case: Case, most_rows: int) -> Job:
    """As the model takes it: one field, whose ids are named one and a half times."""
    return Job(
        rows=case.rows(most_rows) * case.tables,
        dim=case.dim,
        rule=RULE,
        tables=case.tables,
        fields=1,
        batch=round(case.distinct * (1 + REPEATED)),
        distinct=1 / (1 + REPEATED),
        dense=case.dense,
        workers=group.workers,
        compute_s=case.compute_s,
        mode=group.mode,
    )
