"""PserverTraining by real clients over real shards in this process."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, SUM, SYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError, PushRefused, ShardUnavailable
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.frame_format import Op
from fleet_sparse.worker.modes.step import Progress
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.call import Call
from fleet_sparse.worker.net.channel import Buffer
from fleet_sparse.worker.net.io_loop import IoLoop
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.in_process import QUICK, InProcessCluster
from support.threads import in_threads

SYNC_MODE, SUM_MODE, ASYNC_MODE = Mode(SYNC), Mode(SYNC, SUM), Mode()
ADAM = TableSpec(name="adam", dim=2, rule="adam", initializer=constant(0.0))
RATE = 0.25
IDS = range(1, 7)


class Worker:
    """A worker of `cluster.table`, `cluster.dense` and `ADAM`, whose rows all get the same gradient."""

    def __init__(
        self,
        cluster: InProcessCluster,
        index: int,
        num_workers: int,
        mode: Mode,
        settings: Settings,
        begun_behind: int = 0,
    ) -> None:
        self._cluster = cluster
        self.client = cluster.worker(index, num_workers, mode, settings)
        self._deduplicator = Deduplicator(cluster.placement)
        self.training = PserverTraining(self.client, self._deduplicator, mode, num_workers, begun_behind=begun_behind)

    def lookup(self, spec: TableSpec, ids: Sequence[int]) -> tuple[RowBatch, NDArray[np.int64]]:
        unique, (inverse,) = self._deduplicator.unique([np.array(ids, np.int64)], spec.salt)
        return RowBatch(spec, unique, np.full((len(unique.ids), spec.dim), np.nan, np.float32)), inverse

    def rows(self, spec: TableSpec | None = None) -> list[float]:
        """The first float of each row of `IDS`, as an evaluation sees them."""
        lookup, inverse = self.lookup(spec or self._cluster.table, IDS)
        self.training.pull([lookup])
        values: list[float] = lookup.values[inverse, 0].tolist()
        return values

    def update(
        self,
        gradient: float = 1.0,
        *,
        ids: Sequence[int] = IDS,
        spec: TableSpec | None = None,
        dense: float | None = None,
        num_examples: float = 1.0,
        position: str = "",
    ) -> list[NDArray[np.float32]]:
        """Returns the new values of the dense array, if it is trained."""
        lookup, _ = self.lookup(spec or self._cluster.table, ids)
        rows = [RowBatch(lookup.spec, lookup.unique, np.full(lookup.values.shape, gradient, np.float32), RATE)]
        values = [] if dense is None else [np.empty(10, np.float32)]
        of_dense = [DenseUpdate(self._cluster.dense, np.full(10, dense, np.float32), [out], RATE) for out in values]
        self.training.update(rows, of_dense, num_examples, None, position)
        return values

    def step(self, gradient: float, spec: TableSpec | None = None) -> float:
        """A whole step; the first float of the first row before it."""
        before = self.rows(spec)[0]
        self.update(gradient, spec=spec)
        return before

    def held(self) -> tuple[list[Progress], bool]:
        """How far it is, and whether pushes were held back meanwhile."""
        with self.training.quiesce(10.0) as held:
            return list(held.passed), held.holds_back

    def dense(self) -> list[float]:
        out = np.empty(10, np.float32)
        self.training.pull_dense(self._cluster.dense, out)
        values: list[float] = out.tolist()
        return values


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    cluster = InProcessCluster(2, [ADAM])
    yield cluster
    cluster.close()


def workers_of(
    cluster: InProcessCluster, num_workers: int, mode: Mode = SYNC_MODE, settings: Settings = QUICK
) -> list[Worker]:
    return [Worker(cluster, index, num_workers, mode, settings) for index in range(num_workers)]


def assign_zeros(cluster: InProcessCluster, worker: Worker) -> None:
    worker.client.assign_dense(cluster.dense, np.zeros(10, np.float32))


def adam_after(gradients: Sequence[float], first_t: int = 1) -> float:
    """A row of `ADAM` that began at 0, in float64."""
    row = mean = square = 0.0
    for t, gradient in enumerate(gradients, first_t):
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        row -= RATE * mean / (1 - 0.9**t) / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
    return row


# Async


@pytest.mark.parametrize("mode", [ASYNC_MODE, Mode(ASYNC, max_step_lag=3)], ids=str)
def test_in_async_the_number_of_examples_changes_nothing(cluster: InProcessCluster, mode: Mode) -> None:
    worker, _ = workers_of(cluster, 2, mode)
    assign_zeros(cluster, worker)
    worker.update(1.0, dense=1.0, num_examples=512)
    assert (worker.rows(), worker.dense()) == ([0.75] * 6, [-0.25] * 7 + [-0.5] * 3)


def test_an_update_returns_the_new_dense_values(cluster: InProcessCluster) -> None:
    (worker,) = workers_of(cluster, 1, ASYNC_MODE)
    assign_zeros(cluster, worker)
    for step in (1, 2):
        (values,) = worker.update(dense=1.0)
        assert values.tolist() == worker.dense() == [-0.25 * step] * 7 + [-0.5 * step] * 3


def test_in_async_the_steps_of_a_rule_are_those_of_the_worker(cluster: InProcessCluster) -> None:
    (worker,) = workers_of(cluster, 1, ASYNC_MODE)
    for gradient in (1.0, -0.5, 2.0):
        worker.update(gradient, spec=ADAM)
    np.testing.assert_allclose(worker.rows(ADAM), adam_after([1.0, -0.5, 2.0]), rtol=1e-5)


@pytest.mark.parametrize(("are_replaced", "first_t"), [(False, 7), (True, 3)])
def test_steps_of_a_rule_continue_from_the_pservers_count(
    cluster: InProcessCluster, are_replaced: bool, first_t: int
) -> None:
    (worker,) = workers_of(cluster, 1, ASYNC_MODE)
    worker.training.note_states([TableState("adam", 6, 0, False)])
    worker.training.note_states([TableState("adam", 2, 0, False)], are_replaced=are_replaced)
    worker.update(1.0, spec=ADAM)
    np.testing.assert_allclose(worker.rows(ADAM), adam_after([1.0], first_t), rtol=1e-5)


def test_in_async_leaving_waits_for_no_worker(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2, ASYNC_MODE)
    first.update(1.0)
    first.training.drain(leaves=True)
    assert second.rows() == [0.75] * 6


def test_after_drain_every_push_is_applied(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2, ASYNC_MODE)
    for _ in range(4):
        first.update(0.5)
    first.training.drain()
    assert second.rows() == [0.5] * 6


# Sync


def test_a_pull_advances_nothing(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2, SUM_MODE)
    for worker in (first, second):
        worker.update(1.0)
    assert [first.rows() for _ in range(5)] == [[0.5] * 6] * 5
    for worker in (second, first):
        worker.step(1.0)
    assert first.rows() == second.rows() == [0.0] * 6


def test_workers_that_left_rejoin_together(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster, 2, SUM_MODE)

    def work(worker: Worker, num_steps: int) -> list[float]:
        for _ in range(num_steps):
            worker.step(0.25)
        worker.training.drain(leaves=True)
        for _ in range(2):
            worker.step(0.5)
        return worker.rows()

    first, second = workers
    rows = in_threads(lambda: work(first, 4), lambda: work(second, 1))
    assert rows[0] == rows[1] == [1.0 - RATE * (5 * 0.25 + 2 * 2 * 0.5)] * 6


@pytest.mark.guarantee("A9")
def test_a_worker_in_the_place_of_another_makes_steps_once(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2, Mode(ASYNC, max_step_lag=4))
    second.update(1.0, position="a")
    first.update(1.0)
    first.update(1.0)
    in_threads(lambda: first.training.drain(leaves=True), lambda: second.training.drain(leaves=True))
    reported = second.training.progress()
    assert reported == Progress(1, "a", 2)
    second.update(1.0)
    second.training.drain()
    again = Worker(cluster, 1, 2, Mode(ASYNC, max_step_lag=4), QUICK, begun_behind=reported.pushed_step)
    for _ in range(2):
        again.update(1.0)
    again.training.drain()
    assert again.training.progress().pushed_step == 4
    assert first.rows() == [1.0 - RATE * (2 + 1 + 2)] * 6


def test_steps_of_a_worker_behind_others_at_a_barrier_count(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2, Mode(ASYNC, max_step_lag=4))
    second.update(1.0)
    for _ in range(3):
        first.update(1.0)
    in_threads(lambda: first.training.drain(leaves=True), lambda: second.training.drain(leaves=True))
    second.update(1.0)
    assert second.held() == ([Progress(2, "")], True)


@pytest.mark.guarantee("A9")
def test_a_worker_that_died_after_leave_leaves_no_batch_out(cluster: InProcessCluster) -> None:
    mode = Mode(ASYNC, max_step_lag=4)
    first, second = workers_of(cluster, 2, mode)
    second.update(1.0)
    reported = second.training.progress()
    for _ in range(3):
        first.update(1.0)
    in_threads(lambda: first.training.drain(leaves=True), lambda: second.training.drain(leaves=True))
    again = Worker(cluster, 1, 2, mode, QUICK, begun_behind=reported.pushed_step)
    for _ in range(3):
        again.update(1.0)
    again.training.drain()
    assert first.rows() == [1.0 - RATE * (3 + 1 + 3)] * 6


def test_a_push_without_a_pull_waits_for_no_worker(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2)
    assert in_threads(lambda: first.update(1.0)) == [[]]
    second.update(1.0)
    assert first.rows() == [0.75] * 6


# Interrupted, refused, at once


def test_a_worker_interrupted_at_a_barrier_trains_after_it(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers_of(cluster, 2, SUM_MODE)
    with monkeypatch.context() as interrupted:

        def rest() -> int:
            raise KeyboardInterrupt

        interrupted.setattr(first.client, "leave", rest)
        with pytest.raises(KeyboardInterrupt):
            first.training.drain(leaves=True)
    with pytest.raises(FleetSparseError, match=r"fleet\.barrier_worker"):
        first.update(1.0)
    in_threads(partial(first.training.drain, leaves=True), partial(second.training.drain, leaves=True))
    for worker in (first, second):
        worker.update(1.0)
    assert first.rows() == [0.5] * 6


@pytest.mark.parametrize("mode", [SUM_MODE, Mode(ASYNC, max_step_lag=2)], ids=str)
def test_a_worker_leaves_once_if_ctrl_c_ends_its_wait(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    first, second = workers_of(cluster, 2, mode)
    wait = IoLoop.wait

    def interrupted(io: IoLoop, call: Call, timeout_s: float = math.inf) -> None:
        if not call.is_push:
            return wait(io, call, timeout_s)
        monkeypatch.undo()
        call.is_abandoned = True
        raise KeyboardInterrupt

    monkeypatch.setattr(IoLoop, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.training.drain(leaves=True)
    second.update(1.0)
    in_threads(partial(first.training.drain, leaves=True), partial(second.training.drain, leaves=True))
    for worker in (first, second):
        worker.update(1.0)
    for worker in (first, second):
        worker.training.drain()
    assert first.rows() == [0.25] * 6


@pytest.mark.parametrize("dense", [None, 1.0], ids=["rows", "rows and dense"])
def test_a_step_whose_push_is_not_accepted_does_not_count(cluster: InProcessCluster, dense: float | None) -> None:
    (worker,) = workers_of(cluster, 1, ASYNC_MODE, replace(QUICK, max_inflight_pushes=1, deadline_s=0.5))
    assign_zeros(cluster, worker)
    cluster.channel.loses_request = lambda shard: True
    worker.update(1.0, position="a")
    with pytest.raises(ShardUnavailable):
        worker.update(1.0, position="b", dense=dense)
    assert worker.training.progress() == Progress(1, "a")


def test_a_push_interrupted_by_ctrl_c_counts(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = workers_of(cluster, 2, SUM_MODE)
    channel = cluster.channel  # the second worker's
    send = channel.send

    def interrupted(shard: int, parts: Sequence[Buffer]) -> bool:
        signal.raise_signal(signal.SIGINT)
        return send(shard, parts)

    with monkeypatch.context() as patch:
        patch.setattr(channel, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            second.update(1.0)
    first.update(1.0)
    for worker in (first, second):
        worker.update(1.0)
    assert first.rows() == [0.0] * 6  # two steps of two workers


def test_with_a_bound_training_goes_on_after_a_refused_push(cluster: InProcessCluster) -> None:
    (worker,) = workers_of(cluster, 1, Mode(ASYNC, max_step_lag=1))
    worker.update(float("nan"))
    for _ in range(2):  # each shard refused its part
        with pytest.raises(PushRefused):
            worker.training.drain()
    for _ in range(3):
        worker.update(1.0)
    assert worker.rows() == [0.25] * 6


def test_an_update_without_a_lookup_waits_for_the_last_step(cluster: InProcessCluster) -> None:
    workers = workers_of(cluster, 2, SUM_MODE)
    in_threads(*(lambda worker=worker: [worker.update(1 / 16) for _ in range(8)] for worker in workers))
    assert workers[0].rows() == [1.0 - 16 * RATE / 16] * 6


@pytest.mark.parametrize("mode", [SYNC_MODE, Mode(ASYNC, max_step_lag=50)])
def test_updates_of_several_threads_are_sent_in_order(cluster: InProcessCluster, mode: Mode) -> None:
    (worker,) = workers_of(cluster, 1, mode)
    in_threads(*(lambda: [worker.update(1 / 16) for _ in range(10)] for _ in range(4)))
    assert worker.rows() == [1.0 - 40 * RATE / 16] * 6


# QuiescePoint at a step boundary


@pytest.mark.parametrize("mode", [ASYNC_MODE, Mode(ASYNC, max_step_lag=5)], ids=str)
def test_a_quiesced_worker_pulls_and_pushes_afterwards(cluster: InProcessCluster, mode: Mode) -> None:
    first, second = workers_of(cluster, 2, mode)
    with first.training.quiesce(10.0):
        thread = threading.Thread(target=first.update, daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert in_threads(first.rows) == [second.rows()] == [[1.0] * 6]
    thread.join(20)
    first.training.drain()
    assert second.rows() == [0.75] * 6


def test_all_pushes_of_a_quiesced_worker_are_applied(cluster: InProcessCluster) -> None:
    (worker,) = workers_of(cluster, 1, ASYNC_MODE)
    lost = iter([True, True, False, True])
    cluster.channel.loses_request = lambda shard: next(lost, False)
    for _ in range(3):
        worker.update(0.5)
    with worker.training.quiesce(10.0):
        assert sum(shard.counters.num_pushed_rows for shard in cluster.shards) == 3 * 6


@pytest.mark.parametrize("mode", [ASYNC_MODE, Mode(ASYNC, max_step_lag=5), SYNC_MODE], ids=str)
def test_a_quiesced_worker_reports_its_position(cluster: InProcessCluster, mode: Mode) -> None:
    (worker,) = workers_of(cluster, 1, mode)
    assert worker.held() == ([Progress(0, None)], True)
    for batch in range(1, 8):
        worker.update(1 / 16, position=f"{batch}")
    assert worker.held() == ([Progress(7, "7")], True)


def test_a_worker_whose_push_waits_can_be_quiesced(cluster: InProcessCluster) -> None:
    """With lag 0 the new dense values come when all have pushed the step; the push is applied all the same."""
    first, second = workers_of(cluster, 2, Mode(ASYNC, max_step_lag=0))
    assign_zeros(cluster, first)
    thread = threading.Thread(target=lambda: first.update(1.0, dense=1.0), daemon=True)
    thread.start()
    while first.held()[0] != [Progress(1, "")]:
        assert thread.is_alive()
    assert thread.is_alive()
    second.update(1.0, dense=1.0)
    thread.join(20)
    assert not thread.is_alive()


def test_a_worker_that_waits_for_others_to_leave_can_be_quiesced(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2, Mode(ASYNC, max_step_lag=2))
    second.update(1.0, position="x")
    has_left = threading.Event()

    def observe(shard: int, request: Sequence[Buffer], reply: Sequence[Buffer]) -> Sequence[Buffer]:
        if decode(request, max_bytes=QUICK.max_frame_bytes).header.op is Op.LEAVE:
            has_left.set()
        return reply

    cluster.channel.changes_reply = observe  # of the second one
    thread = threading.Thread(target=partial(second.training.drain, leaves=True), daemon=True)
    thread.start()
    assert has_left.wait(20)
    assert second.held() == ([Progress(1, "x")], True)
    assert thread.is_alive()
    first.training.drain(leaves=True)
    thread.join(20)
    assert not thread.is_alive()


def test_earlier_errors_are_left_to_the_next_step(cluster: InProcessCluster) -> None:
    (worker,) = workers_of(cluster, 1, ASYNC_MODE)
    worker.update(float("nan"), ids=[1])
    assert worker.held() == ([Progress(1, "")], True)
    with pytest.raises(PushRefused):
        worker.update(1.0)


def test_pushes_not_applied_in_time_do_not_quiesce(cluster: InProcessCluster) -> None:
    (worker,) = workers_of(cluster, 1, ASYNC_MODE)
    cluster.channel.loses_request = lambda shard: True
    with pytest.raises(FleetSparseError, match=r"client: not done in 0\.\d s"), worker.training.quiesce(0.2):
        raise AssertionError
    cluster.channel.loses_request = lambda shard: False
    worker.update(1.0)
    assert worker.rows() == [0.75] * 6


def test_in_sync_pushes_are_not_held_back(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2, SUM_MODE)
    with first.training.quiesce(10.0) as held:
        assert not held.holds_back
        first.update(1.0)
        second.update(1.0)
        assert second.rows() == [0.5] * 6


def test_in_sync_the_coordinator_is_quiesced(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2, SUM_MODE)
    for worker in (first, second):
        worker.update(1.0, position="x")
    with first.training.quiesce(10.0, is_coordinator=True) as held:
        assert held == ([Progress(1, "x")], True)
        thread = threading.Thread(target=first.update, daemon=True)
        thread.start()
        second.update(1.0)
        thread.join(0.2)
        assert thread.is_alive()
        assert sum(shard.counters.num_pushed_rows for shard in cluster.shards) == 6
    thread.join(20)
    assert first.rows() == [0.0] * 6


def test_in_sync_a_worker_that_left_reports_the_jobs_steps(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2, SUM_MODE)

    def work(worker: Worker, num_steps: int) -> None:
        for step in range(1, num_steps + 1):
            worker.update(1 / 16, position=f"{step}")
        worker.training.drain(leaves=True)

    in_threads(lambda: work(first, 5), lambda: work(second, 2))
    assert first.held()[0][-2:] == [Progress(4, "4"), Progress(5, "5")]
    assert second.held()[0][-2:] == [Progress(2, "2"), Progress(5, "2")]
