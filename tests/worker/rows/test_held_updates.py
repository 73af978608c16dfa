"""Workers of a sync job send what their row caches hold: when they do, in how many steps, and what these count as."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import AGED_LFU, ALL
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, SUM, SYNC, Mode
from fleet_sparse.core.row_bound import MIN_DRIFT, RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from fleet_sparse.worker.rows.row_caches import RowCaches
from support.cow_views import all_rows
from support.in_process import InProcessCluster
from support.saves import store_of
from support.threads import in_threads
from support.waits import wait_until

SPEC = TableSpec(name="held", dim=2, rule="adagrad", initializer=constant(0.0))
BOUND = RowBound(lag=1000, share=None)
CHANGE_BYTES = 16 + 2 * 4 * SPEC.dim
NUM_IDS = 40


class Worker:
    """A worker that trains one table, of which it caches all rows that it reads; its job has `others`, too."""

    def __init__(  # what the tests vary
        self,
        cluster: InProcessCluster,
        index: int,
        num_workers: int,
        mode: Mode,
        max_staged: int,
        others: Sequence[TableSpec] = (),
    ) -> None:
        assert mode.row_bound is not None
        self.client = client = cluster.worker(index, num_workers, mode)
        self.channel = cluster.channel
        self.deduplicator, self.gradient = Deduplicator(cluster.placement), 1.0 - 2 * index
        job = CacheJob(mode.row_bound, num_workers, 0 if mode.kind == SYNC else None, AGED_LFU, ALL)
        tables = {spec.name: spec for spec in (SPEC, *others)}
        self.caches = RowCaches(
            *(client, self.deduplicator, job, tables),
            max_bytes=1 << 20,
            max_rows=NUM_IDS,
            max_staged_bytes=max_staged,
        )
        self.training = PserverTraining(client, self.deduplicator, mode, num_workers, caches=self.caches)

    def step(self, ids: NDArray[np.int64], position: str = "", *, rate: float = 1.0) -> NDArray[np.float32]:
        """Trains the rows of ids; returns them as they were read."""
        unique, _ = self.deduplicator.unique([ids], SPEC.salt)
        batch = RowBatch(SPEC, unique, np.zeros((len(unique.ids), SPEC.dim), np.float32))
        self.training.prefetch([batch])
        grads = np.full_like(batch.values, self.gradient)
        self.training.update([batch._replace(values=grads, learning_rate=rate)], [], 1.0, None, position)
        return batch.values

    def evaluate(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        unique, _ = self.deduplicator.unique([ids], SPEC.salt)
        batch = RowBatch(SPEC, unique, np.zeros((len(unique.ids), SPEC.dim), np.float32))
        self.training.pull([batch])
        return batch.values

    @property
    def num_trained(self) -> int:
        """Number of steps that a save counts which this worker makes."""
        return self._num_trained(is_coordinator=True)

    @property
    def num_trained_of_others(self) -> int:
        """Number of steps that this worker reports to a save which another one makes."""
        return self._num_trained(is_coordinator=False)

    def _num_trained(self, *, is_coordinator: bool) -> int:
        with self.training.quiesce(10.0, is_coordinator=is_coordinator) as held:
            newest = held.passed[-1]
        return newest.num_steps - newest.num_untrained


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    made = InProcessCluster(2, [SPEC])
    yield made
    made.close()


def workers_of(
    cluster: InProcessCluster,
    num_workers: int = 2,
    *,
    kind: str = SYNC,
    max_staged: int = Settings.max_staged_bytes,
    bound: RowBound = BOUND,
    others: Sequence[TableSpec] = (),
) -> list[Worker]:
    for shard in cluster.shards:
        shard._jobs._max_staged_bytes = max_staged
    lag = 100 if kind == "lag" else None
    mode = Mode(SYNC, SUM, row_bound=bound) if kind == SYNC else Mode(ASYNC, max_step_lag=lag, row_bound=bound)
    return [Worker(cluster, index, num_workers, mode, max_staged, others) for index in range(num_workers)]


def train(workers: list[Worker], num_steps: int, ids: NDArray[np.int64]) -> None:
    for _ in range(num_steps):
        for worker in workers:
            worker.step(ids)


def meet(workers: list[Worker]) -> None:
    in_threads(*(partial(worker.training.drain, leaves=True) for worker in workers))
    agree(workers)


def agree(workers: list[Worker]) -> None:
    """As at a barrier behind which all workers have left the steps."""
    num_trained = max(worker.training.num_trained for worker in workers)
    for worker in workers:
        worker.training.note_trained(num_trained)


@pytest.mark.guarantee("H8")
def test_a_worker_alone_behind_a_barrier_has_nothing_to_send(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster)
    train(workers, 4, np.arange(8))
    assert all(worker.caches.num_held for worker in workers)
    meet(workers)
    before = workers[0].training.progress()
    in_threads(workers[0].training.send_held)  # would wait for the other in a step
    assert workers[0].training.progress() == before


@pytest.mark.guarantee("H8")
def test_all_workers_that_save_send_what_they_hold_once(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster)
    train(workers, 4, np.arange(8))
    in_threads(*(worker.training.send_held for worker in workers))
    assert [worker.caches.num_held for worker in workers] == [0, 0]
    before = [worker.training.progress().num_steps for worker in workers]
    in_threads(*(worker.training.send_held for worker in workers))
    assert [worker.training.progress().num_steps for worker in workers] == before == [5, 5]


@pytest.mark.guarantee("V3")
def test_steps_that_send_held_updates_are_not_counted(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster)
    train(workers, 4, np.arange(8))
    in_threads(*(worker.training.send_held for worker in workers))
    assert [worker.num_trained for worker in workers] == [4, 4]
    train(workers, 3, np.arange(8))
    meet(workers)
    meet(workers)
    assert [worker.num_trained for worker in workers] == [7, 7]


@pytest.mark.guarantee("V3")
def test_a_worker_with_fewer_batches_counts_all_steps(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster, 3)

    def run(worker: Worker, num_steps: int) -> None:
        for _ in range(num_steps):
            worker.step(np.arange(8))
        worker.training.drain(leaves=True)

    for _ in range(2):
        in_threads(*(partial(run, worker, n) for worker, n in zip(workers, (5, 2, 0), strict=True)))
        agree(workers)
    assert [worker.num_trained for worker in workers] == [10, 10, 10]


@pytest.mark.parametrize(("rule", "num_parts"), [("ftrl", 5), ("adagrad", 10)])
def test_tables_whose_updates_are_not_held_add_no_parts(cluster: InProcessCluster, rule: str, num_parts: int) -> None:
    other = TableSpec(name="other", dim=2, rule=rule, initializer=constant(0.0))
    workers = workers_of(cluster, max_staged=2 * 2 * CHANGE_BYTES * NUM_IDS // 5, others=[other])
    assert workers[0].training.held.num_parts == num_parts


@pytest.mark.guarantee("H7")
def test_held_updates_past_the_limit_are_sent_in_several_steps(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster, max_staged=2 * 2 * CHANGE_BYTES * NUM_IDS // 5)
    for first in range(0, NUM_IDS, 4):
        train(workers, 4, np.arange(first, first + 4))
    assert [worker.caches.num_held for worker in workers] == [NUM_IDS, NUM_IDS]
    assert workers[0].training.held.num_parts == 5
    meet(workers)
    assert [worker.caches.num_held for worker in workers] == [0, 0]
    assert [worker.num_trained for worker in workers] == [NUM_IDS, NUM_IDS]


@pytest.mark.guarantee("H7")
@pytest.mark.parametrize(("kind", "num_workers"), [(SYNC, 1), ("lag", 1), ("lag", 2)])
def test_held_updates_past_the_limit_are_sent_in_several_pushes(
    cluster: InProcessCluster, kind: str, num_workers: int
) -> None:
    limit = 2 * num_workers * CHANGE_BYTES * NUM_IDS // 5
    workers = workers_of(cluster, num_workers, kind=kind, max_staged=limit)
    for worker in workers:
        worker.client.max_frame_bytes = 400
    for first in range(0, NUM_IDS, 4):
        train(workers, 4, np.arange(first, first + 4))
    assert [worker.caches.num_held for worker in workers] == [NUM_IDS] * num_workers
    trained = [worker.evaluate(np.arange(NUM_IDS)) for worker in workers]
    with ExitStack() as paused:
        for worker in workers:
            paused.enter_context(worker.training.quiesce(10.0, is_coordinator=True))
        assert [worker.caches.num_held for worker in workers] == [0] * num_workers
    rows = workers[0].evaluate(np.arange(NUM_IDS))
    np.testing.assert_allclose(rows, sum(trained), rtol=1e-6, atol=1e-6)


@pytest.mark.guarantee("H7")
def test_the_end_of_an_async_pass_sends_what_is_held(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster, kind=ASYNC)
    train(workers, 4, np.arange(8))
    assert all(worker.caches.num_held for worker in workers)
    for worker in workers:
        worker.training.end_pass()
    assert [worker.caches.num_held for worker in workers] == [0, 0]
    assert [worker.num_trained for worker in workers] == [4, 4]


@pytest.mark.guarantee("V3")
@pytest.mark.parametrize(("num_passes", "sizes"), [(1, (1, 2)), (3, (2, 4))])
def test_uneven_passes_count_as_many_steps_as_without_a_cache(
    cluster: InProcessCluster, num_passes: int, sizes: tuple[int, int]
) -> None:
    workers = workers_of(cluster, max_staged=1 << 10)
    assert workers[0].training.held.num_parts > 1

    def run(worker: Worker, size: int) -> None:
        for _ in range(num_passes):
            for _ in range(size):
                worker.step(np.arange(8))
            worker.training.end_pass()
        worker.training.drain(leaves=True)

    in_threads(*(partial(run, worker, size) for worker, size in zip(workers, sizes, strict=True)))
    agree(workers)
    assert [worker.num_trained for worker in workers] == [num_passes * max(sizes)] * 2


@pytest.mark.guarantee("V3")
def test_steps_that_others_train_count_while_one_sends_alone(cluster: InProcessCluster) -> None:
    """The worker that sends knows no better than that its own steps trained nothing."""
    workers = workers_of(cluster, max_staged=1 << 10)
    num_parts = workers[0].training.held.num_parts
    train(workers, 4, np.arange(8))

    def train_on() -> None:
        for _ in range(num_parts):
            workers[1].step(np.arange(8))

    assert in_threads(workers[0].training.send_held, train_on)[0]
    assert [worker.num_trained for worker in workers] == [4, 4 + num_parts]
    train(workers, 2, np.arange(8))
    meet(workers)
    assert [worker.num_trained for worker in workers] == [6 + num_parts] * 2


@pytest.mark.guarantee("V3")
def test_steps_that_send_while_others_wait_do_not_count(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster)
    train(workers, 4, np.arange(8))

    def save_and_train_on() -> None:
        for num_steps in (2, 3):
            workers[0].training.send_held()
            for _ in range(num_steps):
                workers[0].step(np.arange(8))
        workers[0].training.drain(leaves=True)

    in_threads(partial(workers[1].training.drain, leaves=True), save_and_train_on)
    agree(workers)
    assert [worker.num_trained for worker in workers] == [9, 9]


@pytest.mark.guarantee("H8")
def test_a_worker_that_sends_reports_its_position_to_a_save(cluster: InProcessCluster) -> None:
    """Its first part is the step after the one that the save holds back."""
    workers = workers_of(cluster)
    train(workers, 4, np.arange(8))
    workers[1].step(np.arange(8))
    channel, num_sent = workers[1].channel, sum(workers[1].channel.num_sent)
    with workers[0].training.quiesce(10.0, is_coordinator=True):
        leaving = threading.Thread(target=partial(workers[1].training.drain, leaves=True), daemon=True)
        leaving.start()
        wait_until(lambda: sum(channel.num_sent) > num_sent)
        assert in_threads(lambda: workers[1].num_trained_of_others) == [5]
    workers[0].step(np.arange(8))
    workers[0].training.drain(leaves=True)
    leaving.join()


@pytest.mark.guarantee("H1")
@pytest.mark.parametrize("kind", [SYNC, ASYNC])
def test_a_row_made_anew_does_not_pass_for_the_removed_one(cluster: InProcessCluster, kind: str) -> None:
    """The removed row had six updates, all of the worker that keeps its copy, and the new one as many of the other."""
    bound, row, elsewhere = RowBound(lag=4, share=None), np.array([1]), np.array([30])
    workers = workers_of(cluster, kind=kind, bound=bound)
    for _ in range(6):
        workers[0].step(row)
        workers[1].step(elsewhere)
    meet(workers)
    for number, shard in enumerate(cluster.shards):
        store = shard.tables[SPEC.table_id].table.store
        cluster.run(number, partial(store.remove, row))
    for _ in range(6):
        workers[0].step(elsewhere)
        workers[1].step(row)
    meet(workers)
    np.testing.assert_array_equal(workers[0].step(row), workers[1].evaluate(row))


@pytest.mark.guarantee("H2")
@pytest.mark.parametrize("kind", [SYNC, ASYNC])
@pytest.mark.parametrize("num_updates", [1, 3, 4, 8])
def test_updates_far_past_the_drift_do_not_bring_the_clock_round(
    cluster: InProcessCluster, kind: str, num_updates: int
) -> None:
    workers = workers_of(cluster, kind=kind, bound=RowBound(drift=MIN_DRIFT))
    row, elsewhere = np.array([1]), np.array([30])
    train(workers, 2, row)
    workers[0].gradient, workers[1].gradient = 0.0, -1e6
    for number in range(num_updates):
        for worker, ids in zip(workers, (elsewhere, row), strict=True):
            worker.step(ids, rate=100.0 * (number + 1))
    meet(workers)
    np.testing.assert_array_equal(workers[0].step(row), workers[1].evaluate(row))


@pytest.mark.guarantee("H7")
def test_updates_of_tables_declared_late_are_held_back(cluster: InProcessCluster) -> None:
    mode, tables = Mode(SYNC, SUM, row_bound=BOUND), dict[str, TableSpec]()
    client, deduplicator = cluster.worker(0, 2, mode), Deduplicator(cluster.placement)
    caches = RowCaches(client, deduplicator, CacheJob(BOUND, 2, 0, AGED_LFU, ALL), tables, max_bytes=1 << 20)
    training = PserverTraining(client, deduplicator, mode, 2, caches=caches)
    tables[SPEC.name] = SPEC
    assert training.holds_back


def barrier(worker: Worker) -> None:
    worker.training.drain()


def save(worker: Worker) -> None:
    with worker.training.quiesce(10.0, is_coordinator=True):
        pass


def end_of_pass(worker: Worker) -> None:
    worker.training.end_pass()


@pytest.mark.guarantee("H7")
@pytest.mark.parametrize("send", [barrier, save, end_of_pass])
def test_states_are_sent_though_no_update_of_a_row_is_held(
    cluster: InProcessCluster, send: Callable[[Worker], None]
) -> None:
    """Each second update of a row sends it, and its states only if an eighth of its updates are missing in them."""
    workers, ids = workers_of(cluster, kind=ASYNC, bound=RowBound(lag=3, share=None)), np.arange(8)
    train_in_turns(workers, 18, ids)
    assert (num_squares_of(cluster) < 36.0).all()
    for worker in workers:
        send(worker)
    for worker in workers:
        worker.training.drain()  # the pservers have applied what was sent
    np.testing.assert_array_equal(num_squares_of(cluster), np.full((len(ids), SPEC.dim), 36.0))


@pytest.mark.guarantee("H7")
def test_states_of_an_unused_copy_are_sent(cluster: InProcessCluster) -> None:
    workers, ids = workers_of(cluster, kind=ASYNC, bound=RowBound(lag=3, share=None)), np.arange(2)
    train_in_turns(workers, 18, ids)
    assert (num_squares_of(cluster) < 36.0).all()
    train_in_turns(workers, 20 * NUM_IDS, np.arange(NUM_IDS - 8, NUM_IDS))
    assert np.count_nonzero(num_squares_of(cluster)[:, 0] == 36.0) == len(ids)


@pytest.mark.guarantee("H9")
def test_a_dead_worker_loses_the_states_that_it_did_not_send(cluster: InProcessCluster) -> None:
    """Each second update of a row sends it, so that the rows of the pservers have all updates."""
    workers, ids = workers_of(cluster, kind=ASYNC, bound=RowBound(lag=3, share=None)), np.arange(8)
    train_in_turns(workers, 18, ids)
    rows = workers[1].evaluate(ids)
    assert workers[0].caches.num_held == len(ids)
    workers[0].client.abandon()
    meet(workers[1:])
    np.testing.assert_array_equal(workers[1].evaluate(ids), rows)
    assert ((num_squares_of(cluster) >= 18 + 18 * 7 / 8) & (num_squares_of(cluster) < 36)).all()


def train_in_turns(workers: list[Worker], num_steps: int, ids: NDArray[np.int64]) -> None:
    """As `train`; each step begins when the pservers have the update of the one before."""
    for _ in range(num_steps):
        for worker in workers:
            worker.step(ids)
            worker.training._client.flush()


def num_squares_of(cluster: InProcessCluster) -> NDArray[np.float32]:
    """The sums of squares of the rows of all shards, which count their updates."""
    states = []
    for number, shard in enumerate(cluster.shards):
        cluster.run(number, lambda shard=shard: states.append(all_rows(store_of(shard, SPEC)).states[:, 0]))
    return np.concatenate(states)
