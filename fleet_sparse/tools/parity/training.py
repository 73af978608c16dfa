"""Trains one model on pservers or in plain Paddle, from the same first values, for comparing the losses.

`python -m fleet_sparse.tools.parity.training` trains one of the two and prints one line of JSON. A job of several
workers is compared with one process of plain Paddle, which runs the workers' sub-batches one after the other, merges
their gradients as a shard does in sync training, and takes one step with Paddle's optimizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet

from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.initializer import initial_rows
from fleet_sparse.core.mode import ASYNC, AVG, GEO, SUM, SYNC, Mode
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.plugin.active_session import active
from fleet_sparse.plugin.install import install
from fleet_sparse.plugin.optimizer_config import read_initializer
from fleet_sparse.plugin.strategy import PserverStrategy

from .model import CLICKS, MODELS, Feed, Lookup, ParityModel

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **more: paddle.optimizer.SGD(0.125, **more),
    "adagrad": lambda **more: paddle.optimizer.Adagrad(0.05, initial_accumulator_value=0.1, **more),
    "adam": lambda **more: paddle.optimizer.Adam(0.01, lazy_mode=True, **more),
    "adamw": lambda **more: paddle.optimizer.AdamW(0.01, weight_decay=0.1, lazy_mode=True, **more),
    "adamax": lambda **more: paddle.optimizer.Adamax(0.01, **more),
    "momentum": lambda **more: paddle.optimizer.Momentum(
        paddle.optimizer.lr.StepDecay(0.05, step_size=10, gamma=0.75), use_nesterov=True, **more
    ),
    "rmsprop": lambda **more: paddle.optimizer.RMSProp(0.005, momentum=0.5, centered=True, **more),
    # Without decay there is no trust ratio. With Paddle's default decay, 0.01, there is one per parameter, which is
    # refused for tables.
    "lamb": lambda **more: paddle.optimizer.Lamb(0.01, lamb_weight_decay=0.0, **more),
}
"""Makes each optimizer, with additional arguments of Paddle's class."""

# A clip by value is left out: Paddle 3.3 does not support it in static programs of its default IR.
CLIPS: dict[str, Callable[[], Any]] = {
    "norm": lambda: paddle.nn.ClipGradByNorm(0.02),
    "global-norm": lambda: paddle.nn.ClipGradByGlobalNorm(0.05),
}
TOLERANCE = 1e-6

_ASYNC = Mode()


class ParityJob(NamedTuple):
    """A model and how it is trained.

    Attributes:
        model: The model.
        optimizers: Keys of `OPTIMIZERS`. The model is trained once with each, under names of its own.
        num_steps: Number of steps.
        mode: Training mode; plain Paddle uses only its scale. With "avg" the loss of a worker is the mean over its
            examples, with "sum" their sum divided by the number of all examples of the step. So each training equals,
            but for rounding, that of one worker with all examples.
        clip: A key of `CLIPS`; None for no clip.
    """

    model: ParityModel
    optimizers: Sequence[str]
    num_steps: int
    mode: Mode
    clip: str | None = None

    def make_optimizer(self, name: str) -> Any:
        """Makes the optimizer `name`, a key of `OPTIMIZERS`."""
        return OPTIMIZERS[name]() if self.clip is None else OPTIMIZERS[name](grad_clip=CLIPS[self.clip]())


class TrainingResult(NamedTuple):
    """Result of training with one optimizer."""

    losses: NDArray[np.float64]
    """Loss of each step: `(num_steps,)`, of this worker, on pservers; `(num_steps, num_workers)` in plain Paddle."""
    rows: dict[str, NDArray[np.float32]]
    """Rows of each table, `(num_ids, dim)`, after the last step of all workers."""


class Parity(NamedTuple):
    """Losses of both trainings, one per step."""

    pservers: NDArray[np.float64]
    plain: NDArray[np.float64]

    @property
    def largest_difference(self) -> float:
        """Largest difference between the losses of one step."""
        return float(np.abs(self.pservers - self.plain).max())


def run_parity(optimizer: str, num_steps: int, mode: Mode = _ASYNC) -> Parity:
    """Trains `CLICKS` both ways in this process, which is the only worker of its job."""
    install()
    paddle.enable_static()
    job = ParityJob(CLICKS, [optimizer], num_steps, mode)
    plain = train_plain(job, 1)[optimizer]
    return Parity(train_on_pservers(job)[optimizer].losses, plain.losses[:, 0])


# On pservers


class _Programs(NamedTuple):
    """Programs of a model that is trained with one optimizer."""

    training: Any
    startup: Any
    loss: Any
    reading: Any
    """Program that looks up all rows."""
    rows: list[Any]
    """Rows of each table, values of `reading`."""
    optimizer: Any


