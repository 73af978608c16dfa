"""How many rows does a bound save? The simulator's estimate for the jobs of `het_auc`, without training them.

`python -m benchmarks.het.limits` from the root of a checkout. All rows fit into the caches, workers are in step, and no
copy is leased, as in async mode. A worker that reads a row for the first time receives it, whatever the bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.het.trace import draw
from benchmarks.het.traffic import Traffic, simulated
from benchmarks.options import AT_LEAST_1, AT_LEAST_2
from fleet_sparse.core.row_bound import DEFAULT_SHARE
from fleet_sparse.models.synthetic import EXPONENT, criteo_sizes


class Bound(NamedTuple):
    """The values of `max_row_lag` and `max_row_lag_share` in a job."""

    lag: int
    share: float | None


BOUNDS = [Bound(100, DEFAULT_SHARE), *(Bound(lag, None) for lag in (2, 20, 50, 100, 400))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulates a job of each size and bound and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=AT_LEAST_2, default=[8, 4])
    parser.add_argument("--examples", nargs="+", type=AT_LEAST_1, default=[600_000, 3_000_000], help="of all workers")
    parser.add_argument("--ids", type=AT_LEAST_1, default=600_000, help="distinct values of all fields")
    parser.add_argument("--batch", type=AT_LEAST_1, default=128, help="examples of a step of each worker")
    options = parser.parse_args(arguments)
    table = Table(title=f"simulated, batch {options.batch}, {options.ids:,} ids, all of them cached")
    for heading in ("workers", "examples", "max_row_lag", "share", "rows saved, %", "first reads, %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for num_workers, num_examples in product(options.workers, options.examples):
        for bound, found in jobs(num_workers, num_examples, options.ids, options.batch).items():
            saved, entered = f"{100 * found.rows_saved:.1f}", f"{100 * found.entered / found.read:.1f}"
            cells = f"{bound.lag}", "none" if bound.share is None else f"{bound.share:g}", saved, entered
            table.add_row(f"{num_workers}", f"{num_examples:,}", *cells)
    Console(width=120).print(table)


def jobs(num_workers: int, num_examples: int, num_ids: int, batch: int) -> dict[Bound, Traffic]:
    """Returns what travels in a job of each bound."""
    sizes = criteo_sizes(num_ids)
    num_steps = num_examples // (num_workers * batch)
    traces = [
        draw(sizes, exponent=EXPONENT, batch=batch, num_steps=num_steps, seed=worker) for worker in range(num_workers)
    ]
    job = partial(simulated, traces, capacity=int(sizes.sum()), has_leases=False, first_counted=0)
    return {bound: job(lag=bound.lag, share=bound.share) for bound in BOUNDS}


if __name__ == "__main__":
    main()
