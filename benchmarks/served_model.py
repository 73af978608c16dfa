"""A job of `benchmarks.serving` in a process of its own: it saves a model with many rows, and deltas when asked.

`python -m benchmarks.served_model DIR NUM_ROWS` writes `DIR/serve` and `DIR/ids.npy`, the ids of the rows, and prints a
line. For every line `N` of its standard input it trains N rows, saves a delta, and prints its name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet

import fleet_sparse
from fleet_sparse.core.placement import Placement
from fleet_sparse.models.dnn import dnn
from fleet_sparse.models.embedding import Embedding, distributed
from fleet_sparse.plugin.active_session import active
from fleet_sparse.worker.rows.deduplicator import Deduplicator, UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch

NUM_FIELDS, NUM_DENSE, DIM, HIDDEN = 26, 13, 16, (400, 400, 400)
MODEL, ROWS, IDS = "serve", "serve/rows", "ids.npy"
TABLE = "dnn.e"
BATCH = 100_000
SEED = 5


def inputs_and_prediction(ids_name: str, embedding: Embedding) -> tuple[paddle.pir.Value, ...]:
    """Builds the network; returns its ids, its dense values and its prediction."""
    ids = paddle.static.data(ids_name, [None, NUM_FIELDS], "int64")
    dense = paddle.static.data("dense", [None, NUM_DENSE], "float32")
    logit = dnn(ids, dense, embedding=embedding, num_fields=NUM_FIELDS, dim=DIM, hidden=HIDDEN)
    return ids, dense, paddle.nn.functional.sigmoid(logit)


class Trainer:
    """Pushes rows of the model's table.

    Args:
        ids: Ids of all rows.
    """

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self._ids = ids
        connection = active().connection("served_model")
        self._client = connection.client
        self._spec = active().catalog.tables[TABLE]
        self._deduplicator = Deduplicator(Placement.even(1))
        self._step = 0
        self._rng = np.random.default_rng(SEED)

    def push(self, ids: NDArray[np.int64]) -> None:
        """Trains rows with random gradients."""
        for some in np.array_split(ids, max(-(-len(ids) // BATCH), 1)):
            found, _ = self._deduplicator.unique([some], self._spec.salt)
            unique = UniqueIds(found.ids.copy(), found.num_per_shard.copy())
            grads = self._rng.standard_normal((len(unique.ids), DIM), np.float32)
            self._step += 1
            self._client.push([RowBatch(self._spec, unique, grads, 0.01, self._step)])
        self._client.flush()

    def push_some(self, num_rows: int) -> None:
        """Trains rows that are drawn at random."""
        self.push(self._rng.choice(self._ids, num_rows, replace=False))


def main() -> None:
    """Saves the model, then a delta for each line."""
    root, num_rows = Path(sys.argv[1]), int(sys.argv[2])
    os.environ["FLEET_SPARSE_ROOT"] = str(root)
    paddle.enable_static()
    fleet_sparse.install()
    fleet.init()
    paddle.seed(SEED)
    _, _, prediction = inputs_and_prediction("ids", distributed)
    label = paddle.static.data("label", [None, 1], "float32")
    loss = paddle.nn.functional.binary_cross_entropy(prediction, label)
    fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.01), fleet.DistributedStrategy()).minimize(loss)
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()
    rng = np.random.default_rng(SEED)
    ids = np.unique(rng.integers(-(2**63), 2**63 - 1, num_rows))
    trainer = Trainer(ids)
    trainer.push(ids)
    feed = {"ids": rng.choice(ids, (64, NUM_FIELDS)), "dense": rng.random((64, NUM_DENSE), np.float32)}
    exe.run(feed={**feed, "label": np.zeros((64, 1), np.float32)}, fetch_list=[loss])
    fleet.save_inference_model(exe, MODEL, ["ids", "dense"], [prediction])
    np.save(root / IDS, ids)
    print("saved", flush=True)
    for line in sys.stdin:
        trainer.push_some(int(line))
        fleet.save_persistables(exe, ROWS, mode=1)
        print(max(path.name for path in (root / ROWS).glob("*-delta")), flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
