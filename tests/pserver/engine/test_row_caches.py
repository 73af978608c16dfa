"""Jobs whose workers cache rows, on real shards: counting ones, which show what a row lacks."""

from __future__ import annotations

from typing import Literal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import ALL
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.mode import ASYNC, SUM, SYNC, Mode
from fleet_sparse.core.row_bound import RowBound, steps_off_lease
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.worker.rows.cached_table import CacheJob
from support.cached_jobs import Step
from support.cached_shards import CachedShards
from support.cow_views import everything

NUM_IDS = 20
EVERY_ID = np.arange(NUM_IDS, dtype=np.int64)
BOUNDS = st.builds(RowBound, st.integers(1, 120), st.none() | st.sampled_from([0.25, 0.5]))
SEEDS = st.integers(0, 2**32)


class CountingShards:
    """A job in which an update of worker j adds 1 to value j of a row, so that each row says which updates it has."""

    def __init__(self, mode: Mode, num_workers: int, num_shards: int, capacity: int, seed: int) -> None:
        assert mode.row_bound is not None
        self.bound, self.num_workers = mode.row_bound, num_workers
        if mode.kind == SYNC:
            off_lease = 0
        else:
            off_lease = None if mode.max_step_lag is None else steps_off_lease(mode.max_step_lag)
        job = CacheJob(self.bound, num_workers, off_lease, admission=ALL, is_merged=mode.kind == SYNC)
        spec = TableSpec(name="C1", dim=num_workers, rule="sgd", initializer=constant(0.0))
        self.cached = CachedShards(mode, job, capacity, spec, num_shards)
        self.num_made = np.zeros((NUM_IDS, num_workers), np.int64)
        self.rng, self.order = np.random.default_rng(seed).spawn(2)
        self.weights = 1.0 / np.arange(1, NUM_IDS + 1)

    def read(self, worker: int, step: int) -> Step:
        """Reads a batch and checks every row of it."""
        ids = self.rng.choice(NUM_IDS, self.rng.integers(0, 9), replace=False, p=self.weights / self.weights.sum())
        begun = self.cached.read(worker, ids.astype(np.int64), step)
        made = self.num_made[ids]
        np.testing.assert_array_equal(begun.rows[:, worker], made[:, worker])
        num_lacked = (made - begun.rows).sum(axis=1)
        assert self.bound.lag is not None
        assert (num_lacked <= self.bound.lag).all()
        if self.bound.share is not None:
            assert (num_lacked <= self.bound.share * made.sum(axis=1)).all()
        return begun

    def update(self, worker: int, begun: Step) -> None:
        grads = np.zeros((len(begun.plan.ids), self.num_workers), np.float32)
        grads[:, worker] = -1
        self.cached.update(worker, begun, grads)
        self.num_made[begun.plan.ids, worker] += 1

    def run_in_steps(self, num_steps: int) -> None:
        """All workers read, then all update, in any order."""
        for _ in range(num_steps):
            step = self.cached.workers[0][0].step + 1
            begun = [self.read(worker, step) for worker in range(self.num_workers)]
            for worker in self.order.permutation(self.num_workers).tolist():
                self.update(worker, begun[worker])

    def flush_all(self) -> None:
        for worker in self.order.permutation(self.num_workers).tolist():
            self.cached.flush(worker)

    def rows(self) -> NDArray[np.float32]:
        return self.cached.rows_of(EVERY_ID)


@settings(max_examples=25)
@given(BOUNDS, st.integers(2, 3), st.integers(1, 3), st.integers(1, 30), SEEDS)
def test_a_row_of_shards_lacks_at_most_the_bound_in_sync(
    bound: RowBound, num_workers: int, num_shards: int, capacity: int, seed: int
) -> None:
    job = CountingShards(Mode(SYNC, SUM, row_bound=bound), num_workers, num_shards, capacity, seed)
    for _ in range(2):
        job.run_in_steps(20)
        job.flush_all()
        np.testing.assert_array_equal(job.rows(), job.num_made)
    job.cached.close()


@settings(max_examples=25)
@given(BOUNDS, st.integers(2, 3), st.integers(1, 3), st.integers(1, 30), SEEDS)
def test_a_row_of_shards_lacks_at_most_the_bound_in_async(
    bound: RowBound, num_workers: int, num_shards: int, capacity: int, seed: int
) -> None:
    job = CountingShards(Mode(ASYNC, row_bound=bound), num_workers, num_shards, capacity, seed)
    begun: list[Step | None] = [None] * num_workers
    for step in range(1, 150):
        worker = int(job.rng.integers(num_workers))
        each = begun[worker]
        if each is None:
            begun[worker] = job.read(worker, step)
        else:
            job.update(worker, each)
            begun[worker] = None
        if job.rng.random() < 0.02:
            job.cached.flush(worker)
    job.flush_all()
    np.testing.assert_array_equal(job.rows(), job.num_made)
    job.cached.close()


