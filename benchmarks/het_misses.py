"""How often does a row cache miss, and how many rows enter it?

`python -m benchmarks.het_misses` from the root of a checkout. One worker's batches have Criteo's shape: 26 fields with
the sizes of Criteo's, scaled to `--rows`, and values by Zipf's law. The index of the workers' row cache runs with each
of its policies. Beside it runs `benchmarks.het.simulator`, which shares no code with it: LRU and LFU, into which every
row enters, aged LFU, and Belady's, which knows the future. Rates are those of the second half of the steps, over the
distinct ids of each batch.

In `hot set moved` other values are the frequent ones from 80 % of the steps on. Shown are the misses of 300 steps, from
200 steps after that on, in a cache of 1 % of the rows; LRU and LFU begin there without a row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.het import simulator
from benchmarks.het.trace import Trace, draw
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, amount
from benchmarks.record import Record, add_results
from fleet_sparse.core.cache_index import CacheIndex
from fleet_sparse.core.cache_policies import AGED_LFU, ALL, ESTIMATE, LFU, LRU, SECOND, Admission, CachePolicy
from fleet_sparse.models.synthetic import criteo_sizes
from fleet_sparse.warm_up import warm_up

SALT = 0x5EED
MOVED, MOVED_PERCENT, FIRST_AFTER, STEPS_AFTER = "hot set moved", 1.0, 200, 300
BELADY = "Belady"

Counts = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Missed and entered ids of each step."""


class Cache(NamedTuple):
    """A cache: its name, and what runs a trace through it, given the number of its rows."""

    name: str
    run: Callable[[Trace, int], Counts]


def simulated(run: Callable[..., None]) -> Callable[[Trace, int], Counts]:
    """Returns what runs a cache of the simulator."""

    def counted(trace: Trace, capacity: int) -> Counts:
        missed, entered = np.empty(trace.num_steps, np.int64), np.empty(trace.num_steps, np.int64)
        run(trace.ids, trace.begins, trace.num_ids, capacity, missed, entered)
        return missed, entered

    return counted


def indexed(policy: CachePolicy, admission: Admission) -> Callable[[Trace, int], Counts]:
    """Returns what runs the index of the workers' cache."""

    def counted(trace: Trace, capacity: int) -> Counts:
        index = CacheIndex(capacity, SALT, policy, admission)
        missed, entered = np.empty(trace.num_steps, np.int64), np.empty(trace.num_steps, np.int64)
        for step in range(trace.num_steps):
            ids = trace.batch(step).astype(np.int64)
            missing = ids[index.use(ids, step).missing]
            entries = index.choose(missing)
            index.replace(missing[entries.indices], entries, step)
            index.age(len(ids), step)
            missed[step], entered[step] = len(missing), len(entries.indices)
        return missed, entered

    return counted


CACHES = (
    Cache("aged LFU", indexed(AGED_LFU, ESTIMATE)),
    Cache("aged LFU, second", indexed(AGED_LFU, SECOND)),
    Cache("LFU, all", indexed(LFU, ALL)),
    Cache("LRU, all", indexed(LRU, ALL)),
    Cache("simulated aged LFU", simulated(simulator.run_aged_lfu)),
    Cache("simulated LFU", simulated(simulator.run_lfu)),
    Cache("simulated LRU", simulated(simulator.run_lru)),
    Cache(BELADY, simulated(simulator.run_optimal)),
)


def rates(trace: Trace, counts: Counts, steps: slice) -> dict[str, float]:
    """Returns missed and entered ids over the reads of some steps."""
    num_reads = int(np.diff(trace.begins)[steps].sum())
    return {
        name: float(each[steps].sum() / num_reads) for name, each in zip(("missed", "entered"), counts, strict=True)
    }


def after_a_move(trace: Trace, moved_at: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the rates of caches after the hot set moved."""
    capacity = max(int(trace.num_ids * MOVED_PERCENT / 100), 1)
    begin = trace.begins[moved_at]
    since = Trace(trace.ids[begin:], trace.begins[moved_at:] - begin, trace.num_ids)
    after = slice(FIRST_AFTER, FIRST_AFTER + STEPS_AFTER)
    yield "aged LFU", rates(trace, CACHES[0].run(trace, capacity), slice(moved_at + after.start, moved_at + after.stop))
    for name, run in (("LRU begun anew", simulator.run_lru), ("LFU begun anew", simulator.run_lfu)):
        yield name, rates(since, simulated(run)(since, capacity), after)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all caches and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exponent", type=amount, default=1.1, help="of Zipf's law")
    parser.add_argument("--batch", type=AT_LEAST_1, default=512, help="examples of a batch")
    parser.add_argument("--rows", type=AT_LEAST_1, default=10_000_000)
    parser.add_argument("--steps", type=AT_LEAST_2, default=8000)
    parser.add_argument(
        "--moved-steps", type=AT_LEAST_2, default=2500, help="steps of the moved hot set; moved at 80 %%"
    )
    parser.add_argument("--percent", type=amount, nargs="+", default=[1, 3, 5, 10, 15], help="rows that are cached")
    parser.add_argument("--seeds", type=AT_LEAST_1, default=1)
    add_results(parser)
    options = parser.parse_args(arguments)
    record = Record("het_misses", options)
    warm_up()
    rounds: list[dict[str, dict[str, float]]] = []
    sizes, console = criteo_sizes(options.rows), Console()
    with console.status("") as status:
        for seed in range(options.seeds):
            of_round: dict[str, dict[str, float]] = {}
            status.update("draws ids")
            trace = draw(sizes, exponent=options.exponent, batch=options.batch, num_steps=options.steps, seed=seed)
            for percent in options.percent:
                for cache in CACHES:
                    name = f"{percent:g} %: {cache.name}"
                    status.update(name)
                    begun = time.perf_counter()
                    counts = cache.run(trace, max(int(trace.num_ids * percent / 100), 1))
                    of_round[name] = rates(trace, counts, slice(options.steps // 2, None))
                    of_round[name]["s"] = time.perf_counter() - begun
            moved_at = options.moved_steps * 4 // 5
            if moved_at + FIRST_AFTER + STEPS_AFTER <= options.moved_steps:
                status.update(MOVED)
                steps = {"num_steps": options.moved_steps, "moved_at": moved_at}
                trace = draw(sizes, exponent=options.exponent, batch=options.batch, seed=seed, **steps)
                of_round |= {f"{MOVED}: {name}": of for name, of in after_a_move(trace, moved_at)}
            rounds.append(of_round)
    table = Table(
        title=f"batches of {options.batch} examples, zipf {options.exponent:g}, {options.rows:,} rows; medians"
    )
    for heading in ("cache", "misses, %", "rows that enter, %"):
        table.add_column(heading, justify="right" if heading != "cache" else "left", no_wrap=True)
    for name in rounds[0]:
        cells = [f"{100 * float(np.median([each[name][key] for each in rounds])):.2f}" for key in ("missed", "entered")]
        table.add_row(name, *cells)
    console.print(table)
    record.append(rounds)


if __name__ == "__main__":
    main()
