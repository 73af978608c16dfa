"""The program of a chaos job, run by fleetrun: in each step a worker adds 1 to its own value of every row.

It trains until the file `finish` exists, and in sync mode until the step that `last` names. The number of the steps
that it made, in all of its lives, is in the file `steps`n, as 8 bytes.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
from paddle.distributed import fleet

from fleet_sparse.plugin.install import install
from fleet_sparse.plugin.row_cache import RowCache
from fleet_sparse.plugin.save_calls import resume, save_every
from fleet_sparse.plugin.strategy import PserverStrategy

NUM_ROWS = 128
STEPS = struct.Struct("<Q")
STEP_S = 0.002
_LAG, _STEPS_PER_SAVE = 4, 200
_RESTARTS = "1000000"
_RESUMING = ("sync", "lag")
"""Modes in which the death of a worker sends the job back to its newest snapshot."""
_LONG_S = 0.25  # a step that takes longer is a pause


def main() -> None:
    """Runs a pserver or a worker, as fleetrun says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("async", "lag", "geo", "sync"), required=True)
    parser.add_argument("--geo-steps", type=int, required=True, help="steps of a window of a geo job")
    parser.add_argument("--row-lag", type=int, default=0, help="max_row_lag of caches of half of the rows; 0 for none")
    parser.add_argument("--restart-workers", action="store_true")
    arguments = parser.parse_args()
    mode: str = arguments.mode
    if arguments.restart_workers or os.environ.get("TRAINING_ROLE") == "PSERVER":
        os.environ["FLEET_SPARSE_RESTARTS"] = _RESTARTS
    install()
    paddle.enable_static()
    fleet.init()
    num_workers = fleet.worker_num()
    ids = paddle.static.data("ids", [None], "int64")
    zeros = paddle.ParamAttr(name="counts", initializer=paddle.nn.initializer.Constant(0.0))
    size = [1 << 40, num_workers]
    rows = paddle.static.nn.embedding(ids, size=size, is_sparse=True, is_distributed=True, param_attr=zeros)
    evaluation = paddle.static.default_main_program().clone(for_test=True)
    own = paddle.static.data("own", [num_workers, 1], "float32")
    loss = paddle.sum(paddle.matmul(rows, own))
    fleet.distributed_optimizer(
        paddle.optimizer.SGD(1.0), strategy_of(mode, arguments.geo_steps, arguments.row_lag)
    ).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    column = np.zeros((num_workers, 1), np.float32)
    column[fleet.worker_index()] = -1
    feed = {"ids": np.arange(NUM_ROWS), "own": column}
    worker, begun = fleet.worker_index(), None
    if arguments.restart_workers and mode in _RESUMING:
        save_every("model", steps=_STEPS_PER_SAVE)
        begun = resume("model")
        print("resumes at", begun, flush=True)
    counter = open_counter(worker)
    num_steps = train(mode, arguments.geo_steps, counter, begun, lambda: executor.run(feed=feed, fetch_list=[loss]))
    fleet.barrier_worker()
    values = executor.run(evaluation, feed={"ids": np.arange(NUM_ROWS)}, fetch_list=[rows])[0]
    counts = values[:, fleet.worker_index()]
    print("counted", num_steps, int(counts.min()), int(counts.max()), flush=True)
    fleet.barrier_worker()
    fleet.stop_worker()
    print("ended well", flush=True)


def strategy_of(mode: str, geo_steps: int, row_lag: int) -> PserverStrategy:
    """Returns the strategy of a mode in which updates add up exactly."""
    strategy = PserverStrategy(
        max_step_lag=_LAG if mode == "lag" else None,
        delta_scale="sum" if mode == "geo" else "avg",
        max_row_lag=row_lag or None,
        row_cache=RowCache(max_rows=NUM_ROWS // 2) if row_lag else None,
    )
    strategy.a_sync = mode != "sync"
    if mode == "geo":
        strategy.a_sync_configs = {"k_steps": geo_steps}
    elif mode == "sync":
        strategy.gradient_scale_configs = {"scale_strategy": "sum"}
    return strategy


def open_counter(worker: int) -> mmap.mmap:
    """Returns the memory of the file with the number of steps, and says the process id."""
    path = Path(f"steps{worker}")
    if not path.exists():
        path.write_bytes(bytes(STEPS.size))
    with path.open("r+b") as file:
        counter = mmap.mmap(file.fileno(), STEPS.size)
    print("pid", os.getpid(), flush=True)
    return counter


def train(mode: str, geo_steps: int, counter: mmap.mmap, begun: int | None, step: Callable[[], object]) -> int:
    """Makes steps until the job should end.

    Args:
        mode: Mode of training.
        geo_steps: Steps of a window of a geo job.
        counter: Number of steps of all lives.
        begun: Number of steps that the rows have; None for those of all former lives.
        step: Makes a step.

    Returns:
        The number of steps that the rows should have.
    """
    worker = fleet.worker_index()
    (made,) = STEPS.unpack(counter)
    before = made if begun is None else begun
    for number in itertools.count(before + 1):
        begun_at = time.monotonic()
        step()
        took_s = time.monotonic() - begun_at
        STEPS.pack_into(counter, 0, made + number - before)
        if took_s > _LONG_S:
            print(f"pause {took_s:.3f}", flush=True)
        if mode == "sync":  # all workers end after the same step
            if worker == 0 and Path("finish").exists() and not Path("last").exists():
                Path("last.part").write_text(str(number + 2))  # no worker is more than one step ahead
                Path("last.part").rename("last")
            if Path("last").exists() and number == int(Path("last").read_text()):
                return number
        elif Path("finish").exists() and (mode != "geo" or (number - before) % geo_steps == 0):
            return number
        time.sleep(STEP_S)
    raise AssertionError("steps have no end")


if __name__ == "__main__":
    main()
