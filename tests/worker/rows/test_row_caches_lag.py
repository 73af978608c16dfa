"""Tests how many updates cached rows lack, in jobs of real clients whose rows count their updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import AGED_LFU, ALL, ESTIMATE, LFU, LRU, SECOND, Admission, CachePolicy
from fleet_sparse.core.clip import BY_GLOBAL_NORM, Clip
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.plugin.row_cache import RowCache
from fleet_sparse.plugin.strategy import PserverStrategy, read_strategy
from fleet_sparse.worker.modes.step import StepClip
from fleet_sparse.worker.net import shard_link
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.caching_workers import ALL_KINDS, KINDS, LOOSE, CountingJob, Worker, cluster_of, mode_of
from support.counted_updates import EVERY_ID, NUM_IDS
from support.in_process import QUICK
from support.successive import SuccessiveLookups
from support.threads import in_threads

BOUNDS = st.builds(RowBound, st.integers(1, 60), st.none() | st.sampled_from([0.25, 0.5])) | st.builds(
    RowBound, drift=st.floats(0.5, 40)
)
POLICIES = st.sampled_from(
    [(AGED_LFU, ALL), (AGED_LFU, ESTIMATE), (AGED_LFU, SECOND), (LFU, ESTIMATE), (LRU, ALL), (LRU, SECOND)]
)


@pytest.mark.guarantee("H1", "H2", "H3")
@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    BOUNDS,
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(1, 24),
    st.booleans(),
    st.sampled_from([None, 0]),
    st.integers(0, 2**32),
)
def test_a_row_lacks_at_most_the_bound(
    kind: str,
    bound: RowBound,
    num_workers: int,
    num_shards: int,
    max_rows: int,
    is_embedded: bool,
    max_held: int | None,
    seed: int,
) -> None:
    with cluster_of(num_shards, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, kind, bound, num_workers, seed, max_rows=max_rows, max_held=max_held)
        for _ in range(3):
            for _ in range(12):
                job.step()
            job.meet()
            assert job.num_held == 0
            np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H7")
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_what_was_made_is_on_the_pservers_after_a_barrier(kind: str) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, kind, LOOSE, 3, 5, max_rows=12)
        for num_steps in (12, 15):
            job.in_steps(num_steps)
            assert job.num_held > 0
            job.meet()
            assert job.num_held == 0
            for worker in job.workers:
                np.testing.assert_array_equal(worker.evaluate(job.spec), job.num_made)


def rows_of_one_writer(
    kind: str, rule: str, bound: RowBound | None, max_held: int | None = None, merge: Literal["avg"] | None = None
) -> list[float]:
    """Trains a row towards 1 by one of two workers, each with a row of its own; returns what it reads, and the end."""
    spec = TableSpec(name="C1", dim=1, rule=rule, initializer=constant(0.0))
    with cluster_of(1) as cluster:
        cluster.run(0, partial(cluster.shards[0].add_table, spec))
        workers = [
            Worker(cluster, index, 2, [spec], mode_of(kind, bound), max_held=max_held, merge=merge)
            for index in range(2)
        ]
        seen = []
        for _ in range(40):
            batches = [worker.read(spec, np.array([index])) for index, worker in enumerate(workers)]
            seen.append(float(batches[0].values[0, 0]))
            for worker, batch in zip(workers, batches, strict=True):
                grads = batch.values - 1
                worker.update(batch, grads / 2 if bound is None and merge == "avg" else grads, 0.1)
                if kind == "async":
                    worker.client.flush()
        in_threads(*(partial(worker.training.drain, leaves=True) for worker in workers))
        return [*seen, float(workers[1].evaluate(spec, np.array([0]))[0, 0])]


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "adam", "ftrl"])
@pytest.mark.parametrize(("kind", "merge"), [("sync avg", None), ("sync", None), ("async", "avg"), ("sync", "avg")])
@pytest.mark.parametrize("max_held", [None, 0])
def test_copies_are_trained_as_the_rows_of_the_pservers(
    rule: str, kind: str, merge: Literal["avg"] | None, max_held: int | None
) -> None:
    # A held update has a part of the momentum of a step, which the other worker's would share.
    tolerance = 0.2 if (rule, kind, max_held) == ("momentum", "sync avg", None) else 1e-4
    without = rows_of_one_writer(kind, rule, None, merge=merge)
    for bound in (RowBound(lag=1), RowBound(lag=2), RowBound(lag=100, share=0.25), RowBound(drift=0.2)):
        np.testing.assert_allclose(rows_of_one_writer(kind, rule, bound, max_held, merge), without, rtol=tolerance)


def row_of_all(rule: str, decay: float, bound: RowBound | None, *, rate: float) -> NDArray[np.float32]:
    """Trains one row by four workers, each towards a target of its own; returns it with what all hold."""
    spec = TableSpec(
        name="C1", dim=2, rule=rule, initializer=constant(1.0), hyperparameters=tuple({"l2_decay": decay}.items())
    )
    with cluster_of(1) as cluster:
        cluster.run(0, partial(cluster.shards[0].add_table, spec))
        workers = [Worker(cluster, index, 4, [spec], mode_of("sync avg", bound)) for index in range(4)]
        num_held = 0
        for _ in range(200):
            batches = [worker.read(spec, np.array([1])) for worker in workers]
            for number, (worker, batch) in enumerate(zip(workers, batches, strict=True)):
                worker.update(batch, batch.values - np.array([2 + number, -1], np.float32), rate)
            num_held += sum(worker.caches.num_held for worker in workers if worker.caches is not None)
        assert (num_held > 400) == (bound is not None)
        in_threads(*(partial(worker.training.drain, leaves=True) for worker in workers))
        return workers[0].evaluate(spec, np.array([1]))[0]


@pytest.mark.parametrize(("rule", "rate"), [("sgd", 0.1), ("momentum", 0.01)])
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_workers_that_hold_a_row_share_the_decay_of_a_step(rule: str, rate: float, decay: float) -> None:
    without = row_of_all(rule, decay, None, rate=rate)
    np.testing.assert_allclose(without, np.array([3.5, -1]) / (1 + decay), rtol=0.02)
    np.testing.assert_allclose(row_of_all(rule, decay, RowBound(lag=30), rate=rate), without, rtol=0.1)


@pytest.mark.guarantee("C3")
@pytest.mark.parametrize("kind", ["sync", "sync avg"])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_copies_are_trained_by_gradients_clipped_by_norm(kind: str, rule: str) -> None:
    spec = TableSpec(name="C1", dim=2, rule=rule, initializer=constant(0.0))
    clip = StepClip(Clip(BY_GLOBAL_NORM, norm=1.0), (True,))
    seen: list[list[NDArray[np.float32]]] = []
    for bound in (None, RowBound(lag=100, share=0.25), RowBound(drift=0.02)):
        seen.append([])
        with cluster_of(2) as cluster:
            for number in range(2):
                cluster.run(number, partial(cluster.shards[number].add_table, spec))
            workers = [Worker(cluster, index, 2, [spec], mode_of(kind, bound), max_held=0) for index in range(2)]
            for step in range(20):
                batches = [worker.read(spec, np.array([index, index + 2])) for index, worker in enumerate(workers)]
                seen[-1] += [batch.values for batch in batches]
                grads = [np.full((2, 2), [(step % 4) * 5 + index, 3], np.float32) for index in range(2)]
                in_threads(
                    *(
                        partial(worker.training.update, [batch._replace(values=g, learning_rate=0.1)], [], 1.0, clip)
                        for worker, batch, g in zip(workers, batches, grads, strict=True)
                    )
                )
    for rows in seen[1:]:
        np.testing.assert_allclose(rows, seen[0], rtol=1e-4)


@pytest.mark.guarantee("C3")
def test_gradients_of_an_async_mean_are_divided_then_clipped() -> None:
    spec, bound = TableSpec(name="C1", dim=1, rule="sgd", initializer=constant(0.0)), RowBound(lag=4)
    clip = StepClip(Clip(BY_GLOBAL_NORM, norm=1.0), (True,))
    with cluster_of(1) as cluster:
        cluster.run(0, partial(cluster.shards[0].add_table, spec))
        worker = Worker(cluster, 0, 4, [spec], mode_of("async", bound), merge="avg")
        for gradient, row in ((2.0, -0.5), (40.0, -1.5)):
            batch = worker.read(spec, np.array([1]))
            grads = np.full((1, 1), gradient, np.float32)
            worker.training.update([batch._replace(values=grads, learning_rate=1.0)], [], 1.0, clip)
            assert worker.evaluate(spec, np.array([1])).tolist() == [[row]]


def test_a_copy_follows_the_row_if_others_have_no_examples() -> None:
    """The mean over a step is then the gradient of one worker."""
    spec, bound = TableSpec(name="C1", dim=1, rule="sgd", initializer=constant(0.0)), RowBound(lag=4)
    with cluster_of(1) as cluster:
        cluster.run(0, partial(cluster.shards[0].add_table, spec))
        workers = [Worker(cluster, index, 2, [spec], mode_of("sync avg", bound), max_held=0) for index in range(2)]
        nothing = workers[1].batch(spec, np.empty(0, np.int64))
        for number in range(30):
            batch = workers[0].read(spec, np.array([1]))
            assert number - 3 <= batch.values[0, 0] <= number
            workers[0].update(batch, np.full((1, 1), -1, np.float32))
            workers[1].training.skip([nothing], [])


@pytest.mark.guarantee("H1")
def test_workers_of_an_async_job_run_at_their_own_speed() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", RowBound(lag=40, share=0.5), 3, 5, max_rows=12, admission=SECOND)
        job.at_own_speed(600, speeds=[0.6, 0.3, 0.1])
        assert job.num_held > 0


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bound", [LOOSE, RowBound(drift=8)], ids=str)
def test_lost_and_repeated_frames_lose_and_double_no_update(
    bound: RowBound, kind: str, looks_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose reply is lost is sent again, here after 0.1 s also if it waits for other workers."""
    monkeypatch.setattr(shard_link, "_WAITING_PROBES", 200)
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, kind, bound, 2, 7, looks_ahead=looks_ahead, max_rows=12)
        losses = np.random.default_rng(1)
        for worker in job.workers:
            worker.channel.loses_request = lambda shard: bool(losses.random() < 0.05)
            worker.channel.loses_reply = lambda shard: bool(losses.random() < 0.05)
        for _ in range(25):
            job.step()
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("ids", [[2**24, 2**24 + 1], [-(2**63), 2**63 - 1], [2**53, 2**53 + 1]], ids=str)
def test_ids_that_a_float_cannot_tell_apart_are_two_rows(ids: list[int]) -> None:
    with cluster_of(3) as cluster:  # a shard at least has none of them
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        worker, both = job.workers[0], np.array(ids)
        for number in range(6):
            batch = worker.read(job.spec, both[: 1 + number % 2])
            worker.update(batch, np.full(batch.values.shape, -1, np.float32))
        assert worker.evaluate(job.spec, both)[:, 0].tolist() == [6.0, 3.0]
        worker.training.drain()
        assert job.workers[1].evaluate(job.spec, both)[:, 0].tolist() == [6.0, 3.0]


