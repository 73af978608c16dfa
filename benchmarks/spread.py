"""Does a step cost as little over its floor with other batches, dims, tables and rules?

`python -m benchmarks.spread` from the root of a checkout. The click model of `benchmarks.step` in several shapes: batch
128 to 4096, dim 8 to 64, 1 to 30 tables, Adagrad and Adam. A shape is written as `512x16x1xadagrad`: batch, dim,
tables and rule, and `--shapes` chooses others. There are 26 fields, or one for each table if there are more tables.
Each shape is measured with its floor, the same program with its rows fed from memory. All programs belong to one job
and are interleaved; a block has fewer steps the larger its batch. Each batch is trained once before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import paddle
from paddle import _C_ops
from paddle.distributed import fleet
from rich.console import Console
from rich.table import Table

import fleet_sparse
from benchmarks import step
from benchmarks.baselines import zipf
from benchmarks.interleaved import interleaved
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, DIM, PSERVERS
from benchmarks.programs import floor_name
from benchmarks.record import Record, add_results
from benchmarks.step import LEARNING_RATE, NUM_DENSE, NUM_FIELDS, Block, Feed, Program, turn
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.settings import CHANNELS

RULES: Mapping[str, Callable[[], Any]] = {
    "adagrad": partial(paddle.optimizer.Adagrad, LEARNING_RATE),
    "adam": partial(paddle.optimizer.Adam, LEARNING_RATE, lazy_mode=True),
}
LEAST_STEPS = 2


class Shape(NamedTuple):
    """Sizes of a model, and the rule that trains it."""

    batch: int
    dim: int
    tables: int
    rule: str

    def __str__(self) -> str:
        return f"batch {self.batch}, dim {self.dim}, {self.tables} table{'s' * (self.tables > 1)}, {self.rule}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `<batch>x<dim>x<tables>x<rule>`, as a `type` of argparse."""
        parts = text.split("x", 3)
        if len(parts) != len(cls._fields) or parts[3] not in RULES:
            raise argparse.ArgumentTypeError(f"{text!r} should be as 512x16x1xadagrad; rules are {', '.join(RULES)}")
        return cls(AT_LEAST_1(parts[0]), DIM(parts[1]), AT_LEAST_1(parts[2]), parts[3])

    @property
    def num_fields(self) -> int:
        """Number of fields of an example."""
        return max(NUM_FIELDS, self.tables)

    def table_name(self, table: int) -> str:
        """Name of a table, which no other shape has."""
        return f"{'x'.join(map(str, self))}.{table}"

    def fields_of(self, table: int) -> range:
        """Fields that are looked up in a table."""
        ends = [number * self.num_fields // self.tables for number in (table, table + 1)]
        return range(*ends)

    def steps(self, steps: int) -> int:
        """Number of steps of a block, where it is `steps` with the usual batch."""
        return max(LEAST_STEPS, steps * step.BATCH // self.batch)


SHAPES = tuple(
    map(
        Shape.parse,
        (
            "512x16x1xadagrad",
            "128x16x1xadagrad",
            "2048x16x1xadagrad",
            "4096x16x1xadagrad",
            "512x8x1xadagrad",
            "512x64x1xadagrad",
            "512x16x8xadagrad",
            "512x16x30xadagrad",
            "512x16x1xadam",
            "128x8x30xadam",
            "4096x64x1xadam",
        ),
    )
)


class Case(NamedTuple):
    """A shape, and its programs."""

    shape: Shape
    ours: Program
    floor: Program


def batches(shape: Shape, count: int, ranks_of: Callable[..., Any]) -> list[Feed]:
    """Returns batches of a shape; each table has its ids as an input of its own."""
    rng = np.random.default_rng(0)
    feeds = []
    for _ in range(count):
        ids = ranks_of(rng, (shape.batch, shape.num_fields)) * shape.num_fields + np.arange(shape.num_fields)
        feed = {f"ids{table}": ids[:, shape.fields_of(table)] for table in range(shape.tables)}
        feed["dense"] = rng.random((shape.batch, NUM_DENSE), np.float32)
        feed["label"] = (rng.random((shape.batch, 1)) < 0.3).astype(np.float32)
        feeds.append(feed)
    return feeds


def with_rows(feed: Feed, shape: Shape) -> Feed:
    """Returns the floor's batch with the same work as `feed`."""
    fed = {name: feed[name] for name in ("dense", "label")}
    for table in range(shape.tables):
        unique, positions = np.unique(feed[f"ids{table}"], return_inverse=True)
        fed[f"rows{table}"] = np.full((len(unique), shape.dim), 0.01, np.float32)
        fed[f"positions{table}"] = positions.reshape(shape.batch, -1)
    return fed


def loss_of(rows: Sequence[Any], shape: Shape) -> Any:
    """Returns the loss of an MLP over the rows of all tables and dense values."""
    parts = [paddle.reshape(each, [-1, len(shape.fields_of(table)) * shape.dim]) for table, each in enumerate(rows)]
    return step.mlp_loss(paddle.concat(parts, axis=1) if len(parts) > 1 else parts[0])


def flagged(shape: Shape, mode: str) -> Any:
    """Builds the user's program, minimized by fleet; returns its loss."""
    rows = []
    for table in range(shape.tables):
        ids = paddle.static.data(f"ids{table}", [-1, len(shape.fields_of(table))], "int64")
        attr = paddle.ParamAttr(name=shape.table_name(table), initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
        size = [10**9, shape.dim]
        rows.append(paddle.static.nn.embedding(ids, size, is_sparse=True, is_distributed=True, param_attr=attr))
    loss = loss_of(rows, shape)
    strategy = fleet_sparse.PserverStrategy()
    strategy.a_sync = mode != "sync"
    fleet.distributed_optimizer(RULES[shape.rule](), strategy).minimize(loss)
    return loss


def floor(shape: Shape) -> Any:
    """Builds the same program with its rows and positions fed, and their gradient computed; returns its loss."""
    rows, looked_up = [], []
    for table in range(shape.tables):
        rows.append(paddle.static.data(f"rows{table}", [-1, shape.dim], "float32"))
        rows[-1].stop_gradient = False
        positions = paddle.static.data(f"positions{table}", [-1, len(shape.fields_of(table))], "int64")
        looked_up.append(_C_ops.embedding(positions, rows[-1], -1, False))
    loss = loss_of(looked_up, shape)
    parameters = paddle.static.default_main_program().global_block().all_parameters()
    pairs = paddle.base.backward.append_backward(loss, parameter_list=[*parameters, *rows])
    dense = [(parameter, grad) for parameter, grad in pairs if not any(map(parameter.is_same, rows))]
    RULES[shape.rule]().apply_gradients(dense)
    return loss


def start(shapes: Sequence[Shape], mode: str, num_batches: int) -> list[Case]:
    """Builds the programs of all shapes and connects."""
    fleet_sparse.install()
    paddle.enable_static()
    fleet.init()
    executor, ranks_of, cases = paddle.static.Executor(paddle.CPUPlace()), zipf.sampler(), []
    for shape in shapes:
        feeds, programs = batches(shape, num_batches, ranks_of), []
        of_floor = [with_rows(feed, shape) for feed in feeds]
        for build, of_build in ((partial(flagged, shape, mode), feeds), (partial(floor, shape), of_floor)):
            program, startup = paddle.static.Program(), paddle.static.Program()
            with paddle.static.program_guard(program, startup):
                loss = build()
            executor.run(startup)
            programs.append(Program(str(shape), program, loss, of_build))
        cases.append(Case(shape, *programs))
    fleet.init_worker()
    return cases


def run(options: argparse.Namespace) -> tuple[list[step.Round], dict[str, float]]:
    """Starts everything; returns every round but the first, and the mean number of distinct ids of each shape."""
    os.environ["FLEET_SPARSE_CHANNEL"] = options.channel
    step.apply_program_options(options)
    measured = []
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pservers = stack.enter_context(local_pservers(options.pservers, root=root, log=subprocess.DEVNULL))
        os.environ.update(pservers.environment())
        pids = [each.process.pid for each in pservers.processes]
        cases = start(options.shapes, options.mode, options.batches)
        for case in cases:
            step.block(case.ours, case.ours.feeds, pids)  # its rows are there from now on
        for number in range(options.rounds):
            blocks: dict[str, Callable[[], Block]] = {}
            for shape, ours, of_floor in cases:
                for name, program in ((str(shape), ours), (floor_name(shape), of_floor)):
                    feeds = turn(program.feeds, number, shape.steps(options.steps))
                    blocks[name] = partial(step.block, program, feeds, pids)
            measured.append(interleaved(blocks, number))
        fleet.stop_worker()
    num_distinct = {
        str(case.shape): float(
            np.mean(
                [sum(len(each) for name, each in feed.items() if name.startswith("rows")) for feed in case.floor.feeds]
            )
        )
        for case in cases
    }
    return measured[1:], num_distinct


def show(options: argparse.Namespace, measured: Sequence[step.Round], num_distinct: Mapping[str, float]) -> None:
    """Prints a table of all shapes."""
    where = f"{options.pservers} pserver(s), {options.channel}, OMP {os.environ['OMP_NUM_THREADS']}"
    table = Table(title=f"CTR step, {options.mode}, 1 worker, {where}")
    for heading in ("shape", "rows", "ms", "over the floor", "CPU ms over the floor", "CPU us a row"):
        table.add_column(heading, justify="right", no_wrap=True)
    for shape in options.shapes:
        name, of_floor = str(shape), floor_name(shape)
        ratios = [np.median(each[name].seconds) / np.median(each[of_floor].seconds) for each in measured]
        costs = np.array([np.subtract(step.cpu_ms(each[name]), step.cpu_ms(each[of_floor])) for each in measured])
        table.add_row(
            name,
            f"{num_distinct[name]:,.0f}",
            f"{1e3 * np.median(np.concatenate([each[name].seconds for each in measured])):.2f}",
            f"{np.median(ratios):.3f}",
            " + ".join(f"{cost:.2f}" for cost in np.median(costs, axis=0)),
            f"{1e3 * np.median(costs.sum(axis=1)) / num_distinct[name]:.2f}",
        )
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all shapes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=SHAPES, help="as 512x16x1xadagrad")
    parser.add_argument("--mode", choices=("async", "sync"), default="async", help="mode of training")
    parser.add_argument("--pservers", type=PSERVERS, default=2, help="processes")
    parser.add_argument("--channel", choices=CHANNELS, default="stream", help="channel to pserver processes")
    parser.add_argument("--steps", type=AT_LEAST_1, default=8, help=f"steps of a block with a batch of {step.BATCH}")
    parser.add_argument("--rounds", type=AT_LEAST_2, default=21, help="blocks of each program; the first is not timed")
    parser.add_argument("--batches", type=AT_LEAST_1, default=16, help="number of batches of each shape")
    step.add_execution_options(parser)
    add_results(parser)
    options = parser.parse_args(arguments)
    record = Record("spread", argparse.Namespace(**{**vars(options), "shapes": [*map(str, options.shapes)]}))
    measured, num_distinct = run(options)
    show(options, measured, num_distinct)
    record.append([step.as_recorded(each) for each in measured], num_distinct=num_distinct)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
