"""How fast does a table grow, what is its longest pause, and what does a row cost in memory?

`python -m benchmarks.growth --rows 20000000` from the root of a checkout.

Batches of 13 000 new ids are pushed to a table of dim 16 with Adagrad, to a store of this process and to a pserver
process on this host, one after the other in each round. A push over the wire returns when the one before it is
applied, so that a batch is prepared while another is applied, as in training; its time is from the end of one push to
the end of the next. Pages that the machine has not used lately cost far more than the store's own work, most of all in
a virtual machine; `--fresh` includes that cost. Without it as much memory as the run needs is used and given back
twice before, and the rate at which the system backs it is printed; a guest that reports free memory to its host keeps
it for about a second. The ids are the same in every run, so a pause that the next run does not have at the same size
comes from the machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.options import AT_LEAST_1
from benchmarks.processes import resident_bytes
from benchmarks.record import Record, add_results
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.storage.virtual_memory import ReservedMemory
from fleet_sparse.settings import Settings
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch

DIM = 16
BATCH_ROWS = 13_000
BYTES_A_ROW = 180
SIZES = (1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000)
LEARNING_RATE = 0.05
IN_PROCESS, OVER_THE_WIRE = WAYS = ("in process", "over the wire")
CURVE_ROWS = 250_000
PAGE_BYTES = 4096

Push = Callable[[NDArray[np.int64], NDArray[np.float32]], object]


class Growing(NamedTuple):
    """A table to grow.

    Attributes:
        push: Pushes new ids and their gradients.
        pid: Id of the process that has the rows.
        count_rows: Returns the number of rows that were pushed.
        in_flight: Number of rows that may not be applied yet when `push` returns.
    """

    push: Push
    pid: int
    count_rows: Callable[[], int]
    in_flight: int


class Stretch(NamedTuple):
    """Measurements while the store grew from the size before to `num_rows`."""

    num_rows: int
    rows_per_s: float
    median_ms: float
    worst_ms: float
    bytes_a_row: float
    most_bytes_a_row: float


def use_and_give_back(num_bytes: int, *, huge_pages: bool) -> float:
    """Uses that much memory and gives it back; returns the bytes a second at which the system backed it."""
    memory = ReservedMemory(huge_pages=huge_pages)
    start = time.perf_counter()
    memory.array(np.uint8)[:num_bytes:PAGE_BYTES] = 1
    seconds = time.perf_counter() - start
    memory.close()
    return num_bytes / seconds


def grow(table: Growing, sizes: list[int]) -> tuple[list[Stretch], list[tuple[float, float, float]]]:
    """Pushes new ids until there are as many rows as the last size.

    Returns:
        The stretches, and (rows, rows/s, bytes/row) in small steps.
    """
    idle_bytes = resident_bytes(table.pid)
    grads = np.random.default_rng(0).standard_normal((BATCH_ROWS, DIM)).astype(np.float32)
    stretches: list[Stretch] = []
    times: list[float] = []
    curve: list[tuple[float, float, float]] = []
    num_of_curve, seconds_of_curve = 0, 0.0
    num_rows, most = 0, 0.0
    ended = time.perf_counter()
    while len(stretches) < len(sizes):
        ids = hash_ids(np.arange(num_rows, num_rows + BATCH_ROWS), 0).view(np.int64)
        begun = ended if table.in_flight else time.perf_counter()
        table.push(ids, grads)
        ended = time.perf_counter()
        times.append(ended - begun)
        num_rows += BATCH_ROWS
        num_of_curve, seconds_of_curve = num_of_curve + BATCH_ROWS, seconds_of_curve + times[-1]
        bytes_a_row = (resident_bytes(table.pid) - idle_bytes) / max(num_rows - table.in_flight, 1)
        if num_rows >= SIZES[0]:
            most = max(most, bytes_a_row)
        if num_of_curve >= CURVE_ROWS:
            curve.append((num_rows, num_of_curve / seconds_of_curve, bytes_a_row))
            num_of_curve, seconds_of_curve = 0, 0.0
        if num_rows >= sizes[len(stretches)]:
            ms = np.array(times) * 1e3
            rate = BATCH_ROWS * len(times) / sum(times)
            stretches.append(Stretch(num_rows, rate, float(np.median(ms)), ms.max(), bytes_a_row, most))
            times, most = [], 0.0
    return stretches, curve


def shown(way: str, stretches: list[Stretch]) -> Table:
    """Returns the measurements as a table."""
    table = Table(title=f"{way}: dim {DIM}, Adagrad, batches of {BATCH_ROWS:,} new ids")
    for heading in ("rows", "M rows/s", "median ms", "worst ms", "bytes/row", "most on the way"):
        table.add_column(heading, justify="right")
    for s in stretches:
        cells = (s.rows_per_s / 1e6, s.median_ms, s.worst_ms, s.bytes_a_row, s.most_bytes_a_row)
        table.add_row(
            f"{s.num_rows:,}", *(f"{cell:.{digits}f}" for cell, digits in zip(cells, (2, 2, 1, 1, 1), strict=True))
        )
    return table


@contextmanager
def in_process(spec: TableSpec, *, huge_pages: bool) -> Iterator[Growing]:
    """Opens a store of this process."""
    store = TableStore(spec, huge_pages=huge_pages)
    yield Growing(
        lambda ids, grads: store.push(ids, grads, LEARNING_RATE, 1), os.getpid(), lambda: store.num_rows, in_flight=0
    )
    store.close()


@contextmanager
def over_the_wire(spec: TableSpec) -> Iterator[Growing]:
    """Opens a table of a pserver process."""
    settings, placement = Settings(max_inflight_pushes=1), Placement.even(1)
    with (
        tempfile.TemporaryDirectory() as root,
        local_pservers(1, root=Path(root), log=subprocess.DEVNULL) as pservers,
        ControlClient(pservers.endpoints, settings) as control,
    ):
        registrations = control.register([spec], 0, 1)
        channel = open_channel(registrations, settings)
        with Client(channel, control.identity, registrations, placement, settings) as client:
            deduplicator, steps = Deduplicator(placement), count(1)

            def push(ids: NDArray[np.int64], grads: NDArray[np.float32]) -> None:
                unique, _ = deduplicator.unique([ids], spec.salt)
                client.push([RowBatch(spec, unique, grads, LEARNING_RATE, next(steps))])

            def count_rows() -> int:
                client.flush()
                return control.stats()[0].tables[0].num_rows

            yield Growing(push, pservers.processes[0].process.pid, count_rows, in_flight=BATCH_ROWS)


def grown(spec: TableSpec, options: argparse.Namespace) -> dict[str, Any]:
    """Returns one round: the growth of a new table, in process and over the wire."""
    found: dict[str, Any] = {}
    sizes = [size for size in SIZES if size < options.rows] + [options.rows]
    for way in WAYS:
        num_bytes = options.rows * BYTES_A_ROW
        num_times = 0 if options.fresh else 2
        backed = [use_and_give_back(num_bytes, huge_pages=options.huge_pages) for _ in range(num_times)]
        table = in_process(spec, huge_pages=options.huge_pages) if way == IN_PROCESS else over_the_wire(spec)
        with table as growing:
            stretches, curve = grow(growing, sizes)
            if (num_rows := growing.count_rows()) != stretches[-1].num_rows:
                raise SystemExit(f"{way}: {num_rows} rows are there, should be {stretches[-1].num_rows}")
        stretches_ = [each._asdict() for each in stretches]
        found[way] = {"backed_bytes_per_s": backed, "stretches": stretches_, "curve": curve}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Grows tables in each round and prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=AT_LEAST_1, default=20_000_000, help="rows to grow to")
    parser.add_argument("--rounds", type=AT_LEAST_1, default=3)
    parser.add_argument("--fresh", action="store_true", help="do not use the memory before")
    parser.add_argument("--no-huge-pages", dest="huge_pages", action="store_false", help="no 2 MB pages in process")
    add_results(parser)
    options = parser.parse_args(arguments)
    record = Record("growth", options)
    console = Console()
    warm_up()
    spec = TableSpec(name="growth", dim=DIM, rule="adagrad", initializer=uniform(-0.1, 0.1))
    rounds = []
    for _ in range(options.rounds):
        rounds.append(grown(spec, options))
        for way, found in rounds[-1].items():
            for number, rate in enumerate(found["backed_bytes_per_s"], 1):
                console.print(f"memory backed at {rate / 1e9:.2f} GB/s, time {number}")
            console.print(shown(way, [Stretch(**each) for each in found["stretches"]]))
    record.append(rounds)


if __name__ == "__main__":
    main()