def train_on_pservers(job: ParityJob) -> dict[str, TrainingResult]:
    """Trains as the worker that the environment names; without a role in it as the only one, with a pserver inside.

    All optimizers share one connection; it ends the pservers.
    """
    fleet.init()
    worker, num_workers = fleet.worker_index(), fleet.worker_num()
    with paddle.utils.unique_name.guard():
        programs = {optimizer: _build(job, optimizer) for optimizer in job.optimizers}
    executor = paddle.static.Executor(paddle.CPUPlace())
    for each in programs.values():
        executor.run(each.startup)
    fleet.init_worker()
    feeds = [shares[worker] for shares in job.model.steps(job.num_steps, num_workers)]
    trained = {optimizer: _train(executor, each, job.model, feeds) for optimizer, each in programs.items()}
    fleet.stop_worker()
    return trained


def _train(executor: Any, programs: _Programs, model: ParityModel, feeds: Iterable[Feed]) -> TrainingResult:
    losses = []
    for feed in feeds:
        (loss,) = executor.run(programs.training, feed=feed, fetch_list=[programs.loss])
        losses.append(float(loss))
        _advance_schedule(programs.optimizer)
    fleet.barrier_worker()  # after it the rows have the pushes of all workers
    rows = executor.run(programs.reading, feed={"ids": np.arange(model.num_ids)}, fetch_list=programs.rows)
    return TrainingResult(np.array(losses), dict(zip(model.tables, rows, strict=True)))


def _build(job: ParityJob, name: str) -> _Programs:
    training, startup, reading = (paddle.static.Program() for _ in range(3))
    lookup, optimizer = _flagged_lookup(job.model, name), job.make_optimizer(name)
    with paddle.static.program_guard(training, startup):
        loss = _loss(job, name, lookup)
        fleet.distributed_optimizer(optimizer, _strategy(job.mode)).minimize(loss)
    with paddle.static.program_guard(reading, paddle.static.Program()):
        ids = paddle.static.data("ids", [-1], "int64")
        rows = [lookup(ids, table) for table in job.model.tables]
    return _Programs(training, startup, loss, reading, rows, optimizer)


def _strategy(mode: Mode) -> PserverStrategy:
    """The strategy that a user writes for `mode`."""
    strategy = PserverStrategy(max_step_lag=mode.max_step_lag)
    strategy.a_sync = mode.kind != SYNC
    if mode.kind == SYNC:
        strategy.gradient_scale_configs = {"scale_strategy": mode.scale}
    if mode.kind == GEO:
        strategy.delta_scale = mode.scale
        strategy.a_sync_configs = {"k_steps": mode.k_steps}
    return strategy


def _flagged_lookup(model: ParityModel, optimizer: str) -> Lookup:
    def lookup(ids: Any, table: str) -> Any:
        dim, initializer = model.tables[table]
        attr = paddle.ParamAttr(name=_full_name(optimizer, table), initializer=initializer)
        return paddle.static.nn.embedding(ids, size=[10**11, dim], is_sparse=True, is_distributed=True, param_attr=attr)

    return lookup


# In plain Paddle


def train_plain(job: ParityJob, num_workers: int) -> dict[str, TrainingResult]:
    """Trains in plain Paddle what `num_workers` workers train in sync mode."""
    return {optimizer: _train_plain(job, optimizer, num_workers) for optimizer in job.optimizers}


def _train_plain(job: ParityJob, name: str, num_workers: int) -> TrainingResult:
    main, update, startup, startup_of_update = (paddle.static.Program() for _ in range(4))
    scope, optimizer = paddle.static.Scope(), job.make_optimizer(name)
    executor = paddle.static.Executor(paddle.CPUPlace())
    losses = []
    with paddle.static.scope_guard(scope), paddle.utils.unique_name.guard():
        with paddle.static.program_guard(main, startup):
            loss = _loss(job, name, _plain_lookup(job.model, name))
            parameters, grads = zip(*optimizer.backward(loss), strict=True)
        with paddle.static.program_guard(update, startup_of_update):
            optimizer.apply_gradients([_like(parameter) for parameter in parameters])
        executor.run(startup_of_update)
        executor.run(startup)
        for shares in job.model.steps(job.num_steps, num_workers):
            ran = [executor.run(main, feed=share, fetch_list=[loss, *grads]) for share in shares]
            losses.append([float(values[0]) for values in ran])
            sizes = [len(next(iter(share.values()))) for share in shares]
            merged = [
                merge_gradients(parts, sizes, job.mode.scale) for parts in zip(*(v[1:] for v in ran), strict=True)
            ]
            executor.run(update, feed={_grad_name(p): grad for p, grad in zip(parameters, merged, strict=True)})
            _advance_schedule(optimizer)
    rows = {table: np.array(scope.find_var(_full_name(name, table)).get_tensor()) for table in job.model.tables}
    return TrainingResult(np.array(losses), rows)


