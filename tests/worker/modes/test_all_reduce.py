"""AllReduceTraining over real shards in this process; threads are the workers, and add up arrays among themselves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import ALL
from fleet_sparse.core.clip import BY_GLOBAL_NORM, BY_NORM, Clip
from fleet_sparse.core.mode import ALL_REDUCE, AVG, SUM, SYNC, Mode, Scale
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.errors import FleetSparseError, PushRefused
from fleet_sparse.worker.modes.all_reduce import AllReduceTraining, ReducedProgram
from fleet_sparse.worker.modes.step import Progress, StepClip
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from fleet_sparse.worker.rows.row_caches import RowCaches
from support.in_process import InProcessCluster
from support.threads import in_threads

RATE = 0.25
LIMIT_S = 20


class Exchange:
    """The arrays that threads share: one of each worker, in the order in which they were made."""

    def __init__(self, num_workers: int) -> None:
        self.barrier = threading.Barrier(num_workers)
        self.arrays: list[list[ThreadArray]] = [[] for _ in range(num_workers)]


class ThreadArray:
    """Implements `SharedArray`."""

    def __init__(self, exchange: Exchange, index: int, num_values: int) -> None:
        self._exchange = exchange
        self._number = len(exchange.arrays[index])
        exchange.arrays[index].append(self)
        self.values: NDArray[np.float32] = np.zeros(num_values, np.float32)

    def sum(self) -> None:
        total = np.sum([each.copy() for each in self._gathered()], axis=0, dtype=np.float32)
        self._exchange.barrier.wait(LIMIT_S)
        self.values[:] = total

    def broadcast(self, source: int) -> None:
        values = self._gathered()[source].copy()
        self._exchange.barrier.wait(LIMIT_S)
        self.values[:] = values

    def _gathered(self) -> list[NDArray[np.float32]]:
        self._exchange.barrier.wait(LIMIT_S)
        return [arrays[self._number].values for arrays in self._exchange.arrays]


class ThreadGroup:
    """Implements `WorkerGroup`."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._exchange = exchange
        self._index = index

    def share(self, num_values: int) -> ThreadArray:
        return ThreadArray(self._exchange, self._index, num_values)

    def close(self) -> None:
        pass


class Replica:
    """Implements `DenseReplica`: the values of a program that trains with SGD."""

    num_floats = 10

    def __init__(self) -> None:
        self.values = np.zeros(10, np.float32)

    def read(self) -> NDArray[np.float32]:
        return self.values

    def write(self, floats: NDArray[np.float32]) -> None:
        self.values[:] = floats


class Worker:
    """A worker that trains a row of `cluster.table` on the shards and 10 dense values itself."""

    def __init__(
        self,
        cluster: InProcessCluster,
        exchange: Exchange,
        index: int,
        num_workers: int,
        scale: Scale,
        clip: StepClip | None,
        bound: RowBound | None = None,
    ) -> None:
        self._cluster = cluster
        self.exchange = exchange
        mode = Mode(SYNC, scale, dense=ALL_REDUCE, row_bound=bound)
        client = cluster.worker(index, num_workers, mode)
        self._deduplicator = Deduplicator(cluster.placement)
        self.replica = Replica()
        self.caches: RowCaches | None = None
        if bound is not None:
            job, tables = (
                CacheJob(bound, num_workers, 0, admission=ALL, is_merged=True),
                {cluster.table.name: cluster.table},
            )
            self.caches = RowCaches(client, self._deduplicator, job, tables, max_bytes=1 << 20)
        self.rows = PserverTraining(client, self._deduplicator, mode, num_workers, caches=self.caches)
        group = ThreadGroup(exchange, index)
        program = ReducedProgram(cluster.dense, (cluster.table,), clip)
        self.training = AllReduceTraining(self.rows, group, index, num_workers, scale, program, self.replica)

    def step(self, gradient: float, num_examples: float = 1.0, *, of_row: float = -1.0, position: str = "") -> None:
        spec = self._cluster.table
        unique, _ = self._deduplicator.unique([np.array([7], np.int64)], spec.salt)
        if self.caches is not None:
            self.training.prefetch([RowBatch.empty(spec, unique)])
        rows = [RowBatch(spec, unique, np.full((1, spec.dim), of_row, np.float32), RATE)]
        merged = np.empty((2, 5), np.float32)
        update = DenseUpdate(self._cluster.dense, np.full(10, gradient, np.float32), [merged], RATE)
        self.training.update(rows, [update], num_examples, None, position)
        self.replica.values -= merged.reshape(-1)

    def row(self) -> float:
        spec = self._cluster.table
        unique, _ = self._deduplicator.unique([np.array([7], np.int64)], spec.salt)
        batch = RowBatch.empty(spec, unique)
        self.training.pull([batch])
        return float(batch.values[0, 0])


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    cluster = InProcessCluster(2)
    yield cluster
    cluster.close()


