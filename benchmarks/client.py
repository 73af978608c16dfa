"""How many rows a second does one client pull and push, of pserver processes and, without frames, in this process?

`python -m benchmarks.client` from the root of a checkout. A cycle is one pull and one push of the same ids; the push of
a cycle is applied while the next pull is prepared, as in training. A combined cycle has the push of the cycle before
and its own pull in one message a shard. Every cycle has other ids. All channels and numbers of shards are there at once
and take turns, some cycles each. A thread other than the main one calls, as Paddle's operators do. Times are medians
over cycles of all rounds; the quartiles beside them say how quiet the machine was. Bytes are those of all frames; in
process, of ids, gradients and rows.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.interleaved import interleaved
from benchmarks.options import AT_LEAST_1, DIM, PSERVERS, TRAINED, check_batch
from benchmarks.record import Record, add_results
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded import start_embedded
from fleet_sparse.embedded_client import EmbeddedClient
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.settings import CHANNELS, ROWS_DTYPES, RowsDtype, Settings
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.deduplicator import Deduplicator, UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch

KINDS = ["zmq", "stream", "in-process"]
LEARNING_RATE = 0.05
NUM_WARM_UP = 20


BenchmarkedClient = Client | EmbeddedClient


class Cycles(NamedTuple):
    """Seconds of each cycle and of its parts, and bytes of a cycle.

    Attributes:
        dedup: Finding the distinct ids, grouped by shard; not part of the cycle.
        pull: Until the rows have arrived; the push of the cycle before is applied first.
        push: Until it is accepted.
        whole: Pull and push.
        combined: A combined cycle, until the rows have arrived.
        num_bytes: Bytes of the frames of a cycle, sent and received.
        combined_num_bytes: Bytes of those of a combined cycle.
    """

    dedup: NDArray[np.float64]
    pull: NDArray[np.float64]
    push: NDArray[np.float64]
    whole: NDArray[np.float64]
    combined: NDArray[np.float64]
    num_bytes: float
    combined_num_bytes: float


class Work(NamedTuple):
    """A client and its work."""

    client: BenchmarkedClient
    spec: TableSpec
    deduplicator: Deduplicator
    num_rows: int
    batch: int


@contextmanager
def connected(kind: str, num_shards: int, spec: TableSpec, rows_dtype: RowsDtype) -> Iterator[BenchmarkedClient]:
    """Opens a client of pserver processes (`zmq`, `stream`) or of pservers in this process."""
    settings = Settings(channel=next((each for each in CHANNELS if each == kind), "auto"), rows_dtype=rows_dtype)
    with ExitStack() as stack:
        if kind in CHANNELS:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            environment = {"FLEET_SPARSE_CHANNEL": kind}
            pservers = stack.enter_context(
                local_pservers(num_shards, root=root, log=subprocess.DEVNULL, environment=environment)
            )
            control = stack.enter_context(ControlClient(pservers.endpoints, settings))
            registrations = control.register([spec], 0, 1)
            channel, placement = open_channel(registrations, settings), Placement.even(num_shards)
            yield stack.enter_context(Client(channel, control.identity, registrations, placement, settings))
        else:
            control, client = start_embedded(settings, num_shards=num_shards)
            stack.enter_context(control)
            control.register([spec], 0, 1)
            yield stack.enter_context(client)


def fill(client: BenchmarkedClient, spec: TableSpec, deduplicator: Deduplicator, num_rows: int) -> None:
    """Creates the rows of ids `[0, num_rows)`."""
    for begin in range(0, num_rows, 50_000):
        unique, _ = deduplicator.unique([np.arange(begin, min(begin + 50_000, num_rows), dtype=np.int64)], spec.salt)
        push(client, spec, unique, np.full((len(unique.ids), spec.dim), 0.01, np.float32), 1)
    client.flush()


def push(client: BenchmarkedClient, spec: TableSpec, unique: UniqueIds, grads: NDArray[np.float32], step: int) -> None:
    client.push([RowBatch(spec, unique, grads, LEARNING_RATE, step)])


def measure(work: Work, num_cycles: int, seed: int) -> Cycles:
    """Runs a number of cycles of both kinds."""
    client, rng = work.client, np.random.default_rng(seed)
    batches = [rng.choice(work.num_rows, work.batch, replace=False).astype(np.int64) for _ in range(num_cycles + 1)]
    before = client.bytes_sent + client.bytes_received
    dedup, pull, push_, whole = two_messages(work, batches[1:])
    between = client.bytes_sent + client.bytes_received
    combined = one_message(work, batches)
    after = client.bytes_sent + client.bytes_received
    num_bytes, combined_num_bytes = (between - before) / num_cycles, (after - between) / num_cycles
    return Cycles(dedup, pull, push_, whole, combined, num_bytes, combined_num_bytes)


def two_messages(work: Work, batches: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Returns the first four parts of `Cycles`, `(4, n)`."""
    client, spec = work.client, work.spec
    grads = [np.full((work.batch, spec.dim), 0.01, np.float32) for _ in range(8)]  # more than are in flight at once
    out = np.empty((work.batch, spec.dim), np.float32)
    times = np.empty((len(batches), 4))
    for step, ids in enumerate(batches):
        begun = time.perf_counter()
        unique, _ = work.deduplicator.unique([ids], spec.salt)
        ready = time.perf_counter()
        client.pull([RowBatch(spec, unique, out)])
        pulled = time.perf_counter()
        push(client, spec, unique, grads[step % len(grads)], step + 1)
        pushed = time.perf_counter()
        times[step] = ready - begun, pulled - ready, pushed - pulled, pushed - ready
    client.flush()
    return times.T