@pytest.mark.guarantee("H1", "H2", "H3")
@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=10, deadline=None)
@given(
    BOUNDS,
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(1, 24),
    POLICIES,
    st.sampled_from([None, 0]),
    st.integers(0, 2**32),
)
def test_a_copy_looked_up_ahead_lacks_at_most_the_bound(  # what jobs differ in
    kind: str,
    bound: RowBound,
    num_workers: int,
    num_shards: int,
    max_rows: int,
    policies: tuple[CachePolicy, Admission],
    max_held: int | None,
    seed: int,
) -> None:
    """In async mode and with a step lag workers run at their own speed."""
    with cluster_of(num_shards) as cluster:
        options: dict[str, Any] = {"max_held": max_held, "max_rows": max_rows}
        options["policy"], options["admission"] = policies
        job = CountingJob(cluster, kind, bound, num_workers, seed, looks_ahead=True, **options)
        for _ in range(2):
            if job.is_merged:
                job.in_steps(30)
            else:
                job.at_own_speed(100, max_step_lag=1 if kind == "lag" else None)
            job.meet()
            np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


def test_own_updates_are_no_lag_of_copies_looked_up_ahead() -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "sync", RowBound(lag=20), 2, 0, looks_ahead=True)
        batch = {job.spec.name: [1, 2, 3]}
        for _ in range(40):
            job.update(0, job.read(0, batch))
            job.update(1, job.workers[1].read(job.spec, np.array([9])))
        caches = job.workers[0].caches
        assert caches is not None
        counters = caches.stats()[job.spec.name].counters
    assert (counters.hit > 100, counters.refreshed) == (True, 0)


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("max_held", [None, 0])
def test_a_row_enters_with_all_updates_made_since_it_was_read(num_workers: int, max_held: int | None) -> None:
    with cluster_of(1) as cluster:
        options: dict[str, Any] = {"admission": SECOND, "max_held": max_held}
        job = CountingJob(cluster, "async", LOOSE, num_workers, 0, **options)
        worker, ids = job.workers[0], np.array([1])
        first, second = (worker.read(job.spec, ids) for _ in range(2))  # it enters by the second
        for number, batch in enumerate((first, second, worker.read(job.spec, ids)), 1):
            job.update(0, batch)
            assert worker.read(job.spec, ids).values[0, 0] == number
        worker.training.drain()
        assert worker.evaluate(job.spec, ids)[0, 0] == 3


