"""A worker of `het_save`: it holds updates of many rows, and says how long a save keeps it from training.

Its role comes from fleetrun's environment. It trains batches of a click model's ids (`trace.py`), and holds what is
held after the last one; with `--trace-steps 0` all workers train all rows, `--passes` times, so that all are old enough
for updates to be held of each. Its last line of output is `@@` and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet

import fleet_sparse
from benchmarks.het.job import MARK
from benchmarks.het.trace import draw
from benchmarks.options import AT_LEAST_0, AT_LEAST_1
from fleet_sparse.models.synthetic import criteo_sizes

RATE = 0.03
_BATCH = 50_000
_EXPONENT, _EXAMPLES = 1.1, 512
_ROWS_PER_COPY = 20
"""Ids of the trace for each copy that a worker may have: 5 % of the rows are cached."""
_MEET_S, _POLL_S = 300.0, 0.005


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, saves and prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=AT_LEAST_1, required=True)
    parser.add_argument("--dim", type=AT_LEAST_1, required=True)
    parser.add_argument("--trace-steps", type=AT_LEAST_0, required=True)
    parser.add_argument("--passes", type=AT_LEAST_1, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="empty, and the same for all workers")
    parser.add_argument("--lag", type=AT_LEAST_1, help="bound of updates; without it, a drift of twice the rate")
    options = parser.parse_args(arguments)
    paddle.enable_static()
    print(MARK, json.dumps(saved(options)), flush=True)


def saved(options: argparse.Namespace) -> dict[str, Any]:
    """Trains and saves; returns what was measured."""
    fleet_sparse.install()
    fleet.init()
    ids = paddle.static.data("ids", [None], "int64")
    slopes = paddle.static.data("slopes", [None, 1], "float32")
    size = [2 * _ROWS_PER_COPY * options.rows, options.dim]
    rows = paddle.static.nn.embedding(ids, size=size, is_sparse=True, is_distributed=True)
    loss = paddle.sum(rows * slopes)
    admit = "estimate" if options.trace_steps else "all"
    cache = fleet_sparse.RowCache(max_bytes=4 << 30, max_rows=options.rows, admit=admit)
    bound = {"max_row_lag": options.lag} if options.lag else {"max_row_drift": 2 * RATE}
    strategy = fleet_sparse.PserverStrategy(row_cache=cache, **bound)
    strategy.a_sync = True
    fleet.distributed_optimizer(paddle.optimizer.Adagrad(RATE), strategy).minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    rng = np.random.default_rng(fleet.worker_index())
    for batch in trace_batches(options) if options.trace_steps else passes(options):
        gradients = {"slopes": rng.normal(0.0, 1e-3, (len(batch), 1)).astype(np.float32)}
        executor.run(feed={"ids": batch, **gradients}, fetch_list=[])
    (held,) = (table["held"] for table in fleet_sparse.stats()["row_cache"].values())
    meet(options.directory, fleet.worker_index(), fleet.worker_num())
    begun_at = time.perf_counter()
    fleet_sparse.save("model", wait=False)
    waited_s = time.perf_counter() - begun_at
    fleet.barrier_worker()
    fleet.stop_worker()
    return {"worker": fleet.worker_index(), "held": held, "waited_s": waited_s}


def meet(directory: Path, worker: int, num_workers: int) -> None:
    """Returns when all workers are here. A barrier would send what they hold."""
    (directory / f"worker-{worker}").touch()
    deadline = time.monotonic() + _MEET_S
    while not all((directory / f"worker-{each}").exists() for each in range(num_workers)):
        if time.monotonic() > deadline:
            raise SystemExit(f"worker {worker}: the others are not here after {_MEET_S:g} s")
        time.sleep(_POLL_S)


def trace_batches(options: argparse.Namespace) -> Iterator[NDArray[np.int64]]:
    """Yields the distinct ids of the batches of this worker."""
    sizes, seed = criteo_sizes(_ROWS_PER_COPY * options.rows), 100 + fleet.worker_index()
    trace = draw(sizes, exponent=_EXPONENT, batch=_EXAMPLES, num_steps=options.trace_steps, seed=seed)
    fleet.barrier_worker()  # all begin when all have drawn
    for step in range(trace.num_steps):
        yield trace.batch(step).astype(np.int64)


def passes(options: argparse.Namespace) -> Iterator[NDArray[np.int64]]:
    """Yields all ids in batches, `passes` times and once more. A barrier ends each pass but the last."""
    for number in range(options.passes + 1):
        if number:
            fleet.barrier_worker()
        for begin in range(0, options.rows, _BATCH):
            yield np.arange(begin, min(begin + _BATCH, options.rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
