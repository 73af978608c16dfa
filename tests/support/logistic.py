"""Logistic regression on sparse ids in NumPy, locally and as a worker: `python -m support.logistic`.

The logit of an example is the sum of its ids' weights (a table of dim 1) plus a bias (a dense value).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch

from .pserver_job import connected

WEIGHTS = TableSpec(name="weights", dim=1, rule="sgd", initializer=constant(0.0))
BIAS = DenseSpec("bias", "sgd", (), (Segment("bias", 0, 1, 1.0),))
NUM_EXAMPLES, NUM_FIELDS, NUM_IDS, BATCH = 4096, 6, 300, 64
LEARNING_RATE = 0.5


class Data(NamedTuple):
    """Examples of a true model.

    Attributes:
        ids: int64 `(n, fields)`, over the whole range of int64.
        labels: float32 `(n,)`, 0 or 1.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.float32]

    def batches(self, worker: int, num_workers: int, num_epochs: int) -> Iterator[Data]:
        """Every `num_workers`-th batch."""
        for _ in range(num_epochs):
            for begin in range(worker * BATCH, NUM_EXAMPLES, num_workers * BATCH):
                yield Data(self.ids[begin : begin + BATCH], self.labels[begin : begin + BATCH])


def make_data() -> Data:
    rng = np.random.default_rng(3)
    names = rng.integers(-(2**63), 2**63 - 1, NUM_IDS)
    chosen = rng.zipf(1.3, (NUM_EXAMPLES, NUM_FIELDS)) % NUM_IDS
    logits = rng.normal(0.0, 1.0, NUM_IDS)[chosen].sum(1) - 0.5
    labels = rng.random(NUM_EXAMPLES) < 1 / (1 + np.exp(-logits))
    return Data(names[chosen], labels.astype(np.float32))


class Model(Protocol):
    """The weights."""

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]: ...

    def learn(self, ids: NDArray[np.int64], of_logits: NDArray[np.float32]) -> None: ...


class LocalModel:
    """Weights in a NumPy array."""

    def __init__(self, data: Data) -> None:
        self._names = np.unique(data.ids)
        self._weights = np.zeros(len(self._names), np.float32)
        self._bias = np.float32(0)

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._weights[np.searchsorted(self._names, ids)].sum(1) + self._bias

    def learn(self, ids: NDArray[np.int64], of_logits: NDArray[np.float32]) -> None:
        grads = np.zeros_like(self._weights)
        np.add.at(grads, np.searchsorted(self._names, ids), of_logits[:, None])
        self._weights -= np.float32(LEARNING_RATE) * grads
        self._bias -= np.float32(LEARNING_RATE) * of_logits.sum()


class RemoteModel:
    """Weights on pservers."""

    def __init__(self, client: Client, num_shards: int) -> None:
        self._client = client
        self._deduplicator = Deduplicator(Placement.even(num_shards))
        self._step = 0

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        unique, (inverse,) = self._deduplicator.unique([ids], WEIGHTS.salt)
        rows, bias = np.empty((len(unique.ids), 1), np.float32), np.empty(1, np.float32)
        self._client.pull([RowBatch(WEIGHTS, unique, rows)])
        self._client.pull_dense(BIAS, bias)
        return rows[inverse, 0].sum(1) + bias[0]

    def learn(self, ids: NDArray[np.int64], of_logits: NDArray[np.float32]) -> None:
        self._step += 1
        unique, (inverse,) = self._deduplicator.unique([ids], WEIGHTS.salt)
        grads = np.zeros((len(unique.ids), 1), np.float32)
        np.add.at(grads[:, 0], inverse, of_logits[:, None])
        self._client.push([RowBatch(WEIGHTS, unique, grads, LEARNING_RATE, self._step)])
        bias_grad, new_bias = of_logits.sum(keepdims=True), np.empty(1, np.float32)
        self._client.exchange_dense(BIAS, bias_grad, new_bias, learning_rate=LEARNING_RATE, optimizer_step=self._step)


def loss_of(logits: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Returns the mean log loss."""
    return float(np.mean(np.logaddexp(0.0, np.where(labels > 0, -logits, logits).astype(np.float64))))


def train(model: Model, batches: Iterator[Data]) -> list[float]:
    """Returns the loss of each batch before its update."""
    losses = []
    for ids, labels in batches:
        logits = model.logits(ids)
        losses.append(loss_of(logits, labels))
        probability = 1 / (1 + np.exp(-logits))
        model.learn(ids, ((probability - labels) / np.float32(len(labels))).astype(np.float32))
    return losses


def train_remotely(
    endpoints: Sequence[str], worker: int, num_workers: int, num_epochs: int
) -> tuple[list[float], float]:
    """Trains as one worker; returns its losses, and the loss over all data after every worker has finished."""
    data = make_data()
    with connected(endpoints, [WEIGHTS, BIAS], Settings(), worker, num_workers) as (control, client):
        if worker == 0:
            client.assign_dense(BIAS, np.zeros(1, np.float32))
        control.barrier("assigned")
        model = RemoteModel(client, len(endpoints))
        losses = train(model, data.batches(worker, num_workers, num_epochs))
        client.flush()
        control.barrier("trained")
        final = loss_of(model.logits(data.ids), data.labels)
        control.barrier("stop_worker")
        if worker == 0:
            control.stop()
    return losses, final


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoints", nargs="+", required=True)
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--num-epochs", type=int, required=True)
    options = parser.parse_args()
    losses, final = train_remotely(options.endpoints, options.worker, options.num_workers, options.num_epochs)
    print(json.dumps({"losses": losses, "final": final}))


if __name__ == "__main__":
    main()