@pytest.mark.guarantee("H3")
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 2),
    st.sampled_from([None, 0]),
    POLICIES,
    st.integers(1, 24),
    st.integers(0, 2**32),
)
def test_own_updates_are_all_there_once(
    num_workers: int, max_held: int | None, policies: tuple[CachePolicy, Admission], max_rows: int, seed: int
) -> None:
    """Batches overlap, as those of threads that train."""
    with cluster_of(2) as cluster:
        options: dict[str, Any] = {"max_held": max_held, "max_rows": max_rows}
        options["policy"], options["admission"] = policies
        job = CountingJob(cluster, "async", LOOSE, num_workers, seed, **options)
        begun: list[tuple[int, RowBatch]] = []
        for _ in range(120):
            if len(begun) < 4:
                worker = int(job.rng.integers(num_workers))
                begun.append((worker, job.read(worker)))
            else:
                job.update(*begun.pop(int(job.rng.integers(len(begun)))))
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H2")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_held", [None, 0])
def test_a_row_is_off_by_at_most_the_drift(kind: str, max_held: int | None) -> None:
    drift, dim = 0.5, 3
    spec = TableSpec(name="C1", dim=dim, rule="sgd", initializer=constant(0.0))
    rng = np.random.default_rng(1)
    with cluster_of(2) as cluster:
        for number in range(2):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
        mode = mode_of(kind, RowBound(drift=drift))
        workers = [Worker(cluster, index, 3, [spec], mode, max_rows=12, max_held=max_held) for index in range(3)]
        moved = np.zeros((3, NUM_IDS, dim))
        for _ in range(60):
            batches = []
            for worker in workers:
                batch = worker.read(spec, rng.choice(NUM_IDS, 6, replace=False).astype(np.int64))
                lacked = moved[:, batch.unique.ids].sum(axis=0) - batch.values
                assert np.abs(lacked).max() <= drift * (1 + 1e-3)
                batches.append(batch)
            for index, (worker, batch) in enumerate(zip(workers, batches, strict=True)):
                grads = rng.normal(0, 0.03, batch.values.shape).astype(np.float32)
                worker.update(batch, grads)
                if kind != "sync":
                    worker.client.flush()
                moved[index, batch.unique.ids] -= grads
        has_held = any(worker.caches is not None and worker.caches.num_held for worker in workers)
        assert has_held == (max_held is None)
        in_threads(*(partial(worker.training.drain, leaves=True) for worker in workers))
        np.testing.assert_allclose(workers[0].evaluate(spec), moved.sum(axis=0), atol=1e-3)


