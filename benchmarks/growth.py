"""How fast does a store grow in this process, what is its longest pause, and what does a row cost in memory?

`python -m benchmarks.growth --rows 20000000` from the root of a checkout.

Batches of 13 000 new ids are pushed to a table of dim 16 with Adagrad. Pages that the machine has not used lately cost
far more than the store's own work, in a virtual machine most of all; `--fresh` leaves that in. Without it as much
memory as the run needs is used and given back first, twice, and the rate at which the system backs it is printed.
The ids are the same in every run: a pause that the next run does not have at the same size is the machine's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import Record, add_results
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.table import TableSpec
from fleet_sparse.core.warm_up import warm_up
from fleet_sparse.pserver.reserved_memory import ReservedMemory
from fleet_sparse.pserver.store import Store

DIM = 16
BATCH_ROWS = 13_000
BYTES_A_ROW = 180
SIZES = (1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000)
CURVE_ROWS = 250_000
PAGE_BYTES = 4096


class Stretch(NamedTuple):
    """What was measured while the store grew to `num_rows`, since the size before."""

    num_rows: int
    rows_per_s: float
    median_ms: float
    worst_ms: float
    bytes_a_row: float
    most_bytes_a_row: float


def resident_bytes() -> int:
    """Memory of this process that is backed."""
    with open("/proc/self/statm") as line:
        return int(line.read().split()[1]) * PAGE_BYTES


def use_and_give_back(num_bytes: int, *, huge_pages: bool) -> float:
    """Has the system back that much memory and gives it back; bytes/s."""
    memory = ReservedMemory(huge_pages=huge_pages)
    start = time.perf_counter()
    memory.array(np.uint8)[:num_bytes:PAGE_BYTES] = 1
    seconds = time.perf_counter() - start
    memory.close()
    return num_bytes / seconds


def grow(store: Store, idle_bytes: int, sizes: list[int]) -> tuple[list[Stretch], list[tuple[float, float, float]]]:
    """Pushes new ids until the store has the last size; the stretches, and (rows, rows/s, bytes/row) in small steps."""
    grads = np.random.default_rng(0).standard_normal((BATCH_ROWS, DIM)).astype(np.float32)
    stretches: list[Stretch] = []
    times: list[float] = []
    curve: list[tuple[float, float, float]] = []
    num_of_curve, seconds_of_curve = 0, 0.0
    most = 0.0
    while len(stretches) < len(sizes):
        ids = hash_ids(np.arange(store.num_rows, store.num_rows + BATCH_ROWS), 0).view(np.int64)
        start = time.perf_counter()
        store.push(ids, grads, 0.05, 1)
        times.append(time.perf_counter() - start)
        num_of_curve, seconds_of_curve = num_of_curve + BATCH_ROWS, seconds_of_curve + times[-1]
        bytes_a_row = (resident_bytes() - idle_bytes) / store.num_rows
        if store.num_rows >= SIZES[0]:
            most = max(most, bytes_a_row)
        if num_of_curve >= CURVE_ROWS:
            curve.append((store.num_rows, num_of_curve / seconds_of_curve, bytes_a_row))
            num_of_curve, seconds_of_curve = 0, 0.0
        if store.num_rows >= sizes[len(stretches)]:
            ms = np.array(times) * 1e3
            rate = BATCH_ROWS * len(times) / sum(times)
            stretches.append(Stretch(store.num_rows, rate, float(np.median(ms)), ms.max(), bytes_a_row, most))
            times, most = [], 0.0
    return stretches, curve


def shown(stretches: list[Stretch]) -> Table:
    """The measurements as a table for people."""
    table = Table(title=f"dim {DIM}, Adagrad, batches of {BATCH_ROWS:,} new ids")
    for heading in ("rows", "M rows/s", "median ms", "worst ms", "bytes/row", "most on the way"):
        table.add_column(heading, justify="right")
    for s in stretches:
        cells = (s.rows_per_s / 1e6, s.median_ms, s.worst_ms, s.bytes_a_row, s.most_bytes_a_row)
        table.add_row(
            f"{s.num_rows:,}", *(f"{cell:.{digits}f}" for cell, digits in zip(cells, (2, 2, 1, 1, 1), strict=True))
        )
    return table


def grown(spec: TableSpec, rows: int, *, fresh: bool, huge_pages: bool) -> dict[str, Any]:
    """One round: what growing a new store to so many rows took."""
    backed = [use_and_give_back(rows * BYTES_A_ROW, huge_pages=huge_pages) for _ in range(0 if fresh else 2)]
    store = Store(spec, huge_pages=huge_pages)
    stretches, curve = grow(store, resident_bytes(), [size for size in SIZES if size < rows] + [rows])
    if store.num_rows < rows:
        raise SystemExit(f"{store.num_rows} rows are there, should be {rows}")
    store.close()
    return {"backed_bytes_per_s": backed, "stretches": [each._asdict() for each in stretches], "curve": curve}


def main(arguments: Sequence[str] | None = None) -> None:
    """Grows a store in each round and prints what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000, help="to grow to")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="measure on memory as the system gives it")
    parser.add_argument("--no-huge-pages", dest="huge_pages", action="store_false", help="do not ask for 2 MB pages")
    add_results(parser)
    options = parser.parse_args(arguments)
    record = Record("growth", options)
    console = Console()
    warm_up()
    spec = TableSpec(name="growth", dim=DIM, rule="adagrad", initializer=uniform(-0.1, 0.1))
    rounds = []
    for _ in range(options.rounds):
        rounds.append(grown(spec, options.rows, fresh=options.fresh, huge_pages=options.huge_pages))
        for number, rate in enumerate(rounds[-1]["backed_bytes_per_s"], 1):
            console.print(f"memory backed at {rate / 1e9:.2f} GB/s, time {number}")
        console.print(shown([Stretch(**each) for each in rounds[-1]["stretches"]]))
    record.append(rounds)


if __name__ == "__main__":
    main()
