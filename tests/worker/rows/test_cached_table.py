"""CachedTable in simulated jobs: counting ones, which show what a row lacks, and against tables without a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import AGED_LFU, ALL, ESTIMATE, LRU, SECOND
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.row_bound import NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW, RowBound, steps_off_lease
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables.row_asks import answer
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.cache_step import Answer, Outgoing, Plan
from fleet_sparse.worker.rows.cached_table import CachedTable
from support.cached_jobs import CachedJob, Step
from support.counted_updates import NUM_IDS, CountedUpdates
from support.counting_jobs import CachedCounting
from support.cow_views import all_rows

BOUNDS = st.builds(RowBound, st.integers(1, 120), st.none() | st.sampled_from([0.25, 0.5])) | st.builds(
    RowBound, drift=st.floats(0.5, 40)
)
ADMISSIONS = st.sampled_from([ALL, SECOND, ESTIMATE])
SEEDS = st.integers(0, 2**32)


def counting_job(job: CacheJob, capacity: int, seed: int) -> CachedCounting:
    updates = CountedUpdates(job.bound, job.num_workers, seed)
    return CachedCounting(CachedJob(job, capacity, job.num_workers, NUM_IDS), updates)


@settings(max_examples=60)
@given(BOUNDS, st.integers(2, 5), st.integers(1, 30), ADMISSIONS, SEEDS)
def test_a_row_lacks_at_most_the_bound_in_sync(
    bound: RowBound, num_workers: int, capacity: int, admission: Any, seed: int
) -> None:
    job = counting_job(CacheJob(bound, num_workers, 0, admission=admission), capacity, seed)
    job.in_steps(60)


@settings(max_examples=60)
@given(BOUNDS, st.integers(2, 5), st.integers(1, 30), ADMISSIONS, SEEDS)
def test_a_row_lacks_at_most_the_bound_in_async(
    bound: RowBound, num_workers: int, capacity: int, admission: Any, seed: int
) -> None:
    job = counting_job(CacheJob(bound, num_workers, None, admission=admission), capacity, seed)
    for _ in range(3):
        job.at_own_speed(80)
        job.flush()


@settings(max_examples=40)
@given(BOUNDS, st.integers(2, 5), st.integers(0, 3), st.integers(1, 30), SEEDS)
def test_a_row_lacks_at_most_the_bound_with_a_step_lag(
    bound: RowBound, num_workers: int, max_step_lag: int, capacity: int, seed: int
) -> None:
    job = counting_job(CacheJob(bound, num_workers, steps_off_lease(max_step_lag), admission=ALL), capacity, seed)
    job.at_own_speed(300, max_step_lag=max_step_lag)


@settings(max_examples=40)
@given(BOUNDS, st.integers(1, 4), st.integers(1, 30), SEEDS)
def test_what_was_made_is_on_the_pservers_after_a_flush(
    bound: RowBound, num_workers: int, capacity: int, seed: int
) -> None:
    job = counting_job(CacheJob(bound, num_workers, 0, admission=ALL), capacity, seed)
    for _ in range(3):
        job.in_steps(15)
        job.flush()
        assert [table.num_held for table in job.cached.tables] == [0] * num_workers


@settings(max_examples=40)
@given(BOUNDS, st.integers(1, 4), st.integers(1, 30), SEEDS)
def test_a_push_that_is_not_accepted_keeps_what_is_held(
    bound: RowBound, num_workers: int, capacity: int, seed: int
) -> None:
    job = counting_job(CacheJob(bound, num_workers, 0, admission=ALL), capacity, seed)
    for step in range(1, 60):
        for worker, table in enumerate(job.cached.tables):
            begun = job.cached.read(worker, job.updates.batch(), step)
            # Others may hold more than the bound until the next push.
            job.updates.check_own(worker, begun.plan.ids, begun.rows)
            if job.rng.random() < 0.7:
                job.update(worker, begun)
                continue
            ids = begun.plan.ids
            table.apply(begun.plan, begun.arrived, job.updates.grads(worker, len(begun.plan.ids)), 1.0, 1)
            rows = job.cached.rows[ids]
            table.add_held(ids, rows)
            job.num_made[ids, worker] = rows[:, worker].astype(np.int64)  # a row without a copy lost its gradient
    job.flush()


@settings(max_examples=60)
@given(st.floats(0.01, 10), st.integers(2, 5), st.integers(1, 30), SEEDS)
def test_a_row_is_off_by_at_most_the_drift(drift: float, num_workers: int, capacity: int, seed: int) -> None:
    rng, dim = np.random.default_rng(seed), 3
    job = CachedJob(CacheJob(RowBound(drift=drift), num_workers, 0, admission=ALL), capacity, dim, NUM_IDS)
    moved = np.zeros((num_workers, NUM_IDS, dim))  # by the updates of each worker
    size = drift * rng.choice([0.003, 0.05, 0.7])
    for step in range(1, 80):
        for worker in range(num_workers):
            ids = rng.choice(NUM_IDS, rng.integers(0, 9), replace=False).astype(np.int64)
            begun = job.read(worker, ids, step)
            lacked = moved[:, ids].sum(axis=0) - begun.rows
            assert np.abs(lacked).max(initial=0) <= drift * (1 + 1e-3)
            grads = rng.normal(0, size, (len(ids), dim)).astype(np.float32)
            job.update(worker, begun, grads)
            moved[worker, ids] -= grads
    for worker in range(num_workers):
        job.flush(worker)
    np.testing.assert_allclose(job.rows, moved.sum(axis=0), atol=1e-3 * drift)


def test_open_plans_have_no_more_rows_that_enter_than_the_cache() -> None:
    """A table whose rows get no gradient is read in each step, and never trained; then it is."""
    cached, rng = CachedJob(CacheJob(RowBound(lag=100), 2, None, admission=ALL), 8, 2, 1000), np.random.default_rng(0)
    num_entering = []
    for step in range(1, 200):
        begun = cached.read(0, rng.choice(1000, 5, replace=False).astype(np.int64), step)
        num_entering.append(len(begun.plan.entering))
    assert max(sum(num_entering[first : first + 64]) for first in range(len(num_entering))) <= 8 + 5
    cached.update(0, begun, np.ones((5, 2), np.float32))
    for step in range(200, 300):
        begun = cached.read(0, rng.choice(1000, 5, replace=False).astype(np.int64), step)
        cached.update(0, begun, np.ones((5, 2), np.float32))
    assert cached.tables[0].num_rows == 8


def test_a_loose_bound_saves_most_rows() -> None:
    job = counting_job(CacheJob(RowBound(lag=100), 4, 0), NUM_IDS, 0)
    job.in_steps(200)
    num_read = sum(table.counters.read for table in job.cached.tables)
    assert job.cached.num_pulled < 0.15 * num_read
    assert job.cached.num_pushed < 0.3 * num_read


class StoreJob:
    """One worker with a cache, whose pserver is a store."""

    def __init__(self, rule: str, capacity: int, job: CacheJob) -> None:
        self.spec = TableSpec(name="C1", dim=5, rule=rule, initializer=uniform(-0.5, 0.5), seed=3)
        self.job = job
        self.store, self.table = TableStore(self.spec), CachedTable(self.spec, capacity, job)

    def pulled(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        out = np.empty((len(ids), 5), np.float32)
        self.store.pull(ids, out)
        return out

    def answered(self, plan: Plan) -> Answer:
        said = answer(self.store, self.job.bound, self.job.num_workers, plan.ids[plan.asked], plan.versions)
        follows = said.slack[said.slack >= ROW_FOLLOWS]
        rows, versions = np.empty((len(follows), 5), np.float32), np.empty(len(follows), np.uint32)
        for code, its_rows, its_versions in (
            (ROW_FOLLOWS, said.rows, said.versions),
            (STATES_FOLLOW, said.full_rows, said.full_versions),
        ):
            rows[follows == code], versions[follows == code] = its_rows, its_versions
        return Answer(said.slack, rows, versions, said.states)

    def read(self, ids: NDArray[np.int64], step: int) -> Step:
        plan = self.table.plan(ids, step)
        out = self.pulled(ids)
        out[plan.asked] = np.nan
        return Step(plan, self.table.take(plan, self.answered(plan), out), out)

    def receive(self, ids: NDArray[np.int64], grads: NDArray[np.float32], outgoing: Outgoing, step: int) -> None:
        if len(outgoing.as_gradients):
            self.store.push(ids[outgoing.as_gradients], grads[outgoing.as_gradients], 0.05, step)
        for changes in outgoing.changes:
            if self.job.num_workers == 1:
                self.store.load(Rows.of(changes.ids, changes.rows, changes.states))
                continue
            has_states = changes.states.shape[1] > 0
            self.store.merge(
                *(changes.ids, changes.rows, changes.amounts, self.table.update_weight),
                state_changes=changes.states if has_states else None,
                num_updates=changes.num_updates if has_states else None,
            )
        self.table.sent(outgoing)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "momentum", "rmsprop", "ftrl", "lamb", "adamax"])
@pytest.mark.parametrize("admission", [ALL, ESTIMATE], ids=str)
@pytest.mark.parametrize("capacity", [3, 10, 40])
def test_one_worker_with_a_cache_is_as_without_bit_by_bit(rule: str, admission: Any, capacity: int) -> None:
    cached = StoreJob(rule, capacity, CacheJob(RowBound(lag=1), 1, 0, AGED_LFU, admission))
    plain, rng = TableStore(cached.spec), np.random.default_rng(0)
    for step in range(1, 60):
        ids = rng.choice(NUM_IDS, rng.integers(1, 9), replace=False).astype(np.int64)
        begun = cached.read(ids, step)
        expected = np.empty((len(ids), 5), np.float32)
        plain.pull(ids, expected)
        np.testing.assert_array_equal(begun.rows, expected)
        grads = rng.normal(0, 1, (len(ids), 5)).astype(np.float32)
        cached.receive(ids, grads, cached.table.apply(begun.plan, begun.arrived, grads, 0.05, step), step)
        plain.push(ids, grads, 0.05, step)
    evaluated = cached.pulled(np.arange(NUM_IDS))
    cached.table.add_held(np.arange(NUM_IDS), evaluated)
    np.testing.assert_array_equal(evaluated, np.concatenate([_pulled(plain, id_) for id_ in range(NUM_IDS)]))
    cached.receive(np.empty(0, np.int64), np.empty((0, 5), np.float32), cached.table.flush(), 60)
    for store in (cached.store, plain):
        assert store.num_rows == plain.num_rows
    ours, theirs = (_by_id(all_rows(store)) for store in (cached.store, plain))
    assert ours == theirs
    cached.store.close()
    plain.close()


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "adamw", "momentum", "rmsprop", "lamb"])
@pytest.mark.parametrize(
    "bound", [RowBound(lag=30), RowBound(lag=200, share=0.25), RowBound(drift=0.2)], ids=["lag", "share", "drift"]
)
@pytest.mark.parametrize("capacity", [3, 40])
def test_the_only_writer_of_several_workers_trains_as_without(rule: str, bound: RowBound, capacity: int) -> None:
    cached = StoreJob(rule, capacity, CacheJob(bound, 2, 0, AGED_LFU, ALL))
    plain, rng, everything = TableStore(cached.spec), np.random.default_rng(0), np.arange(NUM_IDS)
    num_held = 0
    for step in range(1, 80):
        ids = rng.choice(NUM_IDS, rng.integers(1, 9), replace=False).astype(np.int64)
        begun = cached.read(ids, step)
        expected = np.empty((len(ids), 5), np.float32)
        plain.pull(ids, expected)
        np.testing.assert_allclose(begun.rows, expected, rtol=1e-4, atol=1e-4)
        grads = rng.normal(0, 1, (len(ids), 5)).astype(np.float32)
        cached.receive(ids, grads, cached.table.apply(begun.plan, begun.arrived, grads, 0.05, step), step)
        plain.push(ids, grads, 0.05, step)
        num_held += cached.table.num_held
    cached.receive(np.empty(0, np.int64), np.empty((0, 5), np.float32), cached.table.flush(), 80)
    rows = np.empty((NUM_IDS, 5), np.float32)
    plain.pull(everything, rows)
    assert num_held > 0
    np.testing.assert_allclose(cached.pulled(everything), rows, rtol=1e-4, atol=1e-4)
    states, expected = (store.states_at(store.find(everything)) for store in (cached.store, plain))
    np.testing.assert_allclose(states, expected, rtol=1e-4, atol=1e-4)
    cached.store.close()
    plain.close()


IN_DISTANCE = CacheJob(RowBound(drift=0.2), 2, 0, AGED_LFU, ALL)


def shares_in_changes(cached: StoreJob, steps: range) -> tuple[list[float], list[float]]:
    """Trains a row by the same gradient in each step.

    Returns:
        The updates that each change of states spans over those made since the first of these steps, for changes that
        are sent without the states, and for those with them.
    """
    ids, grads, without_states, with_states = np.array([3]), np.ones((1, 5), np.float32), [], []
    for step in steps:
        begun = cached.read(ids, step)
        outgoing = cached.table.apply(begun.plan, begun.arrived, grads, 0.05, step)
        cached.receive(ids, grads, outgoing, step)
        for changes in outgoing.changes:
            share = float(changes.num_updates[0]) / (step - steps.start + 1)
            (with_states if changes.states.shape[1] else without_states).append(share)
    return without_states, with_states


def test_states_go_with_an_eighth_of_the_updates_in_distance() -> None:
    cached = StoreJob("adagrad", 4, IN_DISTANCE)
    without_states, with_states = shares_in_changes(cached, range(1, 400))
    assert max(without_states) < 1 / 8 <= min(with_states)
    cached.store.close()


@pytest.mark.parametrize("forget", [CachedTable.forget_versions, CachedTable.note_removals])
def test_states_go_with_a_row_that_may_be_another(forget: Callable[[CachedTable], None]) -> None:
    cached = StoreJob("adagrad", 4, IN_DISTANCE)
    shares_in_changes(cached, range(1, 400))
    forget(cached.table)
    without_states, with_states = shares_in_changes(cached, range(400, 1600))
    assert max(without_states) < 1 / 8 <= min(with_states)
    cached.store.close()


def _pulled(store: TableStore, id_: int) -> NDArray[np.float32]:
    out = np.empty((1, store.spec.dim), np.float32)
    store.pull(np.array([id_]), out)
    return out


def _by_id(rows: Rows) -> dict[int, tuple[bytes, bytes]]:
    each = zip(rows.ids.tolist(), rows.rows, rows.states, strict=True)
    return {id_: (row.tobytes(), states.tobytes()) for id_, row, states in each}


def test_a_refresh_keeps_what_is_held() -> None:
    job = CachedJob(CacheJob(RowBound(lag=10), 2, None, admission=ALL), 4, 2, NUM_IDS)
    ids = np.array([3])
    for step in range(1, 3):
        job.update(0, job.read(0, ids, step), np.array([[-1.0, 0.0]], np.float32))
    assert job.tables[0].num_held == 1
    for step in range(1, 13):
        job.update(1, job.read(1, ids, step), np.array([[0.0, -1.0]], np.float32))
    job.flush(1)
    assert job.rows[3].tolist() == [0, 12]
    assert job.read(0, ids, 3).rows.tolist() == [[2, 12]]
    job.flush(0)
    assert job.rows[3].tolist() == [2, 12]


def test_an_evicted_row_reads_its_own_writes() -> None:
    job = CachedJob(CacheJob(RowBound(lag=100), 2, 0, LRU, ALL), 1, 2, NUM_IDS)
    grads, made = np.array([[-1.0, 0.0]], np.float32), Counter[int]()
    for step, id_ in enumerate([1, 1, 2, 1, 2, 2, 1, 3, 1], 1):
        begun = job.read(0, np.array([id_]), step)
        assert begun.rows[0, 0] == made[id_]
        job.update(0, begun, grads)
        made[id_] += 1
    job.flush(0)
    assert job.rows[[1, 2, 3], 0].tolist() == [5, 3, 1]


def test_an_evaluation_changes_no_cache() -> None:
    job = counting_job(CacheJob(RowBound(lag=50), 2, 0), 10, 0)
    job.in_steps(20)
    table, ids = job.cached.tables[0], np.arange(NUM_IDS)
    before = table.counters, table.num_rows, table.num_held
    rows = job.cached.rows.copy()
    table.add_held(ids, rows)
    np.testing.assert_array_equal(rows[:, 0], job.num_made[:, 0])
    assert (table.counters, table.num_rows, table.num_held) == before


def test_versions_that_are_unknown_are_asked_for() -> None:
    job = CachedJob(CacheJob(RowBound(lag=50), 2, 0, admission=ALL), 4, 2, NUM_IDS)
    ids = np.array([1, 2])
    job.update(0, job.read(0, ids, 1), np.ones((2, 2), np.float32))
    assert len(job.tables[0].plan(ids, 2).asked) == 0
    job.tables[0].forget_versions()
    plan = job.tables[0].plan(ids, 2)
    assert plan.asked.tolist() == [0, 1]
    assert plan.versions.tolist() == [NO_VERSION, NO_VERSION]


@pytest.mark.guarantee("H11")
def test_rows_read_before_versions_are_forgotten_do_not_enter() -> None:
    job = CachedJob(CacheJob(RowBound(lag=50), 2, 0, admission=ALL), 10, 2, NUM_IDS)
    ids = np.array([1, 2])
    read = job.read(0, ids, 1)
    job.tables[0].forget_versions()
    job.update(0, read, np.ones((2, 2), np.float32))
    assert job.tables[0].num_rows == 0
    assert len(job.tables[0].plan(ids, 2).entering) == 2


def test_the_only_worker_writes_back_again_what_a_lost_push_had() -> None:
    job = CachedJob(CacheJob(RowBound(lag=5), 1, 0, admission=ALL), 4, 1, NUM_IDS)
    ids, table = np.array([1, 2]), job.tables[0]
    for step in range(1, 4):
        job.update(0, job.read(0, ids, step), np.full((2, 1), -1, np.float32))
    table.sent(table.flush())  # the client accepts it, and the pserver never gets it
    table.forget_versions()
    assert job.read(0, ids, 4).rows[:, 0].tolist() == [3, 3]
    job.flush(0)
    assert job.rows[ids, 0].tolist() == [3, 3]


def test_the_only_worker_repeats_rows_that_left_in_a_lost_push() -> None:
    job = CachedJob(CacheJob(RowBound(lag=5), 1, 0, admission=ALL), 1, 1, NUM_IDS)
    table, grads = job.tables[0], np.full((1, 1), -1, np.float32)
    for step in range(1, 4):
        job.update(0, job.read(0, np.array([1]), step), grads)
    begun = job.read(0, np.array([2]), 4)
    table.sent(table.apply(begun.plan, begun.arrived, grads, 1.0, 4))  # 1 leaves, and the pserver never gets it
    table.forget_versions()
    assert table.num_held == 2
    assert job.read(0, np.array([1]), 5).rows.tolist() == [[3]]
    job.flush(0)
    assert job.rows[[1, 2], 0].tolist() == [3, 1]
    assert table.num_held == 0


@pytest.mark.parametrize("acked", [0, 1])
def test_rows_that_left_in_pushes_that_arrived_are_not_put_back(acked: int) -> None:
    rng = np.random.default_rng(5)
    job = CachedJob(CacheJob(RowBound(lag=5), 1, 0, admission=ALL), 4, 1, NUM_IDS)
    table, made = job.tables[0], np.zeros(NUM_IDS, np.float32)
    for step in range(1, 300):
        ids = rng.choice(NUM_IDS, 6, replace=False)  # more than have a copy
        begun = job.read(0, ids, step)
        assert begun.rows[:, 0].tolist() == made[ids].tolist()
        job.update(0, begun, np.full((6, 1), -1, np.float32))
        made[ids] += 1
        table.note_acked(acked * table.num_unacked)
        if step % 7 == 0:
            table.forget_versions()
    job.flush(0)
    assert job.rows[:, 0].tolist() == made.tolist()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_copy_that_was_not_finite_follows_the_row(value: float) -> None:
    job = CachedJob(CacheJob(RowBound(lag=10), 2, None, admission=ALL), 4, 2, NUM_IDS)
    table, ids = job.tables[0], np.array([3])
    for step in range(1, 3):
        job.update(0, job.read(0, ids, step), np.array([[-value if step == 2 else -1.0, 0.0]], np.float32))
    table.sent(table.flush())  # the pserver refuses it
    table.forget_versions()
    assert job.read(0, ids, 3).rows.tolist() == job.rows[ids].tolist()
    assert np.isfinite(job.rows[ids]).all()


def test_the_only_worker_asks_about_no_copy_in_any_step() -> None:
    job = CachedJob(CacheJob(RowBound(lag=5), 1, 0, admission=ALL), 20, 1, NUM_IDS)
    ids = np.arange(10)
    for step in range(1, 3 << 23, 1 << 16):  # leases tell 2^23 steps apart
        begun = job.read(0, ids, step)
        assert len(begun.plan.asked) == (10 if step == 1 else 0)
        job.update(0, begun, np.full((10, 1), -1, np.float32))


def test_no_row_is_plain_ahead_while_one_that_left_is_not_sent() -> None:
    job = CachedJob(CacheJob(RowBound(lag=1000), 2, 0, admission=ESTIMATE), 2, 2, NUM_IDS)
    table, grads = job.tables[0], -np.ones((2, 2), np.float32)
    job.update(0, job.read(0, np.array([1, 2]), 1), grads)
    assert table.plain_ahead(np.array([1, 5, 2, 6])).tolist() == [1, 3]
    begun = job.read(0, np.array([3, 4]), 2)
    for step in range(3, 20):  # until they enter
        if len(begun.plan.entering):
            break
        begun = job.read(0, np.array([3, 4]), step)
    table.apply(begun.plan, begun.arrived, grads, 1.0, 2)
    assert table.plain_ahead(np.array([1, 5, 2, 6])).tolist() == []


def test_a_forgotten_cache_is_empty() -> None:
    job = counting_job(CacheJob(RowBound(lag=50), 2, 0, admission=ALL), 10, 0)
    job.in_steps(20)
    table = job.cached.tables[0]
    table.forget()
    assert (table.num_rows, table.num_held) == (0, 0)
    assert len(table.plan(np.arange(5), 21).entering) == 5


@pytest.mark.parametrize(("rule", "max_held"), [("ftrl", None), ("adamax", None), ("mine", None), ("adagrad", 0)])
def test_rules_without_merge_train_by_the_pservers(
    rule: str, max_held: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "mine", RULES["adagrad"]._replace(name="mine", merge=None))  # a custom rule's default
    job = StoreJob(rule, 8, CacheJob(RowBound(lag=100), 2, 0, admission=ALL, max_held=max_held))
    ids = np.arange(4)
    begun = job.read(ids, 1)
    for step in range(1, 5):
        outgoing = job.table.apply(begun.plan, begun.arrived, np.ones((4, 5), np.float32), 0.05, step)
        assert outgoing.as_gradients.tolist() == [0, 1, 2, 3]
        assert outgoing.changes == ()
        job.table.sent(outgoing)
        plan = job.table.plan(ids, step + 1)
        assert len(plan.asked) == 0
        begun = Step(plan, begun.arrived, begun.rows)
    job.store.close()


def test_a_plan_from_before_a_change_trains_by_the_pservers() -> None:
    job = CachedJob(CacheJob(RowBound(lag=100), 2, 0, LRU, ALL), 2, 2, NUM_IDS)
    grads = -np.ones((2, 2), np.float32)
    first, second = (job.read(0, ids, 1) for ids in (np.array([1, 2]), np.array([3, 4])))
    job.update(0, first, grads)
    outgoing = job.update(0, second, grads)
    assert outgoing.as_gradients.tolist() == [0, 1]
    job.flush(0)
    assert job.rows[1:5, 0].tolist() == [1, 1, 1, 1]


def test_unused_rows_are_sent_while_the_cache_ages() -> None:
    job = CachedJob(CacheJob(RowBound(lag=1000), 2, 0, AGED_LFU, ALL), 8, 2, NUM_IDS)
    grads = -np.ones((8, 2), np.float32)
    for step in range(1, 3):
        job.update(0, job.read(0, np.arange(8), step), grads)
    assert job.tables[0].num_held == 8
    for step in range(3, 1500):
        job.update(0, job.read(0, np.array([7]), step), grads[:1])
    assert (job.rows[:7, 0] == 2).all()


def test_memory_of_a_cache_is_known() -> None:
    spec = TableSpec(name="C1", dim=16, rule="adagrad", initializer=uniform(-1, 1), seed=3)
    sizes = {
        (num_workers, held): CachedTable(
            spec, 100_000, CacheJob(RowBound(lag=9), num_workers, 0, max_held=held)
        ).num_bytes
        for num_workers, held in ((2, None), (2, 0), (1, None))
    }
    with_bases, without, alone = sizes.values()
    assert with_bases - without == 100_000 * 128
    assert without == alone
    assert without < 100_000 * 220
