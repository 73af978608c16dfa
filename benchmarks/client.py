"""How many rows a second does one client pull and push, against pserver processes and in this process?

`python -m benchmarks.client` from the root of a checkout. A cycle is one pull and one push of the same ids; the push of
a cycle is applied while the next pull is prepared, as in training. Every cycle has other ids. Times are medians over
cycles of all rounds; the quartiles beside them say how quiet the machine was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import Record, add_results
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table import TableSpec
from fleet_sparse.core.warm_up import warm_up
from fleet_sparse.embedded import start_embedded
from fleet_sparse.settings import CHANNELS, ROWS_DTYPES, Settings
from fleet_sparse.worker.batch import Deduplicator, UniqueIds
from fleet_sparse.worker.channel_choice import open_channel
from fleet_sparse.worker.client import Client
from fleet_sparse.worker.control import ControlClient

START_S = 60.0
KINDS = ["zmq", "stream", "in-process"]


class Cycles(NamedTuple):
    """Seconds of each cycle and of its parts.

    Attributes:
        dedup: Ids to distinct ids, grouped by shard; not part of the cycle.
        pull: Until the rows are there; the push of the cycle before is applied first.
        push: Until it is accepted.
        whole: Pull and push.
    """

    dedup: NDArray[np.float64]
    pull: NDArray[np.float64]
    push: NDArray[np.float64]
    whole: NDArray[np.float64]


@contextmanager
def pserver_processes(num_shards: int) -> Iterator[list[str]]:
    """Addresses of the control planes of running pservers."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / str(shard) for shard in range(num_shards)]
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "fleet_sparse.pserver", "--shard", str(shard)),
                    *("--num-shards", str(num_shards), "--control", "127.0.0.1:0", "--cluster-id", "1"),
                    *("--servers", ",".join(["127.0.0.1:0"] * num_shards), "--endpoint-file", str(file)),
                ],
                env={**os.environ, "FLEET_SPARSE_LOG_LEVEL": "ERROR"},
            )
            for shard, file in enumerate(files)
        ]
        try:
            until = time.monotonic() + START_S
            while not all(file.exists() for file in files):
                if any(process.poll() is not None for process in processes) or time.monotonic() > until:
                    raise SystemExit("a pserver did not start")
                time.sleep(0.02)
            yield [file.read_text().strip() for file in files]
        finally:
            for process in processes:
                process.kill()
                process.wait()


@contextmanager
def connected(kind: str, num_shards: int, spec: TableSpec, rows_dtype: str = "float32") -> Iterator[Client]:
    """A client of pserver processes (`zmq`, `stream`) or of pservers in this process."""
    settings = Settings(channel=kind if kind in CHANNELS else "auto", rows_dtype=rows_dtype)
    if kind in CHANNELS:
        with pserver_processes(num_shards) as endpoints, ControlClient(endpoints, settings) as control:
            registrations = control.register([spec], 0, 1)
            channel = open_channel(registrations, settings)
            with Client(channel, control.identity, registrations, Placement.even(num_shards), settings) as client:
                yield client
        return
    control, in_process = start_embedded(settings, num_shards=num_shards)
    with control:
        registrations = control.register([spec], 0, 1)
        with Client(in_process, control.identity, registrations, Placement.even(num_shards), settings) as client:
            yield client


def fill(client: Client, spec: TableSpec, deduplicator: Deduplicator, num_rows: int) -> None:
    """Creates the rows of ids `[0, num_rows)`."""
    for begin in range(0, num_rows, 50_000):
        unique, _ = deduplicator.unique([np.arange(begin, min(begin + 50_000, num_rows), dtype=np.int64)], spec.salt)
        push(client, spec, unique, np.full((len(unique.ids), spec.dim), 0.01, np.float32), 1)
    client.flush()


def push(client: Client, spec: TableSpec, unique: UniqueIds, grads: NDArray[np.float32], step: int) -> None:
    client.push([(spec, unique, grads)], learning_rate=0.05, optimizer_step=step)


def measure(
    client: Client, spec: TableSpec, deduplicator: Deduplicator, *, num_rows: int, batch: int, num_cycles: int
) -> Cycles:
    rng = np.random.default_rng(1)
    batches = [rng.choice(num_rows, batch, replace=False).astype(np.int64) for _ in range(num_cycles)]
    grads = [np.full((batch, spec.dim), 0.01, np.float32) for _ in range(8)]  # more than are in flight at once
    out = np.empty((batch, spec.dim), np.float32)
    times = np.empty((num_cycles, 4))
    for step, ids in enumerate(batches):
        begun = time.perf_counter()
        unique, _ = deduplicator.unique([ids], spec.salt)
        ready = time.perf_counter()
        client.pull([(spec, unique, out)])
        pulled = time.perf_counter()
        push(client, spec, unique, grads[step % len(grads)], step + 1)
        pushed = time.perf_counter()
        times[step] = ready - begun, pulled - ready, pushed - pulled, pushed - ready
    client.flush()
    return Cycles(*times.T)


def joined(rounds: Sequence[Cycles]) -> Cycles:
    return Cycles(*(np.concatenate(parts) for parts in zip(*rounds, strict=True)))


def us(times: NDArray[np.float64]) -> float:
    """Median of seconds, in microseconds."""
    return float(np.median(times)) * 1e6


def describe(name: str, batch: int, cycles: Cycles) -> str:
    low, high = (np.quantile(cycles.whole, q) * 1e6 for q in (0.25, 0.75))
    rate = batch / np.median(cycles.whole) / 1e6
    return (
        f"{name:<16} {us(cycles.pull):>8.0f} {us(cycles.push):>8.0f} {us(cycles.whole):>8.0f} "
        f"{f'{low:.0f}-{high:.0f}':>12} {us(cycles.dedup):>8.0f} {rate:>10.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=13_000, help="distinct ids of a cycle")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows that there are")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--rule", default="adagrad")
    parser.add_argument("--cycles", type=int, default=150, help="of one round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rows-dtype", choices=ROWS_DTYPES, default="float32", help="in which rows travel")
    parser.add_argument("--channels", nargs="+", choices=KINDS, default=KINDS)
    add_results(parser)
    options = parser.parse_args(arguments)
    record = Record("client", options)
    warm_up()
    spec = TableSpec(name="table", dim=options.dim, rule=options.rule, initializer=uniform(-0.01, 0.01))
    print(
        f"dim {options.dim}, {options.batch} distinct ids of {options.rows}, {options.shards} shards, "
        f"{options.rule}; median us"
    )
    print(f"{'channel':<16} {'pull':>8} {'push':>8} {'cycle':>8} {'quartiles':>12} {'(dedup)':>8} {'M rows/s':>10}")
    measured: dict[str, list[Cycles]] = {}
    for kind in options.channels:
        deduplicator = Deduplicator(Placement.even(options.shards))
        with connected(kind, options.shards, spec, options.rows_dtype) as client:
            fill(client, spec, deduplicator, options.rows)
            size = {"num_rows": options.rows, "batch": options.batch}
            measure(client, spec, deduplicator, **size, num_cycles=20)
            measured[kind] = [
                measure(client, spec, deduplicator, **size, num_cycles=options.cycles) for _ in range(options.rounds)
            ]
        print(describe(kind, options.batch, joined(measured[kind])), flush=True)
    record.append([{kind: measured[kind][k]._asdict() for kind in measured} for k in range(options.rounds)])


if __name__ == "__main__":
    main()
