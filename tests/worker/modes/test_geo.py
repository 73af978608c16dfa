from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import initial_rows, uniform
from fleet_sparse.core.mode import AVG, GEO, SUM, Mode
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded import local_dense, local_rows
from fleet_sparse.errors import PushRefused, ShardUnavailable
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.frame_format import Buffer, Op
from fleet_sparse.wire.row_dtype import RowDtype, for_frame, from_frame
from fleet_sparse.worker.modes.geo import GeoTraining, dense_on_pservers, table_on_pservers
from fleet_sparse.worker.modes.step import Progress
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import Deduplicator, UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.in_process import QUICK, InProcessCluster

DIM = 4
TRAINED = sorted(name for name, rule in RULES.items() if rule.kernel is not None)
every_rule = pytest.mark.parametrize("rule", TRAINED)


def table_of(rule: str = "sgd", name: str = "geo", **hyperparameters: float) -> TableSpec:
    given = tuple(hyperparameters.items())
    return TableSpec(name=name, dim=DIM, rule=rule, hyperparameters=given, initializer=uniform(-0.5, 0.5), seed=3)


def dense_of(rule: str = "sgd") -> DenseSpec:
    return DenseSpec("geo_dense", rule, (), (Segment("w", 0, 5, 1.0, 0.0, 0.25), Segment("b", 5, 4, 2.0)))


FIRST_DENSE = np.linspace(-1, 1, 9, dtype=np.float32)


def first_rows(spec: TableSpec, ids: Sequence[int]) -> NDArray[np.float32]:
    return initial_rows(spec.initializer, np.array(ids, np.int64), dim=DIM, seed=spec.seed, salt=spec.salt)


