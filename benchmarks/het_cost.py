"""What does a row cache cost in CPU?

`python -m benchmarks.het_cost` from the root of a checkout. Jobs of one and of several workers in async mode, with real
clients in this process and a pserver process: Adagrad, batches of Criteo's shape as in `benchmarks.het_traffic`, and
gradients that are the same for a row in every step but for noise. Each job runs without caches, with rows that lag by
at most a distance of twice the learning rate, and by 100 updates and a quarter of all; all rows fit into the caches.

Figures are of the second half of the steps: CPU of a worker's lookup and update, its I/O thread included, and of the
pserver, for a step. Small batches show what a step costs whatever its size, and more tables what each of them adds;
large ones what rows cost. Waits are not CPU, and nothing of Paddle is in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_clock import cpu_seconds
from benchmarks.het.clients import RATE, one_process_job
from benchmarks.het.trace import Trace, draw
from benchmarks.het.training import DRIFT, LAG, NO_CACHE
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, DIM
from benchmarks.record import Record, add_results
from fleet_sparse.core.row_bound import DEFAULT_SHARE, RowBound
from fleet_sparse.models.synthetic import criteo_sizes
from fleet_sparse.warm_up import warm_up

BOUNDS = {NO_CACHE: None, DRIFT: RowBound(drift=2 * RATE), LAG: RowBound(100, DEFAULT_SHARE)}
_NOISE = np.float32(2.0)  # of a gradient, over its mean
_EXPONENT = 1.1


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each job and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=AT_LEAST_1, nargs="+", default=[1, 4])
    parser.add_argument("--tables", type=AT_LEAST_1, nargs="+", default=[1, 26])
    parser.add_argument("--dims", type=DIM, nargs="+", default=[16, 64])
    parser.add_argument("--batches", type=AT_LEAST_1, nargs="+", default=[32, 2048], help="examples of a batch")
    parser.add_argument("--rows", type=AT_LEAST_1, default=300_000)
    parser.add_argument("--examples", type=AT_LEAST_1, default=300_000, help="of all workers and steps of a job")
    parser.add_argument("--max-steps", type=AT_LEAST_2, default=300)
    parser.add_argument("--rounds", type=AT_LEAST_1, default=3)
    add_results(parser)
    options = parser.parse_args(arguments)
    record, console = Record("het_cost", options), Console(width=120)
    warm_up()
    rounds = []
    with console.status("") as status:
        for number in range(options.rounds):
            rounds.append(measured_round(options, number, status.update))
    show(console, rounds)
    record.append(rounds)


def measured_round(
    options: argparse.Namespace, seed: int, on_progress: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Returns what each job costs, with and without caches."""
    found = {}
    for num_workers in options.workers:
        for batch in options.batches:
            steps = max(2, min(options.examples // (batch * num_workers), options.max_steps))
            shape = {"exponent": _EXPONENT, "batch": batch, "num_steps": steps}
            sizes = criteo_sizes(options.rows)
            traces = [draw(sizes, **shape, seed=100 * seed + worker) for worker in range(num_workers)]
            for (dim, num_tables), (of_bound, bound) in product(product(options.dims, options.tables), BOUNDS.items()):
                name = f"{num_workers} workers, {num_tables} tables, dim {dim}, {batch} examples: {of_bound}"
                on_progress(f"seed {seed}: {name}")
                found[name] = measured(traces, dim, num_tables, bound, seed)
    return found


def measured(traces: Sequence[Trace], dim: int, num_tables: int, bound: RowBound | None, seed: int) -> dict[str, float]:
    """Returns the CPU seconds of a worker and of the pserver for a worker's step, and its distinct rows."""
    rng, first_counted = np.random.default_rng(seed), traces[0].num_steps // 2
    means = rng.standard_normal((traces[0].num_ids, 1), np.float32)
    num_rows, own_s, others_s, pserver_s = 0, 0.0, 0.0, 0.0
    with one_process_job(len(traces), dim, bound, -(-traces[0].num_ids // num_tables), num_tables) as (workers, pid):
        for step in range(traces[0].num_steps):
            if step == first_counted:
                for worker in workers:
                    worker.client.flush()
                num_rows, own_s, pserver_s = 0, 0.0, -cpu_seconds([pid])
                others_s = time.thread_time() - time.process_time()
            for worker, trace in zip(workers, traces, strict=True):
                batches = worker.batches(trace.batch(step).astype(np.int64))
                grads = [
                    means[batch.unique.ids] + _NOISE * rng.standard_normal(batch.values.shape, np.float32)
                    for batch in batches
                ]
                begun = time.thread_time()
                worker.read(batches)
                worker.update(batches, grads)
                own_s += time.thread_time() - begun
                num_rows += sum(len(batch.unique.ids) for batch in batches)
        for worker in workers:
            worker.client.flush()
        others_s += time.process_time() - time.thread_time()
        pserver_s += cpu_seconds([pid])
    num_steps = len(traces) * (traces[0].num_steps - first_counted)
    return {
        "worker_s": (own_s + others_s) / num_steps,
        "pserver_s": pserver_s / num_steps,
        "rows": num_rows / num_steps,
    }


def show(console: Console, rounds: Sequence[dict[str, dict[str, float]]]) -> None:
    """Prints medians over the rounds."""
    table = Table(title="CPU of a step of one worker")
    table.add_column("job", no_wrap=True)
    for heading in ("worker, ms", "pserver, ms", "distinct rows"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in rounds[0]:
        worker_s, pserver_s, rows = (
            np.median([each[name][key] for each in rounds]) for key in ("worker_s", "pserver_s", "rows")
        )
        table.add_row(name, f"{1e3 * worker_s:.3f}", f"{1e3 * pserver_s:.3f}", f"{rows:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
