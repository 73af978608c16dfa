"""Gradients of dense parameters that travel as bfloat16, against a model of the rounding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.mode import ASYNC, SYNC, Kind, Mode
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from support.in_process import InProcessCluster
from support.threads import in_threads

NUM_STEPS, NUM_WORKERS, RATE = 20, 3, 0.1
WEIGHTS = (32.0, 32.0, 7.0)


def rounded(grads: NDArray[np.float32]) -> NDArray[np.float64]:
    """To 8 significant bits, ties to even, in float64."""
    fraction, exponent = np.frexp(grads.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(fraction, 8)), exponent - 8)


def gradients(step: int, worker: int) -> NDArray[np.float32]:
    return np.random.default_rng((step, worker)).normal(0, 1, 10).astype(np.float32)


class Worker:
    """A worker that trains `cluster.dense`."""

    def __init__(self, cluster: InProcessCluster, index: int, mode: Mode) -> None:
        self._spec, self._index = cluster.dense, index
        self.client: Client = cluster.worker(index, NUM_WORKERS, mode)
        self.training = PserverTraining(self.client, Deduplicator(cluster.placement), mode, NUM_WORKERS)

    def step(self, step: int) -> NDArray[np.float32]:
        out = np.empty(10, np.float32)
        update = DenseUpdate(self._spec, gradients(step, self._index), [out], RATE)
        self.training.update([], [update], WEIGHTS[self._index])
        return out


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    cluster = InProcessCluster(2)
    yield cluster
    cluster.close()


def workers_of(cluster: InProcessCluster, kind: Kind) -> list[Worker]:
    mode = Mode(kind, dense_grads_dtype="bfloat16")
    workers = [Worker(cluster, index, mode) for index in range(NUM_WORKERS)]
    workers[0].client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    return workers


MULTIPLIERS = np.repeat([1.0, 2.0], [7, 3])


@pytest.mark.guarantee("R7")
def test_sync_steps_merge_gradients_that_each_worker_rounded(cluster: InProcessCluster) -> None:
    workers, expected = workers_of(cluster, SYNC), np.zeros(10)
    for step in range(NUM_STEPS):
        values = in_threads(*(partial(worker.step, step) for worker in workers))
        assert len({each.tobytes() for each in values}) == 1, "all workers have the same bits"
        mean = sum(WEIGHTS[w] * rounded(gradients(step, w)) for w in range(NUM_WORKERS)) / sum(WEIGHTS)
        expected -= RATE * MULTIPLIERS * mean
        np.testing.assert_allclose(values[0], expected, rtol=0, atol=1e-6)
    exact = sum(WEIGHTS[w] * gradients(step, w).astype(np.float64) for w in range(NUM_WORKERS)) / sum(WEIGHTS)
    assert np.abs(mean - exact).max() > 1e-4, "rounding makes a difference that the test can see"


@pytest.mark.guarantee("R7")
def test_async_steps_apply_gradients_that_each_worker_rounded(cluster: InProcessCluster) -> None:
    workers, expected = workers_of(cluster, ASYNC), np.zeros(10)
    for step in range(NUM_STEPS):
        for index, worker in enumerate(workers):
            values = worker.step(step)
            expected -= RATE * MULTIPLIERS * rounded(gradients(step, index))
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-6)


def test_values_that_are_pushed_whole_are_not_rounded(cluster: InProcessCluster) -> None:
    """As the frozen arrays of a save are: the client pushes them, not the steps."""
    (worker, *_), values = workers_of(cluster, ASYNC), np.full(10, 1 / 3, np.float32)
    out = np.empty(10, np.float32)
    worker.client.exchange_dense(cluster.dense, values, out, learning_rate=-1.0, optimizer_step=1)
    np.testing.assert_array_equal(out, values * MULTIPLIERS.astype(np.float32))