@pytest.mark.guarantee("H2")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_held", [None, 0])
def test_gradients_that_cancel_out_leave_a_row_within_the_drift(kind: str, max_held: int | None) -> None:
    """In a merged step the row stays where it is, and both copies move away from it."""
    drift, spec = 0.5, TableSpec(name="C1", dim=1, rule="sgd", initializer=constant(0.0))
    with cluster_of(2) as cluster:
        for number in range(2):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
        mode = mode_of(kind, RowBound(drift=drift))
        workers = [Worker(cluster, index, 2, [spec], mode, max_held=max_held) for index in range(2)]
        for step in range(100):
            batches = [worker.read(spec, EVERY_ID) for worker in workers]
            assert max(np.abs(batch.values).max() for batch in batches) <= drift * (1 + 1e-3), step
            for worker, batch, sign in zip(workers, batches, (1, -1), strict=True):
                worker.update(batch, np.full(batch.values.shape, 0.02 * sign, np.float32))
                if kind != "sync":
                    worker.client.flush()


@pytest.mark.guarantee("H2")
@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("max_held", [None, 0])
@pytest.mark.parametrize(
    ("kind", "looks_ahead", "merge"),
    [
        *((kind, False, None) for kind in ALL_KINDS),
        *((kind, True, None) for kind in ALL_KINDS),
        ("sync", False, "avg"),
        ("async", False, "avg"),
    ],
)
def test_a_row_of_any_mean_and_rule_is_off_by_at_most_the_drift(
    kind: str, looks_ahead: bool, merge: Literal["avg"] | None, rule: str, max_held: int | None
) -> None:
    """Off from the rows of the pservers with what all workers hold. Rows that are pulled early may be older."""
    drift, rate = 0.1, 1.0 if rule == "sgd" else 0.02
    spec, rng = TableSpec(name="C1", dim=3, rule=rule, initializer=constant(0.0)), np.random.default_rng(4)

    def batch_of_ids() -> dict[str, list[int]]:
        return {spec.name: rng.choice(NUM_IDS, 6, replace=False).tolist()}

    with cluster_of(2) as cluster:
        for number in range(2):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
        mode = mode_of(kind, RowBound(drift=drift))
        workers = [
            Worker(cluster, index, 3, [spec], mode, max_rows=12, max_held=max_held, merge=merge) for index in range(3)
        ]
        lookups = [SuccessiveLookups(worker.deduplicator, [spec]) for worker in workers]
        coming: list[tuple[dict[str, list[int]], EarlyRows | None]] = [(batch_of_ids(), None) for _ in workers]
        num_hits = 0
        for step in range(1, 50):
            made = workers[0].evaluate(spec)  # with what this worker holds
            for worker in workers[1:]:
                made += worker.evaluate(spec) - on_pservers(worker, spec, step)
            batches = []
            for index, worker in enumerate(workers):
                ids, early = coming[index]
                next_ids = batch_of_ids()
                announced = lookups[index].announce(next_ids, ids) if looks_ahead else None
                coming[index] = next_ids, announced
                batch = lookups[index].of(ids, early)[spec.name].rows
                is_checked = worker.have_copies(spec, batch.unique.ids) | (not looks_ahead or kind.startswith("sync"))
                worker.training.prefetch([batch], early, announced)
                off = np.abs(batch.values - made[batch.unique.ids])[is_checked]
                assert off.max(initial=0) <= drift * (1 + 1e-3)
                batches.append(batch)
            for worker, batch in zip(workers, batches, strict=True):
                worker.update(batch, rng.normal(0, 0.03, batch.values.shape).astype(np.float32), rate)
                if not kind.startswith("sync"):
                    worker.client.flush()
        for worker in workers:
            assert worker.caches is not None
            num_hits += worker.caches.stats()[spec.name].counters.hit
        assert num_hits > 100


