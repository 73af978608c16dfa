"""A worker of `het_save`: it holds updates of many rows, and says how long a save keeps it from training.

Its role comes from fleetrun's environment. All workers train all rows, `--passes` times, so that the rows are old
enough for updates to be held. Its last line of output is `@@` and JSON.
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
from benchmarks.options import AT_LEAST_1

RATE = 0.03
_BATCH = 50_000
_MEET_S, _POLL_S = 300.0, 0.005


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, saves and prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=AT_LEAST_1, required=True)
    parser.add_argument("--dim", type=AT_LEAST_1, required=True)
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
    size = [2 * options.rows, options.dim]
    loss = paddle.sum(paddle.static.nn.embedding(ids, size=size, is_sparse=True, is_distributed=True)) * 1e-3
    cache = fleet_sparse.RowCache(max_bytes=4 << 30, max_rows=options.rows, admit="all")
    bound = {"max_row_lag": options.lag} if options.lag else {"max_row_drift": 2 * RATE}
    strategy = fleet_sparse.PserverStrategy(row_cache=cache, **bound)
    strategy.a_sync = True
    fleet.distributed_optimizer(paddle.optimizer.Adagrad(RATE), strategy).minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    for _ in range(options.passes):
        for batch in batches(options.rows):
            executor.run(feed={"ids": batch}, fetch_list=[])
        fleet.barrier_worker()
    for batch in batches(options.rows):
        executor.run(feed={"ids": batch}, fetch_list=[])
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


def batches(num_rows: int) -> Iterator[NDArray[np.int64]]:
    """Yields all ids once."""
    for begin in range(0, num_rows, _BATCH):
        yield np.arange(begin, min(begin + _BATCH, num_rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