def rounded(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return from_frame(for_frame(rows, RowDtype.BFLOAT16), RowDtype.BFLOAT16)


class Worker:
    """A geo worker whose ids and rows are in the order in which a test writes them."""

    def __init__(self, job: Job, client: Client, training: GeoTraining) -> None:
        self.job, self.client, self.training = job, client, training

    def prefetch(self, ids: Sequence[int], spec: TableSpec | None = None) -> NDArray[np.float32]:
        return self._looked_up(self.training.prefetch, ids, spec)

    def pull(self, ids: Sequence[int]) -> NDArray[np.float32]:
        return self._looked_up(self.training.pull, ids, None)

    def update(self, ids: Sequence[int], grads: Any, learning_rate: float = 1.0, spec: TableSpec | None = None) -> None:
        spec = spec or self.job.table
        unique, inverse = self.job.unique(spec, ids)
        ordered = np.empty((len(ids), DIM), np.float32)
        ordered[inverse] = np.broadcast_to(grads, ordered.shape)
        self.training.update([RowBatch(spec, unique, ordered, learning_rate)], [], 1.0)
        self.client.flush()  # now other clients see what was pushed

    def step(self, ids: Sequence[int], grads: Any, learning_rate: float = 1.0) -> None:
        self.prefetch(ids)
        self.update(ids, grads, learning_rate)

    def update_dense(self, grads: Any, learning_rate: float = 1.0) -> NDArray[np.float32]:
        spec = self.job.dense
        whole = np.broadcast_to(np.float32(grads), (spec.num_values,)).copy()
        values = np.empty_like(whole)
        self.training.update([], [DenseUpdate(spec, whole, [values], learning_rate)], 1.0)
        return values

    def pull_dense(self) -> NDArray[np.float32]:
        out = np.empty(self.job.dense.num_values, np.float32)
        self.training.pull_dense(self.job.dense, out)
        return out

    def _looked_up(
        self, call: Callable[[list[RowBatch]], None], ids: Sequence[int], spec: TableSpec | None
    ) -> NDArray[np.float32]:
        spec = spec or self.job.table
        unique, inverse = self.job.unique(spec, ids)
        out = np.full((len(unique.ids), DIM), np.nan, np.float32)
        call([RowBatch(spec, unique, out)])
        return out[inverse]


class Job:
    """Two shards with a table and a dense array, and the geo workers that train them.

    Attributes:
        table: The pservers' spec.
        dense: As `table`.
        tables: The workers' specs by name; may grow.
        stores: All that workers keep or kept rows in.
    """

    def __init__(self, table: TableSpec | None = None, dense: DenseSpec | None = None) -> None:
        table, dense = table or table_of(), dense or dense_of()
        self.cluster = InProcessCluster(2)
        self.table, self.dense = table_on_pservers(table), dense_on_pservers(dense)
        self.tables, self.dense_specs = {table.name: table}, {dense.name: dense}
        for shard in self.cluster.shards:
            shard.add_table(self.table)
            shard.add_table(self.dense)
        self.stores: list[TableStore] = []
        self._trainings: list[GeoTraining] = []
        self._deduplicator = Deduplicator(self.cluster.placement)
        self._reader = self.cluster.client()
        self._reader.assign_dense(self.dense, FIRST_DENSE)

    def worker(self, k_steps: int = 1, num_workers: int = 1, scale: str = AVG, settings: Settings = QUICK) -> Worker:
        client = self.cluster.client(settings)
        training = GeoTraining(
            client,
            Mode(GEO, scale, k_steps=k_steps),
            num_workers,
            tables=self.tables,
            dense=self.dense_specs,
            local_rows=self._make_store,
            local_dense=local_dense,
        )
        self._trainings.append(training)
        return Worker(self, client, training)

    def unique(self, spec: TableSpec, ids: Sequence[int]) -> tuple[UniqueIds, NDArray[np.int64]]:
        unique, (inverse,) = self._deduplicator.unique([np.array(ids, np.int64)], spec.salt)
        return unique, inverse

    def rows(self, ids: Sequence[int], spec: TableSpec | None = None) -> NDArray[np.float32]:
        """As the pservers have them."""
        spec = spec or self.table
        unique, inverse = self.unique(spec, ids)
        out = np.empty((len(unique.ids), DIM), np.float32)
        self._reader.pull([RowBatch(spec, unique, out)])
        return out[inverse]

    def dense_values(self) -> NDArray[np.float32]:
        """As the pservers have them."""
        out = np.empty(self.dense.num_values, np.float32)
        self._reader.pull_dense(self.dense, out)
        return out

    def num_rows(self) -> int:
        """On the pservers."""
        return sum(state.num_rows for shard in self.cluster.shards for state in shard.states())

    def close(self) -> None:
        for training in self._trainings:
            training.close()
        self.cluster.close()

    def num_rows_of_workers(self) -> list[int]:
        """In each store of the workers that is not closed."""
        return [store.num_rows for store in self.stores if not is_closed(store)]

    def _make_store(self, spec: TableSpec) -> TableStore:
        self.stores.append(local_rows(spec))
        return self.stores[-1]


def is_closed(store: TableStore) -> bool:
    try:
        store.has_rows(np.empty(0, np.int64))
    except ValueError:
        return True
    return False


OpenJob = Callable[..., Job]


@pytest.fixture
def open_job() -> Iterator[OpenJob]:
    jobs: list[Job] = []

    def opened(table: TableSpec | None = None, dense: DenseSpec | None = None) -> Job:
        jobs.append(Job(table, dense))
        return jobs[-1]

    yield opened
    for job in jobs:
        job.close()


@pytest.fixture
def job(open_job: OpenJob) -> Job:
    """SGD."""
    return open_job()


def batches(num_steps: int) -> Iterator[tuple[list[int], NDArray[np.float32], float]]:
    """Ids that come and go, gradients away from 0 and learning rates."""
    rng = np.random.default_rng(11)
    for step in range(1, num_steps + 1):
        ids = rng.permutation(40)[: rng.integers(1, 40)].tolist()
        grads = rng.uniform(0.5, 2, (len(ids), DIM)) * rng.choice([-1, 1], (len(ids), DIM))
        yield ids, grads.astype(np.float32), 0.1 / step


def assert_equal_to_1e_6(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6 * float(np.abs(expected).max()))


# One worker is training on the shard


@every_rule
@pytest.mark.parametrize("k_steps", [1, 4])
@pytest.mark.guarantee("G1")
def test_rows_of_one_worker_are_those_of_the_rule_on_a_shard(open_job: OpenJob, rule: str, k_steps: int) -> None:
    spec = table_of(rule)
    geo = open_job(spec)
    worker, plain = geo.worker(k_steps), InProcessCluster(2)
    for shard in plain.shards:
        shard.add_table(spec)
    client = plain.client()
    for step, (ids, grads, learning_rate) in enumerate(batches(22), 1):
        worker.step(ids, grads, learning_rate)
        unique, inverse = geo.unique(spec, ids)
        ordered = np.empty_like(grads)
        ordered[inverse] = grads
        client.push([RowBatch(spec, unique, ordered, learning_rate, step)])
    worker.training.drain()
    unique, inverse = geo.unique(spec, range(40))
    expected = np.empty((40, DIM), np.float32)
    client.pull([RowBatch(spec, unique, expected)])
    plain.close()
    assert_equal_to_1e_6(geo.rows(range(40)), expected[inverse])


@every_rule
@pytest.mark.parametrize("k_steps", [1, 4])
@pytest.mark.guarantee("G1")
def test_dense_values_of_one_worker_are_those_of_the_rule(open_job: OpenJob, rule: str, k_steps: int) -> None:
    geo = open_job(dense=dense_of(rule))
    worker, plain = geo.worker(k_steps), local_dense(dense_of(rule), 1)[0]
    plain.assign(FIRST_DENSE)
    rng = np.random.default_rng(2)
    for step in range(1, 23):
        grads = (rng.uniform(0.5, 2, 9) * rng.choice([-1, 1], 9)).astype(np.float32)
        values = worker.update_dense(grads, 0.1 / step)
        plain.push(grads, 0.1 / step, step)
        assert_equal_to_1e_6(values, plain.values)
    worker.training.drain()
    assert_equal_to_1e_6(geo.dense_values(), plain.values)


def test_rows_decay_on_the_worker_only(open_job: OpenJob) -> None:
    geo = open_job(table_of(l2_decay=0.5))
    geo.worker().step([7], 0.0, 0.5)
    np.testing.assert_allclose(geo.rows([7]), 0.75 * first_rows(geo.table, [7]), rtol=1e-6)


# Several workers


@pytest.mark.parametrize(("scale", "weight"), [(AVG, 0.5), (SUM, 1.0)])
def test_dense_changes_of_two_workers_are_put_together(job: Job, scale: str, weight: float) -> None:
    workers = [job.worker(2, 2, scale) for _ in range(2)]
    for _ in range(2):
        changed = [worker.update_dense(grad, 0.5) for worker, grad in zip(workers, (1.0, -3.0), strict=True)]
    plain = [local_dense(dense_of(), 1)[0] for _ in workers]
    for values, grad in zip(plain, (1.0, -3.0), strict=True):
        values.assign(FIRST_DENSE)
        for step in (1, 2):
            values.push(np.full(9, grad, np.float32), 0.5, step)
    expected = FIRST_DENSE + weight * sum(values.values.astype(np.float64) - FIRST_DENSE for values in plain)
    np.testing.assert_allclose(job.dense_values(), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(changed[1], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["adagrad", "adam"])
@pytest.mark.guarantee("G6")
def test_state_and_step_count_are_those_of_the_worker_alone(open_job: OpenJob, rule: str) -> None:
    geo = open_job(table_of(rule))
    first, other = geo.worker(1, 2, SUM), geo.worker(1, 2, SUM)
    for _ in range(5):
        other.step([1], 8.0)
    before = geo.rows([1])
    first.training.note_states([TableState(geo.table.name, 1000, 1, False)])
    first.step([1], 0.5, 0.25)
    # The first step of either rule is the learning rate, whatever the gradient.
    np.testing.assert_allclose(geo.rows([1]), before - 0.25, rtol=0, atol=1e-5)


@pytest.mark.guarantee("G4")
def test_an_idle_worker_counts_in_the_average(job: Job) -> None:
    job.worker(1, 3).step([1], 3.0)
    np.testing.assert_allclose(job.rows([1]), first_rows(job.table, [1]) - 1, rtol=1e-6)


# What a worker sees


def test_a_window_is_k_updates_of_any_table(job: Job) -> None:
    worker = job.worker(3)
    worker.step([1], 1.0)
    worker.update_dense(1.0)
    assert (job.rows([1]) == first_rows(job.table, [1])).all()
    worker.step([2], 1.0)
    np.testing.assert_allclose(job.rows([1, 2]), first_rows(job.table, [1, 2]) - 1, rtol=1e-6)
    assert (job.dense_values() != FIRST_DENSE).all()


def test_rows_that_were_only_looked_up_are_not_pushed(job: Job) -> None:
    worker = job.worker(1)
    worker.prefetch([1, 2, 3])
    worker.update([2], 1.0)
    worker.training.drain()
    assert job.num_rows() == 1


def test_a_table_that_is_only_read_is_pulled_each_time(job: Job) -> None:
    spec = TableSpec(name=job.table.name, dim=DIM, rule="read_only", initializer=job.table.initializer, seed=3)
    for shard in job.cluster.shards:
        shard.add_table(spec)
    worker, other = job.worker(10, 2), job.worker(1, 2, SUM)
    worker.prefetch([1], spec)
    other.step([1], 16.0)
    np.testing.assert_allclose(worker.prefetch([1], spec), first_rows(spec, [1]) - 16, rtol=1e-6)
    assert len(job.stores) == 2  # of the other worker: rows, and which of them are in the window


def test_tables_of_one_call_travel_together_and_train_apart(job: Job) -> None:
    worker, second = job.worker(1), table_of("adagrad", "second")
    job.tables["second"] = second  # a program that is declared late
    for shard in job.cluster.shards:
        shard.add_table(table_on_pservers(second))
    ids = list(range(20))
    specs = [job.table, table_on_pservers(second)]
    uniques = [job.unique(spec, ids)[0] for spec in specs]
    outs = [np.empty((20, DIM), np.float32) for _ in specs]
    num_before = sum(job.cluster.channel.num_sent)
    worker.training.prefetch([RowBatch(*each) for each in zip(specs, uniques, outs, strict=True)])
    assert sum(job.cluster.channel.num_sent) == num_before + 2
    ones = np.ones((20, DIM), np.float32)
    worker.training.update([RowBatch(s, u, ones, 0.5) for s, u in zip(specs, uniques, strict=True)], [], 1.0)
    worker.training.drain()
    for spec in specs:
        np.testing.assert_allclose(job.rows(ids, spec), first_rows(spec, ids) - 0.5, rtol=0, atol=2e-6)


# Dense values


@pytest.mark.guarantee("R5")
def test_changes_of_a_geo_worker_travel_rounded(job: Job) -> None:
    worker = job.worker(k_steps=2, settings=replace(QUICK, rows_dtype="bfloat16"))
    before, seen = job.rows([1, 2]), worker.prefetch([1, 2])
    np.testing.assert_array_equal(seen, rounded(before))
    assert not np.array_equal(seen, before)
    trained = seen
    for _ in range(2):
        worker.update([1, 2], np.full(DIM, 1 / 3), 0.1)
        trained = trained - np.float32(0.1) * np.float32(1 / 3)
    np.testing.assert_array_equal(job.rows([1, 2]), before + rounded(trained - seen))


def test_dense_values_of_the_window_are_the_workers_own(job: Job) -> None:
    worker, other = job.worker(10, 2), job.worker(1, 2, SUM)
    values = worker.update_dense(1.0, 0.5)
    other.update_dense(1.0, 0.5)
    assert (worker.pull_dense() == values).all()
    assert (job.dense_values() == values).all()  # both took the same step from the same values
    kept = values.copy()
    worker.update_dense(1.0, 0.5)
    assert (values == kept).all()


def test_dense_values_of_a_new_window_are_the_pservers(job: Job) -> None:
    worker, other = job.worker(2, 2), job.worker(1, 2, SUM)
    assert (worker.pull_dense() == FIRST_DENSE).all()
    for _ in range(2):
        worker.update_dense(1.0, 0.5)
    other.update_dense(1.0, 0.5)
    seen = worker.pull_dense()
    assert (seen == job.dense_values()).all()
    assert (worker.update_dense(0.0, 0.0) == seen).all()


# The end of a window


@pytest.mark.parametrize("end", [GeoTraining.drain, partial(GeoTraining.drain, leaves=True)])
@pytest.mark.guarantee("G7")
def test_a_drained_worker_applies_its_unfinished_window(job: Job, end: Callable[[GeoTraining], None]) -> None:
    worker = job.worker(10)
    worker.step([1, 2], 1.0)
    values = worker.update_dense(1.0, 0.5)
    end(worker.training)
    np.testing.assert_allclose(job.rows([1, 2]), first_rows(job.table, [1, 2]) - 1, rtol=1e-6)
    assert_equal_to_1e_6(job.dense_values(), values)
    assert held(worker) == Progress(2, "")


def test_drain_waits_until_the_pservers_applied_the_window(job: Job) -> None:
    worker = job.worker(10)
    worker.step([1], 1.0)
    lost = iter([True])
    job.cluster.channel.loses_request = lambda shard: next(lost, False)  # it is sent again after 0.05 s
    worker.training.drain()
    np.testing.assert_allclose(job.rows([1]), first_rows(job.table, [1]) - 1, rtol=1e-6)


# Quiescing, replaced tables


def held(worker: Worker) -> Progress:
    with worker.training.quiesce(10.0) as hold:
        assert hold.holds_back
        (progress,) = hold.passed
    return progress


def test_a_quiesced_worker_is_where_its_last_window_ended(job: Job) -> None:
    worker = job.worker(k_steps=2)
    seen = [(held(worker).num_steps, job.rows([1])[0, 0])]
    for _ in range(5):
        worker.step([1], 1.0)
        seen.append((held(worker).num_steps, job.rows([1])[0, 0]))
    first = first_rows(job.table, [1])[0, 0]
    assert [count for count, _ in seen] == [0, 0, 2, 2, 4, 4]
    np.testing.assert_allclose([row for _, row in seen], first - [0, 0, 2, 2, 4, 4], rtol=1e-6)


def test_a_quiesced_worker_does_not_end_its_window(job: Job) -> None:
    worker = job.worker(k_steps=1)
    worker.prefetch([1])
    with worker.training.quiesce(10.0):
        thread = threading.Thread(target=worker.update, args=([1], 1.0), daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        np.testing.assert_array_equal(job.rows([1]), first_rows(job.table, [1]))
    thread.join(20)
    assert_equal_to_1e_6(job.rows([1]), first_rows(job.table, [1]) - 1.0)


def test_rows_of_replaced_tables_begin_with_new_states(open_job: OpenJob) -> None:
    job = open_job(table_of("adagrad"))
    worker = job.worker()
    worker.step([1], 2.0)
    before = job.rows([1])
    worker.training.note_states([], are_replaced=True)
    worker.step([1], 2.0)
    assert_equal_to_1e_6(job.rows([1]) - before, before - first_rows(job.table, [1]))


def test_rows_whose_window_ended_are_trained_in_the_next(job: Job) -> None:
    worker = job.worker(10)
    worker.prefetch([1, 2])
    worker.update([1], 1.0)
    worker.training.drain()
    worker.update([1, 2], 1.0)
    worker.training.drain()
    np.testing.assert_allclose(job.rows([1, 2]), first_rows(job.table, [1, 2]) - [[2], [1]], rtol=1e-6)


def test_rows_of_a_push_that_was_not_sent_are_pushed_later(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = job.worker(1)

    def raise_earlier(*_: object, **__: object) -> None:
        raise PushRefused("of an earlier push")

    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "start_push", raise_earlier)
        with pytest.raises(PushRefused, match="earlier"):
            worker.step([1], 1.0)
    worker.step([1, 2], 1.0)
    np.testing.assert_allclose(job.rows([1, 2]), first_rows(job.table, [1, 2]) - [[2], [1]], rtol=1e-6)


@pytest.mark.guarantee("G9")
def test_a_change_interrupted_by_ctrl_c_is_added_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = job.worker(1)
    channel = job.cluster.channel
    send = channel.send

    def interrupted(shard: int, parts: Sequence[Buffer]) -> bool:
        if decode(parts, max_bytes=1 << 20).header.op is Op.PUSH:
            signal.raise_signal(signal.SIGINT)
        return send(shard, parts)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(channel, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.step([1, 2], 1.0)
    signal.signal(signal.SIGINT, before)
    worker.step([1, 2], 1.0)
    np.testing.assert_allclose(job.rows([1, 2]), first_rows(job.table, [1, 2]) - 2, rtol=1e-6)


def test_dense_changes_of_unknown_fate_are_not_added_twice(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = job.worker(1)
    exchange = worker.client.exchange_dense

    def lose_answer(*args: Any, **options: Any) -> None:
        exchange(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "exchange_dense", lose_answer)
        with pytest.raises(KeyboardInterrupt):
            worker.update_dense(1.0, 0.5)
    once = job.dense_values()
    assert (once != FIRST_DENSE).all()
    worker.training.drain()
    assert (job.dense_values() == once).all()
    assert (worker.update_dense(0.0, 0.0) == once).all()


def test_a_row_that_overflowed_is_refused_by_its_pserver(job: Job) -> None:
    worker = job.worker(1)
    worker.step([1], -3e38)
    with pytest.raises(PushRefused, match="table 'geo': 4 of 4 gradients are NaN or infinite"):
        worker.step([1], -3e38)
    assert np.isfinite(job.rows([1])).all()


# What a worker keeps

without_state = pytest.mark.parametrize("rule", [name for name in TRAINED if RULES[name].num_states == 0])
with_state = pytest.mark.parametrize("rule", [name for name in TRAINED if RULES[name].num_states > 0])
NUM_WINDOWS, IDS_PER_STEP, K_STEPS = 12, 50, 2


def train_fresh_ids(worker: Worker) -> Iterator[int]:
    """Windows of ids that never came before; yields the number of each before its last update."""
    for number in range(NUM_WINDOWS * K_STEPS):
        worker.prefetch(ids := range(number * IDS_PER_STEP, (number + 1) * IDS_PER_STEP))
        if number % K_STEPS == K_STEPS - 1:
            yield number // K_STEPS + 1
        worker.update(ids, 1.0)


@without_state
@pytest.mark.guarantee("G5")
def test_without_state_a_worker_keeps_the_rows_of_one_window(open_job: OpenJob, rule: str) -> None:
    geo = open_job(table_of(rule))
    for _ in train_fresh_ids(geo.worker(K_STEPS)):
        assert geo.num_rows_of_workers() == [K_STEPS * IDS_PER_STEP]
    assert geo.num_rows_of_workers() == [0]


@with_state
@pytest.mark.guarantee("G5")
def test_with_state_a_worker_keeps_the_rows_of_all_windows(open_job: OpenJob, rule: str) -> None:
    geo = open_job(table_of(rule))
    for number in train_fresh_ids(geo.worker(K_STEPS)):
        of_window = K_STEPS * IDS_PER_STEP
        assert sorted(geo.num_rows_of_workers()) == sorted([of_window, number * of_window])
    assert sorted(geo.num_rows_of_workers()) == [0, NUM_WINDOWS * K_STEPS * IDS_PER_STEP]


# Threads


def test_threads_lose_no_step(job: Job) -> None:
    worker = job.worker(3)
    num_threads, num_steps = 4, 30

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(num_steps):
            worker.step([0, *(1 + rng.permutation(50)[:20]).tolist()], 1 / 1024)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.training.drain()
    change = job.rows(range(51)) - first_rows(job.table, range(51))
    np.testing.assert_allclose(change[0], -num_threads * num_steps / 1024, rtol=0, atol=1e-4)
    np.testing.assert_allclose(change[1:, 0].sum(), -num_threads * num_steps * 20 / 1024, rtol=0, atol=1e-3)


# Refusals


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.guarantee("G8")
def test_gradients_that_are_not_finite_change_nothing(job: Job, wrong: float) -> None:
    worker = job.worker(10)
    worker.step([1], 1.0)
    values = worker.update_dense(1.0, 0.5)
    unique, _ = job.unique(job.table, [1])
    grads, dense_grads = np.ones((1, DIM), np.float32), np.full(9, wrong, np.float32)
    with pytest.raises(PushRefused, match="dense 'geo_dense': 9 of 9 gradients are NaN or infinite"):
        worker.training.update(
            [RowBatch(job.table, unique, grads, 1.0)],
            [DenseUpdate(job.dense, dense_grads, [np.empty_like(dense_grads)], 1.0)],
            1.0,
        )
    with pytest.raises(PushRefused, match="table 'geo': 4 of 8 gradients are NaN or infinite"):
        worker.update([1, 2], [[1.0] * DIM, [wrong] * DIM])
    with pytest.raises(PushRefused, match=f"table 'geo': learning rate is {wrong}"):
        worker.update([1], 1.0, wrong)
    assert (worker.pull([1]) == first_rows(job.table, [1]) - 1).all()
    assert (worker.pull_dense() == values).all()


def test_a_table_that_occurs_twice_is_refused(job: Job) -> None:
    worker = job.worker()
    unique, _ = job.unique(job.table, [1])
    row = np.ones((1, DIM), np.float32)
    with pytest.raises(ValueError, match="'geo'"):
        worker.training.prefetch([RowBatch(job.table, unique, row)] * 2)
    with pytest.raises(ValueError, match="'geo'"):
        worker.training.update([RowBatch(job.table, unique, row, 1.0)] * 2, [], 1.0)


def test_a_mode_of_another_kind_is_refused(job: Job) -> None:
    client = job.cluster.client()
    with pytest.raises(ValueError, match="the mode is async, should be of kind 'geo'"):
        GeoTraining(client, Mode(), 1, tables={}, dense={}, local_rows=local_rows, local_dense=local_dense)


def test_close_releases_all_rows(job: Job) -> None:
    worker = job.worker()
    worker.step([1], 1.0)
    worker.training.close()
    worker.training.close()
    assert job.stores
    assert all(is_closed(store) for store in job.stores)


# What pservers hold


def test_pservers_know_no_rule_of_a_table_or_parameter() -> None:
    spec = table_of("adam", beta1=0.5, l2_decay=0.25)
    on_pservers = table_on_pservers(spec)
    assert (on_pservers.rule, on_pservers.hyperparameters) == ("delta", ())
    assert (on_pservers.initializer, on_pservers.seed, on_pservers.salt) == (spec.initializer, spec.seed, spec.salt)
    dense_there = dense_on_pservers(dense_of("lamb"))
    assert (dense_there.rule, dense_there.hyperparameters) == ("delta", ())
    assert dense_there.segments == (Segment("w", 0, 5, 1.0), Segment("b", 5, 4, 1.0))


# Against a model


class Model:
    """Geo training with SGD in float64: the pservers' rows, and base and copy of each row in a worker's window."""

    def __init__(self, spec: TableSpec, k_steps: int, num_workers: int, weight: float) -> None:
        self.spec, self.k_steps, self.weight = spec, k_steps, weight
        self.rows: dict[int, NDArray[np.float64]] = {}
        self.windows: list[dict[int, list[NDArray[np.float64]]]] = [{} for _ in range(num_workers)]
        self.num_steps = [0] * num_workers

    def row(self, id_: int) -> NDArray[np.float64]:
        return self.rows.get(id_, first_rows(self.spec, [id_])[0].astype(np.float64))

    def prefetch(self, worker: int, ids: list[int]) -> NDArray[np.float64]:
        for id_ in ids:
            self.windows[worker].setdefault(id_, [self.row(id_), self.row(id_)])
        return self.pull(worker, ids)

    def pull(self, worker: int, ids: list[int]) -> NDArray[np.float64]:
        window = self.windows[worker]
        return np.array([window[id_][1] if id_ in window else self.row(id_) for id_ in ids])

    def update(self, worker: int, ids: list[int], grads: NDArray[np.float32]) -> None:
        for id_, grad in zip(ids, grads, strict=True):
            self.windows[worker][id_][1] = self.windows[worker][id_][1] - grad.astype(np.float64)
        self.num_steps[worker] += 1
        if self.num_steps[worker] == self.k_steps:
            self.settle(worker)

    def settle(self, worker: int) -> None:
        for id_, (base, copy) in self.windows[worker].items():
            self.rows[id_] = self.row(id_) + self.weight * (copy - base)
        self.windows[worker].clear()
        self.num_steps[worker] = 0


some_ids = st.lists(st.integers(-4, 4) | st.sampled_from([-(2**63), 2**63 - 1]), min_size=1, max_size=6, unique=True)
steps = st.tuples(st.integers(0, 1), st.sampled_from(["train", "train", "train", "evaluate", "settle"]), some_ids)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, max_size=25), st.integers(1, 4), st.sampled_from([(AVG, 0.5), (SUM, 1.0)]))
@pytest.mark.guarantee("G2", "G3")
def test_two_workers_see_and_give_the_rows_of_the_model(
    steps: list[tuple[int, str, list[int]]], k_steps: int, scaled: tuple[str, float]
) -> None:
    scale, weight = scaled
    job = Job()
    workers = [job.worker(k_steps, 2, scale) for _ in range(2)]
    model = Model(job.table, k_steps, 2, weight)
    rng = np.random.default_rng(6)
    for number, action, ids in steps:
        worker = workers[number]
        if action == "settle":
            worker.training.drain()
            model.settle(number)
        elif action == "evaluate":
            np.testing.assert_allclose(worker.pull(ids), model.pull(number, ids), rtol=0, atol=2e-5)
        else:
            np.testing.assert_allclose(worker.prefetch(ids), model.prefetch(number, ids), rtol=0, atol=2e-5)
            grads = rng.standard_normal((len(ids), DIM)).astype(np.float32)
            worker.update(ids, grads)
            model.update(number, ids, grads)
    for number, worker in enumerate(workers):
        worker.training.drain()
        model.settle(number)
    ids = [*range(-4, 5), -(2**63), 2**63 - 1]
    np.testing.assert_allclose(job.rows(ids), [model.row(id_) for id_ in ids], rtol=0, atol=2e-5)
    job.close()


def test_a_window_whose_push_is_not_accepted_stays(job: Job) -> None:
    worker = job.worker(k_steps=2, settings=replace(QUICK, max_inflight_pushes=1, deadline_s=0.5))
    worker.step([1, 2], 1.0)
    worker.prefetch([1, 2])
    job.cluster.channel.loses_request = lambda shard: True
    unique, _ = job.unique(job.table, range(3, 20))
    worker.client.push([RowBatch(job.table, unique, np.ones((len(unique.ids), DIM), np.float32), 1.0)])
    before = worker.training.progress()
    with pytest.raises(ShardUnavailable):
        worker.update([1, 2], 1.0)
    assert worker.training.progress() == before
    assert sum(len(each.unique.ids) for each in worker.training._window.changes(1.0)) == 2