def workers_of(
    cluster: InProcessCluster,
    num_workers: int,
    scale: Scale = AVG,
    clip: StepClip | None = None,
    bound: RowBound | None = None,
) -> list[Worker]:
    exchange = Exchange(num_workers)
    return [Worker(cluster, exchange, index, num_workers, scale, clip, bound) for index in range(num_workers)]


@pytest.mark.parametrize(("scale", "merged"), [(AVG, (3 * 8 + 5 * 16) / 24), (SUM, 3 + 5)])
def test_dense_gradients_are_averaged_by_examples_or_summed(
    cluster: InProcessCluster, scale: Scale, merged: float
) -> None:
    first, second = workers_of(cluster, 2, scale)
    weights = (8.0, 16.0) if scale == AVG else (1.0, 1.0)
    in_threads(lambda: first.step(3, weights[0]), lambda: second.step(5, weights[1]))
    for worker in (first, second):
        np.testing.assert_array_equal(worker.replica.values, np.full(10, -np.float32(merged)))


@pytest.mark.parametrize(
    ("needs_clip", "of_row", "of_dense"),
    [((True, True, False), 2.0, (2.0, 4.0)), ((False, True, True), 4.0, (1.5, 1.5))],
)
def test_global_norm_is_that_of_rows_and_merged_gradients(
    cluster: InProcessCluster, needs_clip: tuple[bool, ...], of_row: float, of_dense: tuple[float, float]
) -> None:
    """The row has 4 gradients of 4, the dense array 7 and 3 merged ones of 4, of which the last 3 may be left out."""
    num_clipped = np.dot([4, 7, 3], needs_clip)
    norm = float(np.sqrt(num_clipped * 16)) * (of_dense[0] / 4)
    first, second = workers_of(cluster, 2, AVG, StepClip(Clip(BY_GLOBAL_NORM, norm=norm), needs_clip))

    def train(worker: Worker, gradient: float, num_steps: int) -> None:
        for _ in range(num_steps):
            worker.step(gradient, of_row=-4.0)
        worker.training.drain(leaves=True)

    in_threads(lambda: train(first, 3.0, 1), lambda: train(second, 5.0, 1))
    expected = -np.repeat(of_dense, [7, 3])
    for worker in (first, second):
        np.testing.assert_allclose(worker.replica.values, expected, rtol=1e-6)
    assert in_threads(first.row, second.row) == [pytest.approx(1 + RATE * of_row)] * 2


@pytest.mark.guarantee("D10")
def test_worker_that_leaves_a_clipped_job_gets_the_same_values(cluster: InProcessCluster) -> None:
    clip = StepClip(Clip(BY_NORM, norm=0.5), (True, True, True))
    workers = workers_of(cluster, 2, SUM, clip)

    def train(worker: Worker, num_steps: int) -> None:
        for _ in range(num_steps):
            worker.step(1.0, of_row=-1.0)
        worker.training.drain(leaves=True)

    in_threads(lambda: train(workers[0], 1), lambda: train(workers[1], 3))
    assert workers[0].replica.values.tobytes() == workers[1].replica.values.tobytes()
    np.testing.assert_allclose(workers[0].replica.values[:7], -3 * 0.5 / np.sqrt(7), rtol=1e-6)
    assert in_threads(*(worker.row for worker in workers)) == [pytest.approx(1 + RATE * 3 * 0.25)] * 2