@settings(max_examples=25)
@given(BOUNDS, st.integers(2, 3), st.integers(0, 3), st.integers(1, 30), SEEDS)
def test_a_row_of_shards_lacks_at_most_the_bound_with_a_step_lag(
    bound: RowBound, num_workers: int, max_step_lag: int, capacity: int, seed: int
) -> None:
    job = CountingShards(Mode(ASYNC, max_step_lag=max_step_lag, row_bound=bound), num_workers, 2, capacity, seed)
    begun: list[Step | None] = [None] * num_workers
    ended = [0] * num_workers
    for _ in range(200):
        worker = int(job.rng.integers(num_workers))
        each = begun[worker]
        if each is not None:
            job.update(worker, each)
            ended[worker] += 1
            begun[worker] = None
        elif min(ended) >= ended[worker] - max_step_lag:
            begun[worker] = job.read(worker, ended[worker] + 1)
    job.flush_all()
    np.testing.assert_array_equal(job.rows(), job.num_made)
    job.cached.close()


@settings(max_examples=10)
@given(st.sampled_from(["sgd", "adagrad", "adam"]), st.integers(2, 4), st.integers(3, 30), SEEDS)
def test_the_order_of_arrival_in_sync_changes_no_bit(rule: str, num_workers: int, capacity: int, seed: int) -> None:
    spec = TableSpec(name="C1", dim=4, rule=rule, initializer=uniform(-0.5, 0.5))
    bound = RowBound(lag=60)
    ends = []
    for orders in np.random.default_rng(seed).spawn(2):
        job = CacheJob(bound, num_workers, 0, admission=ALL)
        cached = CachedShards(Mode(SYNC, SUM, row_bound=bound), job, capacity, spec, 2, learning_rate=0.05)
        rng = np.random.default_rng(seed)
        for step in range(1, 30):
            batches = [rng.choice(NUM_IDS, 6, replace=False).astype(np.int64) for _ in range(num_workers)]
            grads = rng.normal(0, 1, (num_workers, 6, 4)).astype(np.float32)
            begun = [cached.read(worker, ids, step) for worker, ids in enumerate(batches)]
            for worker in orders.permutation(num_workers).tolist():
                cached.update(worker, begun[worker], grads[worker])
        for worker in orders.permutation(num_workers).tolist():
            cached.flush(worker)
        stores = [shard.tables[spec.table_id].table.store for shard in cached.shards]  # type: ignore[attr-defined]
        ends.append([everything(store) for store in stores])
        cached.close()
    assert ends[0] == ends[1]


@settings(max_examples=20)
@given(st.floats(0.01, 10), st.sampled_from([SYNC, ASYNC]), st.integers(2, 3), st.integers(1, 30), SEEDS)
def test_a_row_of_shards_is_off_by_at_most_the_drift(
    drift: float, kind: Literal["sync", "async"], num_workers: int, capacity: int, seed: int
) -> None:
    bound, rng, dim = RowBound(drift=drift), np.random.default_rng(seed), 3
    job = CacheJob(bound, num_workers, 0 if kind == SYNC else None, admission=ALL, is_merged=kind == SYNC)
    spec = TableSpec(name="C1", dim=dim, rule="sgd", initializer=constant(0.0))
    cached = CachedShards(Mode(kind, SUM, row_bound=bound), job, capacity, spec, 2)
    moved = np.zeros((num_workers, NUM_IDS, dim))  # by the updates of each worker
    size = drift * rng.choice([0.003, 0.05, 0.7])
    for step in range(1, 40):
        begun = []
        for worker in range(num_workers):
            ids = rng.choice(NUM_IDS, rng.integers(0, 9), replace=False).astype(np.int64)
            begun.append(cached.read(worker, ids, step))
            lacked = moved[:, ids].sum(axis=0) - begun[-1].rows
            assert np.abs(lacked).max(initial=0) <= drift * (1 + 1e-3)
        for worker, each in enumerate(begun):
            grads = rng.normal(0, size, (len(each.plan.ids), dim)).astype(np.float32)
            cached.update(worker, each, grads)
            moved[worker, each.plan.ids] -= grads
    for worker in range(num_workers):
        cached.flush(worker)
    np.testing.assert_allclose(cached.rows_of(EVERY_ID), moved.sum(axis=0), atol=1e-3 * drift)
    cached.close()
