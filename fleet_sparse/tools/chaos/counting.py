"""The program of a chaos job, which fleetrun runs: in each step a worker adds 1 to its own value of 128 rows.

Before that it adds 1 to its own value of the other rows, once. It trains until the file `finish` exists, and in sync
mode until the step that `last` names. When each step ended, in all of its lives, is in the file `step_ends`n. By how
much the rows differed from their number when an async or geo worker was started again is in `differences`n.npy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet

from fleet_sparse.plugin import connection
from fleet_sparse.plugin.install import install
from fleet_sparse.plugin.row_cache import RowCache
from fleet_sparse.plugin.save_calls import resume, save_every
from fleet_sparse.plugin.strategy import PserverStrategy
from fleet_sparse.worker.net import channel_choice

from .disordered_channel import DisorderedChannel
from .step_ends import StepEnds

NUM_COUNTING_ROWS = 128
FILLER_ROWS_PER_STEP = 1 << 15
STEP_S = 0.002
DISORDER = "disorder"
"""File that exists while frames are disordered."""
_LAG, _STEPS_PER_SAVE = 4, 200
_RESTARTS = "1000000"
_RESUMING = ("sync", "lag")
"""Modes in which a worker that was started again counts on from a step that the pservers know: that of the newest
snapshot, or with a bounded lag and no row cache its own, from which it makes steps again."""


class Table:
    """A table with a column for each worker, and the program that trains it: one for each process.

    Args:
        num_workers: Number of workers.

    Attributes:
        loss: What the optimizer minimizes.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._ids = paddle.static.data("ids", [None], "int64")
        zeros = paddle.ParamAttr(name="counts", initializer=paddle.nn.initializer.Constant(0.0))
        options = {"is_sparse": True, "is_distributed": True, "param_attr": zeros}
        self._rows = paddle.static.nn.embedding(self._ids, size=[1 << 40, num_workers], **options)
        self._evaluation = paddle.static.default_main_program().clone(for_test=True)
        own = paddle.static.data("own", [num_workers, 1], "float32")
        self.loss = paddle.sum(paddle.matmul(self._rows, own))

    def start(self) -> None:
        """Makes this process a worker that runs the program."""
        self._executor = paddle.static.Executor(paddle.CPUPlace())
        self._executor.run(paddle.static.default_startup_program())

    def add(self, ids: NDArray[np.int64]) -> None:
        """Adds 1 to the value of this worker in rows: a step."""
        column = np.zeros((self._num_workers, 1), np.float32)
        column[fleet.worker_index()] = -1
        self._executor.run(feed={"ids": ids, "own": column}, fetch_list=[self.loss])

    def counts(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the values of this worker in rows."""
        (values,) = self._executor.run(self._evaluation, feed={"ids": ids}, fetch_list=[self._rows])
        return np.asarray(values[:, fleet.worker_index()], np.int64)


def main() -> None:
    """Runs a pserver or a worker, as fleetrun says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("async", "lag", "geo", "sync"), required=True)
    parser.add_argument("--geo-steps", type=int, required=True, help="steps of a window of a geo job")
    parser.add_argument("--rows", type=int, required=True, help="rows of the table")
    parser.add_argument("--row-lag", type=int, default=0, help="max_row_lag of row caches; 0 for none")
    parser.add_argument("--restart-workers", action="store_true")
    parser.add_argument("--disordered-frames", action="store_true", help="while there is a file `disorder`")
    arguments = parser.parse_args()
    if arguments.restart_workers or os.environ.get("TRAINING_ROLE") == "PSERVER":
        os.environ["FLEET_SPARSE_RESTARTS"] = _RESTARTS
    install()
    paddle.enable_static()
    fleet.init()
    table = Table(fleet.worker_num())
    strategy = strategy_of(arguments.mode, arguments.geo_steps, arguments.row_lag)
    fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), strategy).minimize(table.loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    table.start()
    disorder = Disorder()
    if arguments.disordered_frames:
        disorder.begin(fleet.worker_index())
    fleet.init_worker()
    count(table, arguments, disorder)
    fleet.barrier_worker()
    fleet.stop_worker()
    print("ended well", flush=True)


def count(table: Table, arguments: argparse.Namespace, disorder: Disorder) -> None:
    """Trains as a worker, and says what is in the rows then."""
    mode: str = arguments.mode
    worker, begun = fleet.worker_index(), None
    if arguments.restart_workers and mode in _RESUMING:
        save_every("model", steps=_STEPS_PER_SAVE)
        begun = resume("model")
        print("resumes at", begun, flush=True)
    ends = StepEnds(Path(f"step_ends{worker}"))
    print("pid", os.getpid(), flush=True)
    ids, fillers = np.arange(NUM_COUNTING_ROWS), filler_ids(arguments.rows, arguments.geo_steps)
    if not (len(ends) if begun is None else begun):
        for each in fillers:
            table.add(each)
        fleet.barrier_worker()  # what is not acked before it would be lost with this worker
    elif begun:
        begun -= len(fillers)
    differences = np.zeros(NUM_COUNTING_ROWS, np.int64)
    if arguments.restart_workers and mode not in _RESUMING:
        differences = find_differences(worker, len(ends), table.counts(ids))

    def step() -> None:
        table.add(ids)
        disorder.say()

    num_steps = train(mode, arguments.geo_steps, ends, begun, step)
    fleet.barrier_worker()
    found = table.counts(ids) - differences
    print("counted", num_steps, found.min(), found.max(), flush=True)
    filled = np.concatenate([table.counts(each) for each in fillers])
    print("filled", filled.min(), filled.max(), flush=True)


def filler_ids(num_rows: int, geo_steps: int) -> list[NDArray[np.int64]]:
    """Returns the ids of the rows that do not count, one array for each step that fills them: whole windows of geo."""
    ids = np.arange(NUM_COUNTING_ROWS, num_rows)
    num_windows = -(-len(ids) // (FILLER_ROWS_PER_STEP * geo_steps))
    return np.array_split(ids, num_windows * geo_steps)


class Disorder:
    """The channels of this worker that disorder frames while there is a file."""

    def __init__(self) -> None:
        self._channels: list[DisorderedChannel] = []
        self._num_said = 0

    def begin(self, worker: int) -> None:
        """Wraps the channels that are opened from now on."""
        file = Path(DISORDER)

        def open_disordered(*arguments: Any, **options: Any) -> DisorderedChannel:
            channel = channel_choice.open_channel(*arguments, **options)
            self._channels.append(DisorderedChannel(channel, seed=worker, is_active=file.exists))
            return self._channels[-1]

        connection.open_channel = open_disordered  # type: ignore[attr-defined]  # the name that it imported

    def say(self) -> None:
        """Says how many frames were delayed or doubled since the last time, if any: this life may end at any time."""
        count = sum(each.num_delayed + each.num_doubled for each in self._channels)
        if count > self._num_said:
            print("disordered", count - self._num_said, flush=True)
            self._num_said = count


def strategy_of(mode: str, geo_steps: int, row_lag: int) -> PserverStrategy:
    """Returns the strategy of a mode in which updates add up exactly."""
    strategy = PserverStrategy(
        max_step_lag=_LAG if mode == "lag" else None,
        delta_scale="sum" if mode == "geo" else "avg",
        max_row_lag=row_lag or None,
        row_cache=RowCache(max_rows=NUM_COUNTING_ROWS // 2) if row_lag else None,
    )
    strategy.a_sync = mode != "sync"
    if mode == "geo":
        strategy.a_sync_configs = {"k_steps": geo_steps}
    elif mode == "sync":
        strategy.gradient_scale_configs = {"scale_strategy": "sum"}
    return strategy


def find_differences(worker: int, made: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns by how much the rows differ from the steps of all former lives; says how the last death changed that.

    Nothing that the former life has sent can change the rows any more. On the thread that applies pushes, a pserver
    makes this process the worker before it answers its registration (`Jobs.join`); a push of the client before that it
    has not applied by then, even one that has arrived, is refused with STALE_EPOCH. So this life counts exactly.

    Args:
        worker: Index of this worker.
        made: Number of steps of all former lives.
        counts: Its values in the rows.
    """
    path = Path(f"differences{worker}.npy")
    before = np.load(path) if path.exists() else np.zeros(len(counts), np.int64)
    differences = counts - made
    if made:
        change = differences - before
        print("death", change.min(), change.max(), flush=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.save(file, differences)
    part.rename(path)
    return differences


def train(mode: str, geo_steps: int, ends: StepEnds, begun: int | None, step: Callable[[], object]) -> int:
    """Makes steps until the job should end.

    Args:
        mode: Mode of training.
        geo_steps: Steps of a window of a geo job.
        ends: The steps of all lives.
        begun: Number of steps that the rows have; None for those of all former lives.
        step: Makes a step.

    Returns:
        The number of steps that the rows should have.
    """
    worker = fleet.worker_index()
    made = len(ends)
    before = made if begun is None else begun
    for number in itertools.count(before + 1):
        step()
        ends.append(time.monotonic())
        if mode == "sync":  # all workers end after the same step
            if worker == 0 and Path("finish").exists() and not Path("last").exists():
                Path("last.part").write_text(str(number + 2))  # no worker is more than one step ahead
                Path("last.part").rename("last")
            if Path("last").exists() and number == int(Path("last").read_text()):
                return number
        elif (
            Path("finish").exists()
            and (mode != "geo" or (number - before) % geo_steps == 0)
            and (mode != "lag" or number > made)  # else the rows may have steps that are still to be made again
        ):
            return number
        time.sleep(STEP_S)
    raise AssertionError("steps have no end")
