"""Rows and losses with row caches that are those of another job, bit by bit: without caches, or run again."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import ESTIMATE
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PushRefused
from fleet_sparse.worker.modes import sync_async
from fleet_sparse.worker.rows.early_rows import EarlyRows
from support.caching_workers import KINDS, LOOSE, CountingJob, Worker, cluster_of, mode_of
from support.counted_updates import EVERY_ID, NUM_IDS
from support.in_process import QUICK
from support.successive import SuccessiveLookups
from support.threads import in_threads


def rows_of_one_worker(
    rule: str,
    kind: str,
    bound: RowBound | None,
    *,
    is_embedded: bool = False,
    max_held: int | None = None,
    **options: Any,
) -> list[NDArray[np.float32]]:
    """Trains random batches; returns the rows of each, and of evaluations."""
    spec = TableSpec(name="C1", dim=5, rule=rule, initializer=uniform(-0.5, 0.5), seed=3)
    rng, seen = np.random.default_rng(0), []
    with cluster_of(2, is_embedded=is_embedded) as cluster:
        for number in range(2):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
        mode = mode_of(kind, bound)
        worker = Worker(cluster, 0, 1, [spec], mode, max_rows=8, admission=ESTIMATE, max_held=max_held, **options)
        for number in range(60):
            batch = worker.read(spec, rng.choice(NUM_IDS, 6, replace=False).astype(np.int64))
            seen.append(batch.values.copy())
            worker.update(batch, rng.normal(0, 1, batch.values.shape).astype(np.float32), 0.05)
            if number % 20 == 19:
                seen.append(worker.evaluate(spec))
        if worker.caches is not None:
            assert worker.caches.stats()[spec.name].counters.hit > 0
            assert (worker.caches.num_held > 0) == (max_held is None)
        worker.training.drain(leaves=True)
        seen.append(worker.evaluate(spec))
    return seen


@pytest.mark.guarantee("H4")
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "momentum", "ftrl"])
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("bound", "is_embedded"),
    [(RowBound(lag=1), False), (RowBound(lag=100, share=0.25), True), (RowBound(drift=0.01), False)],
    ids=["lag, frames", "share, embedded", "drift, frames"],
)
def test_one_worker_with_a_cache_is_as_without_bit_by_bit(
    rule: str, kind: str, bound: RowBound, is_embedded: bool
) -> None:
    with_cache, without = (rows_of_one_worker(rule, kind, each, is_embedded=is_embedded) for each in (bound, None))
    for ours, theirs in zip(with_cache, without, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.guarantee("R9")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_embedded", [False, True], ids=["frames", "embedded"])
def test_rounded_rows_of_one_worker_are_as_without_a_cache(rule: str, dtype: Any, kind: str, is_embedded: bool) -> None:
    options: dict[str, Any] = {"max_held": 0, "is_embedded": is_embedded, "settings": replace(QUICK, rows_dtype=dtype)}
    with_cache, without = (rows_of_one_worker(rule, kind, each, **options) for each in (RowBound(lag=1), None))
    for ours, theirs in zip(with_cache, without, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.guarantee("R9")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_looked_ahead_are_as_without_a_cache(dtype: Any, kind: str) -> None:
    spec = TableSpec(name="ahead", dim=5, rule="adagrad", initializer=uniform(-0.5, 0.5), seed=3)
    seen: dict[bool, list[NDArray[np.float32]]] = {}
    for has_cache in (True, False):
        rng, options = np.random.default_rng(0), {"settings": replace(QUICK, rows_dtype=dtype), "max_held": 0}
        of_steps = [rng.choice(NUM_IDS, 6, replace=False).tolist() for _ in range(41)]
        seen[has_cache], early = [], None
        with cluster_of(2) as cluster:
            for number in range(2):
                cluster.run(number, partial(cluster.shards[number].add_table, spec))
            mode = mode_of(kind, LOOSE if has_cache else None)
            worker = Worker(cluster, 0, 1, [spec], mode, max_rows=8, **options)
            lookups = SuccessiveLookups(worker.deduplicator, [spec])
            for ids, next_ids in pairwise(of_steps):
                coming = lookups.announce({spec.name: next_ids}, {spec.name: ids}) if has_cache else None
                batch, inverse = lookups.of({spec.name: ids}, early)[spec.name]
                worker.training.prefetch([batch], early, coming)
                early = coming
                seen[has_cache].append(batch.values[inverse])
                grads = np.empty_like(batch.values)
                grads[inverse] = rng.normal(0, 1, batch.values.shape)
                worker.update(batch, grads, 0.05)
            worker.training.drain(leaves=True)
            seen[has_cache].append(worker.evaluate(spec))
            if worker.caches is not None:
                assert worker.caches.stats()[spec.name].counters.hit > 0
    for ours, theirs in zip(seen[True], seen[False], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.guarantee("R9")
def test_workers_read_copies_rounded_and_train_them_exactly() -> None:
    settings = replace(QUICK, rows_dtype="bfloat16")
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", RowBound(lag=1000, share=None), 2, 0, max_held=0, settings=settings)
        first, second = job.workers
        grads = np.full((NUM_IDS, 2), [0, -1], np.float32)
        for _ in range(301):  # the bfloat16s there are multiples of 2
            second.update(second.batch(job.spec, EVERY_ID), grads)
        second.client.flush()
        read = []
        for _ in range(4):  # an update of the first worker makes 302 of the 301 that its copies have
            batch = first.read(job.spec, EVERY_ID)
            read.append(set(batch.values[:, 1].tolist()))
            first.update(batch, grads)
        assert first.caches is not None
        assert first.caches.stats()[job.spec.name].counters.hit == 3 * NUM_IDS
    assert read == [{300.0}, {302.0}, {304.0}, {304.0}]  # 301, 303 and so on go to the even neighbour


@pytest.mark.guarantee("R9")
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_rows_count_every_update_within_the_bound(kind: str) -> None:
    settings = replace(QUICK, rows_dtype="bfloat16")  # which has every count up to 256
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, kind, LOOSE, 3, 5, max_held=0, settings=settings)
        for _ in range(60):
            job.step()
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("R6")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_gradient_past_the_largest_float16_changes_no_copy(num_workers: int) -> None:
    settings = replace(QUICK, rows_dtype="float16")
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, num_workers, 0, max_held=0, settings=settings)
        worker = job.workers[0]
        for _ in range(2):
            job.update(0, worker.read(job.spec, EVERY_ID))
        batch = worker.read(job.spec, EVERY_ID)
        with pytest.raises(PushRefused):
            worker.update(batch, np.full(batch.values.shape, 70_000, np.float32))
        assert set(worker.read(job.spec, EVERY_ID).values[:, 0].tolist()) == {2.0}


def test_the_only_worker_reads_again_after_a_refused_push(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 1, 0, max_held=0)
        worker = job.workers[0]
        for _ in range(2):
            job.update(0, worker.read(job.spec, EVERY_ID))
        batch = worker.read(job.spec, EVERY_ID)
        monkeypatch.setattr(sync_async, "check_finite", lambda rows, dense: None)  # so that the pserver refuses it
        worker.update(batch, np.full(batch.values.shape, np.inf, np.float32))
        with pytest.raises(PushRefused):
            worker.client.flush()
        assert set(worker.read(job.spec, EVERY_ID).values[:, 0].tolist()) == {2.0}


def rows_of_a_sync_job(
    kind: str, bound: RowBound, *, looks_ahead: bool, waits: Container[int] = (), **options: Any
) -> list[NDArray[np.float32]]:
    """Trains random batches of three workers; returns the rows of each, and of an evaluation at the end.

    Behind the steps of `waits` the first worker waits for its pushes, as for a save.
    """
    spec = TableSpec(name="C1", dim=5, rule="adagrad", initializer=uniform(-0.5, 0.5), seed=3)
    rng, seen = np.random.default_rng(0), []
    of_steps = [[{spec.name: rng.choice(NUM_IDS, 6, replace=False).tolist()} for _ in range(3)] for _ in range(41)]
    with cluster_of(2) as cluster:
        for number in range(2):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
        mode = mode_of(kind, bound)
        workers = [Worker(cluster, index, 3, [spec], mode, max_rows=12, **options) for index in range(3)]
        lookups = [SuccessiveLookups(worker.deduplicator, [spec]) for worker in workers]
        early: list[EarlyRows | None] = [None] * 3
        for number, (ids, next_ids) in enumerate(pairwise(of_steps)):
            found = []
            for index, worker in enumerate(workers):
                coming = lookups[index].announce(next_ids[index], ids[index]) if looks_ahead else None
                found.append(lookups[index].of(ids[index], early[index])[spec.name])
                worker.training.prefetch([found[-1].rows], early[index], coming)
                early[index] = coming
            grads = [np.empty_like(batch.values) for batch, _ in found]
            for (_, inverse), of_worker in zip(found, grads, strict=True):
                of_worker[inverse] = rng.normal(0, 1, of_worker.shape)
            order = [int(each) for each in np.random.default_rng().permutation(3)]
            for index in order:  # whichever worker is faster
                workers[index].update(found[index].rows, grads[index], 0.05)
            seen += [batch.values[inverse] for batch, inverse in found]
            if number in waits:
                workers[0].training.drain()
        of_caches = [worker.caches.stats()[spec.name] for worker in workers if worker.caches is not None]
        assert all(each.counters.hit > 0 and (each.held > 0) == ("max_held" not in options) for each in of_caches)
        assert len(of_caches) == 3
        in_threads(*(partial(worker.training.drain, leaves=True) for worker in workers))
        seen.append(workers[0].evaluate(spec))
    return seen


@pytest.mark.guarantee("H6")
@pytest.mark.parametrize("bound", [RowBound(lag=20), RowBound(drift=0.3)], ids=["lag", "drift"])
@pytest.mark.parametrize("kind", ["sync", "sync avg"])
@pytest.mark.parametrize("looks_ahead", [False, True], ids=["plain", "looking ahead"])
def test_two_sync_runs_with_caches_are_equal_bit_by_bit(kind: str, bound: RowBound, looks_ahead: bool) -> None:
    runs = [rows_of_a_sync_job(kind, bound, looks_ahead=looks_ahead) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.guarantee("H6")
def test_waits_of_a_worker_change_no_row_of_a_sync_job() -> None:
    options: dict[str, Any] = {"looks_ahead": True, "max_held": 0, "admission": ESTIMATE}
    runs = [rows_of_a_sync_job("sync", RowBound(lag=20), waits=waits, **options) for waits in ((), range(1, 40, 3))]
    for plain, waiting in zip(*runs, strict=True):
        np.testing.assert_array_equal(plain, waiting)
