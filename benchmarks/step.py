"""What do pservers add to the step of a click model, over the same program with its rows fed from memory?

`python -m benchmarks.step --pservers 2` from the root of a checkout. 26 fields on one table, dim 16, batch 512, an MLP
of 400x3, Adagrad; ids are Zipf 1.1 over 10 M a field. Dense parameters are trained on the pservers, in the floor by
Paddle. The program on the pservers runs plainly and behind `look_ahead`. All run in turn, a block of steps each; the
ratio is of medians. `--mode sync` or `geo` trains so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import _C_ops
from paddle.distributed import fleet
from rich.console import Console
from rich.table import Table

import fleet_sparse
from benchmarks.peers import paddle_steps
from benchmarks.record import Record, add_results
from fleet_sparse.local_pservers import local_pservers

NUM_FIELDS, DIM, BATCH, NUM_DENSE = 26, 16, 512, 13
HIDDEN = (400, 400, 400)
LEARNING_RATE = 0.01
PLAIN, AHEAD, FLOOR, PADDLE = "pservers", "pservers, looking ahead", "rows from memory", "PaddlePaddle 2.6.2"

Loss = Callable[[Any], Any]
"""Of a model, from the rows that it looked up."""


class Contender(NamedTuple):
    """A program, what it is fed, and its loss."""

    name: str
    program: Any
    loss: Any
    feeds: list[dict[str, NDArray[Any]]]
    looks_ahead: bool = False


def main() -> None:
    """Prints medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pservers", type=int, default=2, help="processes; 0 is one inside this process")
    parser.add_argument("--mode", choices=("async", "sync", "geo"), default="async", help="of training")
    parser.add_argument("--steps", type=int, default=25, help="of a block")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of steps of each program; the first is not timed")
    parser.add_argument("--peer", action="store_true", help="measure PaddlePaddle 2.6's parameter server too")
    parser.add_argument("--peer-python", type=Path, help="interpreter that has it; a venv is made when left out")
    add_results(parser)
    options = parser.parse_args()
    record = Record("step", options)
    with ExitStack() as stack:
        if options.pservers:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pservers = stack.enter_context(local_pservers(options.pservers, root=root, log=subprocess.DEVNULL))
            os.environ.update(pservers.environment())
        contenders = start(options.mode, list(batches(options.steps * options.rounds)), click_loss)
        peers = {}
        if options.peer:
            peers[PADDLE] = stack.enter_context(paddle_steps("ctr", servers=2, python=options.peer_python))
        measured = measure(contenders, options.steps, options.rounds, peers)
        fleet.stop_worker()
    show("CTR", options.pservers, options.mode, measured)
    record.append(measured)


