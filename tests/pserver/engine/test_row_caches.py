"""Jobs whose workers cache rows, on real shards: counting ones, which show what a row lacks."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.cache_policies import ALL
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.mode import ASYNC, AVG, SUM, SYNC, Mode
from fleet_sparse.core.row_bound import RowBound, steps_off_lease
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.plugin.row_cache import RowCache, cache_job
from fleet_sparse.worker.rows.cache_job import CacheJob
from support.cached_shards import CachedShards
from support.counted_updates import EVERY_ID, NUM_IDS, CountedUpdates
from support.counting_jobs import CachedCounting
from support.cow_views import everything

BOUNDS = st.builds(RowBound, st.integers(1, 120), st.none() | st.sampled_from([0.25, 0.5])) | st.builds(
    RowBound, drift=st.floats(0.5, 40)
)
SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize(
    "mode", [Mode(SYNC, SUM), Mode(ASYNC), *(Mode(ASYNC, max_step_lag=lag) for lag in (0, 1, 3))], ids=str
)
@settings(max_examples=12)
@given(BOUNDS, st.integers(2, 3), st.integers(1, 3), st.integers(1, 30), SEEDS)
def test_a_row_of_shards_lacks_at_most_the_bound(
    mode: Mode, bound: RowBound, num_workers: int, num_shards: int, capacity: int, seed: int
) -> None:
    off_lease = steps_off_lease(mode.max_step_lag) if mode.is_step_synchronized else None
    cache_job = CacheJob(bound, num_workers, off_lease, admission=ALL, is_merged=mode.kind == SYNC)
    spec = TableSpec(name="C1", dim=num_workers, rule="sgd", initializer=constant(0.0))
    cached = CachedShards(msgspec.structs.replace(mode, row_bound=bound), cache_job, capacity, spec, num_shards)
    job = CachedCounting(cached, CountedUpdates(bound, num_workers, seed))
    for _ in range(2):
        if mode.kind == SYNC:
            job.in_steps(20)
        else:
            job.at_own_speed(90, max_step_lag=mode.max_step_lag)
        job.flush()
    cached.close()


@settings(max_examples=10)
@given(
    st.sampled_from([RowBound(lag=60), RowBound(drift=0.3)]),
    st.sampled_from([SUM, AVG]),
    st.sampled_from(["sgd", "adagrad", "adam"]),
    st.integers(2, 4),
    st.integers(3, 30),
    SEEDS,
)
def test_the_order_of_arrival_in_sync_changes_no_bit(
    bound: RowBound, scale: Literal["sum", "avg"], rule: str, num_workers: int, capacity: int, seed: int
) -> None:
    spec = TableSpec(name="C1", dim=4, rule=rule, initializer=uniform(-0.5, 0.5))
    mode = Mode(SYNC, scale, row_bound=bound)
    ends = []
    for orders in np.random.default_rng(seed).spawn(2):
        job = cache_job(RowCache(), mode, num_workers)._replace(admission=ALL)
        cached = CachedShards(mode, job, capacity, spec, 2, learning_rate=0.05)
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
