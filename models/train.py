"""Trains a model of the zoo: in one process, on parameter servers, or in plain Paddle for comparison.

    python -m fleet_sparse.models.train --model deepfm --data flights
    fleetrun --server_num 2 --worker_num 2 models/train.py --model deepfm --data flights
    fleetrun --server_num 2 --worker_num 2 models/train.py --model deepfm --data flights --mode sync --batch-size 256
    python -m fleet_sparse.models.train --model deepfm --data flights --plain

Without fleetrun the pserver is inside the process. The defaults train DeepFM on the flights to a test AUC of 0.80;
more epochs overfit.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet
from rich.console import Console

import fleet_sparse
from fleet_sparse.core.mode import GEO, SYNC
from fleet_sparse.settings import Settings

if __name__ == "__main__" and not __package__:
    __package__ = "fleet_sparse.models"  # PEP 366: fleetrun starts a file, not a module

from . import drawn, synthetic
from .auc import auc
from .embedding import Embedding, LocalTables, distributed
from .options import TrainOptions, parse
from .progress import TrainingProgress, cache_figures
from .source import DataSource
from .zoo import MODELS

OPTIMIZERS = {
    "adagrad": paddle.optimizer.Adagrad,
    "adam": lambda learning_rate: paddle.optimizer.Adam(learning_rate, lazy_mode=True),
    "sgd": paddle.optimizer.SGD,
}
SYNTHETIC_EXAMPLES = 1_000_000

FeedIds = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Converts the ids of a batch to those that a program is fed."""


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
    """None on workers other than 0; so are the next three."""
    test_loss: float | None = None
    test_auc: float | None = None
    """AUC of the first label."""
    test_aucs: list[float] | None = None
    """AUC of each label."""
    bytes_pulled: int = 0
    bytes_pushed: int = 0
    rows_pulled: int = 0
    rows_pushed: int = 0
    row_cache: dict[str, dict[str, Any]] | None = None
    """As in `fleet_sparse.stats()`, by table; None without pservers."""
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
    if options.config_unused:
        Console(stderr=True).print(
            f"{options.config}: changes nothing: {', '.join(options.config_unused)}", highlight=False
        )
    paddle.enable_static()
    paddle.seed(options.seed)
    metrics = _train_plain(options) if options.plain else _train_with_pservers(options)
    if metrics.test_aucs is not None:
        aucs = ", ".join(f"{value:.6f}" for value in metrics.test_aucs)
        Console().print(f"test AUC {aucs}, test loss {metrics.test_loss:.6f}", highlight=False)
    if metrics.row_cache:
        figures = cache_figures(metrics.row_cache)
        Console().print(f"row cache of worker {metrics.worker_index}: {figures}", highlight=False, soft_wrap=True)
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
    _train(options, source, network, executor, metrics, _same, fleet_sparse.stats)
    after = fleet_sparse.stats()
    for counter in ("bytes_pulled", "bytes_pushed", "rows_pulled", "rows_pushed"):
        setattr(metrics, counter, after[counter] - before[counter])
    metrics.row_cache = after["row_cache"]

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
    has_cache = options.max_row_lag or options.max_row_drift is not None
    strategy = fleet_sparse.PserverStrategy(
        max_step_lag=options.max_step_lag,
        max_row_lag=options.max_row_lag,
        max_row_lag_share=options.max_row_lag_share,
        max_row_drift=options.max_row_drift,
        row_cache=fleet_sparse.RowCache(max_rows=options.cache_rows, min_dim=options.cache_min_dim)
        if has_cache
        else None,
    )
    strategy.a_sync = options.mode != SYNC
    if options.mode == GEO:
        strategy.a_sync_configs = {"k_steps": options.k_steps}
    return strategy


def build(options: TrainOptions, source: DataSource, embedding: Embedding, optimizer: Any) -> Network:
    """Builds the programs of a model and minimizes the main one."""

    def model() -> paddle.pir.Value:
        ids = paddle.static.data("ids", [None, source.num_fields], "int64")
        dense = paddle.static.data("dense", [None, source.num_dense], "float32")
        return MODELS[options.model].network(
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
        label = paddle.static.data("label", [None, source.num_labels], "float32")
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
    stats: Callable[[], dict[str, Any]] | None,
) -> None:
    """Runs the epochs of this worker; fills in their metrics."""
    num_steps = None
    if source.num_batches is not None:
        num_steps = options.epochs * len(range(metrics.worker_index, source.num_batches, metrics.num_workers))
    console = Console(quiet=metrics.worker_index != 0)
    started_s = time.perf_counter()
    with TrainingProgress(console, num_steps=num_steps, stats=stats) as progress:
        for epoch in range(options.epochs):
            losses = []
            for batch in source.train(epoch, metrics.worker_index, metrics.num_workers):
                feed = {"ids": feed_ids(batch.ids), "dense": batch.dense, "label": batch.label}
                loss, logits = executor.run(network.main, feed=feed, fetch_list=[network.loss, network.logits])
                losses.append(float(loss))
                metrics.num_examples += len(batch.label)
                progress.step(losses[-1], batch.label[:, :1], logits[:, :1])
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
    metrics.test_aucs = [auc(of_task, score) for of_task, score in zip(label.T, logit.T, strict=True)]
    metrics.test_auc = metrics.test_aucs[0]


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
        num_examples = int(rest[0]) if rest else SYNTHETIC_EXAMPLES
        draw: Callable[..., drawn.Truth] = MODELS[options.model].draw
        if options.field_sizes is not None:
            sizes = map(synthetic.criteo_sizes, map(int, options.field_sizes[1:]))
            draw = partial(draw, field_sizes=next(sizes, synthetic.CRITEO_SIZES))
        if options.drift_at is not None:
            draw = partial(draw, drift_at=options.drift_at * options.batch_size // drawn.DRAW)
        return drawn.source(draw, num_examples, batch_size=options.batch_size, seed=options.seed)
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


if __name__ == "__main__":
    main()
