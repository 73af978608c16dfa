"""A worker of a training job that `het_auc` and `het_link` start, with the models and strategies of `models/train.py`.

Its role comes from fleetrun's environment, its options are those of `models/train.py` without `--data`. It reads
examples that were drawn once (`drawn_examples`), since many processes on a few cores would draw longer than they train.
Its last line of output is `@@` and JSON: what it trained, counted and, on worker 0, the AUC of held-out examples over
the seconds of training. Before an evaluation, and behind the last step, the workers meet at a barrier, which sends what
they hold back: that is part of the training. The evaluation is not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet

import fleet_sparse
from benchmarks.options import AT_LEAST_0
from fleet_sparse.models import synthetic, train
from fleet_sparse.models.auc import auc
from fleet_sparse.models.drawn import DRAW, TEST_STREAM, TRAIN_STREAM
from fleet_sparse.models.embedding import distributed
from fleet_sparse.models.options import TrainOptions, parse
from fleet_sparse.models.source import Batch, DataSource

MARK = "@@"
COUNTERS = ("bytes_pulled", "bytes_pushed", "rows_pulled", "rows_pushed")


class Point(NamedTuple):
    """An evaluation."""

    train_s: float
    """Seconds of training until then."""
    num_steps: int
    """Steps of this worker."""
    auc: float


@contextmanager
def drawn_examples(options: argparse.Namespace, seed: int, *, are_needed: bool) -> Iterator[Path]:
    """Yields a directory with the examples of a seed, as many as the options say, if they are needed."""
    with tempfile.TemporaryDirectory(prefix="fleet_sparse-") as name:
        directory = Path(name)
        if are_needed:
            sizes = {"num_train": options.examples, "num_test": options.tested, "num_ids": options.ids}
            _draw(directory, **sizes, seed=seed)
        yield directory


def _draw(directory: Path, *, num_train: int, num_test: int, num_ids: int, seed: int) -> None:
    """Writes examples of `models/synthetic.py`, with Criteo's field sizes scaled to `num_ids`."""
    draw = partial(synthetic.draw, field_sizes=synthetic.criteo_sizes(num_ids))
    for name, stream, size in (("train", TRAIN_STREAM, num_train), ("test", TEST_STREAM, num_test)):
        shape = draw(1, seed=seed).batch._asdict()
        arrays = {key: _memory_map(directory / f"{name}.{key}.npy", size, of) for key, of in shape.items()}
        for index in range(-(-size // DRAW)):
            drawn = draw(DRAW, seed=seed, stream=stream, index=index).batch._asdict()
            for key, array in arrays.items():
                array[index * DRAW : (index + 1) * DRAW] = drawn[key][: size - index * DRAW]


def _memory_map(path: Path, size: int, example: NDArray[Any]) -> NDArray[Any]:
    """Returns a new array in a file, as large as `size` of these examples."""
    array: NDArray[Any] = np.lib.format.open_memmap(path, "w+", example.dtype, (size, example.shape[1]))
    return array


def read_examples(directory: Path, batch_size: int, num_workers: int) -> DataSource:
    """Returns the examples; every worker has as many batches, all of the same size."""
    train_columns, test_columns = (
        [np.load(directory / f"{name}.{column}.npy", mmap_mode="r") for column in Batch._fields]
        for name in ("train", "test")
    )
    num_batches = len(train_columns[0]) // (batch_size * num_workers) * num_workers

    def batches(columns: Sequence[NDArray[Any]], numbers: range) -> Iterator[Batch]:
        for number in numbers:
            yield Batch(*(np.array(column[number * batch_size : (number + 1) * batch_size]) for column in columns))

    return DataSource(
        num_fields=train_columns[0].shape[1],
        num_dense=train_columns[1].shape[1],
        num_batches=num_batches,
        train=lambda _, worker, workers: batches(train_columns, range(worker, num_batches, workers)),
        test=lambda: batches(test_columns, range(-(-len(test_columns[0]) // batch_size))),
    )


class Traffic:
    """Counts what this worker sends and receives for training."""

    def __init__(self) -> None:
        self._before = fleet_sparse.stats()

    def so_far(self) -> dict[str, int]:
        """Returns the counters by name."""
        now = fleet_sparse.stats()
        return {name: now[name] - self._before[name] for name in COUNTERS}

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Does not count what the block sends and receives."""
        counted = self.so_far()
        yield
        now = fleet_sparse.stats()
        self._before = {name: now[name] - counted[name] for name in COUNTERS}


class Evaluation:
    """Evaluates the model on worker 0, while the others wait. All workers have met before.

    Args:
        network: The programs.
        executor: Runs them.
        source: Has the held-out examples.
    """

    def __init__(self, network: train.Network, executor: paddle.static.Executor, source: DataSource) -> None:
        self._network, self._executor, self._source = network, executor, source

    def auc(self) -> float:
        """Returns the AUC of the held-out examples; nan on workers other than 0."""
        found = np.nan
        if fleet.is_first_worker():
            labels, logits = [], []
            for batch in self._source.test():
                feed = {"ids": batch.ids, "dense": batch.dense}
                program, fetched = self._network.evaluation, [self._network.evaluation_logits]
                logits += self._executor.run(program, feed=feed, fetch_list=fetched)
                labels.append(batch.label)
            found = auc(np.concatenate(labels)[:, 0], np.concatenate(logits)[:, 0].astype(np.float64))
        fleet.barrier_worker()
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--examples", type=Path, required=True, help="directory of `drawn_examples`")
    parser.add_argument("--evaluate-every", type=AT_LEAST_0, default=0, help="steps; 0 evaluates at the end alone")
    own, others = parser.parse_known_args(arguments)
    options = parse(["--data", "synthetic", *others])
    paddle.enable_static()
    paddle.seed(options.seed)
    print(MARK, json.dumps(trained(options, own.examples, own.evaluate_every)), flush=True)


def trained(options: TrainOptions, examples: Path, evaluate_every: int) -> dict[str, Any]:
    """Trains one epoch; returns what was measured."""
    fleet_sparse.install()
    fleet.init()
    worker, num_workers = fleet.worker_index(), fleet.worker_num()
    source = read_examples(examples, options.batch_size, num_workers)
    optimizer = train.OPTIMIZERS[options.optimizer](options.learning_rate)
    optimizer = fleet.distributed_optimizer(optimizer, train.strategy(options))
    network = train.build(options, source, distributed, optimizer)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(network.startup)
    fleet.init_worker()
    evaluation = Evaluation(network, executor, source)
    fleet.barrier_worker()
    traffic = Traffic()
    points, train_s, num_steps = [], 0.0, 0
    begun_at = time.perf_counter()
    for num_steps, batch in enumerate(source.train(0, worker, num_workers), 1):
        executor.run(network.main, feed=batch._asdict(), fetch_list=[])
        if evaluate_every and num_steps % evaluate_every == 0:
            fleet.barrier_worker()  # the pservers have what all workers held
            train_s += time.perf_counter() - begun_at
            with traffic.uncounted():
                points.append(Point(train_s, num_steps, evaluation.auc()))
            begun_at = time.perf_counter()
    fleet.barrier_worker()
    train_s += time.perf_counter() - begun_at
    counted, row_cache = traffic.so_far(), fleet_sparse.stats()["row_cache"]
    points.append(Point(train_s, num_steps, evaluation.auc()))
    fleet.stop_worker()
    return {
        "worker": worker,
        "train_s": train_s,
        "num_steps": num_steps,
        "num_examples": num_steps * options.batch_size,
        "points": points,
        "row_cache": row_cache,
        **counted,
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
