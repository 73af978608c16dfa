"""What do requests, rows and bytes cost, and does the model of `fleet-sparse plan` tell what jobs here take?

`python -m benchmarks.scale` from the root of a checkout, five to six minutes on a machine that does nothing else. It
measures

- the kernels of a store alone, for each rule and some dims: CPU of a row pulled and pushed, also of a larger store;
- jobs of 1, 2 and 4 workers with 1, 2 and 4 pserver processes in async and sync: seconds of a step, and CPU of the
  workers and of each thread of the pservers meanwhile. The cases of a job take turns. A round in which other processes
  used the machine does not count, and is repeated; a case is the medians of the rounds that count, of several passes
  over all jobs, because the speed of a machine may drift.

From the CPU it fits what each party pays for a request, a row and a byte (`fleet_sparse/costs.py`); the seconds of a
step tell it how long threads were idle, and the two shares of the I/O thread, and nothing else. Then it asks the model
for these, of all jobs, those that were not fitted among them, and prints what was measured, what was predicted and
their ratio; and how far the model's steps of large jobs move if one case less is fitted. Frames travel by ZeroMQ, as
between machines, though the machine is one; jobs on one host use streams, which are faster.

`--costs fleet_sparse/costs.json` hands the costs, with commit, machine and ratios, to the command, and to
`scripts/bench --page`, which writes the tables and charts of docs/scaling.md.
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
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.options import AT_LEAST_0, AT_LEAST_1, AT_LEAST_2, TRAINED
from benchmarks.page import MODEL_TOLERANCE
from benchmarks.processes import Worker as WorkerProcess
from benchmarks.processes import all_busy_s, asked, thread_seconds, workers
from benchmarks.record import Record, add_results, commit, machine
from benchmarks.scaling_page import EXAMPLES
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table import DenseSpec, Segment, TableSpec
from fleet_sparse.core.warm_up import warm_up
from fleet_sparse.costs import Costs, Price, Prices, Work, parse_costs
from fleet_sparse.local_pservers import LocalPservers, local_pservers
from fleet_sparse.plan import Cpu, Job, Machines, plan, plan_on, times_of, work_of
from fleet_sparse.pserver.store import Store
from fleet_sparse.settings import Settings
from fleet_sparse.worker.batch import Deduplicator
from fleet_sparse.worker.client import Client, DensePush, RowsPush
from fleet_sparse.worker.control import ControlClient
from fleet_sparse.worker.zmq_channel import ZmqChannel

RULE = "adagrad"
DIMS = (8, 16, 64, 256, 1024, 4096)
KERNEL_BYTES = 256 << 20  # of a store, at most: past every cache
KERNEL_IDS = 13_000
KERNEL_CALLS = 24
FAR = 10  # times as many rows
FILL_IDS = 50_000
WARM_UP = 4
COMPUTED = (16, 400)  # times a matrix of as many columns, what a program computes
REPEATED = 0.5  # of the distinct ids, named once more
DISTURBED = 0.1  # cores that others use
AT_PSERVER = ("requests", "blocks", "rows", "row_bytes", "dense_bytes")
COLD = [number / 20 for number in range(81)]  # the least is taken that is almost as good as any
ALMOST, TINY = 1.02, 1e-9
LOOPBACK = Machines(memory_bytes=1e12, network_bits_per_s=1e15, shared_cores=len(os.sched_getaffinity(0)))


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
    """Whether its CPU is used, beside being checked."""
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
HELD_OUT_WHOLE = Case("click model", distinct=9_200, dense=100_000, compute_s=0.005, is_fitted=False)
HELD_OUT = (HELD_OUT_WIDE, HELD_OUT_WHOLE)


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
    worker_s: float
    """CPU, without what the program computes."""
    data_s: float
    """CPU of the data threads of all pservers."""
    io_s: float
    """CPU of their other threads."""
    others: float
    """Cores that processes of no job of ours used meanwhile."""


class Measured(NamedTuple):
    """A case that ran."""

    group: Group
    case: Case
    job: Job
    rounds: tuple[Round, ...]

    @property
    def middle(self) -> Round:
        """Medians of the rounds that were quiet; without any, of the quietest round."""
        kept = quiet(self.rounds) or [min(self.rounds, key=lambda each: each.others)]
        return Round(*np.median(np.array(kept), axis=0).tolist())

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.group.name}: {self.case.name}"

    @property
    def is_fitted(self) -> bool:
        """Whether its CPU is used."""
        return self.case.is_fitted

    @property
    def work(self) -> Work:
        """Of a worker's step, as the model has it."""
        return work_of(self.job, self.group.pservers)


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
        num_steps: Of a round.
    """

    def __init__(self, endpoints: Sequence[str], group: Group, index: int, most_rows: int, num_steps: int) -> None:
        self._group, self._index, self._most_rows, self._num_steps = group, index, most_rows, num_steps
        self._values = np.zeros(COMPUTED, np.float32)
        self._weights = np.zeros((COMPUTED[1], COMPUTED[1]), np.float32)
        settings = Settings()
        control = ControlClient(endpoints, settings)
        specs = [spec for case in group.cases for spec in case.specs()]
        registrations = control.register(specs, index, group.workers, Mode(group.mode))
        # The channel between machines, which the model is about, whatever `open_channel` would take here.
        channel = BetweenMachines([registration.data_endpoint for registration in registrations], settings)
        placement = Placement.even(group.pservers)
        self._control = control  # its heartbeat
        self._client = Client(channel, control.identity, registrations, placement, settings)
        self._deduplicator = Deduplicator(placement)
        self._step = 0
        self._rng = np.random.default_rng(index)
        if index == 0:
            for spec in specs:
                if isinstance(spec, DenseSpec):
                    self._client.assign_dense(spec, np.zeros(spec.num_values, np.float32))

    def fill(self, case: Case) -> None:
        """Creates this worker's part of the rows; all take as many steps."""
        rows = case.rows(self._most_rows)
        part = -(-rows // self._group.workers)
        for spec in case.specs():
            if isinstance(spec, TableSpec):
                for begin in range(self._index * part, (self._index + 1) * part, FILL_IDS):
                    end = min(begin + FILL_IDS, (self._index + 1) * part)
                    self._train([spec], [np.arange(begin, end)], None, 0.0)

    def round(self, case: Case) -> Callable[[], dict[str, float]]:
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
            step_s, cpu_s = (time.perf_counter() - begun) / num_steps, time.process_time() - cpu
            return {"step_s": step_s, "worker_s": (cpu_s - computed_s) / num_steps, "cpu_s": cpu_s}

        return run

    def _train(
        self, specs: Sequence[TableSpec], ids: Sequence[NDArray[np.int64]], dense: DenseSpec | None, compute_s: float
    ) -> float:
        """One step; what was computed in it."""
        self._step += 1
        step = self._step if self._group.mode == SYNC else 0
        unique = [self._deduplicator.unique([each], spec.salt)[0] for spec, each in zip(specs, ids, strict=True)]
        outs = [np.empty((len(each.ids), spec.dim), np.float32) for spec, each in zip(specs, unique, strict=True)]
        self._client.pull(list(zip(specs, unique, outs, strict=True)), step=step)
        begun = computed = time.thread_time()
        while computed < begun + compute_s:
            np.matmul(self._values, self._weights, out=self._values)
            computed = time.thread_time()
        pushes = [
            RowsPush(spec, each, out, 0.05, self._step) for spec, each, out in zip(specs, unique, outs, strict=True)
        ]
        dense_pushes = []
        if dense is not None:
            values = np.full(dense.num_values, 0.01, np.float32)
            dense_pushes.append(DensePush(dense, values, [np.empty_like(values)], 0.01, self._step))
        pending = self._client.start_update(pushes, dense_pushes, step=step)
        if pending is not None:
            pending.wait()
        return computed - begun


def work(options: argparse.Namespace) -> None:
    """One worker process: takes a round of steps for each two lines that it reads, the first with the case's number."""
    group = GROUPS[options.group]
    worker = Worker(options.endpoints, group, options.worker, options.rows, options.steps)
    for case in group.cases:
        worker.fill(case)
    for line in sys.stdin:
        run = worker.round(group.cases[int(line)])
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


def run_group(number: int, options: argparse.Namespace) -> tuple[list[Measured], float]:
    """Its cases, by turns, and the memory of one of its pservers before there are rows."""
    group = GROUPS[number]
    rounds: list[list[Round]] = [[] for _ in group.cases]
    with (
        tempfile.TemporaryDirectory() as root,
        local_pservers(group.pservers, root=Path(root), log=subprocess.DEVNULL) as pservers,
        workers(commands(number, pservers, options)) as processes,
    ):
        status = Path(f"/proc/{pservers.processes[0].process.pid}/statm").read_text().split()
        data_threads: list[int] = []
        for attempt in range(options.rounds + options.retries):
            for index, case in enumerate(group.cases):
                if attempt < options.rounds or len(quiet(rounds[index])) < options.rounds:
                    measured = one_round(index, group, processes, pservers, data_threads, options.steps * case.longer)
                    rounds[index].append(measured)
    jobs = [job_of(group, case, options.rows) for case in group.cases]
    measured_ = [
        Measured(group, case, job, tuple(of_case)) for case, job, of_case in zip(group.cases, jobs, rounds, strict=True)
    ]
    return measured_, int(status[1]) * float(os.sysconf("SC_PAGE_SIZE"))


def one_round(
    index: int,
    group: Group,
    processes: Sequence[WorkerProcess],
    pservers: LocalPservers,
    data_threads: list[int],
    num_steps: int,
) -> Round:
    """Of one case; the first of all tells which threads of the pservers are the data threads."""
    asked(processes, index)
    before, begun, busy_s = thread_seconds(pservers), time.perf_counter(), all_busy_s()
    results = [json.loads(answer) for answer in asked(processes, index)]
    busy_s, seconds = all_busy_s() - busy_s, time.perf_counter() - begun
    spent = spent_since(before, thread_seconds(pservers))
    if not data_threads:
        data_threads += [max(tasks, key=tasks.__getitem__) for tasks in spent]
    all_s = sum(sum(tasks.values()) for tasks in spent)
    data_s = sum(tasks[thread] for tasks, thread in zip(spent, data_threads, strict=True))
    ours_s = all_s + sum(result["cpu_s"] for result in results)
    step_s, worker_s = (float(np.mean([result[name] for result in results])) for name in ("step_s", "worker_s"))
    steps = num_steps * group.workers
    others = max(busy_s - ours_s, 0.0) / seconds
    return Round(step_s, worker_s, data_s / steps, (all_s - data_s) / steps, others)


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


# The kernels


def kernel_ns(rule: str, dim: int, most_rows: int, most_bytes: int = KERNEL_BYTES) -> tuple[float, float]:
    """CPU of pulling one row and of pushing one, the lower quartiles of several calls."""
    spec = TableSpec(name="kernels", dim=dim, rule=rule, initializer=uniform(-0.01, 0.01))
    num_rows = min(most_rows, most_bytes // (4 * dim * (1 + spec.update_rule.num_states)))
    store, rng = Store(spec), np.random.default_rng(0)
    num_ids = min(KERNEL_IDS, num_rows // 2)
    grads = rng.standard_normal((num_ids, dim)).astype(np.float32)
    for begin in range(0, num_rows, num_ids):
        ids = np.arange(begin, min(begin + num_ids, num_rows))
        store.push(ids, grads[: len(ids)], 0.05, 1)
    out = np.empty_like(grads)
    seconds = np.empty((KERNEL_CALLS, 2))
    for call in range(KERNEL_CALLS):
        ids = rng.integers(0, num_rows, num_ids)
        begun = time.thread_time()
        store.pull(ids, out)
        pulled = time.thread_time()
        store.push(ids, grads, 0.05, 2)
        seconds[call] = pulled - begun, time.thread_time() - pulled
    store.close()
    pull_ns, push_ns = (1e9 * np.quantile(seconds, 0.25, axis=0) / num_ids).tolist()
    return pull_ns, push_ns


def measure_kernels(num_rows: int) -> dict[str, Any]:
    """As `Costs` has them."""
    of_rules = {rule: {dim: kernel_ns(rule, dim, num_rows) for dim in DIMS} for rule in TRAINED}
    near_pull, near_push = kernel_ns(RULE, 16, num_rows)
    far_pull, far_push = kernel_ns(RULE, 16, FAR * num_rows, FAR * KERNEL_BYTES)
    return {
        "kernel_rows": num_rows,
        "pull_ns": {dim: float(np.median([of_rules[rule][dim][0] for rule in TRAINED])) for dim in DIMS},
        "push_ns": {rule: {dim: of_rules[rule][dim][1] for dim in DIMS} for rule in TRAINED},
        "far_rows": FAR * num_rows,
        "far_pull_ns": max(far_pull - near_pull, 0.0),
        "far_push_ns": max(far_push - near_push, 0.0),
        "num_states": {rule: RULES[rule].num_states for rule in TRAINED},
    }


# The fit


def fitted(
    units: Sequence[str],
    measured: Sequence[Measured],
    seconds: Callable[[Measured], float],
    known: Callable[[Measured], float],
) -> tuple[dict[str, float], float]:
    """Prices of these units, by the least squares of the relative errors of `seconds`; and their sum.

    While a price is below 0, the lowest one is left at 0 for good, and the others are fitted again: so another set of
    units at 0 might have a smaller sum.

    Args:
        units: Of `Work`.
        measured: Cases.
        seconds: What is explained.
        known: What of it is known already.
    """
    totals = np.array([1e9 * seconds(each) for each in measured])
    amounts = np.array([[getattr(each.work, unit) for unit in units] for each in measured]) / totals[:, None]
    targets = 1 - np.array([1e9 * known(each) for each in measured]) / totals
    kept = [column for column in range(len(units)) if amounts[:, column].any()]
    while True:
        prices = np.linalg.lstsq(amounts[:, kept], targets)[0]
        if not kept or prices.min() >= 0:
            found = {units[column]: round(float(price), 5) for column, price in zip(kept, prices, strict=True)}
            return found, float(np.square(amounts[:, kept] @ prices - targets).sum())
        kept.pop(int(prices.argmin()))


def tells_costs(groups: Sequence[Group]) -> bool:
    """Whether all costs can be fitted: in either mode to some case, in async of a worker alone."""
    fitted = [group for group in groups if any(case.is_fitted for case in group.cases)]
    alone = any(group.mode == ASYNC and group.workers == 1 for group in fitted)
    return alone and any(group.mode == SYNC for group in fitted)


def warm(each: Measured, party: str, cold: float) -> float:
    """CPU of a party in a step, as if its thread had never been idle in it."""
    spent_s = {"worker": each.middle.worker_s, "data_thread": each.middle.data_s, "io_thread": each.middle.io_s}[party]
    share = 1.0 if party == "worker" else each.group.workers / each.group.pservers
    return spent_s / (1 + cold * max(1 - share * spent_s / each.middle.step_s, 0.0))


def fit(measured: Sequence[Measured], kernels: dict[str, Any], pserver_bytes: float) -> Costs:
    """The costs, from CPU; seconds of a step only tell how long a thread was idle, and the I/O shares."""
    fields: dict[str, Any] = {**kernels, "pserver_bytes": pserver_bytes}
    fields |= {"cold": 0.0, "io_share": 0.0, "pull_io_share": 0.0, "measured": {}, "checks": ()}
    nothing: dict[str, Any] = {mode: {party: {} for party in Prices._fields} for mode in (ASYNC, SYNC)}
    costs = parse_costs(json.dumps(fields | {"prices": nothing}), "kernels")

    errors = [priced(measured, costs, cold)[1] for cold in COLD]
    cold = next(cold for cold, error in zip(COLD, errors, strict=True) if error <= ALMOST * min(errors) + TINY)
    alone = [each for each in measured if each.is_fitted and each.group.mode == ASYNC and each.group.workers == 1]
    return replace(
        costs,
        prices=priced(measured, costs, cold)[0],
        cold=cold,
        io_share=io_share([each for each in alone if each.job.waits_for_push]),
        pull_io_share=io_share([each for each in alone if not each.job.waits_for_push]),
    )


def priced(measured: Sequence[Measured], costs: Costs, cold: float) -> tuple[dict[str, Prices], float]:
    """Prices of each mode, fitted to its cases that are for that, and the sum of the squares; kernels as in `costs`."""

    def of_kernels(each: Measured) -> float:
        return each.work.rows / 2 * costs.kernel_s(RULE, each.case.dim, each.job.rows / each.group.pservers)

    prices, errors = {}, 0.0
    for mode in (ASYNC, SYNC):
        ours = [each for each in measured if each.is_fitted and each.group.mode == mode]
        of_mode = {}
        for party in Prices._fields:
            units = Work._fields if party == "worker" else AT_PSERVER
            known = of_kernels if party == "data_thread" else free
            of_party, error = fitted(units, ours, partial(warm, party=party, cold=cold), known)
            of_mode[party] = Price(**of_party)
            errors += error
        prices[str(mode)] = Prices(**of_mode)
    return prices, errors


def left_out(measured: Sequence[Measured], costs: Costs) -> list[dict[str, Any]]:
    """How far the steps of large jobs move if the prices are fitted without one case; `cold` and I/O shares stay."""
    others = {}
    for each in measured:
        if each.is_fitted:
            prices, _ = priced([other for other in measured if other is not each], costs, costs.cold)
            others[each.name] = replace(costs, prices=prices)
    found = []
    for name, job, machines, given in EXAMPLES:
        chosen = plan(job, machines, costs, given)
        pservers = chosen.num_pservers
        steps_ms = {without: 1e3 * plan_on(job, machines, of, pservers).step_s for without, of in others.items()}
        shortest, longest = (pick(steps_ms, key=steps_ms.__getitem__) for pick in (min, max))
        found.append(
            {
                "name": f"{name}, {pservers} pservers",
                "step_ms": round(1e3 * chosen.step_s, 2),
                "shortest_ms": round(steps_ms[shortest], 2),
                "shortest_without": shortest,
                "longest_ms": round(steps_ms[longest], 2),
                "longest_without": longest,
            }
        )
    return found


def free(_: Measured) -> float:
    """Nothing is known."""
    return 0.0


def io_share(alone: Sequence[Measured]) -> float:
    """What of the I/O threads' time is in the step of these, which wait for nobody else; least squares."""
    turns = [max(each.group.pservers / LOOPBACK.shared_cores, 1.0) / each.group.pservers for each in alone]
    middles = [each.middle for each in alone]
    io = np.array([turn * each.io_s / each.step_s for turn, each in zip(turns, middles, strict=True)])
    known = [each.case.compute_s + each.middle.worker_s for each in alone]
    rest = np.array(
        [1 - (own + turn * each.data_s) / each.step_s for own, turn, each in zip(known, turns, middles, strict=True)]
    )
    return round(float(np.clip(io @ rest / (io @ io), 0, 1)), 3)


def predicted_s(each: Measured, costs: Costs) -> float:
    """Of a step, as the model has it."""
    return plan_on(each.job, LOOPBACK, costs, each.group.pservers).step_s


def from_own_cpu_s(each: Measured, costs: Costs) -> float:
    """Of a step, by the model's formulae from the CPU of this very case: what is off then is not the prices."""
    data_s, io_s = each.middle.data_s / each.group.pservers, each.middle.io_s / each.group.pservers
    io_share = costs.io_share if each.job.waits_for_push else costs.pull_io_share
    cpu = Cpu(each.middle.worker_s, data_s, io_s, waited_io=io_share * io_s)
    return times_of(each.job, LOOPBACK, each.group.pservers, cpu)[1]


def report(measured: Sequence[Measured], costs: Costs, told: dict[str, Any]) -> dict[str, Any]:
    """What the package ships; `told` is the commit that was measured."""
    checks = [
        {
            "name": each.name,
            "job": asdict(each.job),
            "pservers": each.group.pservers,
            "is_fitted": each.is_fitted,
            "measured_us": round(1e6 * each.middle.step_s, 1),
            "predicted_us": round(1e6 * predicted_s(each, costs), 1),
            "from_own_cpu_us": round(1e6 * from_own_cpu_s(each, costs), 1),
            "others": round(each.middle.others, 2),
            "rounds": len(quiet(each.rounds)),
            "cpu_us": [
                round(1e6 * seconds, 1) for seconds in (each.middle.worker_s, each.middle.data_s, each.middle.io_s)
            ],
        }
        for each in measured
    ]
    return {
        "measured": {
            "commit": told["commit"],
            "is_changed": told["is_dirty"],
            "date": date.today().isoformat(),
            "cpu": machine()["cpu"],
            "cores": LOOPBACK.shared_cores,
            "load": os.getloadavg()[0],
        },
        "prices": {
            mode: {party: price._asdict() for party, price in prices._asdict().items()}
            for mode, prices in costs.prices.items()
        },
        "cold": costs.cold,
        "io_share": costs.io_share,
        "pull_io_share": costs.pull_io_share,
        "kernel_rows": costs.kernel_rows,
        "pull_ns": rounded(costs.pull_ns),
        "push_ns": {rule: rounded(of_rule) for rule, of_rule in costs.push_ns.items()},
        "far_rows": costs.far_rows,
        "far_pull_ns": round(costs.far_pull_ns, 1),
        "far_push_ns": round(costs.far_push_ns, 1),
        "num_states": dict(costs.num_states),
        "pserver_bytes": costs.pserver_bytes,
        "checks": checks,
        "left_out": left_out(measured, costs),
    }


def rounded(by_dim: Any) -> dict[str, float]:
    """To a tenth of a nanosecond."""
    return {str(dim): round(value, 1) for dim, value in by_dim.items()}


def show(console: Console, content: dict[str, Any]) -> None:
    """Three tables: costs, predictions, and how far those of large jobs move."""
    table = Table(title="CPU ns of one")
    table.add_column("")
    for unit in Work._fields:
        table.add_column(unit, justify="right")
    for mode, of_mode in content["prices"].items():
        for party, price in of_mode.items():
            table.add_row(f"{mode}: {party}", *(f"{price[unit]:.3g}" for unit in Work._fields))
    console.print(table)
    table = Table(title="a step, workers x pservers")
    headings = ["case", "measured us", "predicted us", "ratio", "", "from own CPU", "fitted", "others"]
    for heading in [*headings, "CPU us: worker, data, I/O"]:
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for check in content["checks"]:
        ratio = check["predicted_us"] / check["measured_us"]
        own = f"{check['from_own_cpu_us'] / check['measured_us']:.2f}"
        verdict = "" if abs(ratio - 1) <= MODEL_TOLERANCE else "OFF" if check["rounds"] else "disturbed"
        cells = (f"{check['measured_us']:.0f}", f"{check['predicted_us']:.0f}", f"{ratio:.2f}", verdict)
        cpu = ", ".join(f"{each:.0f}" for each in check["cpu_us"])
        table.add_row(check["name"], *cells, own, "yes" if check["is_fitted"] else "no", f"{check['others']:.2f}", cpu)
    console.print(table)
    table = Table(title="steps of large jobs by the model, if one case less is fitted")
    for heading in ("job", "step ms", "shortest", "without", "longest", "without"):
        table.add_column(heading)
    for each in content["left_out"]:
        table.add_row(*(str(value) for value in each.values()))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints costs and predictions, and writes the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=AT_LEAST_1, default=80, help="of a round")
    parser.add_argument("--passes", type=AT_LEAST_1, default=2, help="over all jobs, which are started anew in each")
    parser.add_argument("--rounds", type=AT_LEAST_1, default=2, help="of each case in a pass, that nothing disturbed")
    parser.add_argument(
        "--retries", type=AT_LEAST_0, default=6, help="rounds more, at most, of a case that was disturbed"
    )
    parser.add_argument("--rows", type=AT_LEAST_2, default=1_000_000, help="of a table of dim 16")
    names = [group.name.replace(" ", "") for group in GROUPS]
    parser.add_argument("--jobs", nargs="+", choices=names, default=names, metavar="JOB", help=", ".join(names))
    parser.add_argument("--costs", type=Path, help="file for the costs; costs.json beside the results if left out")
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoints", nargs="+", help=argparse.SUPPRESS)
    add_results(parser)
    options = parser.parse_args(arguments)
    if not tells_costs([GROUPS[names.index(name)] for name in options.jobs]):
        parser.error("argument --jobs: costs need an async job of one worker and a sync one, as async,1x1 sync,1x1")
    if options.worker is not None:
        work(options)
    record, told = Record("scale", options), commit()
    console = Console()
    with console.status("kernels"):
        warm_up()
        kernels = measure_kernels(options.rows)
    by_name: dict[str, Measured] = {}
    idle = []
    for number in [names.index(name) for _ in range(options.passes) for name in options.jobs]:
        with console.status(names[number]):
            of_group, idle_bytes = run_group(number, options)
        for each in of_group:
            before = by_name[each.name].rounds if each.name in by_name else ()
            by_name[each.name] = each._replace(rounds=before + each.rounds)
        idle.append(idle_bytes)
    measured = list(by_name.values())
    content = report(measured, fit(measured, kernels, float(np.median(idle))), told)
    show(console, content)
    rounds = [
        {each.name: each.rounds[number]._asdict() for each in measured if number < len(each.rounds)}
        for number in range(max(len(each.rounds) for each in measured))
    ]
    record.append(rounds, checks=content["checks"])
    costs = options.costs or options.results / "costs.json"
    costs.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written to {costs}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