def one_message(work: Work, batches: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Returns the seconds of cycles, `(n - 1,)`; each has the gradients of a batch and the rows of the next."""
    client, spec = work.client, work.spec
    grads = np.full((work.batch, spec.dim), 0.01, np.float32)
    out = np.empty((work.batch, spec.dim), np.float32)
    times = np.empty(len(batches) - 1)
    last, _ = work.deduplicator.unique([batches[0]], spec.salt)
    for step, ids in enumerate(batches[1:]):
        unique, _ = work.deduplicator.unique([ids], spec.salt)
        begun = time.perf_counter()
        push = RowBatch(spec, last, grads, LEARNING_RATE, step + 1)
        pending = client.start_update([push], [], [RowBatch(spec, unique, out)])
        pending.wait()
        times[step] = time.perf_counter() - begun
        last = unique
    return times


def show(options: argparse.Namespace, rounds: Sequence[dict[str, Cycles]]) -> None:
    """Prints a table of medians and quartiles of cycles."""
    table = Table(title=f"dim {options.dim}, {options.batch} distinct ids of {options.rows}, {options.rule}")
    for heading in (
        "shards, channel",
        "pull us",
        "push us",
        "cycle us",
        "M rows/s",
        "combined us",
        "combined M rows/s",
        "kB",
    ):
        table.add_column(heading, justify="right")
    for name in rounds[0]:
        pull, push, whole, combined = (
            np.concatenate([getattr(each[name], part) for each in rounds]) * 1e6
            for part in ("pull", "push", "whole", "combined")
        )
        kilobytes = np.mean([each[name].num_bytes for each in rounds]) / 1e3
        cells = [f"{np.median(pull):.0f}", f"{np.median(push):.0f}"]
        for times in (whole, combined):
            low, middle, high = np.percentile(times, [25, 50, 75])
            cells += [f"{middle:.0f} ({low:.0f} - {high:.0f})", f"{options.batch / middle:.2f}"]
        table.add_row(name, *cells, f"{kilobytes:.0f}")
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all clients and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=DIM, default=16)
    parser.add_argument("--batch", type=AT_LEAST_1, default=13_000, help="distinct ids of a cycle")
    parser.add_argument("--rows", type=AT_LEAST_1, default=1_000_000, help="rows of the table")
    parser.add_argument("--shards", type=PSERVERS, nargs="+", default=[1, 2])
    parser.add_argument("--rule", choices=TRAINED, default="adagrad")
    parser.add_argument("--cycles", type=AT_LEAST_1, default=60, help="cycles of each kind in a round")
    parser.add_argument("--rounds", type=AT_LEAST_1, default=8, help="rounds of each client")
    parser.add_argument("--rows-dtype", choices=ROWS_DTYPES, default="float32", help="dtype of rows on the wire")
    parser.add_argument("--channels", nargs="+", choices=KINDS, default=KINDS)
    add_results(parser)
    options = parser.parse_args(arguments)
    check_batch(parser, options.batch, options.rows)
    record = Record("client", options)
    warm_up()
    spec = TableSpec(name="table", dim=options.dim, rule=options.rule, initializer=uniform(-0.01, 0.01))
    rounds: list[dict[str, Cycles]] = []
    with ExitStack() as stack:
        works: dict[str, Work] = {}
        for num_shards in options.shards:
            for kind in options.channels:
                client = stack.enter_context(connected(kind, num_shards, spec, options.rows_dtype))
                deduplicator = Deduplicator(Placement.even(num_shards))
                works[f"{num_shards}, {kind}"] = Work(client, spec, deduplicator, options.rows, options.batch)
        thread = stack.enter_context(ThreadPoolExecutor(1))
        for work in works.values():
            fill(work.client, spec, work.deduplicator, options.rows)
            thread.submit(measure, work, NUM_WARM_UP, 0).result()
        for number in range(options.rounds):
            cycles = {name: partial(measure, work, options.cycles, number + 1) for name, work in works.items()}
            rounds.append(thread.submit(interleaved, cycles, number).result())
    show(options, rounds)
    record.append([{name: each._asdict() for name, each in of_round.items()} for of_round in rounds])


if __name__ == "__main__":
    main()