def on_pservers(worker: Worker, spec: TableSpec, step: int = 0) -> NDArray[np.float32]:
    """The rows of all ids without what a worker holds."""
    batch = worker.batch(spec, EVERY_ID)
    worker.client.pull([batch], step=step if worker.counts_steps else 0)
    rows = np.empty_like(batch.values)
    rows[batch.unique.ids] = batch.values
    return rows


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("kind", KINDS)
def test_repeated_ids_of_a_batch_are_one_update_of_their_copy(kind: str) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, kind, LOOSE, 2, 0)
        for _ in range(20):
            batches = [worker.read(job.spec, np.array([3, 5, 3, 3])) for worker in job.workers]
            for worker, batch in enumerate(batches):
                assert sorted(batch.unique.ids.tolist()) == [3, 5]
                job.updates.check(worker, batch.unique.ids, batch.values)
                job.update(worker, batch)
        caches = job.workers[0].caches
        assert caches is not None
        counters = caches.stats()[job.spec.name].counters
        assert (counters.read, counters.hit > 30) == (40, True)
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("lag", [1, 6])
def test_a_row_pushed_and_refreshed_at_once_has_each_update_once(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With look-ahead a step is one message to each shard, which pushes the rows and asks about their copies."""
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "sync", RowBound(lag=lag), 2, 0, looks_ahead=True)
        monkeypatch.setattr(job.updates, "batch", lambda: EVERY_ID)
        job.in_steps(4)
        caches, num_sent = job.workers[0].caches, sum(job.workers[0].channel.num_sent)
        assert caches is not None
        before = caches.stats()[job.spec.name].counters
        job.in_steps(24)
        counters = caches.stats()[job.spec.name].counters
        assert counters.refreshed - before.refreshed >= 6 * NUM_IDS
        assert sum(job.workers[0].channel.num_sent) - num_sent == 24 * 2
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_shards_without_ids_in_a_step_lose_no_update(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(3) as cluster:
        job = CountingJob(cluster, kind, LOOSE, 2, 3)
        shards = cluster.placement.shard_of(EVERY_ID, job.spec.salt)
        batches = cycle([EVERY_ID[shards == shard] for shard in (0, 0, 0, 1, 1, 2, 2, 2, 3)])
        monkeypatch.setattr(job.updates, "batch", lambda: next(batches))
        job.in_steps(30)
        job.meet()
        assert (job.num_made >= 7).all()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_rows_that_hold_updates_leave_in_the_order_of_use(num_workers: int) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, num_workers, 3, max_rows=4, policy=LRU)
        assert set(cluster.placement.shard_of(EVERY_ID[:4], job.spec.salt).tolist()) == {0, 1}
        worker, order = job.workers[0], [2, 0, 3, 1]
        for id_ in (*EVERY_ID[:4], *order):
            job.update(0, worker.read(job.spec, np.array([id_])))
        for number in range(5):
            np.testing.assert_array_equal(on_pservers(worker, job.spec)[order, 0], [2] * number + [0] * (4 - number))
            job.update(0, worker.read(job.spec, EVERY_ID[4 + number : 5 + number]))


@pytest.mark.guarantee("H6")
@pytest.mark.guarantee("A4")
@pytest.mark.parametrize("looks_ahead", [False, True], ids=["plain", "looking ahead"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_without_a_copy_have_what_was_pushed(
    kind: str, looks_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that enter, too. With look-ahead, where others go on, what was pushed when the step before began.

    With a step lag they have besides all pushes of the steps up to the one before the last.
    """
    with cluster_of(2) as cluster:
        bound, policies = RowBound(lag=40), {"max_held": 0, "admission": SECOND}
        job = CountingJob(cluster, kind, bound, 3, 5, looks_ahead=looks_ahead, max_rows=4, **policies)
        pushed, read, num_checked = [job.num_made.copy()] * 3, job.read, 0

        def checked(index: int) -> RowBatch:
            nonlocal num_checked
            is_plain = ~job.workers[index].have_copies(job.spec, EVERY_ID)
            before, pushed[index] = pushed[index], job.num_made.copy()
            batch = read(index)
            has_all = np.full(3, job.is_merged or not looks_ahead)
            if kind == "lag":
                has_all |= np.array(job.num_ended) < job.num_ended[index]
            ids, expected = batch.unique.ids, np.where(has_all, job.num_made, before)
            assert (batch.values >= expected[ids])[is_plain[ids]].all()
            num_checked += int(is_plain[ids].sum())
            return batch

        monkeypatch.setattr(job, "read", checked)
        if job.is_merged:
            job.in_steps(30)
        else:
            job.at_own_speed(180, max_step_lag=1 if kind == "lag" else None)
        assert num_checked > 100


@pytest.mark.guarantee("H5")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_lag_0_sends_the_same_bytes(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    sent: list[list[tuple[int, int, bytes]]] = []
    for strategy in (PserverStrategy(), PserverStrategy(max_row_lag=0, row_cache=RowCache())):
        strategy.a_sync = is_async
        read, frames = read_strategy(strategy), []
        assert read.row_cache is None
        spec = TableSpec(name="C1", dim=2, rule="adagrad", initializer=uniform(-0.5, 0.5), seed=3)
        with cluster_of(2) as cluster:
            for number in range(2):
                cluster.run(number, partial(cluster.shards[number].add_table, spec))
            patient, workers = replace(QUICK, retry_s=20.0), []
            for index in range(3):
                workers.append(Worker(cluster, index, 3, [spec], read.mode, settings=patient))
                channel = workers[-1].channel
                monkeypatch.setattr(channel, "send", noting(index, channel.send, frames))
            rng = np.random.default_rng(0)
            for _ in range(12):
                batches = [worker.read(spec, rng.choice(NUM_IDS, 6).astype(np.int64)) for worker in workers]
                for worker, batch in zip(workers, batches, strict=True):
                    worker.update(batch, rng.normal(0, 1, batch.values.shape).astype(np.float32), 0.1)
            for worker in workers:
                worker.client.flush()
        sent.append(sorted(frames))
    assert len(sent[0]) >= 12 * 3 * 2
    assert sent[0] == sent[1]


def noting(worker: int, send: Callable[..., bool], frames: list[tuple[int, int, bytes]]) -> Callable[..., bool]:
    def sending(shard: int, parts: Sequence[Any]) -> bool:
        frames.append((worker, shard, b"".join(bytes(part) for part in parts)))
        return send(shard, parts)

    return sending