def batches(count: int) -> Iterator[dict[str, NDArray[Any]]]:
    """Feeds of the flagged model."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        ranks = rng.zipf(1.1, (BATCH, NUM_FIELDS)) % 10_000_000
        yield {
            "ids": ranks * NUM_FIELDS + np.arange(NUM_FIELDS),
            "dense": rng.random((BATCH, NUM_DENSE), np.float32),
            "label": (rng.random((BATCH, 1)) < 0.3).astype(np.float32),
        }


def start(mode: str, feeds: list[dict[str, NDArray[Any]]], loss_of: Loss) -> list[Contender]:
    """All of them, ready to run; `loss_of` is the model."""
    fleet_sparse.install()
    paddle.enable_static()
    fleet.init()
    executor = paddle.static.Executor(paddle.CPUPlace())
    contenders = []
    builds: list[tuple[str, Callable[[], Any], list[dict[str, NDArray[Any]]]]] = [
        (PLAIN, lambda: flagged(mode, loss_of), feeds),
        (FLOOR, lambda: floor(loss_of), [with_rows(feed) for feed in feeds]),
    ]
    for name, build, feed in builds:
        program, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(program, startup):
            loss = build()
        executor.run(startup)
        contenders.append(Contender(name, program, loss, feed))
    fleet.init_worker()
    return [contenders[0], contenders[0]._replace(name=AHEAD, looks_ahead=True), contenders[1]]


def measure(
    contenders: list[Contender], steps: int, rounds: int, peers: dict[str, Callable[[int], list[float]]]
) -> list[dict[str, list[float]]]:
    """By round, the first left out, and contender: seconds of each step of its block.

    Args:
        contenders: Programs of this process, by turns.
        steps: Of a block.
        rounds: Blocks of each.
        peers: What runs so many steps elsewhere and tells their seconds; takes its turn too.
    """
    executor = paddle.static.Executor(paddle.CPUPlace())
    measured: list[dict[str, list[float]]] = []
    for block in range(rounds):
        measured.append({contender.name: [] for contender in contenders})
        for contender in contenders:
            feeds: Iterable[dict[str, NDArray[Any]]] = iter(contender.feeds[block * steps : (block + 1) * steps])
            if contender.looks_ahead:
                feeds = fleet_sparse.look_ahead(feeds, contender.program)
            begun_at = time.perf_counter()
            for feed in feeds:  # reading the loader is a part of the step
                executor.run(contender.program, feed=feed, fetch_list=[contender.loss])
                ended_at = time.perf_counter()
                measured[block][contender.name].append(ended_at - begun_at)
                begun_at = ended_at
        for name, run in peers.items():
            measured[block][name] = run(steps)
    return measured[1:]


def show(model: str, num_pservers: int, mode: str, measured: list[dict[str, list[float]]]) -> None:
    """One table: medians, quartiles, ratio to the floor."""
    where = f"{num_pservers or 'embedded'} pserver(s), 1 worker, OMP {os.environ['OMP_NUM_THREADS']}"
    table = Table(title=f"{model} step, {mode}, {where}")
    for heading in ("program", "median ms", "quartiles ms", "over the floor"):
        table.add_column(heading, justify="right")
    times = {name: np.concatenate([each[name] for each in measured]) for name in measured[0]}
    floor_s = float(np.median(times[FLOOR]))
    for name, seconds in times.items():
        low, middle, high = (1e3 * np.percentile(seconds, [25, 50, 75])).tolist()
        table.add_row(name, f"{middle:.2f}", f"{low:.2f} - {high:.2f}", f"{middle / 1e3 / floor_s:.3f}")
    Console().print(table)


def flagged(mode: str, loss_of: Loss) -> Any:
    """The user's program, minimized by fleet; its loss."""
    ids = paddle.static.data("ids", [-1, NUM_FIELDS], "int64")
    attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    rows = paddle.static.nn.embedding(ids, [10**9, DIM], is_sparse=True, is_distributed=True, param_attr=attr)
    loss = loss_of(rows)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = mode != "sync"
    if mode == "geo":
        strategy.a_sync_configs = {"k_steps": 10}
    fleet.distributed_optimizer(paddle.optimizer.Adagrad(LEARNING_RATE), strategy).minimize(loss)
    return loss


def floor(loss_of: Loss) -> Any:
    """The same with rows and positions fed, and the gradient of the rows computed; its loss."""
    rows = paddle.static.data("rows", [-1, DIM], "float32")
    rows.stop_gradient = False
    positions = paddle.static.data("positions", [-1, NUM_FIELDS], "int64")
    loss = loss_of(_C_ops.embedding(positions, rows, -1, False))
    parameters = paddle.static.default_main_program().global_block().all_parameters()
    pairs = paddle.base.backward.append_backward(loss, parameter_list=[*parameters, rows])
    dense = [(parameter, grad) for parameter, grad in pairs if not parameter.is_same(rows)]
    if dense:
        paddle.optimizer.Adagrad(LEARNING_RATE).apply_gradients(dense)
    return loss


def click_loss(rows: Any) -> Any:
    """Of an MLP over rows and dense values."""
    dense = paddle.static.data("dense", [-1, NUM_DENSE], "float32")
    label = paddle.static.data("label", [-1, 1], "float32")
    hidden = paddle.concat([paddle.reshape(rows, [-1, NUM_FIELDS * DIM]), dense], axis=1)
    for width in HIDDEN:
        hidden = paddle.nn.functional.relu(paddle.nn.Linear(int(hidden.shape[-1]), width)(hidden))
    logit = paddle.nn.Linear(HIDDEN[-1], 1)(hidden)
    return paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)


def with_rows(feed: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The floor's feed that does the same work as `feed`."""
    unique, positions = np.unique(feed["ids"], return_inverse=True)
    rows = np.full((len(unique), DIM), 0.01, np.float32)
    others = {name: array for name, array in feed.items() if name != "ids"}
    return {**others, "rows": rows, "positions": positions.reshape(BATCH, -1)}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