@pytest.mark.guarantee("D10")
def test_worker_that_leaves_first_gets_the_values_of_the_last(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster, 3)

    def train(worker: Worker, num_steps: int) -> None:
        for _ in range(num_steps):
            worker.step(1.0)
        worker.training.drain(leaves=True)
        worker.step(1.0)

    in_threads(*(lambda w=worker, n=n: train(w, n) for worker, n in zip(workers, (1, 4, 2), strict=True)))
    assert [worker.replica.values[0] for worker in workers] == [-5.0] * 3
    rows = in_threads(*(worker.row for worker in workers))
    assert rows == [1 + RATE * 5] * 3, "a leaving worker has weight 0 in the average of rows, too"


@pytest.mark.guarantee("H7")
def test_workers_that_leave_send_what_their_caches_hold(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster, 2, SUM, bound=RowBound(lag=1000))

    def train(worker: Worker, num_steps: int) -> tuple[int, int]:
        assert worker.caches is not None
        for _ in range(num_steps):
            worker.step(1.0)
        num_held = worker.caches.num_held
        worker.training.drain(leaves=True)
        return num_held, worker.caches.num_held

    held = in_threads(*(lambda w=worker, n=n: train(w, n) for worker, n in zip(workers, (3, 5), strict=True)))
    assert held == [(1, 0), (1, 0)]
    assert in_threads(*(worker.row for worker in workers)) == [1 + RATE * 8] * 2
    assert [worker.replica.values[0] for worker in workers] == [-8.0] * 2


@pytest.mark.guarantee("H8")
def test_workers_that_all_save_send_what_their_caches_hold(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster, 2, SUM, bound=RowBound(lag=1000))

    def train(worker: Worker) -> tuple[int, int, Progress]:
        assert worker.caches is not None
        for _ in range(3):
            worker.step(1.0)
        num_held = worker.caches.num_held
        worker.training.send_held()
        sent = num_held, worker.caches.num_held, worker.training.progress()
        worker.step(1.0)
        worker.training.drain(leaves=True)
        return sent

    found = in_threads(*(lambda w=worker: train(w) for worker in workers))
    assert found == [(1, 0, Progress(4, "", num_untrained=1))] * 2
    assert in_threads(*(worker.row for worker in workers)) == [1 + RATE * 8] * 2
    assert [worker.replica.values[0] for worker in workers] == [-8.0] * 2
    assert workers[0].training.progress() == Progress(6, "", num_untrained=2)


@pytest.mark.guarantee("H8")
def test_a_worker_that_saves_while_others_train_is_refused(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster, 2, SUM, bound=RowBound(lag=1000))

    def save_alone() -> None:
        workers[0].step(1.0)
        with pytest.raises(FleetSparseError, match="save"):
            workers[0].training.send_held()
        with pytest.raises(FleetSparseError, match="barrier_worker"):
            workers[0].step(1.0)
        workers[0].training.drain(leaves=True)
        workers[0].step(1.0)

    def train_on() -> None:
        for _ in range(3):
            workers[1].step(1.0)
        workers[1].training.drain(leaves=True)
        workers[1].step(1.0)

    in_threads(save_alone, train_on)
    assert [worker.replica.values[0] for worker in workers] == [-6.0] * 2


@pytest.mark.guarantee("H7")
@pytest.mark.parametrize("bound", [None, RowBound(lag=1000)])
def test_uneven_passes_need_no_barrier_between_them(cluster: InProcessCluster, bound: RowBound | None) -> None:
    workers = workers_of(cluster, 2, SUM, bound=bound)

    def run(worker: Worker, num_steps: int) -> None:
        for _ in range(2):
            for _ in range(num_steps):
                worker.step(1.0)
            worker.training.end_pass()
        worker.training.drain(leaves=True)

    in_threads(*(lambda w=worker, n=n: run(w, n) for worker, n in zip(workers, (2, 3), strict=True)))
    assert in_threads(*(worker.row for worker in workers)) == [1 + RATE * 10] * 2
    assert [worker.replica.values[0] for worker in workers] == [-10.0] * 2


