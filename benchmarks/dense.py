"""What does a step of dense parameters cost in sync training, merged by a pserver or reduced by Gloo?

`python -m benchmarks.dense` from the root of a checkout. A call begins with each worker's gradients in an array and
ends when each worker has the new values (SGD) in an array. "pserver, sync" merges the gradients of all workers,
"pserver, async" applies each as it comes; with Gloo every worker applies their mean to values of its own. All workers
are at a barrier before each call; a call lasts until the slowest of them has its answer. The four ways take turns, a
block of calls each; times are medians over all blocks but the first.

Gloo's all-reduce adds up in the order of a ring. Gathered shares are added up in the order of the workers, and must
give the bits that the pserver gives; this is checked.

Where network namespaces can be made, `benchmarks.het.dense_link` then counts the bytes of the busiest link of workers
on hosts of their own: with dense ranges on pservers beside them, and with the all-reduce of `dense="all_reduce"`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.het import dense_link
from benchmarks.het.network import can_make_hosts
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, PSERVERS, amount
from benchmarks.record import Record, add_results
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.local_pservers import child_environment, local_pservers
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate

SYNC_PSERVER, ASYNC_PSERVER, REDUCED, GATHERED = "pserver, sync", "pserver, async", "Gloo all-reduce", "Gloo gathered"
WAYS = (SYNC_PSERVER, ASYNC_PSERVER, REDUCED, GATHERED)
FLOAT_BYTES = 4
BLOCK_CALLS = 8
LEARNING_RATE = 0.01
WEIGHT = 512.0
START_S = 60
LIMIT_S = 120.0

Call = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class GlooGroup:
    """Workers in a process group of Paddle, through one TCPStore on which worker 0 listens."""

    def __init__(self, worker_index: int, num_workers: int, port: int) -> None:
        from paddle.base import core

        os.environ["PADDLE_TRAINER_ID"] = str(worker_index)  # Paddle reads it there
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = core.TCPStore("127.0.0.1", port, worker_index == 0, num_workers, START_S)
        self._num_workers = num_workers
        self._sum = core.ReduceOp.SUM
        self._group = core.ProcessGroupGloo.create(store, worker_index, num_workers, 0)

    def barrier(self) -> None:
        """Returns when all workers have called it."""
        self._group.barrier().wait()

    def reduced(self, num_values: int) -> Call:
        """Runs one all-reduce of weighted gradients followed by the weight."""
        tensor, view = _tensor(num_values + 1)

        def total(grads: NDArray[np.float32]) -> NDArray[np.float32]:
            _weigh(grads, view)
            self._group.all_reduce(tensor, self._sum, True).wait()
            return view

        return _stepping(num_values, total)

    def gathered(self, num_values: int) -> Call:
        """Runs one all-gather of the same, added up by every worker."""
        sent, sent_view = _tensor(num_values + 1)
        received, received_view = _tensor(self._num_workers * (num_values + 1))
        shares = received_view.reshape(self._num_workers, -1)

        def total(grads: NDArray[np.float32]) -> NDArray[np.float32]:
            _weigh(grads, sent_view)
            self._group.all_gather_into_tensor(received, sent, True).wait()
            summed: NDArray[np.float32] = shares[0]
            for share in shares[1:]:
                summed += share
            return summed

        return _stepping(num_values, total)


def _stepping(num_values: int, total: Call) -> Call:
    """Applies SGD with the mean of the gradients in `total`."""
    values = np.zeros(num_values, np.float32)

    def call(grads: NDArray[np.float32]) -> NDArray[np.float32]:
        summed = total(grads)
        mean = summed[:-1]
        mean /= summed[-1]
        mean *= np.float32(LEARNING_RATE)
        np.subtract(values, mean, out=values)
        return values

    return call


def _tensor(size: int) -> tuple[Any, NDArray[np.float32]]:
    """Returns a tensor of Paddle and its memory."""
    import paddle

    tensor = paddle.zeros([size], "float32")
    return tensor, np.asarray(np.from_dlpack(tensor), np.float32)


def _weigh(grads: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    np.multiply(grads, np.float32(WEIGHT), out=out[:-1])
    out[-1] = WEIGHT


def pserver_way(way: str, endpoints: Sequence[str], worker_index: int, num_workers: int, sizes: Sequence[int]) -> Any:
    """Returns the connection, to be kept, and the call of each size."""
    settings = Settings()
    mode = Mode(SYNC) if way == SYNC_PSERVER else Mode()
    specs = [DenseSpec(f"dense{size}", "sgd", (), (Segment("values", 0, size, 1.0),)) for size in sizes]
    control = ControlClient(endpoints, settings)
    registrations = control.register(specs, worker_index, num_workers, mode)
    channel = open_channel(registrations, settings)
    client = Client(channel, control.identity, registrations, Placement.even(len(registrations)), settings)
    if worker_index == 0:
        for spec in specs:
            client.assign_dense(spec, np.zeros(spec.num_values, np.float32))
    updates = count(1)

    def call_of(spec: DenseSpec) -> Call:
        def call(grads: NDArray[np.float32]) -> NDArray[np.float32]:
            number = next(updates)
            out = np.empty(spec.num_values, np.float32)
            push = DenseUpdate(spec, grads, [out], LEARNING_RATE, number)
            pending = client.start_update([], [push], weight=WEIGHT, step=number if mode.is_step_synchronized else 0)
            assert pending is not None  # it pulls
            pending.wait()
            return out

        return call

    return control, [call_of(spec) for spec in specs]


def work(options: argparse.Namespace) -> None:
    """Runs one worker, which prints its seconds of every call, by size and way."""
    worker_index, num_workers = options.worker, options.workers[0]
    sizes = [max(1, round(1000 * kilobytes) // FLOAT_BYTES) for kilobytes in options.kilobytes]
    group = GlooGroup(worker_index, num_workers, options.port)
    calls: dict[str, list[Call]] = {
        REDUCED: [group.reduced(size) for size in sizes],
        GATHERED: [group.gathered(size) for size in sizes],
    }
    controls = []
    for way, endpoints in zip((SYNC_PSERVER, ASYNC_PSERVER), options.endpoints, strict=True):
        control, calls[way] = pserver_way(way, endpoints.split(","), worker_index, num_workers, sizes)
        controls.append(control)
    group.barrier()
    seconds: list[dict[str, list[float]]] = []
    for number, size in enumerate(sizes):
        grads = np.random.default_rng(worker_index).standard_normal(size).astype(np.float32)
        seconds.append({way: [] for way in WAYS})
        values = {}
        for block in range(options.rounds):
            for way in WAYS:
                for _ in range(BLOCK_CALLS):
                    group.barrier()
                    begun_at = time.perf_counter()
                    values[way] = calls[way][number](grads)
                    if block:
                        seconds[-1][way].append(time.perf_counter() - begun_at)
        if not np.array_equal(values[SYNC_PSERVER], values[GATHERED]):
            raise SystemExit(f"{size} values: the pserver and the gathered sum differ")
    group.barrier()
    print(json.dumps(seconds), flush=True)
    os._exit(0)  # there is nothing to save


def measure(options: argparse.Namespace, num_workers: int) -> list[dict[str, NDArray[np.float64]]]:
    """Returns the seconds of every call of the slowest worker, by size and way."""
    with (
        tempfile.TemporaryDirectory() as root,
        local_pservers(options.shards, root=Path(root), log=subprocess.DEVNULL) as merging,
        local_pservers(options.shards, root=Path(root), log=subprocess.DEVNULL) as applying,
        socket.socket() as held,
    ):
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the store may listen where nothing else may bind
        held.bind(("", 0))
        command = [sys.executable, "-m", "benchmarks.dense", "--port", str(held.getsockname()[1])]
        command += ["--workers", str(num_workers), "--rounds", str(options.rounds)]
        command += ["--endpoints", ",".join(merging.endpoints), ",".join(applying.endpoints)]
        command += ["--kilobytes", *map(str, options.kilobytes)]
        workers = [
            subprocess.Popen(
                [*command, "--worker", str(worker)],
                env=child_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for worker in range(num_workers)
        ]
        try:
            outputs = [worker.communicate(timeout=LIMIT_S) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    for worker, (_, complaint) in zip(workers, outputs, strict=True):
        if worker.returncode:
            raise SystemExit(complaint)
    by_worker = [json.loads(output) for output, _ in outputs]
    return [
        {way: np.max([seconds[size][way] for seconds in by_worker], axis=0) for way in WAYS}
        for size in range(len(options.kilobytes))
    ]


def show(options: argparse.Namespace, num_workers: int, seconds: list[dict[str, NDArray[np.float64]]]) -> None:
    """Prints a table of medians with quartiles, and ratios to the pserver that merges."""
    table = Table(title=f"{num_workers} workers, {options.shards} pserver(s), OMP {os.environ['OMP_NUM_THREADS']}")
    for heading in ("kB", "way", "median ms", "quartiles ms", "over pserver, sync"):
        table.add_column(heading, justify="right")
    for kilobytes, of_ways in zip(options.kilobytes, seconds, strict=True):
        base = float(np.median(of_ways[SYNC_PSERVER]))
        for way in WAYS:
            low, middle, high = (1e3 * np.percentile(of_ways[way], [25, 50, 75])).tolist()
            ratio = middle / 1e3 / base
            table.add_row(f"{kilobytes:g}", way, f"{middle:.2f}", f"{low:.2f} - {high:.2f}", f"{ratio:.2f}")
    Console().print(table)


def rounds_of(
    options: argparse.Namespace, measured: dict[int, list[dict[str, NDArray[np.float64]]]]
) -> list[dict[str, Any]]:
    """Returns the seconds of calls by block: `2, 100 kB, Gloo gathered` names workers, size and way."""
    return [
        {
            f"{num_workers}, {kilobytes:g} kB, {way}": seconds[block * BLOCK_CALLS : (block + 1) * BLOCK_CALLS]
            for num_workers, of_sizes in measured.items()
            for kilobytes, of_ways in zip(options.kilobytes, of_sizes, strict=True)
            for way, seconds in of_ways.items()
        }
        for block in range(options.rounds - 1)
    ]


def count_links(options: argparse.Namespace, console: Console) -> dict[str, dict[str, float]]:
    """Returns the bytes of the busiest link over a ring's, by number of workers, size and way; none without hosts."""
    found: dict[str, dict[str, float]] = {}
    if not options.link_workers:
        return found
    if not can_make_hosts():
        console.print("links: not counted, since no network namespaces can be made")
        return found
    num_values = max(1, round(1000 * options.link_kilobytes) // FLOAT_BYTES)
    table = Table(title=f"bytes of the busiest link over 2 D (W - 1) / W, D = {options.link_kilobytes:g} kB")
    for heading in ("workers", "way", "over a ring's"):
        table.add_column(heading, justify="right")
    for num_workers in options.link_workers:
        for way in dense_link.WAYS:
            over_ring = dense_link.bytes_over_ring(way, num_workers, num_values, options.link_steps)
            found[f"{num_workers}, {options.link_kilobytes:g} kB, {way}"] = {"over_ring": over_ring}
            table.add_row(str(num_workers), way, f"{over_ring:.3f}")
    console.print(table)
    return found


def main() -> None:
    """Measures and prints a table for each number of workers, and one of links."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=AT_LEAST_1, nargs="+", default=[2, 3])
    parser.add_argument("--shards", type=PSERVERS, default=1, help="pservers of a job")
    parser.add_argument(
        "--kilobytes", type=amount, nargs="+", default=[1, 100, 700, 4000], help="sizes of the gradients"
    )
    parser.add_argument(
        "--rounds", type=AT_LEAST_2, default=5, help="blocks of calls of each way; the first is not timed"
    )
    parser.add_argument("--link-workers", type=AT_LEAST_2, nargs="*", default=[2, 4, 8], help="of jobs on hosts")
    parser.add_argument("--link-kilobytes", type=amount, default=2000, help="size of their gradients")
    parser.add_argument("--link-steps", type=AT_LEAST_1, default=20)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoints", nargs=2, help=argparse.SUPPRESS)
    add_results(parser)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
    record = Record("dense", options)
    measured = {}
    for num_workers in options.workers:
        measured[num_workers] = measure(options, num_workers)
        show(options, num_workers, measured[num_workers])
    links = count_links(options, Console())
    record.append([each | (links if not number else {}) for number, each in enumerate(rounds_of(options, measured))])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
