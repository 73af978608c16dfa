"""How many bytes do row caches save?

`python -m benchmarks.het_traffic` from the root of a checkout. Batches have Criteo's shape: 26 fields with the sizes of
Criteo's, scaled, and values by Zipf's law; a worker has batches of its own. Bytes are compared with those of a job
without caches: `16 + 8 dim` for each distinct id of a batch. Only the second half of the steps counts.

First `--rows` ids, workers in step with leases, by rule and bound. The caches are those of the workers; the pserver is
an array, and bytes are those of ids, versions, rows and states by the table of docs/protocol.md. Beside them stands
what `benchmarks.het.traffic` simulates, which shares no code with the caches.

Then `--measured-rows` ids and jobs of 1 to 8 workers in async mode, with real clients and a real pserver process, dims
16 to 256 and Adagrad: the bytes of all frames of all clients, heads included, beside the simulated ones. The same jobs
run without caches, too, to compare what the kernel counts on the loopback interface, heads of TCP and acknowledgements
included: nothing else should use that interface meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.het.clients import RATE, one_process_job
from benchmarks.het.trace import Trace, draw
from benchmarks.het.traffic import Traffic, simulated
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, DIM, amount
from benchmarks.record import Record, add_results
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.row_bound import DEFAULT_SHARE, ROW_FOLLOWS, RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.models.synthetic import criteo_sizes
from fleet_sparse.pserver.tables.row_asks import decide
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.cache_step import Answer, Arrived, Plan
from fleet_sparse.worker.rows.cached_table import CachedTable

RULES = ("sgd", "adagrad", "adam")
DIMS = (16, 64, 128)
_GRADIENT = np.float32(1e-3)


class Bound(NamedTuple):
    """A bound and a number of workers, by name."""

    name: str
    bound: RowBound
    num_workers: int


def bounds_of(num_workers: int, lags: Sequence[int]) -> Iterator[Bound]:
    """Yields the bounds that are compared: those of the goals, and others with a share of 1/4."""
    for lag in lags:
        yield Bound(f"lag {lag}, share 1/4", RowBound(lag, DEFAULT_SHARE), num_workers)
    yield Bound("lag 100, share off", RowBound(100), num_workers)
    yield Bound("one worker", RowBound(100), 1)


class LockstepJob:
    """Workers with real caches in step, and a pserver as arrays. Rows have one float: no count depends on the dim.

    Args:
        rule: Update rule of the table.
        bound: Bound of the job.
        traces: Batches of each worker.
        capacity: Copies of a worker.
    """

    def __init__(self, rule: str, bound: RowBound, traces: Sequence[Trace], capacity: int) -> None:
        self._spec = TableSpec(name="rows", dim=1, rule=rule, initializer=constant(0.0))
        self.num_states = self._spec.update_rule.num_states
        self._bound, self._traces, self._num_workers = bound, traces, len(traces)
        job = CacheJob(bound, self._num_workers, 0, is_merged=self._num_workers > 1)
        self._tables = [CachedTable(self._spec, capacity, job) for _ in traces]
        self._clocks = np.zeros(traces[0].num_ids, np.uint32)

    def run(self, first_counted: int) -> Traffic:
        """Runs all steps; returns the traffic from a step on."""
        total = np.zeros(len(Traffic._fields), np.int64)
        for step in range(self._traces[0].num_steps):
            begun = [self._read(worker, step) for worker in range(self._num_workers)]
            of_step = [
                np.add(reads, self._update(worker, plan, arrived, step))
                for worker, (plan, arrived, reads) in enumerate(begun)
            ]
            total += np.sum(of_step, axis=0) * (step >= first_counted)
        return Traffic(*total.tolist())

    def _read(self, worker: int, step: int) -> tuple[Plan, Arrived, Traffic]:
        ids, table = self._traces[worker].batch(step).astype(np.int64), self._tables[worker]
        plan = table.plan(ids, step + 1)
        asked_ids, has_states = ids[plan.asked], self.num_states > 0
        slack, _, full = decide(
            *(asked_ids, asked_ids, plan.versions, self._clocks, self._bound, self._num_workers),
            has_states=has_states,
            gives_steps=self._bound.has_leases,
        )
        follows = asked_ids[slack >= ROW_FOLLOWS]
        num_due, num_with = len(follows), len(full.ids)
        rows, states = np.zeros((num_due, 1), np.float32), np.zeros((num_with, self.num_states, 1), np.float32)
        answer = Answer(slack, rows, self._clocks[follows], states)
        arrived = table.take(plan, answer, np.zeros((len(ids), 1), np.float32))
        num_entered = len(plan.entering)
        num_without = num_due - num_with - (0 if has_states else num_entered)
        num_refreshed_with = num_with - num_entered if has_states else 0
        asked = len(plan.asked) - num_entered
        reads = (len(ids), len(plan.plain), num_entered, asked, num_without, num_refreshed_with)
        return plan, arrived, Traffic(*reads, 0, 0, 0)

    def _update(self, worker: int, plan: Plan, arrived: Arrived, step: int) -> Traffic:
        table, grads = self._tables[worker], np.full((len(plan.ids), 1), _GRADIENT, np.float32)
        outgoing = table.apply(plan, arrived, grads, RATE, step + 1)
        self._clocks[plan.ids[outgoing.as_gradients]] += np.uint32(1)
        num_changes = [0, 0]
        for changes in outgoing.changes:
            self._clocks[changes.ids] += changes.amounts
            num_changes[changes.states.shape[1] > 0] += len(changes.ids)
        table.sent(outgoing)
        return Traffic(0, 0, 0, 0, 0, 0, len(outgoing.as_gradients), *num_changes)


def saved_of(traffic: Traffic, num_states: int, num_workers: int) -> dict[str, float]:
    """Returns the shares of bytes, by dim, and of rows that did not travel."""
    of_dims = {f"dim {dim}": traffic.saved(dim, num_states, num_workers=num_workers) for dim in DIMS}
    return {**of_dims, "rows": traffic.rows_saved}


def expected_of(
    traces: Sequence[Trace], bound: RowBound, capacity: int, first_counted: int, *, has_leases: bool
) -> Traffic:
    """Returns what the simulator says of a bound in updates."""
    assert bound.lag is not None, "no bound in distance"
    options = {"capacity": capacity, "lag": bound.lag, "first_counted": first_counted}
    return simulated(traces, **options, share=bound.share, has_leases=has_leases)


def measured(traces: Sequence[Trace], dim: int, bound: RowBound, capacity: int, first_counted: int) -> dict[str, float]:
    """Returns the share of bytes that a real job saves, by frames and by the kernel, and each over the simulated."""
    with_caches, without = (bytes_of_job(traces, dim, each, capacity, first_counted) for each in (bound, None))
    expected = expected_of(traces, bound, capacity, first_counted, has_leases=False)
    found = {
        "measured": 1 - with_caches.by_frames / (expected.read * (16 + 8 * dim)),
        "by_kernel": 1 - with_caches.by_kernel / without.by_kernel,
        "simulated": expected.saved(dim, 1, num_workers=len(traces)),
    }
    found["ratio"] = found["measured"] / found["simulated"]
    return found | {"ratio_by_kernel": found["by_kernel"] / found["simulated"]}


class Bytes(NamedTuple):
    """Bytes of a job in both directions: of all frames, and as the kernel counts them on the loopback interface."""

    by_frames: int
    by_kernel: int


def bytes_of_job(traces: Sequence[Trace], dim: int, bound: RowBound | None, capacity: int, first_counted: int) -> Bytes:
    """Returns the bytes of a real job from a step on."""
    with one_process_job(len(traces), dim, bound, capacity, has_tcp=True) as (workers, _):

        def counted() -> Bytes:
            for worker in workers:
                worker.client.flush()
            of_kernel = int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())
            return Bytes(sum(worker.num_bytes for worker in workers), of_kernel)

        before = counted()
        for step in range(traces[0].num_steps):
            for worker in workers:
                worker.client.flush()  # a pull may overtake another worker's push
            if step == first_counted:
                before = counted()
            of_workers = [
                worker.batches(trace.batch(step).astype(np.int64))
                for worker, trace in zip(workers, traces, strict=True)
            ]
            for worker, batches in zip(workers, of_workers, strict=True):
                worker.read(batches)
            for worker, batches in zip(workers, of_workers, strict=True):
                worker.update(batches, [np.full_like(batch.values, _GRADIENT) for batch in batches])
        return Bytes(*np.subtract(counted(), before).tolist())


def main(arguments: Sequence[str] | None = None) -> None:
    """Counts and measures, and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=AT_LEAST_1, default=10_000_000)
    parser.add_argument("--workers", type=AT_LEAST_2, default=8)
    parser.add_argument("--batch", type=AT_LEAST_1, default=512, help="examples of a batch")
    parser.add_argument("--steps", type=AT_LEAST_2, default=2000)
    parser.add_argument("--percent", type=amount, default=5, help="rows that are cached")
    parser.add_argument("--exponent", type=amount, default=1.1, help="of Zipf's law")
    parser.add_argument("--lags", type=AT_LEAST_1, nargs="+", default=[100], help="lags with a share of 1/4")
    parser.add_argument("--curve-workers", type=AT_LEAST_1, nargs="*", default=[1, 2, 4, 8], help="of the simulation")
    parser.add_argument("--curve-lags", type=AT_LEAST_1, nargs="+", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--curve-steps", type=AT_LEAST_2, default=600)
    parser.add_argument("--measured-workers", type=AT_LEAST_1, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--measured-dims", type=DIM, nargs="+", default=[16, 64, 256])
    parser.add_argument("--measured-rows", type=AT_LEAST_1, default=300_000)
    parser.add_argument("--measured-batch", type=AT_LEAST_1, default=128)
    parser.add_argument("--measured-steps", type=AT_LEAST_2, default=400)
    add_results(parser)
    options = parser.parse_args(arguments)
    record, console = Record("het_traffic", options), Console(width=120)
    warm_up()
    with console.status("") as status:
        counted = count(options, status.update)
        curves: dict[str, dict[str, float]] = {}
        for num_workers in options.curve_workers:
            curves |= curve(options, num_workers, status.update)
        of_real: dict[str, dict[str, float]] = {}
        for num_workers in options.measured_workers:
            of_real |= measure(options, num_workers, status.update)
    show(console, counted, of_real)
    record.append([counted | curves | of_real])


def draw_traces(options: argparse.Namespace, num_rows: int, batch: int, num_workers: int, steps: int) -> list[Trace]:
    """Draws the batches of all workers."""
    of_batch = {"exponent": options.exponent, "batch": batch, "num_steps": steps}
    return [draw(criteo_sizes(num_rows), **of_batch, seed=100 + worker) for worker in range(num_workers)]


def count(options: argparse.Namespace, on_progress: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Returns what the caches save by rule and bound, beside what the simulator says."""
    on_progress("draws ids")
    traces = draw_traces(options, options.rows, options.batch, options.workers, options.steps)
    capacity, first = max(int(traces[0].num_ids * options.percent / 100), 1), options.steps // 2
    found = {}
    for each in bounds_of(options.workers, options.lags):
        own = traces[: each.num_workers]
        on_progress(f"{each.name}, simulated")
        expected = expected_of(own, each.bound, capacity, first, has_leases=True)
        for rule in RULES:
            on_progress(f"{each.name}, {rule}")
            begun = time.perf_counter()
            job = LockstepJob(rule, each.bound, own, capacity)
            name, numbers = f"{each.name}: {rule}", (job.num_states, each.num_workers)
            found[name] = saved_of(job.run(first), *numbers)
            found[name]["s"] = time.perf_counter() - begun
            found[f"{name}, simulated"] = saved_of(expected, *numbers)
    return found


def curve(
    options: argparse.Namespace, num_workers: int, on_progress: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Returns the share of rows that the simulator saves, by lag."""
    steps, found = options.curve_steps, {}
    traces = draw_traces(options, options.measured_rows, options.batch, num_workers, steps)
    capacity = max(int(traces[0].num_ids * options.percent / 100), 1)
    for lag in options.curve_lags:
        for share, name in ((DEFAULT_SHARE, "share 1/4"), (None, "share off")):
            case = f"simulated, {num_workers} workers, lag {lag}, {name}"
            on_progress(case)
            expected = expected_of(traces, RowBound(lag, share), capacity, steps // 2, has_leases=True)
            found[case] = {"rows": expected.rows_saved}
    return found


def measure(
    options: argparse.Namespace, num_workers: int, on_progress: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Returns what real jobs of some workers save, by dim."""
    steps, found = options.measured_steps, {}
    traces = draw_traces(options, options.measured_rows, options.measured_batch, num_workers, steps)
    capacity = max(int(traces[0].num_ids * options.percent / 100), 1)
    for dim in options.measured_dims:
        name = f"measured, {num_workers} workers, dim {dim}"
        on_progress(name)
        found[name] = measured(traces, dim, RowBound(100, DEFAULT_SHARE), capacity, steps // 2)
    return found


def show(console: Console, counted: dict[str, dict[str, float]], of_real: dict[str, dict[str, float]]) -> None:
    """Prints both tables."""
    table = Table(title="bytes and rows that did not travel, %")
    table.add_column("caches", no_wrap=True)
    columns = [f"dim {dim}" for dim in DIMS] + ["rows"]
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, of in counted.items():
        table.add_row(name, *(f"{100 * of[heading]:.1f}" for heading in columns))
    console.print(table)
    if of_real:
        table = Table(title="bytes that did not travel in real jobs, %")
        table.add_column("job", no_wrap=True)
        for heading in ("by frames", "by the kernel", "simulated", "frames over simulated", "kernel over simulated"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, of in of_real.items():
            cells = (f"{100 * of[key]:.1f}" for key in ("measured", "by_kernel", "simulated"))
            table.add_row(name, *cells, *(f"{of[key]:.3f}" for key in ("ratio", "ratio_by_kernel")))
        console.print(table)


if __name__ == "__main__":
    main()
