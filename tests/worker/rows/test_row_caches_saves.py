"""Row caches at evaluations, saves, barriers, loads and shrinks, while workers wait for others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded_client import EmbeddedClient
from fleet_sparse.errors import ErrorCode, FleetSparseError, LogFull, PushRefused, ShardUnavailable
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.client import Pending
from fleet_sparse.worker.net.deferred_interrupt import DeferredInterrupt
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.net.table_client import ExtraBlock
from fleet_sparse.worker.rows.row_caches import RowCaches
from support.caching_workers import KINDS, LOOSE, CountingJob, Worker, cluster_of, mode_of, no_room
from support.counted_updates import EVERY_ID, NUM_IDS
from support.cow_views import all_rows
from support.in_process import InProcessCluster
from support.saves import store_of
from support.threads import JOIN_S, in_threads
from support.waits import wait_until


def save(training: PserverTraining) -> None:
    with training.quiesce(10.0):
        pass


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
def test_a_save_has_what_was_held() -> None:
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
        refused = worker.refused(job.spec)
        worker.client.start_update([refused], [])
        wait_until(lambda: worker.client.num_failed_pushes > 0)
        assert worker.caches is not None
        assert worker.caches.num_held > 0
        with worker.training.quiesce(10.0), job.workers[1].training.quiesce(10.0):
            assert job.num_held == 0
        with pytest.raises(PushRefused):
            worker.client.flush()
        plain = Worker(cluster, 0, 1, [job.spec], Mode())
        np.testing.assert_array_equal(plain.evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H8")
@pytest.mark.parametrize("end", [save, PserverTraining.end_pass, PserverTraining.drain])
def test_the_only_worker_sends_again_what_a_full_disk_refused(
    end: Callable[[PserverTraining], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 1, 3)
        for _ in range(20):
            job.step()
        worker = job.workers[0]

        def refuse_once(*_: Any, **__: Any) -> None:
            monkeypatch.undo()
            raise Refusal(ErrorCode.LOG_FULL, "full")

        monkeypatch.setattr(cluster.shards[0], "commit", refuse_once)
        with pytest.raises(LogFull):
            worker.training.drain()
        end(worker.training)
        worker.client.flush()
        plain = Worker(cluster, 0, 1, [job.spec], Mode())
        np.testing.assert_array_equal(plain.evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize("is_embedded", [False, True])
@pytest.mark.parametrize("num_between", [0, 3])
def test_the_only_worker_repeats_rows_of_a_refused_push(
    is_embedded: bool, num_between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster_of(1, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 1, 3, max_rows=2)
        worker = job.workers[0]
        first, second = np.array([1, 2]), np.array([3, 4])
        for ids in (first, first, first, *(num_between * (second, first))):
            job.update(0, worker.read(job.spec, ids))
        batch = worker.read(job.spec, second)

        def refuse_once(*_: Any, **__: Any) -> None:
            monkeypatch.undo()
            raise Refusal(ErrorCode.LOG_FULL, "full")

        monkeypatch.setattr(cluster.shards[0], "commit", refuse_once)
        with pytest.raises(LogFull):
            job.update(0, batch)  # the first two leave
        job.updates.note(0, batch.unique.ids)  # what their copies hold
        for ids in (first, second, first):
            batch = worker.read(job.spec, ids)
            np.testing.assert_array_equal(batch.values, job.num_made[batch.unique.ids])
            job.update(0, batch)
        worker.training.drain()
        np.testing.assert_array_equal(worker.evaluate(job.spec), job.num_made)
        assert worker.caches is not None
        assert worker.caches.num_held == 0


@pytest.mark.parametrize("is_embedded", [False, True])
def test_rows_that_left_are_forgotten_once_they_are_applied(is_embedded: bool) -> None:
    with cluster_of(2, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 1, 3, max_rows=2)
        for _ in range(50):
            job.step()
        assert job.workers[0].caches is not None
        (exchange,) = (job.workers[0].caches._tables or {}).values()
        assert 1 <= exchange.table.num_unacked <= 2  # the newest pushes


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
        refused = worker.refused(uncached)
        worker.caches.start_update([refused], [])  # and pulls rows of the next step that have no copies
        wait_until(lambda: worker.client.num_failed_pushes > 0)
        assert worker.caches.num_held > 0
        with worker.training.quiesce(10.0), job.workers[1].training.quiesce(10.0):
            assert job.num_held == 0
        with pytest.raises(PushRefused):
            worker.read(job.spec, np.array([1]))
        plain = Worker(cluster, 0, 1, [job.spec], Mode())
        np.testing.assert_array_equal(plain.evaluate(job.spec), job.num_made)


@pytest.mark.parametrize("end", [PserverTraining.end_pass, PserverTraining.drain, save])
@pytest.mark.parametrize("kind", ["sync", "lag"])
@pytest.mark.parametrize("is_embedded", [False, True])
def test_a_flush_in_parts_ends_although_one_is_refused(
    is_embedded: bool, kind: str, end: Callable[[PserverTraining], None]
) -> None:
    with cluster_of(1, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, kind, LOOSE, 1, 3)
        worker = job.workers[0]
        assert worker.caches is not None
        worker.caches._max_part_bytes = 100
        for _ in range(2):  # copies become infinite, which a pserver refuses
            batch = worker.read(job.spec, EVERY_ID)
            worker.update(batch, np.full(batch.values.shape, -3e38, np.float32))
        with pytest.raises(FleetSparseError):
            end(worker.training)
            worker.client.flush()
        assert 1 <= worker.client.num_failed_pushes <= 2 * worker.caches.num_flushes  # refused, or not accepted


def test_a_save_drops_early_rows_of_a_restarted_pserver(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3, looks_ahead=True, max_held=0)
        worker, ids = job.workers[0], {job.spec.name: [1, 2]}
        assert worker.caches is not None
        worker.training.prefetch([worker.batch(job.spec, np.array([1, 2]))], None, job.lookups[0].announce(ids, ids))
        worker.update(worker.batch(job.spec, np.array([1, 2])), job.updates.grads(0, 2))
        assert worker.caches._ahead is not None
        monkeypatch.setattr(type(worker.client), "num_rejoins", 1)
        save(worker.training)
        assert worker.caches._ahead is None


@pytest.mark.guarantee("H7")
@pytest.mark.parametrize("num_steps", [0, 5], ids=["first push", "later push"])
def test_a_barrier_sends_updates_of_a_push_that_was_not_accepted(num_steps: int) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "sync", LOOSE, 2, 3)
        for _ in range(num_steps):
            job.step()
        job.meet()
        worker, ids = job.workers[0], np.arange(4)
        batch = worker.read(job.spec, ids)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ShardUnavailable):
            patch.setattr(worker.client, "start_update", no_room)
            worker.update(batch, job.updates.grads(0, 4))
        assert job.num_held > 0
        job.meet()
        assert job.num_held == 0


def test_ctrl_c_waits_while_others_have_the_caches() -> None:
    """The main thread waits for other workers, and then for a save, in another thread, that flushes the caches."""
    with cluster_of(1) as cluster, ThreadPoolExecutor(1) as threads:
        caches = CountingJob(cluster, "lag", LOOSE, 2, 3).workers[0].caches
        assert caches is not None
        is_flushing, flushes, main_thread = threading.Event(), list[Future[None]](), threading.get_ident()

        def flush() -> None:
            with caches._lock:
                is_flushing.set()
                wait_until(lambda: (block := DeferredInterrupt._innermost) is not None and not block.is_pending)
                block = DeferredInterrupt._innermost
                assert block is not None
                signal.pthread_kill(main_thread, signal.SIGINT)
                wait_until(lambda: block.is_pending)

        def wait() -> None:
            flushes.append(threads.submit(flush))
            assert is_flushing.wait(JOIN_S)

        with pytest.raises(KeyboardInterrupt), caches._lock:
            caches._waited(wait)
        flushes[0].result(JOIN_S)


def test_early_rows_are_abandoned_while_others_have_the_caches() -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3, looks_ahead=True)
        worker, ids = job.workers[0], {job.spec.name: [1, 2]}
        assert worker.caches is not None
        coming = job.lookups[0].announce(ids, ids)
        batch = worker.batch(job.spec, np.array([1, 2]))
        worker.training.prefetch([batch], None, coming)
        with worker.caches._lock:
            in_threads(partial(worker.training.abandon_early, coming))
        num_pulled = worker.client.num_pulled_rows
        worker.update(batch, job.updates.grads(0, 2))
        assert worker.caches._ahead is None
        assert worker.client.num_pulled_rows == num_pulled


@pytest.mark.parametrize("is_embedded", [False, True])
def test_held_updates_stay_when_the_job_has_ended(is_embedded: bool) -> None:
    with cluster_of(1, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 1, 3)
        job.step()
        worker = job.workers[0]
        num_held = job.num_held
        if isinstance(worker.client, EmbeddedClient):
            worker.client.end(FleetSparseError("the job has ended"))
        else:
            worker.client.fail(0, FleetSparseError("shard 0 is gone"))
            wait_until(lambda: worker.client._io.links[0].failure is not None)
        with pytest.raises(FleetSparseError):
            worker.training.end_pass()
        assert job.num_held == num_held > 0


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


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_save_in_a_wait_for_dense_values_loses_none(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Pending.wait
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, num_workers, 3)
        worker, ids = job.workers[0], {job.spec.name: [1, 2]}
        worker.client.assign_dense(cluster.dense, np.zeros(10, np.float32))
        coming = job.lookups[0].announce(ids, ids)
        batch = worker.batch(job.spec, np.array([1, 2]))
        worker.training.prefetch([batch], None, coming)

        def saved_first(pending: Pending) -> list[ExtraBlock]:
            monkeypatch.undo()
            in_threads(partial(save, worker.training))
            return wait(pending)

        monkeypatch.setattr(Pending, "wait", saved_first)
        values = np.full(10, np.nan, np.float32)
        trained = batch._replace(values=job.updates.grads(0, 2), learning_rate=1.0)
        worker.training.update([trained], [DenseUpdate(cluster.dense, np.ones(10, np.float32), [values], 1.0)], 1.0)
        assert (values < 0).all()
        assert job.num_held == 0
        batch = job.lookups[0].of(ids, coming)[job.spec.name].rows
        worker.training.prefetch([batch], coming)
        assert batch.values[:, 0].tolist() == [1, 1]


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
        batch = worker.batch(job.spec, EVERY_ID)
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
        assert dead.caches is not None
        num_held = dead.caches.num_held
        dead.client.abandon()
        for _ in range(25):
            job.update(0, job.read(0))
        survivor.training.drain(leaves=True)
        lost = job.num_made - survivor.evaluate(job.spec)
        assert not lost[:, 0].any()
        assert lost.min() == 0
        assert np.count_nonzero(lost[:, 1]) == num_held > 0


@pytest.mark.guarantee("H9")
def test_another_process_takes_the_place_of_a_dead_worker() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3, max_rows=12)
        for _ in range(25):
            job.step()
        job.workers[1].client.abandon()
        job.workers[1] = Worker(cluster, 1, 2, [job.spec], mode_of("async", LOOSE), max_rows=12)
        job.num_made[:, 1] = job.workers[1].evaluate(job.spec)[:, 1]  # without what the dead one held
        for _ in range(25):
            job.step()
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H1")
def test_a_copy_is_within_the_bound_behind_a_restart() -> None:
    """A pserver that was started again has no clocks: a new one soon is as large as the version of an old copy."""
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", RowBound(lag=30, share=None), 2, 3, max_held=0)
        ids = np.array([1])

        def train(index: int, num_updates: int) -> None:
            for _ in range(num_updates):
                job.update(index, job.workers[index].read(job.spec, ids))

        train(0, 12)
        train(1, 20)
        cluster.run(0, store_of(cluster.shards[0], job.spec).drop_clocks)
        for worker in job.workers:
            worker.client._io.num_rejoins += 1
        train(1, 13)
        batch = job.workers[0].read(job.spec, ids)
        job.updates.check(0, ids, batch.values)


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
@pytest.mark.parametrize("max_held", [None, 0])
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_the_only_worker_reads_rows_anew_after_a_shrink(
    kind: str, max_held: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trained_alone(monkeypatch, kind, max_held) as (cluster, job):
        shrink_all(cluster)
        job.num_made[:] = 0
        for _ in range(5):
            job.step()
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H11")
def test_rows_removed_before_a_restart_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with trained_alone(monkeypatch) as (cluster, job):
        shrink_all(cluster)
        job.num_made[:] = 0
        job.workers[0].client._io.num_rejoins += 1  # with all pushes
        for _ in range(5):
            job.step()
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H11")
def test_the_only_worker_asks_about_a_copy_once_after_a_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    with trained_alone(monkeypatch) as (cluster, job):
        shrink_all(cluster)
        job.num_made[:] = 0
        for _ in range(5):
            job.step()
            job.meet()  # nothing is held
        caches = job.workers[0].caches
        assert caches is not None
        assert caches.stats()[job.spec.name].counters.asked == NUM_IDS // 2


@pytest.mark.guarantee("H11")
def test_what_the_only_worker_holds_outlasts_a_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    with trained_alone(monkeypatch) as (cluster, job):
        in_steps_of_half(job, 1, monkeypatch)
        assert job.num_held == NUM_IDS // 2
        shrink_all(cluster)
        for _ in range(5):
            job.step()
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@pytest.mark.guarantee("H3")
def test_an_update_of_rows_read_before_a_shrink_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with trained_alone(monkeypatch) as (cluster, job):
        batches = iter([EVERY_ID[: NUM_IDS // 2], EVERY_ID[NUM_IDS // 2 :]])
        monkeypatch.setattr(job.updates, "batch", lambda: next(batches, EVERY_ID))
        before = job.read(0)
        shrink_all(cluster)
        entering = job.read(0)
        for begun in (before, entering):
            job.update(0, begun)
        job.step()
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)


@contextmanager
def trained_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str = "async", max_held: int | None = None
) -> Iterator[tuple[InProcessCluster, CountingJob]]:
    """A job of one worker that has trained half of the rows and holds nothing."""
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, kind, LOOSE, 1, 3, max_held=max_held)
        in_steps_of_half(job, 30, monkeypatch)
        job.meet()
        yield cluster, job


def in_steps_of_half(job: CountingJob, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs steps whose batches have the first half of the ids; those of later steps have all."""
    with monkeypatch.context() as half:
        half.setattr(job.updates, "batch", lambda: EVERY_ID[: NUM_IDS // 2])
        for _ in range(num_steps):
            job.step()
    monkeypatch.setattr(job.updates, "batch", lambda: EVERY_ID)


def shrink_all(cluster: InProcessCluster) -> None:
    """Removes all rows."""
    for number, shard in enumerate(cluster.shards):
        cluster.run(number, partial(shard.shrink, [Criterion("min_norm", 1e9)]))


@pytest.mark.guarantee("H11")
@pytest.mark.parametrize("saves", [False, True])
def test_rows_removed_while_a_worker_waits_are_read_anew(monkeypatch: pytest.MonkeyPatch, saves: bool) -> None:
    with cluster_of(2) as cluster:
        bound = RowBound(lag=3)  # no copy is leased
        job = CountingJob(cluster, "lag", bound, 2, 3, max_held=None if saves else 0)
        batches = iter([EVERY_ID, EVERY_ID[NUM_IDS // 2 :]])
        monkeypatch.setattr(job.updates, "batch", lambda: next(batches, EVERY_ID))
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
                # The row that is inserted again has, with its first update, the clock of the copies of the removed row.
                for number, shard in enumerate(cluster.shards):
                    cluster.run(number, partial(shard.shrink, [Criterion("min_norm", 1e9)]))
                job.num_made[:] = 0
            finally:
                for _ in range(2):
                    job.update(0, job.read(0))
            job.update(1, waiting.result(JOIN_S))
        job.meet()
        np.testing.assert_array_equal(job.workers[0].evaluate(job.spec), job.num_made)
