"""Trains a model of the zoo: in one process, on parameter servers, or in plain Paddle for comparison.

    python -m fleet_sparse.models.train --model deepfm --data flights
    fleetrun --server_num 2 --worker_num 2 models/train.py --model deepfm --data flights
    fleetrun --server_num 2 --worker_num 2 models/train.py --model deepfm --data flights --mode sync --batch-size 256
    python -m fleet_sparse.models.train --model deepfm --data flights --plain

Without fleetrun the pserver is inside the process. The defaults train DeepFM on the flights to a test AUC of 0.80;
more epochs overfit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet
from rich.console import Console

import fleet_sparse
from fleet_sparse.core.mode import ASYNC, GEO, SYNC
from fleet_sparse.counts import count_from
from fleet_sparse.settings import Settings

if __name__ == "__main__" and not __package__:
    __package__ = "fleet_sparse.models"  # PEP 366: fleetrun starts a file, not a module

from .auc import auc
from .deepfm import deepfm
from .dnn import dnn
from .embedding import Embedding, LocalTables, distributed
from .progress import TrainingProgress
from .source import Batch, DataSource
from .wide_deep import wide_deep

MODELS = {"dnn": dnn, "wide_deep": wide_deep, "deepfm": deepfm}
OPTIMIZERS = {
    "adagrad": paddle.optimizer.Adagrad,
    "adam": lambda learning_rate: paddle.optimizer.Adam(learning_rate, lazy_mode=True),
    "sgd": paddle.optimizer.SGD,
}
SYNTHETIC_EXAMPLES = 1_000_000
SYNTHETIC_DRAW = 512
"""Number of synthetic examples that are drawn at once, so that they do not depend on the batch size."""

FeedIds = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Converts the ids of a batch to those that a program is fed."""


class TrainOptions(argparse.Namespace):
    """Options of the command line."""

    model: str
    data: list[str]
    slots: list[str] | None
    num_dense: int
    epochs: int
    batch_size: int
    dim: int
    hidden: list[int]
    optimizer: str
    learning_rate: float
    seed: int
    mode: str
    max_step_lag: int | None
    k_steps: int
    plain: bool
    initial_rows: str
    save: str | None
    load: str | None
    metrics: Path | None


class Network(NamedTuple):
    """A model as two Paddle programs that share their parameters by name."""

    main: paddle.static.Program
    startup: paddle.static.Program
    loss: paddle.pir.Value
    logits: paddle.pir.Value
    evaluation: paddle.static.Program
    """Built separately and never minimized; plain `exe.run` runs it."""
    evaluation_logits: paddle.pir.Value


