"""RowCaches in jobs of real clients and shards in this process, in which rows count the updates that they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import AGED_LFU, ALL, ESTIMATE, SECOND
from fleet_sparse.core.clip import BY_GLOBAL_NORM, Clip
from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.entries import SKETCH, Entry
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.kernels_copies import lag_class
from fleet_sparse.core.mode import ASYNC, AVG, SUM, SYNC, Mode
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PushRefused
from fleet_sparse.plugin.row_cache import RowCache, cache_job
from fleet_sparse.plugin.strategy import PserverStrategy, read_strategy
from fleet_sparse.settings import Settings
from fleet_sparse.worker.modes import sync_async
from fleet_sparse.worker.modes.step import StepClip
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.rows.cache_sizes import capacities_of, is_cached
from fleet_sparse.worker.rows.cached_table import CachedTable, CacheJob
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.row_batch import RowBatch
from fleet_sparse.worker.rows.row_caches import RowCaches
from fleet_sparse.worker.rows.table_exchange import NUM_LAG_CLASSES
from support import counting_jobs
from support.counted_updates import EVERY_ID, NUM_IDS, CountedUpdates
from support.cow_views import all_rows
from support.in_process import QUICK, EmbeddedCluster, InProcessCluster
from support.saves import store_of
from support.successive import SuccessiveLookups
from support.threads import JOIN_S, in_threads
from support.waits import wait_until

EVERYTHING = EVERY_ID
LOOSE = RowBound(lag=30)
KINDS = ["sync", "async", "lag"]
ALL_KINDS = [*KINDS, "sync avg"]


def mode_of(kind: str, bound: RowBound | None) -> Mode:
    if kind in ("sync", "sync avg"):
        return Mode(SYNC, AVG if kind == "sync avg" else SUM, row_bound=bound)
    return Mode(ASYNC, max_step_lag=1 if kind == "lag" else None, row_bound=bound)


class Worker:
    """A worker that trains the tables of `specs`; without a `bound` it has no cache."""

    def __init__(
        self,
        cluster: InProcessCluster,
        index: int,
        num_workers: int,
        specs: Sequence[TableSpec],
        mode: Mode,
        *,
        max_rows: int = NUM_IDS,
        admission: Any = ALL,
        max_held: int | None = None,
        merge: Literal["sum", "avg"] | None = None,
        settings: Settings = QUICK,
    ) -> None:
        self.counts_steps = mode.is_step_synchronized
        self.client = cluster.worker(index, num_workers, mode, settings)
        self.channel = cluster.channel
        self.deduplicator = Deduplicator(cluster.placement)
        self.caches: RowCaches | None = None
        if mode.row_bound is not None:
            options = RowCache(hold_back=max_held, merge=merge)
            job = cache_job(options, mode, num_workers)._replace(policy=AGED_LFU, admission=admission)
            tables = {spec.name: spec for spec in specs}
            self.caches = RowCaches(self.client, self.deduplicator, job, tables, max_bytes=1 << 20, max_rows=max_rows)
        self.training = PserverTraining(self.client, self.deduplicator, mode, num_workers, caches=self.caches)

    def batch(self, spec: TableSpec, ids: NDArray[np.int64]) -> RowBatch:
        unique, _ = self.deduplicator.unique([ids], spec.salt)
        return RowBatch(spec, unique, np.full((len(unique.ids), spec.dim), np.nan, np.float32))

    def read(self, spec: TableSpec, ids: NDArray[np.int64]) -> RowBatch:
        """Looks up the rows of a step."""
        batch = self.batch(spec, ids)
        self.training.prefetch([batch])
        return batch

    def update(self, batch: RowBatch, grads: NDArray[np.float32], rate: float = 1.0) -> None:
        self.training.update([batch._replace(values=grads, learning_rate=rate)], [], 1.0)

    def evaluate(self, spec: TableSpec, ids: NDArray[np.int64] = EVERYTHING) -> NDArray[np.float32]:
        """Rows in the order of the ids, as an evaluation reads them."""
        unique, (places,) = self.deduplicator.unique([ids], spec.salt)
        batch = RowBatch(spec, unique, np.full((len(unique.ids), spec.dim), np.nan, np.float32))
        self.training.pull([batch])
        return batch.values[places]


class CountingJob(counting_jobs.CountingJob[RowBatch]):
    """A counting job of real clients.

    Args:
        cluster: Its pservers.
        kind: One of `KINDS`.
        bound: What rows may lack; None for no caches.
        num_workers: Number of workers.
        seed: Seed of the batches.
        looks_ahead: True if workers announce each batch a step before.
        options: Of each `Worker`.
    """

    def __init__(
        self,
        cluster: InProcessCluster,
        kind: str,
        bound: RowBound | None,
        num_workers: int,
        seed: int,
        *,
        looks_ahead: bool = False,
        merge: Literal["sum", "avg"] | None = None,
        **options: Any,
    ) -> None:
        is_mean = kind == "sync avg" or merge == "avg"
        updates = CountedUpdates(bound, num_workers, seed, 1 / num_workers if is_mean else 1.0)
        super().__init__(updates, num_workers)
        self.is_merged, self.looks_ahead = kind.startswith("sync"), looks_ahead
        self.spec = TableSpec(name=f"counts{num_workers}", dim=num_workers, rule="sgd", initializer=constant(0.0))
        mode = mode_of(kind, bound)
        for number in range(len(cluster.shards)):
            cluster.run(number, partial(cluster.shards[number].add_table, self.spec))
        self.workers = [
            Worker(cluster, index, num_workers, [self.spec], mode, merge=merge, **options)
            for index in range(num_workers)
        ]
        self.lookups = [SuccessiveLookups(worker.deduplicator, [self.spec]) for worker in self.workers]
        self.coming: list[tuple[dict[str, list[int]], EarlyRows] | None] = [None] * num_workers

    def read(self, worker: int, coming: dict[str, list[int]] | None = None) -> RowBatch:
        """Reads a batch and checks its rows. With look-ahead, `coming` is the next one.

        With look-ahead, where it pulls early what others may change, the copies are checked: all rows that the worker
        updated before, if none leaves its cache.
        """
        if not self.looks_ahead:
            batch = self.workers[worker].read(self.spec, self.updates.batch())
            self.updates.check(worker, batch.unique.ids, batch.values)
            return batch
        ids, early = self.coming[worker] or ({self.spec.name: self.updates.batch().tolist()}, None)
        next_ids = coming or {self.spec.name: self.updates.batch().tolist()}
        announced = self.lookups[worker].announce(next_ids, ids)
        self.coming[worker] = next_ids, announced
        batch = self.lookups[worker].of(ids, early)[self.spec.name].rows
        self.workers[worker].training.prefetch([batch], early, announced)
        found = batch.unique.ids
        self.updates.check_own(worker, found, batch.values)
        is_copy = self.num_made[found, worker] > 0
        checked = slice(None) if self.is_merged else is_copy
        self.updates.check_others(found[checked], batch.values[checked])
        return batch

    def update(self, worker: int, batch: RowBatch) -> None:
        self.workers[worker].update(batch, self.updates.grads(worker, len(batch.unique.ids)))
        if not self.is_merged:  # what is on its way is not made yet; in sync it counts in the next step
            self.workers[worker].client.flush()
        self.updates.note(worker, batch.unique.ids)

    def meet(self) -> None:
        """All workers are at a barrier."""
        in_threads(*(partial(worker.training.drain, leaves=True) for worker in self.workers))
        self.num_ended = [0] * self.num_workers

    @property
    def num_held(self) -> int:
        return sum(worker.caches.num_held for worker in self.workers if worker.caches is not None)


@contextmanager
def cluster_of(num_shards: int, *, is_embedded: bool = False) -> Iterator[InProcessCluster]:
    cluster = (EmbeddedCluster if is_embedded else InProcessCluster)(num_shards)
    try:
        yield cluster
    finally:
        cluster.close()


BOUNDS = st.builds(RowBound, st.integers(1, 60), st.none() | st.sampled_from([0.25, 0.5]))


@pytest.mark.guarantee("H1")
@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    BOUNDS,
    st.integers(2, 4),
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
@pytest.mark.parametrize("kind", KINDS)
def test_lost_and_repeated_frames_lose_and_double_no_update(kind: str) -> None:
    """A request whose reply is lost is sent again."""
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, kind, LOOSE, 2, 7, max_rows=12)
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


@pytest.mark.guarantee("H1")
@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=10, deadline=None)
@given(BOUNDS, st.integers(2, 4), st.integers(1, 3), st.sampled_from([None, 0]), st.integers(0, 2**32))
def test_a_copy_looked_up_ahead_lacks_at_most_the_bound(
    kind: str, bound: RowBound, num_workers: int, num_shards: int, max_held: int | None, seed: int
) -> None:
    """In async mode and with a step lag workers run at their own speed."""
    with cluster_of(num_shards) as cluster:
        job = CountingJob(cluster, kind, bound, num_workers, seed, looks_ahead=True, max_held=max_held)
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
    st.sampled_from([ALL, SECOND, ESTIMATE]),
    st.integers(1, 24),
    st.integers(0, 2**32),
)
def test_own_updates_are_there_once_though_batches_overlap(
    num_workers: int, max_held: int | None, admission: Any, max_rows: int, seed: int
) -> None:
    """As those of threads that train."""
    with cluster_of(2) as cluster:
        options: dict[str, Any] = {"max_held": max_held, "admission": admission, "max_rows": max_rows}
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
            batches = [worker.read(spec, EVERYTHING) for worker in workers]
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
        *((kind, True, None) for kind in ("sync", "sync avg")),
        ("sync", False, "avg"),
        ("async", False, "avg"),
    ],
)
def test_a_row_of_any_mean_and_rule_is_off_by_at_most_the_drift(
    kind: str, looks_ahead: bool, merge: Literal["avg"] | None, rule: str, max_held: int | None
) -> None:
    """Off from the rows of the pservers with what all workers hold."""
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
                worker.training.prefetch([batch], early, announced)
                assert np.abs(batch.values - made[batch.unique.ids]).max() <= drift * (1 + 1e-3)
                batches.append(batch)
            for worker, batch in zip(workers, batches, strict=True):
                worker.update(batch, rng.normal(0, 0.03, batch.values.shape).astype(np.float32), rate)
                if not kind.startswith("sync"):
                    worker.client.flush()
        for worker in workers:
            assert worker.caches is not None
            num_hits += worker.caches.stats()[spec.name].counters.hit
        assert num_hits > 100


def on_pservers(worker: Worker, spec: TableSpec, step: int) -> NDArray[np.float32]:
    """The rows of all ids without what a worker holds."""
    batch = worker.batch(spec, EVERYTHING)
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


def test_lags_of_refreshed_copies_are_counted_by_pserver() -> None:
    bound = RowBound(lag=4)
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", bound, 2, 0, max_held=0)
        first, second = job.workers
        read = first.read(job.spec, EVERYTHING)
        job.update(0, read)  # the rows enter
        for ids in (EVERYTHING, EVERYTHING[:7]):
            for _ in range(3):
                job.update(1, second.batch(job.spec, ids))
            assert (first.read(job.spec, ids).values[:, 1] >= 3).all()
        assert first.caches is not None
        lags = np.array(first.caches.stats()[job.spec.name].lags)
    few, _ = first.deduplicator.unique([EVERYTHING[:7]], job.spec.salt)
    three_behind = lag_class(3)
    assert lags[:, three_behind].tolist() == (read.unique.num_per_shard + few.num_per_shard).tolist()
    assert lags.sum() == lags[:, three_behind].sum() == 27


def test_classes_of_lags_are_powers_of_two() -> None:
    classes = [lag_class(lag) for lag in (0, 1, 2, 3, 4, 7, 8, 2**32 - 1)]
    assert classes == [0, 1, 2, 2, 3, 3, 4, NUM_LAG_CLASSES - 1]


def rows_of_one_worker(
    rule: str, kind: str, has_cache: bool, *, is_embedded: bool = False, max_held: int | None = None, **options: Any
) -> list[NDArray[np.float32]]:
    """Trains random batches; returns the rows of each, and of evaluations."""
    spec = TableSpec(name="C1", dim=5, rule=rule, initializer=uniform(-0.5, 0.5), seed=3)
    rng, seen = np.random.default_rng(0), []
    with cluster_of(2, is_embedded=is_embedded) as cluster:
        for number in range(2):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
        mode = mode_of(kind, RowBound(lag=1) if has_cache else None)
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
@pytest.mark.parametrize("is_embedded", [False, True], ids=["frames", "embedded"])
def test_one_worker_with_a_cache_is_as_without_bit_by_bit(rule: str, kind: str, is_embedded: bool) -> None:
    with_cache, without = (rows_of_one_worker(rule, kind, each, is_embedded=is_embedded) for each in (True, False))
    for ours, theirs in zip(with_cache, without, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.guarantee("R9")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_embedded", [False, True], ids=["frames", "embedded"])
def test_rounded_rows_of_one_worker_are_as_without_a_cache(rule: str, dtype: Any, kind: str, is_embedded: bool) -> None:
    options: dict[str, Any] = {"max_held": 0, "is_embedded": is_embedded, "settings": replace(QUICK, rows_dtype=dtype)}
    with_cache, without = (rows_of_one_worker(rule, kind, each, **options) for each in (True, False))
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
            second.update(second.batch(job.spec, EVERYTHING), grads)
        second.client.flush()
        read = []
        for _ in range(4):  # an update of the first worker makes 302 of the 301 that its copies have
            batch = first.read(job.spec, EVERYTHING)
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
            job.update(0, worker.read(job.spec, EVERYTHING))
        batch = worker.read(job.spec, EVERYTHING)
        with pytest.raises(PushRefused):
            worker.update(batch, np.full(batch.values.shape, 70_000, np.float32))
        assert set(worker.read(job.spec, EVERYTHING).values[:, 0].tolist()) == {2.0}


def test_the_only_worker_reads_again_after_a_refused_push(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 1, 0, max_held=0)
        worker = job.workers[0]
        for _ in range(2):
            job.update(0, worker.read(job.spec, EVERYTHING))
        batch = worker.read(job.spec, EVERYTHING)
        monkeypatch.setattr(sync_async, "check_finite", lambda rows, dense: None)  # so that the pserver refuses it
        worker.update(batch, np.full(batch.values.shape, np.inf, np.float32))
        with pytest.raises(PushRefused):
            worker.client.flush()
        assert set(worker.read(job.spec, EVERYTHING).values[:, 0].tolist()) == {2.0}


@pytest.mark.guarantee("H6")
def test_two_sync_runs_with_caches_are_equal_bit_by_bit() -> None:
    spec = TableSpec(name="C1", dim=5, rule="adagrad", initializer=uniform(-0.5, 0.5), seed=3)
    runs: list[list[Any]] = []
    for _ in range(2):
        rng, seen = np.random.default_rng(0), []
        with cluster_of(2) as cluster:
            for number in range(2):
                cluster.run(number, partial(cluster.shards[number].add_table, spec))
            mode = mode_of("sync", RowBound(lag=20))
            workers = [Worker(cluster, index, 3, [spec], mode, max_rows=12) for index in range(3)]
            for _ in range(40):
                batches = [w.read(spec, rng.choice(NUM_IDS, 6, replace=False).astype(np.int64)) for w in workers]
                grads = [rng.normal(0, 1, batch.values.shape).astype(np.float32) for batch in batches]
                order = [int(each) for each in np.random.default_rng().permutation(3)]
                for index in order:  # whichever worker is faster
                    workers[index].update(batches[index], grads[index], 0.05)
                seen += [batch.values.copy() for batch in batches]
            in_threads(*(partial(worker.training.drain, leaves=True) for worker in workers))
            seen.append(workers[0].evaluate(spec))
        runs.append(seen)
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.guarantee("H10")
def test_an_evaluation_changes_no_cache() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        for _ in range(20):
            job.step()
        worker = job.workers[0]
        assert worker.caches is not None
        before = worker.caches.stats()
        rows = worker.evaluate(job.spec)
        assert worker.caches.stats() == before
        np.testing.assert_array_equal(rows[:, 0], job.num_made[:, 0])


@pytest.mark.guarantee("H8")
def test_an_async_save_has_what_was_held() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        for _ in range(20):
            job.step()
        assert job.num_held > 0
        with job.workers[0].training.quiesce(10.0), job.workers[1].training.quiesce(10.0):
            assert job.num_held == 0
        plain = Worker(cluster, 0, 1, [job.spec], Mode())
        np.testing.assert_array_equal(plain.evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H8")
@pytest.mark.parametrize("is_embedded", [False, True])
def test_a_save_has_what_is_held_after_a_failed_push(is_embedded: bool) -> None:
    with cluster_of(2, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        for _ in range(20):
            job.step()
        worker = job.workers[0]
        assert worker.caches is not None
        assert worker.caches.prepare_flush()
        refused = worker.batch(job.spec, np.array([1]))._replace(learning_rate=1.0, optimizer_step=99)  # of NaN
        worker.client.start_update([refused], [])
        wait_until(lambda: worker.client.has_failure)
        assert not worker.caches.prepare_flush()
        with pytest.raises(PushRefused):
            worker.client.flush()
        with worker.training.quiesce(10.0), job.workers[1].training.quiesce(10.0):
            assert job.num_held == 0
        plain = Worker(cluster, 0, 1, [job.spec], Mode())
        np.testing.assert_array_equal(plain.evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H8")
@pytest.mark.parametrize("is_embedded", [False, True])
def test_a_save_leaves_the_error_of_a_push_made_ahead(is_embedded: bool) -> None:
    uncached = TableSpec(name="uncached", dim=1, rule="sgd", initializer=constant(0.0))
    with cluster_of(2, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3, looks_ahead=True, max_rows=NUM_IDS // 2)
        for number, shard in enumerate(cluster.shards):
            cluster.run(number, partial(shard.add_table, uncached))
        for _ in range(20):
            job.step()
        worker = job.workers[0]
        assert worker.caches is not None
        job.read(0, {job.spec.name: EVERY_ID.tolist()})
        refused = worker.batch(uncached, np.array([1]))._replace(learning_rate=1.0, optimizer_step=99)  # of NaN
        worker.caches.start_update([refused], [])  # and pulls rows of the next step that have no copies
        wait_until(lambda: worker.client.num_failed_pushes > 0)
        assert not worker.client.has_failure  # the call has it
        with worker.training.quiesce(10.0):
            assert worker.caches.num_held > 0
        with pytest.raises(PushRefused):
            worker.read(job.spec, np.array([1]))
        with worker.training.quiesce(10.0), job.workers[1].training.quiesce(10.0):
            assert job.num_held == 0
        plain = Worker(cluster, 0, 1, [job.spec], Mode())
        np.testing.assert_array_equal(plain.evaluate(job.spec), job.num_made)


def test_stats_are_read_while_a_pull_waits() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "lag", LOOSE, 2, 3)
        for _ in range(2):
            job.update(1, job.read(1))
        second = job.workers[1]
        assert second.caches is not None
        num_sent = sum(second.channel.num_sent)
        with ThreadPoolExecutor(2) as threads:
            waiting = threads.submit(job.read, 1)
            try:
                wait_until(lambda: sum(second.channel.num_sent) > num_sent)
                assert job.spec.name in threads.submit(second.caches.stats).result(JOIN_S)
                assert not waiting.done()
            finally:
                for _ in range(2):
                    job.update(0, job.read(0))
            waiting.result(JOIN_S)


@pytest.mark.guarantee("H8")
@pytest.mark.guarantee("V2")
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_save_passes_while_a_worker_waits_for_another(evaluates: bool) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "lag", LOOSE, 2, 3)
        first, second = job.workers
        for _ in range(4):
            job.step()
        for _ in range(2):
            job.update(1, job.read(1))
        channel, num_sent = second.channel, sum(second.channel.num_sent)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(partial(second.evaluate, job.spec) if evaluates else partial(job.read, 1))
            try:
                wait_until(lambda: sum(channel.num_sent) > num_sent)
                num_held = job.num_held
                in_threads(partial(quiesce, first), partial(quiesce, second))
                assert num_held > job.num_held == 0
            finally:
                for _ in range(2):
                    job.update(0, job.read(0))
            read = waiting.result(JOIN_S)
            if evaluates:
                np.testing.assert_array_equal(read[:, 1], job.num_made[:, 1])
            else:
                job.update(1, read)
        job.meet()
        np.testing.assert_array_equal(first.evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H3")
def test_rows_that_came_ahead_are_dropped_after_a_save() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "lag", LOOSE, 2, 3, looks_ahead=True)
        for _ in range(6):
            job.step()
        caches = job.workers[1].caches
        assert caches is not None
        assert caches._ahead is not None
        assert job.num_held > 0
        call: Any = SavedMeanwhile(caches._ahead.call, job.workers[1])
        caches._ahead = caches._ahead._replace(call=call)
        for _ in range(2):
            job.step()
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H1")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_came_ahead_are_dropped_at_a_barrier(kind: str) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, kind, RowBound(lag=6), 2, 3, looks_ahead=True, max_held=0)
        job.in_steps(6)
        first, second = job.workers
        assert first.caches is not None
        assert first.caches._ahead is not None

        def train_on() -> None:
            for _ in range(20):
                job.update(1, job.read(1))
            second.training.drain(leaves=True)

        in_threads(partial(first.training.drain, leaves=True), train_on)
        job.in_steps(6)
        job.meet()
        np.testing.assert_array_equal(first.evaluate(job.spec), job.num_made)


class SavedMeanwhile:
    """A call with an answer, before which a save has what its worker holds."""

    def __init__(self, call: Any, worker: Worker) -> None:
        self._call, self._worker = call, worker

    def wait(self) -> Any:
        in_threads(partial(quiesce, self._worker))
        return self._call.wait()


@pytest.mark.guarantee("H3")
def test_a_pull_is_void_if_copies_change_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "lag", LOOSE, 2, 3)
        for _ in range(4):
            job.step()
        worker = job.workers[1]
        caches, start_pull = worker.caches, worker.client.start_pull
        assert caches is not None
        batch = worker.batch(job.spec, EVERYTHING)
        with monkeypatch.context() as patch:
            changed = partial(ClearedMeanwhile, caches, start_pull)
            patch.setattr(worker.client, "start_pull", changed)
            assert not caches.pull([batch], step=5)
        assert caches.pull([batch], step=5)


class ClearedMeanwhile:
    """A call with an answer, before which the rows of the tables were replaced."""

    def __init__(self, caches: RowCaches, start: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        self._call, self._caches = start(*arguments, **more), caches

    def wait(self) -> Any:
        self._caches.clear()
        return self._call.wait()


def quiesce(worker: Worker) -> None:
    """As at the cut of a save."""
    with worker.training.quiesce(10.0):
        pass


@pytest.mark.guarantee("H9")
def test_a_dead_worker_loses_only_what_it_held() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        for _ in range(25):
            job.step()
        survivor, dead = job.workers
        held = dead.evaluate(job.spec)[:, 1] - survivor.evaluate(job.spec)[:, 1]
        assert held.any()
        dead.client.abandon()
        found = survivor.evaluate(job.spec)
        np.testing.assert_array_equal(found[:, 0], job.num_made[:, 0])
        np.testing.assert_array_equal(found[:, 1], job.num_made[:, 1] - held)


@pytest.mark.guarantee("H11")
def test_tables_that_were_replaced_empty_the_caches() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        for _ in range(10):
            job.step()
        job.meet()
        for worker in job.workers:
            worker.training.note_states([], are_replaced=True)
            assert worker.caches is not None
            assert [each.rows for each in worker.caches.stats().values()] == [0]


@pytest.mark.guarantee("H11")
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("bound", [RowBound(lag=60, share=0.25), RowBound(lag=60), RowBound(lag=8, share=0.5)], ids=str)
def test_rows_made_after_a_shrink_lack_at_most_the_bound(bound: RowBound, looks_ahead: bool) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", bound, 2, 5, looks_ahead=looks_ahead)
        for number in range(6):
            for _ in range(10 + 8 * number):
                job.step()
            job.meet()
            shard = cluster.shards[number % 2]
            removed = all_rows(store_of(shard, job.spec)).ids
            assert len(removed)
            cluster.run(number % 2, partial(shard.shrink, [Criterion("min_norm", 1e9)]))
            job.num_made[removed] = 0
        for _ in range(40):
            job.step()
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H11")
@pytest.mark.parametrize("saves", [False, True])
def test_rows_removed_while_a_worker_waits_are_read_anew(monkeypatch: pytest.MonkeyPatch, saves: bool) -> None:
    with cluster_of(2) as cluster:
        bound = RowBound(lag=3)  # no copy is leased
        job = CountingJob(cluster, "lag", bound, 2, 3, max_held=None if saves else 0)
        batches = iter([EVERYTHING, EVERYTHING[NUM_IDS // 2 :]])
        monkeypatch.setattr(job.updates, "batch", lambda: next(batches, EVERYTHING))
        for _ in range(2):
            job.update(1, job.read(1))
        channel = job.workers[1].channel
        num_sent = sum(channel.num_sent)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(job.read, 1)
            try:
                wait_until(lambda: sum(channel.num_sent) > num_sent)
                if saves:
                    in_threads(*(partial(quiesce, worker) for worker in job.workers))
                assert job.num_held == 0
                # The first update of a row that is made anew gives it the clock that copies of the removed one have.
                for number, shard in enumerate(cluster.shards):
                    cluster.run(number, partial(shard.shrink, [Criterion("min_norm", 1e9)]))
                job.num_made[:] = 0
            finally:
                for _ in range(2):
                    job.update(0, job.read(0))
            job.update(1, waiting.result(JOIN_S))
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


def test_updates_that_are_not_held_back_go_as_gradients() -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "sync", LOOSE, 2, 3, max_held=0)
        for _ in range(20):
            job.step()
            assert job.num_held == 0


def test_a_gradient_that_is_not_finite_changes_no_copy() -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        for _ in range(5):
            job.step()
        worker = job.workers[0]
        before = worker.evaluate(job.spec)
        batch = worker.read(job.spec, EVERYTHING)
        with pytest.raises(PushRefused):
            worker.update(batch, np.full(batch.values.shape, np.nan, np.float32))
        np.testing.assert_array_equal(worker.evaluate(job.spec), before)


def test_a_batch_that_was_not_looked_up_is_trained() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        for _ in range(10):
            job.step()
        worker = job.workers[0]
        batch = worker.batch(job.spec, EVERYTHING)
        job.update(0, batch)
        np.testing.assert_array_equal(worker.evaluate(job.spec)[:, 0], job.num_made[:, 0])


def test_answers_may_come_in_several_frames() -> None:
    spec = TableSpec(name="wide", dim=8000, rule="adagrad", initializer=uniform(-1.0, 1.0), seed=1)
    with cluster_of(2) as cluster:
        for number in range(2):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
        worker = Worker(cluster, 0, 2, [spec], mode_of("async", LOOSE), max_rows=NUM_IDS)
        worker.client.max_frame_bytes = 150_000  # two rows with their states
        expected = worker.evaluate(spec)
        for _ in range(2):
            batch = worker.read(spec, EVERYTHING)
            np.testing.assert_array_equal(batch.values, expected[batch.unique.ids])
            worker.update(batch, np.zeros(batch.values.shape, np.float32))


def test_statistics_count_what_the_caches_did() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "sync", LOOSE, 2, 3)
        for _ in range(30):
            job.step()
        caches = job.workers[0].caches
        assert caches is not None
        stats = caches.stats()[job.spec.name]
        assert 0 < stats.rows <= NUM_IDS
        assert stats.counters.hit > 0.8 * stats.counters.read
        assert stats.counters.entered >= stats.rows
        assert stats.held == caches.num_held > 0


def test_tables_whose_pushes_carry_statistics_are_not_cached() -> None:
    plain = TableSpec(name="C1", dim=4, rule="adagrad", initializer=constant(0.0))
    assert is_cached(plain)
    assert not is_cached(TableSpec(name="C1", dim=4, rule="adagrad", initializer=constant(0.0), has_show_click=True))
    assert not is_cached(TableSpec(name="C1", dim=4, rule="read_only", initializer=constant(0.0)))


@pytest.mark.parametrize(
    "entry",
    [
        Entry("probability", (("probability", 0.5),)),
        Entry("count_filter", (("threshold", 3.0),)),
        Entry("count_filter", (("threshold", 3.0),), SKETCH, 1000),
    ],
    ids=str,
)
def test_tables_whose_ids_may_get_no_row_are_not_cached(entry: Entry) -> None:
    assert not is_cached(TableSpec(name="C1", dim=4, rule="adagrad", initializer=constant(0.0), entry=entry))


@pytest.mark.parametrize(
    ("rules", "num_workers", "may_hold"),
    [(["ftrl"], 2, False), (["ftrl", "adagrad"], 2, True), (["ftrl"], 1, True), (["read_only"], 2, False)],
)
def test_caches_may_hold_what_the_rule_of_a_table_can_merge(rules: list[str], num_workers: int, may_hold: bool) -> None:
    specs = [TableSpec(name=rule, dim=2, rule=rule, initializer=constant(0.0)) for rule in rules]
    with cluster_of(1) as cluster:
        worker = Worker(cluster, 0, num_workers, specs, mode_of("sync", LOOSE))
        assert worker.caches is not None
        assert worker.caches.may_hold == may_hold


def test_memory_that_small_tables_do_not_need_is_for_the_others() -> None:
    job = CacheJob(LOOSE, 2, 0)
    small = TableSpec(name="small", dim=4, rule="sgd", initializer=constant(0.0), max_ids=10)
    large = TableSpec(name="large", dim=4, rule="sgd", initializer=constant(0.0))
    row_bytes = CachedTable.bytes_per_row(large, job)
    assert capacities_of([large, small], job, 110 * row_bytes) == {"large": 100, "small": 10}
    assert capacities_of([large, small], job, 110 * row_bytes, 20) == {"large": 20, "small": 10}


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_a_copy_takes_no_more_memory_than_promised(rule: str) -> None:
    spec = TableSpec(name="C1", dim=4, rule=rule, initializer=constant(0.0))
    for num_workers in (1, 2):
        job = CacheJob(LOOSE, num_workers, 0)
        for capacity in (1000, 1500, 4095, 4096):
            table = CachedTable(spec, capacity, job)
            assert table.num_bytes <= 1.05 * capacity * CachedTable.bytes_per_row(spec, job)