def test_steps_of_others_keep_the_position_of_a_worker(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2)

    def leave_early() -> None:
        first.step(1.0, position="mine")
        first.training.drain(leaves=True)

    def train_on() -> None:
        for step in range(3):
            second.step(1.0, position=f"after {step}")
        second.training.drain(leaves=True)

    in_threads(leave_early, train_on)
    with first.training.quiesce(10.0, is_coordinator=True) as held:
        assert held.passed[-1].position == "mine"


def test_nobody_waits_in_the_group_for_a_worker_that_is_refused(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2)

    def refused(worker: Worker, of_row: float) -> str:
        with pytest.raises(PushRefused) as caught:
            worker.step(1.0, of_row=of_row)
        return str(caught.value)

    texts = in_threads(lambda: refused(first, -1.0), lambda: refused(second, np.nan))
    assert all("'table'" in text for text in texts)
    assert "worker 1" in texts[0]


def interrupt_sum(worker: Worker, number: int) -> None:
    """Ctrl-C while the group adds up for the `number`-th time."""
    shared = worker.exchange.arrays[0][0]
    add_up, numbers = shared.sum, count()

    def interrupted() -> None:
        add_up()
        if next(numbers) == number:
            signal.raise_signal(signal.SIGINT)

    shared.sum = interrupted  # type: ignore[method-assign]


def interrupt_pull(worker: Worker) -> None:
    """Ctrl-C while the shards wait for the others' parts of a step."""
    pull, numbers = worker.rows.pull, count()

    def interrupted(batches: Sequence[RowBatch]) -> None:
        if next(numbers) == 0:
            signal.raise_signal(signal.SIGINT)
        pull(batches)

    worker.rows.pull = interrupted  # type: ignore[method-assign]


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize(
    "interrupt", [partial(interrupt_sum, number=0), partial(interrupt_sum, number=1), interrupt_pull]
)
def test_worker_whose_barrier_was_interrupted_must_finish_it(
    cluster: InProcessCluster, interrupt: Callable[[Worker], None]
) -> None:
    first, second = workers_of(cluster, 2)
    interrupt(first)

    def train() -> None:
        second.step(1.0)
        second.step(1.0)
        second.training.drain(leaves=True)

    with ThreadPoolExecutor(1) as others:
        trained = others.submit(train)
        with pytest.raises(KeyboardInterrupt):
            first.training.drain(leaves=True)
        with pytest.raises(FleetSparseError, match=r"fleet\.barrier_worker\(\)"):
            first.step(1.0)
        first.training.drain(leaves=True)
        trained.result(LIMIT_S)
    assert first.replica.values[0] == second.replica.values[0] == -2.0


@pytest.mark.usefixtures("default_handler")
def test_interrupt_of_the_last_step_waits_for_equal_replicas(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2)
    interrupt_sum(first, 1)

    def train() -> None:
        second.step(1.0)
        second.training.drain(leaves=True)

    with ThreadPoolExecutor(1) as others:
        trained = others.submit(train)
        with pytest.raises(KeyboardInterrupt):
            first.training.drain(leaves=True)
        trained.result(LIMIT_S)
    assert first.replica.values[0] == second.replica.values[0] == -1.0


def test_rows_alone_refuse_gradients_that_workers_merge(cluster: InProcessCluster) -> None:
    first, _ = workers_of(cluster, 2)
    merged = np.full((2, 5), 7.0, np.float32)
    with pytest.raises(FleetSparseError):
        first.rows.update([], [DenseUpdate(cluster.dense, np.ones(10, np.float32), [merged], RATE)], 1.0)
    assert merged.min() == 7.0