@dataclass
class Metrics:
    """Results of a run, as in its JSON file.

    Bytes are those of this worker during training: all received are pulled, all sent are pushed, including dense
    parameters and the ids of pulls.
    """

    kind: str
    """plain, embedded or distributed."""
    worker_index: int = 0
    num_workers: int = 1
    num_steps: int = 0
    num_examples: int = 0
    train_s: float = 0.0
    train_loss: float | None = None
    """Mean over the last epoch."""
    test_examples: int | None = None
    """None on workers other than 0, as are the next two."""
    test_loss: float | None = None
    test_auc: float | None = None
    bytes_pulled: int = 0
    bytes_pushed: int = 0
    pserver_rows: list[int] | None = None
    """Rows of all tables on each pserver at the end; None without pservers."""

    @property
    def examples_per_s(self) -> float:
        """Training speed; 0 without training."""
        return self.num_examples / self.train_s if self.train_s else 0.0

    def write(self, path: Path) -> None:
        """Writes `path`, on a worker `i` other than 0 `<stem>.worker-<i><suffix>` in the same directory."""
        if self.worker_index:
            path = path.with_name(f"{path.stem}.worker-{self.worker_index}{path.suffix}")
        path.write_text(json.dumps({**asdict(self), "examples_per_s": self.examples_per_s}, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, evaluates and writes results according to the options."""
    options = parse(arguments)
    paddle.enable_static()
    paddle.seed(options.seed)
    metrics = _train_plain(options) if options.plain else _train_with_pservers(options)
    if metrics.test_auc is not None:
        Console().print(f"test AUC {metrics.test_auc:.6f}, test loss {metrics.test_loss:.6f}", highlight=False)
    if options.metrics is not None:
        metrics.write(options.metrics)


def _train_with_pservers(options: TrainOptions) -> Metrics:
    fleet_sparse.install()
    fleet.init()
    if fleet.is_server():
        fleet.init_server(options.load)
        fleet.run_server()  # becomes the pserver; does not return

    source = open_source(options)
    optimizer = OPTIMIZERS[options.optimizer](options.learning_rate)
    optimizer = fleet.distributed_optimizer(optimizer, strategy(options))
    network = build(options, source, distributed, optimizer)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(network.startup)
    is_embedded = fleet.server_num() == 0
    if is_embedded:
        fleet.init_server(options.load)
    fleet.init_worker()

    worker_index, num_workers = fleet.worker_index(), fleet.worker_num()
    metrics = Metrics("embedded" if is_embedded else "distributed", worker_index, num_workers)
    before = fleet_sparse.stats()
    _train(options, source, network, executor, metrics, _same, _pserver_rows)
    after = fleet_sparse.stats()
    metrics.bytes_pulled = after["bytes_pulled"] - before["bytes_pulled"]
    metrics.bytes_pushed = after["bytes_pushed"] - before["bytes_pushed"]

    fleet.barrier_worker()  # so that evaluation and save have the steps of all workers
    metrics.pserver_rows = _pserver_rows()
    if fleet.is_first_worker():
        _evaluate(source, network, executor, metrics, _same)
        if options.save is not None:
            fleet.save_persistables(executor, options.save, network.main)
    fleet.barrier_worker()
    fleet.stop_worker()
    return metrics


def _train_plain(options: TrainOptions) -> Metrics:
    """Trains the same model in plain Paddle; only first values of rows come from fleet_sparse."""
    source = open_source(options)
    tables = LocalTables(vocabulary(source))
    network = build(options, source, tables, OPTIMIZERS[options.optimizer](options.learning_rate))
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(network.startup)
    if options.initial_rows == "plugin":
        tables.initialise(paddle.static.global_scope(), seed=Settings.from_environment().seed)

    metrics = Metrics("plain")
    _train(options, source, network, executor, metrics, tables.positions, None)
    _evaluate(source, network, executor, metrics, tables.positions)
    return metrics


def strategy(options: TrainOptions) -> fleet_sparse.PserverStrategy:
    """The strategy of a mode."""
    strategy = fleet_sparse.PserverStrategy(max_step_lag=options.max_step_lag)
    strategy.a_sync = options.mode != SYNC
    if options.mode == GEO:
        strategy.a_sync_configs = {"k_steps": options.k_steps}
    return strategy


def build(options: TrainOptions, source: DataSource, embedding: Embedding, optimizer: Any) -> Network:
    """Builds the programs of a model and minimizes the main one."""

    def model() -> paddle.pir.Value:
        ids = paddle.static.data("ids", [None, source.num_fields], "int64")
        dense = paddle.static.data("dense", [None, source.num_dense], "float32")
        return MODELS[options.model](
            ids,
            dense,
            embedding=embedding,
            num_fields=source.num_fields,
            dim=options.dim,
            hidden=options.hidden,
        )

    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        logits = model()
        label = paddle.static.data("label", [None, 1], "float32")
        loss = paddle.nn.functional.binary_cross_entropy_with_logits(logits, label)
        optimizer.minimize(loss)
    evaluation = paddle.static.Program()
    with paddle.static.program_guard(evaluation, paddle.static.Program()):
        evaluation_logits = model()
    return Network(main, startup, loss, logits, evaluation, evaluation_logits)


def vocabulary(source: DataSource) -> NDArray[np.int64]:
    """All distinct ids of a source, sorted. Reads the source once."""
    distinct = np.empty(0, np.int64)
    unmerged: list[NDArray[np.int64]] = []
    num_unmerged = 0
    for batch in itertools.chain(source.train(0, 0, 1), source.test()):
        unmerged.append(batch.ids.ravel())
        num_unmerged += batch.ids.size
        if num_unmerged > max(1 << 22, distinct.size):  # so that an id is sorted a few times, not once per batch
            distinct = np.unique(np.concatenate([distinct, *unmerged]))
            unmerged, num_unmerged = [], 0
    return np.unique(np.concatenate([distinct, *unmerged]))


def _train(
    options: TrainOptions,
    source: DataSource,
    network: Network,
    executor: paddle.static.Executor,
    metrics: Metrics,
    feed_ids: FeedIds,
    pserver_rows: Callable[[], list[int]] | None,
) -> None:
    """Runs the epochs of this worker; fills in their metrics."""
    num_steps = None
    if source.num_batches is not None:
        num_steps = options.epochs * len(range(metrics.worker_index, source.num_batches, metrics.num_workers))
    console = Console(quiet=metrics.worker_index != 0)
    started_s = time.perf_counter()
    with TrainingProgress(console, num_steps=num_steps, pserver_rows=pserver_rows) as progress:
        for epoch in range(options.epochs):
            losses = []
            for batch in source.train(epoch, metrics.worker_index, metrics.num_workers):
                feed = {"ids": feed_ids(batch.ids), "dense": batch.dense, "label": batch.label}
                loss, logits = executor.run(network.main, feed=feed, fetch_list=[network.loss, network.logits])
                losses.append(float(loss))
                metrics.num_examples += len(batch.label)
                progress.step(losses[-1], batch.label, logits)
            metrics.num_steps += len(losses)
            metrics.train_loss = float(np.mean(losses)) if losses else None
    metrics.train_s = time.perf_counter() - started_s


def _evaluate(
    source: DataSource, network: Network, executor: paddle.static.Executor, metrics: Metrics, feed_ids: FeedIds
) -> None:
    """Predicts all held-out examples; fills in the test metrics."""
    labels, logits = [], []
    for batch in source.test():
        feed = {"ids": feed_ids(batch.ids), "dense": batch.dense}
        logits += executor.run(network.evaluation, feed=feed, fetch_list=[network.evaluation_logits])
        labels.append(batch.label)
    label, logit = np.concatenate(labels), np.concatenate(logits).astype(np.float64)
    metrics.test_examples = len(label)
    metrics.test_loss = float(np.mean(np.logaddexp(0, logit) - label * logit))
    metrics.test_auc = auc(label, logit)


def _pserver_rows() -> list[int]:
    return [pserver["rows"] for pserver in fleet_sparse.stats()["pservers"]]


def _same(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return ids


def open_source(options: TrainOptions) -> DataSource:
    """The data set that `--data` names."""
    name, *rest = options.data
    if name == "flights":
        from . import flights

        return flights.source(batch_size=options.batch_size, seed=options.seed)
    if name == "synthetic":
        return _synthetic(int(rest[0]) if rest else SYNTHETIC_EXAMPLES, options.batch_size, options.seed)
    train, test = Path(rest[0]), Path(rest[1]) if len(rest) > 1 else None
    if name == "criteo":
        from . import criteo

        return criteo.source(train, test, batch_size=options.batch_size)
    from . import slots

    return slots.source(
        train,
        test,
        slots=options.slots or slots.CRITEO_SLOTS,
        num_dense=options.num_dense,
        batch_size=options.batch_size,
    )


def _synthetic(num_examples: int, batch_size: int, seed: int) -> DataSource:
    """`num_examples` training examples and a tenth of that, rounded up, for testing."""
    from . import synthetic

    num_tested = -(-num_examples // 10)
    drawn = synthetic.source(
        batch_size=SYNTHETIC_DRAW,
        num_batches=-(-num_examples // SYNTHETIC_DRAW),
        num_test_batches=-(-num_tested // SYNTHETIC_DRAW),
        seed=seed,
    )

    def train(epoch: int, worker_index: int, num_workers: int) -> Iterator[Batch]:
        batches = _rebatched(drawn.train(epoch, 0, 1), num_examples, batch_size)
        return itertools.islice(batches, worker_index, None, num_workers)

    return drawn._replace(
        num_batches=-(-num_examples // batch_size),
        train=train,
        test=lambda: _rebatched(drawn.test(), num_tested, batch_size),
    )


def _rebatched(batches: Iterator[Batch], num_examples: int, size: int) -> Iterator[Batch]:
    """The first `num_examples` examples in batches of `size`; the last batch has the remaining ones."""
    held = next(batches)
    for begin in range(0, num_examples, size):
        wanted = min(size, num_examples - begin)
        while len(held.label) < wanted:
            held = _joined(held, next(batches))
        yield _part(held, slice(wanted))
        held = _part(held, slice(wanted, None))


def _joined(first: Batch, second: Batch) -> Batch:
    return Batch(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.dense, second.dense]),
        np.concatenate([first.label, second.label]),
    )


def _part(batch: Batch, examples: slice) -> Batch:
    return Batch(batch.ids[examples], batch.dense[examples], batch.label[examples])


def parse(arguments: Sequence[str] | None) -> TrainOptions:
    """Parses a command line; exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m fleet_sparse.models.train",
        description="Trains a click model: in one process, under fleetrun on parameter servers, or in plain Paddle.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="deepfm")
    add(
        "--data",
        nargs="+",
        metavar="DATA",
        default=["flights"],
        help="flights | synthetic [EXAMPLES] | criteo TRAIN [TEST] | slots TRAIN [TEST]; without a TEST file every "
        "tenth batch of TRAIN is held out",
    )
    add("--slots", type=lambda text: text.split(","), help="slots that are fields, as 1,2,7; default: 1 to 26")
    add("--num-dense", type=count_from(1), default=13, help="number of dense_feature values in slot files")
    add("--epochs", type=count_from(0), default=1, help="0 only evaluates")
    add("--batch-size", type=count_from(1), default=512, help="examples per step of each worker")
    add("--dim", type=count_from(1), default=8, help="number of floats of a row")
    add("--hidden", type=count_from(1), nargs="*", default=[64, 32], help="widths of the deep layers")
    add("--optimizer", choices=list(OPTIMIZERS), default="adagrad")
    add("--learning-rate", type=float, default=0.01)
    add(
        "--seed",
        type=count_from(0),
        default=0,
        help="seed of data order and dense parameters; FLEET_SPARSE_SEED is that of rows",
    )
    add("--mode", choices=[SYNC, ASYNC, GEO], default=ASYNC, help="training mode")
    add("--max-step-lag", type=count_from(0), help="async: steps that a worker may be ahead of the slowest")
    add("--k-steps", type=count_from(0), default=0, help="geo: steps between two exchanges with the pservers")
    add("--plain", action="store_true", help="plain Paddle: local tables, no plugin, one process")
    add(
        "--initial-rows",
        choices=["plugin", "zeros"],
        default="plugin",
        help="first values of the rows of --plain: those of tables on pservers, or zeros",
    )
    add("--save", metavar="DIR", help="directory where every pserver saves its rows")
    add("--load", metavar="DIR", help="directory from which every pserver loads its rows")
    add("--metrics", metavar="FILE.json", type=Path, help="file for the results; see models/train.py, Metrics")
    options = parser.parse_args(arguments, namespace=TrainOptions())
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: TrainOptions) -> None:
    name, *rest = options.data
    wanted = {"flights": (0, 0), "synthetic": (0, 1), "criteo": (1, 2), "slots": (1, 2)}
    if name not in wanted:
        parser.error(f"--data {name}: no such data, should be one of {', '.join(wanted)}")
    least, most = wanted[name]
    if not least <= len(rest) <= most:
        parser.error(f"--data {name}: {len(rest)} arguments follow, should be {least} to {most}")
    if name == "synthetic" and rest and not (rest[0].isdecimal() and int(rest[0])):
        parser.error(f"--data synthetic: {rest[0]!r} should be a number of examples")
    if options.max_step_lag is not None and options.mode != ASYNC:
        parser.error(f"--max-step-lag: has no meaning in {options.mode} training. Leave it out")
    if (options.k_steps > 0) != (options.mode == GEO):
        parser.error(f"--k-steps: is {options.k_steps}, should be above 0 with --mode {GEO} and 0 without")
    if options.plain and (options.mode != ASYNC or options.max_step_lag is not None):
        parser.error("--plain: has one worker and no pservers. Leave --mode and its options out")
    if options.plain and (options.save or options.load):
        parser.error("--plain: has no pservers that could save or load. Leave --save and --load out")


if __name__ == "__main__":
    main()