def merge_gradients(grads: Sequence[NDArray[np.float32]], sizes: Sequence[int], scale: str) -> NDArray[np.float32]:
    """Merges the gradients of a step as a shard does in sync training, in float32.

    Args:
        grads: Gradient of each worker, in order, all of one shape.
        sizes: Number of examples of each worker.
        scale: "avg" for sum(r g) / sum(r), where r is the size divided by the largest size; "sum" for sum(g).
    """
    factors = np.array(sizes, np.float32) / np.float32(max(sizes)) if scale == AVG else np.ones(len(sizes), np.float32)
    total = np.zeros_like(grads[0])
    for factor, grad in zip(factors, grads, strict=True):
        total += factor * grad
    return total / factors.sum() if scale == AVG else total


def _like(parameter: Any) -> tuple[Any, Any]:
    """The parameter in the current program, and its gradient as an input."""
    attr = paddle.ParamAttr(name=parameter.name)
    same = paddle.create_parameter(parameter.shape, "float32", attr=attr)
    return same, paddle.static.data(_grad_name(parameter), parameter.shape, "float32")


def _grad_name(parameter: Any) -> str:
    return f"{parameter.name}.grad"


def _plain_lookup(model: ParityModel, optimizer: str) -> Lookup:
    """Lookups in parameters that begin with the same rows as on pservers."""
    weights: dict[str, Any] = {}

    def lookup(ids: Any, table: str) -> Any:
        if table not in weights:
            dim, initializer = model.tables[table]
            name, ids_of_rows = _full_name(optimizer, table), np.arange(model.num_ids)
            read = read_initializer(name, initializer, (model.num_ids, dim)).initializer
            seed = active().settings.seed
            weights[table] = _parameter(
                name, initial_rows(read, ids_of_rows, dim=dim, seed=seed, salt=table_salt(name))
            )
        return paddle.nn.functional.embedding(ids, weights[table])

    return lookup


# In both


def _loss(job: ParityJob, optimizer: str, lookup: Lookup) -> Any:
    (example,) = next(job.model.steps(1, 1))
    inputs = {
        name: paddle.static.data(name, [-1, *values.shape[1:]], str(values.dtype)) for name, values in example.items()
    }
    losses = job.model.losses(inputs, lookup, lambda name, values: _parameter(_full_name(optimizer, name), values))
    return paddle.mean(losses) if job.mode.scale == AVG else paddle.sum(losses) / job.model.batch_size


def _parameter(name: str, values: NDArray[np.float32]) -> Any:
    attr = paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Assign(values))
    return paddle.create_parameter(list(values.shape), "float32", attr=attr)


def _full_name(optimizer: str, part: str) -> str:
    """Name of a table or parameter, distinct for each optimizer, because all are on the same pservers."""
    return f"parity.{optimizer}.{part}"


def _advance_schedule(optimizer: Any) -> None:
    if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
        optimizer._learning_rate.step()


# The command


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints `{"tolerance": ..., "trained": {optimizer: {"losses": ...}}}`; errors go to standard error."""
    options = _parser().parse_args(arguments)
    mode = Mode(options.mode, options.scale, options.max_step_lag, options.k_steps)
    job = ParityJob(MODELS[options.model], options.optimizers, options.steps, mode, options.clip)
    try:
        install()
        paddle.enable_static()
        trained = train_plain(job, options.plain) if options.plain else train_on_pservers(job)
    except FleetSparseError as error:
        sys.exit(str(error))
    print(json.dumps({"tolerance": TOLERANCE, "trained": _as_json(trained, with_rows=options.rows)}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fleet_sparse.tools.parity.training", description=__doc__)
    parser.add_argument("optimizers", nargs="+", choices=list(OPTIMIZERS), help="Trained one after the other.")
    parser.add_argument("--model", choices=list(MODELS), default="clicks")
    parser.add_argument("--steps", type=int, default=50, help="Number of steps with each optimizer.")
    parser.add_argument(
        "--plain", type=int, metavar="WORKERS", help="Train in plain Paddle, for this number of workers."
    )
    parser.add_argument("--mode", choices=[SYNC, ASYNC, GEO], default=SYNC)
    parser.add_argument("--scale", choices=[AVG, SUM], default=AVG)
    parser.add_argument("--max-step-lag", type=int, help="Async: see PserverStrategy.")
    parser.add_argument("--k-steps", type=int, default=0, help="Geo: steps between two exchanges.")
    parser.add_argument("--clip", choices=list(CLIPS), help="Gradient clip.")
    parser.add_argument("--rows", action="store_true", help="Print the final rows of all tables as well.")
    return parser


def _as_json(trained: dict[str, TrainingResult], *, with_rows: bool) -> dict[str, Any]:
    values: dict[str, Any] = {name: {"losses": each.losses.tolist()} for name, each in trained.items()}
    if with_rows:
        for name, each in trained.items():
            values[name]["rows"] = {table: rows.tolist() for table, rows in each.rows.items()}
    return values


if __name__ == "__main__":
    main()
