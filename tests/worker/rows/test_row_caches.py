"""RowCaches in jobs of real clients and shards in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import ALL, ESTIMATE
from fleet_sparse.core.clip import BY_GLOBAL_NORM, Clip
from fleet_sparse.core.entries import SKETCH, Entry
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.kernels_cache import MAX_SLOTS
from fleet_sparse.core.kernels_copies import lag_class
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, LogFull, ProtocolError, PushRefused, ShardUnavailable
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Buffer, Frame
from fleet_sparse.worker.modes.step import StepClip
from fleet_sparse.worker.net.client import Pending
from fleet_sparse.worker.net.io_loop import IoLoop
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.net.table_client import ExtraBlock
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.cache_sizes import bytes_per_row, capacities_of, is_cached
from fleet_sparse.worker.rows.cached_table import CachedTable
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.row_batch import RowBatch
from fleet_sparse.worker.rows.table_exchange import NUM_LAG_CLASSES
from support.caching_workers import LOOSE, CountingJob, Worker, cluster_of, mode_of, no_room
from support.counted_updates import EVERY_ID, NUM_IDS
from support.in_process import QUICK, InProcessCluster
from support.successive import SuccessiveLookups
from support.threads import JOIN_S, in_threads
from support.waits import wait_until


def test_lags_of_refreshed_copies_are_counted_by_pserver() -> None:
    bound = RowBound(lag=4)
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", bound, 2, 0, max_held=0)
        first, second = job.workers
        read = first.read(job.spec, EVERY_ID)
        job.update(0, read)  # the rows enter
        for ids in (EVERY_ID, EVERY_ID[:7]):
            for _ in range(3):
                job.update(1, second.batch(job.spec, ids))
            assert (first.read(job.spec, ids).values[:, 1] >= 3).all()
        assert first.caches is not None
        lags = np.array(first.caches.stats()[job.spec.name].lags)
    few, _ = first.deduplicator.unique([EVERY_ID[:7]], job.spec.salt)
    three_behind = lag_class(3)
    assert lags[:, three_behind].tolist() == (read.unique.num_per_shard + few.num_per_shard).tolist()
    assert lags.sum() == lags[:, three_behind].sum() == 27


def test_classes_of_lags_are_powers_of_two() -> None:
    classes = [lag_class(lag) for lag in (0, 1, 2, 3, 4, 7, 8, 2**32 - 1)]
    assert classes == [0, 1, 2, 2, 3, 3, 4, NUM_LAG_CLASSES - 1]


@pytest.mark.parametrize(("kind", "steps_ahead"), [("sync", 1), ("lag", 2)])
def test_stats_are_read_while_a_pull_waits(kind: str, steps_ahead: int) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, kind, LOOSE, 2, 3)
        for _ in range(steps_ahead):
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
                for _ in range(steps_ahead):
                    job.update(0, job.read(0))
            waiting.result(JOIN_S)


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
        batch = worker.read(job.spec, EVERY_ID)
        with pytest.raises(PushRefused):
            worker.update(batch, np.full(batch.values.shape, np.nan, np.float32))
        np.testing.assert_array_equal(worker.evaluate(job.spec), before)


@pytest.mark.guarantee("S9")
@pytest.mark.parametrize("clip", [None, StepClip(Clip(BY_GLOBAL_NORM, norm=1.0), (True,))])
def test_a_gradient_that_is_not_finite_fails_the_step_of_all(clip: StepClip | None) -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "sync", LOOSE, 2, 3, max_held=None if clip is None else 0)
        batches = [worker.read(job.spec, EVERY_ID) for worker in job.workers]

        def fail(worker: Worker, batch: RowBatch, value: float) -> None:
            grads = np.full(batch.values.shape, value, np.float32)
            with pytest.raises(PushRefused):
                worker.training.update([batch._replace(values=grads, learning_rate=1.0)], [], 1.0, clip)
                worker.client.flush()

        in_threads(*map(partial(partial, fail), job.workers, batches, (1.0, np.nan)))


def test_a_batch_that_was_not_looked_up_is_trained() -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        for _ in range(10):
            job.step()
        worker = job.workers[0]
        batch = worker.batch(job.spec, EVERY_ID)
        job.update(0, batch)
        np.testing.assert_array_equal(worker.evaluate(job.spec)[:, 0], job.num_made[:, 0])


def test_rows_of_a_batch_that_was_looked_up_in_parts_enter() -> None:
    """As by the calls of a layer for several fields, whose gradients are one update."""
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        worker = job.workers[0]
        assert worker.caches is not None
        for _ in range(4):
            worker.read(job.spec, EVERY_ID[-2:])  # an evaluation, which nothing follows
            for ids in (EVERY_ID[:12], EVERY_ID[8:20]):
                batch = worker.read(job.spec, ids)
                np.testing.assert_array_equal(batch.values[:, 0], job.num_made[batch.unique.ids, 0])
            job.update(0, worker.batch(job.spec, EVERY_ID[:20]))
            np.testing.assert_array_equal(worker.evaluate(job.spec)[:, 0], job.num_made[:, 0])
        assert worker.caches.stats()[job.spec.name].rows == 20
        job.meet()
        np.testing.assert_array_equal(worker.evaluate(job.spec), job.num_made)


@pytest.mark.parametrize("admission", [ALL, ESTIMATE], ids=["all", "estimate"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.guarantee("H3")
def test_parts_of_a_batch_lose_no_update_in_a_full_cache(num_workers: int, admission: Any) -> None:
    """The slot that a row of one part would take may be that of a row of another part."""
    rng = np.random.default_rng(0)
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, num_workers, 3, max_rows=6, admission=admission)
        worker = job.workers[0]
        for _ in range(60):
            parts = [rng.choice(20, 4, replace=False).astype(np.int64) for _ in range(2)]
            for ids in parts:
                batch = worker.read(job.spec, ids)
                np.testing.assert_array_equal(batch.values[:, 0], job.num_made[batch.unique.ids, 0])
            job.update(0, worker.batch(job.spec, np.concatenate(parts)))
        assert worker.caches is not None
        counters = worker.caches.stats()[job.spec.name].counters
        assert min(counters.hit, counters.entered, counters.left) > 20
        job.meet()
        np.testing.assert_array_equal(worker.evaluate(job.spec), job.num_made)


def without_rows_of_copies(table_id: int, reply: Sequence[Buffer]) -> Sequence[Buffer]:
    """A reply whose answers about copies of a table lack the rows that follow."""
    frame = decode(reply, max_bytes=QUICK.max_frame_bytes)
    kept = [each for each in frame.blocks if each.table_id != table_id or "versions" not in each.copies]
    return encode(Frame(frame.header, kept)) if len(kept) < len(frame.blocks) else reply


def what_copies_are(worker: Worker) -> list[bytes]:
    """Copies, states, bases and counts of all tables."""
    assert worker.caches is not None
    assert worker.caches._tables is not None
    tables = [exchange.table for exchange in worker.caches._tables.values()]
    return [each.tobytes() for table in tables for each in (table._rows, table._states, table._bases, table._counts)]


@pytest.mark.parametrize("looks_ahead", [False, True], ids=["plain", "looking ahead"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_malformed_answer_of_a_later_table_changes_no_copy(
    monkeypatch: pytest.MonkeyPatch, kind: str, looks_ahead: bool
) -> None:
    """In async a worker that looks ahead asks about copies late."""
    with cluster_of(1) as cluster:
        specs, mode = [cluster.table, cluster.other], mode_of(kind, RowBound(lag=2))
        workers = [Worker(cluster, index, 2, specs, mode, max_held=0) for index in range(2)]
        channel, is_damaged = workers[0].channel, False
        deliver = channel.deliver

        def reply_of(parts: Sequence[Buffer]) -> Sequence[Buffer]:
            return without_rows_of_copies(cluster.other.table_id, parts) if is_damaged else parts

        channel.changes_reply = lambda shard, request, reply: reply_of(reply)
        monkeypatch.setattr(channel, "deliver", lambda shard, parts: deliver(shard, reply_of(parts)))
        lookups = [SuccessiveLookups(worker.deduplicator, specs) for worker in workers]
        coming: list[EarlyRows | None] = [None, None]
        ids = {spec.name: range(8) for spec in specs}

        def read(number: int) -> list[RowBatch]:
            announced = lookups[number].announce(ids, ids) if looks_ahead else None
            early, coming[number] = coming[number], announced
            batches = [lookup.rows for lookup in lookups[number].of(ids, early).values()]
            workers[number].training.prefetch(batches, early, announced)
            return batches

        def update(number: int, batches: list[RowBatch]) -> None:
            trained = [each._replace(values=np.ones_like(each.values), learning_rate=1.0) for each in batches]
            workers[number].training.update(trained, [], 1.0)

        for number_of_step in range(4):
            of_all = [read(number) for number in range(2)]
            is_damaged = number_of_step == 3  # the push has the next asks in it, where copies are asked about early
            for number, batches in enumerate(of_all):
                update(number, batches)
            for worker in workers:
                worker.client.flush()
        before = what_copies_are(workers[0])
        with pytest.raises(ProtocolError, match=r"table 'other': .* has 0 rows of ids with slack 254") as caught:
            read(0)
        assert caught.value.code is ErrorCode.MALFORMED
        assert what_copies_are(workers[0]) == before
        is_damaged, coming[0] = False, None
        assert [batch.values[0, 0] for batch in read(0)] == [1 - 8, 2 - 8]
        assert what_copies_are(workers[0]) != before


@pytest.mark.parametrize("lag", [30, 6])
@pytest.mark.guarantee("H3")
def test_a_step_with_a_wrong_dense_gradient_changes_no_copy(lag: int) -> None:
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", RowBound(lag=lag), 2, 3)
        worker, ids = job.workers[0], np.arange(4)
        worker.client.assign_dense(cluster.dense, np.zeros(10, np.float32))
        for number in range(7):
            batch = worker.read(job.spec, ids)
            np.testing.assert_array_equal(batch.values[:, 0], number)
            worker.update(batch, job.updates.grads(0, 4))
        batch = worker.read(job.spec, ids)._replace(values=job.updates.grads(0, 4), learning_rate=1.0)
        wrong = DenseUpdate(cluster.dense, np.full(10, np.nan, np.float32), [np.empty(10, np.float32)], 1.0)
        with pytest.raises(PushRefused):
            worker.training.update([batch], [wrong], 1.0)
        np.testing.assert_array_equal(worker.evaluate(job.spec, ids)[:, 0], 7)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("is_embedded", [False, True])
@pytest.mark.guarantee("H3")
def test_a_step_that_raised_an_earlier_error_is_repeated_once(is_embedded: bool, num_workers: int) -> None:
    with cluster_of(1, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, "async", LOOSE, num_workers, 3)
        worker, ids = job.workers[0], np.arange(4)
        for _ in range(2):
            worker.update(worker.read(job.spec, ids), job.updates.grads(0, 4))
        batch = worker.read(job.spec, ids)
        refused = worker.refused(job.spec, 19)
        worker.client.start_push([refused])
        wait_until(lambda: worker.client.num_failed_pushes > 0)
        with pytest.raises(PushRefused):
            worker.update(batch, job.updates.grads(0, 4))
        worker.update(batch, job.updates.grads(0, 4))
        np.testing.assert_array_equal(worker.evaluate(job.spec, ids)[:, 0], 3)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("is_embedded", [False, True])
@pytest.mark.guarantee("H3")
def test_an_error_that_comes_while_copies_are_trained_waits(
    is_embedded: bool, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = CachedTable.apply
    with cluster_of(1, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, "async", LOOSE, num_workers, 3)
        worker, ids = job.workers[0], np.arange(4)
        for _ in range(2):
            worker.update(worker.read(job.spec, ids), job.updates.grads(0, 4))
        batch = worker.read(job.spec, ids)
        refused = worker.refused(job.spec, 19)

        def trained_meanwhile(*arguments: Any) -> Any:
            monkeypatch.undo()
            worker.client.start_push([refused])
            wait_until(lambda: worker.client.num_failed_pushes > 0)
            return apply(*arguments)

        monkeypatch.setattr(CachedTable, "apply", trained_meanwhile)
        worker.update(batch, job.updates.grads(0, 4))
        with pytest.raises(PushRefused):
            worker.client.check_usable()
        np.testing.assert_array_equal(worker.evaluate(job.spec, ids)[:, 0], 3)


@pytest.mark.guarantee("H3")
def test_a_refused_push_is_lost_with_what_was_due_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seventh update of a row is due. The disk of the log has no room for it."""
    due, kept, both = np.array([1]), np.array([2]), np.array([1, 2])
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", RowBound(lag=12), 2, 3)
        worker = job.workers[0]
        for ids in (due, due, due, kept, kept, due, due, due):
            worker.update(worker.read(job.spec, ids), job.updates.grads(0, 1))
        assert worker.evaluate(job.spec, both)[:, 0].tolist() == [6, 2]
        assert job.workers[1].evaluate(job.spec, both)[:, 0].tolist() == [0, 0]
        batch = worker.read(job.spec, both)

        def refuse_once(*_: Any, **__: Any) -> None:
            monkeypatch.undo()
            raise Refusal(ErrorCode.LOG_FULL, "full")

        monkeypatch.setattr(cluster.shards[0], "commit", refuse_once)
        worker.update(batch, job.updates.grads(0, 2))
        with pytest.raises(LogFull):
            worker.client.flush()
        assert worker.read(job.spec, both).values[np.argsort(batch.unique.ids), 0].tolist() == [0, 3]
        worker.training.drain()
        assert job.workers[1].evaluate(job.spec, both)[:, 0].tolist() == [0, 3]


@pytest.mark.parametrize("is_embedded", [False, True])
@pytest.mark.guarantee("H3")
def test_a_row_that_left_with_a_lost_push_is_trained(is_embedded: bool) -> None:
    """The only worker sends whole rows: its push has no gradient of a row that it also has as a whole."""
    with cluster_of(1, is_embedded=is_embedded) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 1, 3, max_rows=2)
        worker = job.workers[0]
        assert worker.caches is not None
        for _ in range(3):
            job.update(0, worker.read(job.spec, np.array([1, 2])))
        batch = worker.read(job.spec, np.array([5]))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ShardUnavailable):
            patch.setattr(worker.client, "start_update", no_room)
            job.update(0, batch)
        job.num_made[5, 0] = 1  # its copy has what the step made
        for _ in range(2):
            batch = worker.read(job.spec, np.array([1, 2, 5]))  # one of the first two has left
            np.testing.assert_array_equal(batch.values, job.num_made[batch.unique.ids])
            job.update(0, batch)
        job.meet()
        np.testing.assert_array_equal(worker.evaluate(job.spec), job.num_made)


@pytest.fixture
def full_window() -> Iterator[tuple[CountingJob, RowBatch, EarlyRows]]:
    """A worker that has looked up a step whose update is due, and has no room for its push until the deadline."""
    settings = replace(QUICK, max_inflight_pushes=1, deadline_s=0.5)
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3, max_held=1, settings=settings)
        worker, ids = job.workers[0], {job.spec.name: [1, 2]}
        worker.update(worker.read(job.spec, np.array([1, 2])), job.updates.grads(0, 2))  # they enter, and hold it
        coming = job.lookups[0].announce(ids, ids)
        batch = worker.batch(job.spec, np.array([1, 2]))
        worker.training.prefetch([batch], None, coming)
        worker.client.flush()
        worker.channel.loses_request = lambda shard: True
        worker.client.push([worker.batch(job.spec, np.array([7]))._replace(values=job.updates.grads(0, 1))])
        yield job, batch, coming


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.guarantee("H3")
def test_due_updates_are_held_if_the_window_is_full(
    full_window: tuple[CountingJob, RowBatch, EarlyRows], looks_ahead: bool
) -> None:
    job, batch, coming = full_window
    worker = job.workers[0]
    if not looks_ahead:
        worker.training.abandon_early(coming)
    assert job.num_held == 2
    with pytest.raises(ShardUnavailable):
        worker.update(batch, job.updates.grads(0, 2))
    assert job.num_held == 2
    assert worker.training.progress().num_steps == 1


@pytest.mark.guarantee("H3")
def test_a_flush_that_finds_the_window_full_sends_nothing(
    full_window: tuple[CountingJob, RowBatch, EarlyRows],
) -> None:
    job, _, _ = full_window
    with pytest.raises(ShardUnavailable):
        job.workers[0].training.drain()
    assert job.num_held == 2


def test_ctrl_c_leaves_no_copy_with_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    refresh = CachedTable._refresh

    def interrupted(table: CachedTable, *answer: Any) -> None:
        monkeypatch.setattr(CachedTable, "_refresh", refresh)
        signal.raise_signal(signal.SIGINT)
        refresh(table, *answer)

    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", RowBound(lag=1), 2, 0, max_held=0)
        first, second = job.workers
        job.update(0, first.read(job.spec, EVERY_ID))
        for _ in range(3):
            job.update(1, second.batch(job.spec, EVERY_ID))
        monkeypatch.setattr(CachedTable, "_refresh", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.read(job.spec, EVERY_ID)
        assert (first.read(job.spec, EVERY_ID).values[:, 1] >= 2).all()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_training_goes_on_after_ctrl_c_in_a_wait_for_values(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Pending.wait
    with cluster_of(1) as cluster:
        job = CountingJob(cluster, "async", LOOSE, 2, 3)
        worker, ids = job.workers[0], {job.spec.name: [1, 2]}
        worker.client.assign_dense(cluster.dense, np.zeros(10, np.float32))
        coming = job.lookups[0].announce(ids, ids)
        batch = worker.batch(job.spec, np.array([1, 2]))
        worker.training.prefetch([batch], None, coming)
        worker.channel.loses_reply = lambda shard: True

        def interrupted(pending: Pending) -> list[ExtraBlock]:
            monkeypatch.undo()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(IoLoop, "wait", interrupt)
                return wait(pending)

        monkeypatch.setattr(Pending, "wait", interrupted)
        dense = DenseUpdate(cluster.dense, np.ones(10, np.float32), [np.empty(10, np.float32)], 1.0)
        trained = batch._replace(values=job.updates.grads(0, 2), learning_rate=1.0)
        with pytest.raises(KeyboardInterrupt):
            worker.training.update([trained], [dense], 1.0)
        worker.channel.loses_reply = lambda shard: False
        batch = job.lookups[0].of(ids, coming)[job.spec.name].rows
        worker.training.prefetch([batch], coming)
        assert batch.values[:, 0].tolist() == [1, 1]


def test_answers_may_come_in_several_frames() -> None:
    spec = TableSpec(name="wide", dim=8000, rule="adagrad", initializer=uniform(-1.0, 1.0), seed=1)
    with cluster_of(2) as cluster:
        for number in range(2):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
        worker = Worker(cluster, 0, 2, [spec], mode_of("async", LOOSE), max_rows=NUM_IDS)
        worker.client.max_frame_bytes = 150_000  # two rows with their states
        expected = worker.evaluate(spec)
        for _ in range(2):
            batch = worker.read(spec, EVERY_ID)
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


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_bytes_without_a_cache_are_both_ways_of_each_row(num_workers: int, looks_ahead: bool) -> None:
    with cluster_of(2) as cluster:
        job = CountingJob(cluster, "sync", LOOSE, num_workers, 3, looks_ahead=looks_ahead)
        for _ in range(30):
            job.step()
        caches = job.workers[0].caches
        assert caches is not None
        stats = caches.stats()[job.spec.name]
        assert stats.bytes_without == stats.counters.read * (16 + 8 * job.spec.dim) > stats.bytes_saved


def test_tables_whose_pushes_carry_statistics_are_not_cached() -> None:
    plain = TableSpec(name="C1", dim=4, rule="adagrad", initializer=constant(0.0))
    assert is_cached(plain)
    assert not is_cached(TableSpec(name="C1", dim=4, rule="adagrad", initializer=constant(0.0), has_show_click=True))
    assert not is_cached(TableSpec(name="C1", dim=4, rule="read_only", initializer=constant(0.0)))


@pytest.mark.parametrize(("dim", "expected"), [(3, False), (4, True), (5, True)])
def test_tables_from_the_smallest_dim_on_are_cached(dim: int, expected: bool) -> None:
    assert is_cached(TableSpec(name="C1", dim=dim, rule="adagrad", initializer=constant(0.0)), 4) is expected


NARROW, BROAD = (TableSpec(name=f"C{dim}", dim=dim, rule="sgd", initializer=constant(0.0)) for dim in (1, 2))


def workers_of_two_tables(
    cluster: InProcessCluster,
    min_dims: tuple[int, int],
    declared: Sequence[TableSpec] = (NARROW, BROAD),
    *,
    kind: str = "async",
    **options: Any,
) -> list[Worker]:
    """Two workers of a narrow table and a broad one, who cache tables from these dims on.

    Those that are not declared are so after the first step.
    """
    for number, shard in enumerate(cluster.shards):
        for spec in (NARROW, BROAD):
            cluster.run(number, partial(shard.add_table, spec))
    mode = mode_of(kind, LOOSE)
    return [
        Worker(cluster, index, 2, list(declared), mode, min_dim=min_dim, **options)
        for index, min_dim in enumerate(min_dims)
    ]


def update_with_ones(worker: Worker, ids: NDArray[np.int64], specs: Sequence[TableSpec] = (NARROW, BROAD)) -> None:
    """Trains the rows of tables by a gradient of 1, at a rate of 1."""
    batches = [worker.batch(spec, ids) for spec in specs]
    worker.training.prefetch(batches)
    grads = [each._replace(values=np.ones_like(each.values), learning_rate=1.0) for each in batches]
    worker.training.update(grads, [], 1.0)
    worker.client.flush()


def test_a_table_that_is_not_cached_has_what_others_pushed() -> None:
    ids = np.arange(6)
    with cluster_of(2) as cluster:
        own, other = workers_of_two_tables(cluster, (2, 2))
        for worker in (own, other, other):
            update_with_ones(worker, ids)
        np.testing.assert_array_equal(own.read(NARROW, ids).values, -3)


@pytest.mark.guarantee("H6")
def test_in_sync_all_but_cached_rows_have_every_step() -> None:
    ids, values, num_lacked = np.arange(6), np.zeros((2, 10), np.float32), 0
    with cluster_of(2) as cluster:
        workers = workers_of_two_tables(cluster, (2, 2), kind="sync")
        workers[0].client.assign_dense(cluster.dense, np.zeros(10, np.float32))
        for number in range(12):
            of_workers = [[worker.batch(spec, ids) for spec in (NARROW, BROAD)] for worker in workers]
            for worker, batches in zip(workers, of_workers, strict=True):
                worker.training.prefetch(batches)
                np.testing.assert_array_equal(batches[0].values, -2 * number)
                num_lacked += int((batches[1].values != -2 * number).sum())

            def update(index: int, batches: list[RowBatch]) -> None:
                grads = [each._replace(values=np.ones_like(each.values), learning_rate=1.0) for each in batches]
                dense = DenseUpdate(cluster.dense, np.ones(10, np.float32), [values[index]], 1.0)
                workers[index].training.update(grads, [dense], 1.0)

            in_threads(*(partial(update, index, batches) for index, batches in enumerate(of_workers)))
            np.testing.assert_array_equal(values, np.tile([-2 * number - 2] * 7 + [-4 * number - 4] * 3, (2, 1)))
    assert num_lacked > 0


def test_stats_have_the_tables_that_are_cached() -> None:
    with cluster_of(1) as cluster:
        worker = workers_of_two_tables(cluster, (2, 2))[0]
        update_with_ones(worker, np.arange(6))
        assert worker.caches is not None
        assert list(worker.caches.stats()) == ["C2"]


@pytest.mark.guarantee("H10")
def test_an_evaluation_before_the_first_step_makes_no_cache() -> None:
    with cluster_of(1) as cluster:
        worker = workers_of_two_tables(cluster, (1, 1))[0]
        assert worker.caches is not None
        worker.evaluate(NARROW)
        assert worker.caches.stats() == {}


@pytest.mark.parametrize("min_dims", [(1, 1), (2, 2), (2, 1)], ids=str)
def test_the_smallest_dim_changes_no_weight_of_a_gradient(min_dims: tuple[int, int]) -> None:
    ids = np.arange(6)
    with cluster_of(1) as cluster:
        workers = workers_of_two_tables(cluster, min_dims, merge="avg", max_held=0)
        for worker in workers:
            update_with_ones(worker, ids)
        np.testing.assert_array_equal(workers[0].evaluate(NARROW, ids), -1)


def test_gradients_of_tables_declared_late_weigh_the_same() -> None:
    ids = np.arange(6)
    with cluster_of(1) as cluster:
        workers = workers_of_two_tables(cluster, (1, 1), [NARROW], merge="avg", max_held=0)
        for spec in (NARROW, BROAD):
            for worker in workers:
                update_with_ones(worker, ids, [spec])
        assert workers[0].caches is not None
        assert list(workers[0].caches.stats()) == [NARROW.name]
        np.testing.assert_array_equal(workers[0].evaluate(BROAD, ids), -1)


def test_a_worker_says_that_no_table_is_cached(caplog: pytest.LogCaptureFixture) -> None:
    with cluster_of(1) as cluster, caplog.at_level("WARNING", "fleet_sparse.worker.rows.row_caches"):
        update_with_ones(workers_of_two_tables(cluster, (3, 3))[0], np.arange(6))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


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
    row_bytes = bytes_per_row(large, job)
    assert capacities_of([large, small], job, 110 * row_bytes) == {"large": 100, "small": 10}
    assert capacities_of([large, small], job, 110 * row_bytes, 20) == {"large": 20, "small": 10}


def test_a_cache_has_no_more_rows_than_its_index_can() -> None:
    spec = TableSpec(name="C1", dim=4, rule="sgd", initializer=constant(0.0))
    assert capacities_of([spec], CacheJob(LOOSE, 2, 0), 1 << 50) == {"C1": MAX_SLOTS}


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_a_copy_takes_no_more_memory_than_promised(rule: str) -> None:
    spec = TableSpec(name="C1", dim=4, rule=rule, initializer=constant(0.0))
    for num_workers in (1, 2):
        job = CacheJob(LOOSE, num_workers, 0)
        for capacity in (1000, 1500, 4095, 4096):
            table = CachedTable(spec, capacity, job)
            assert table.num_bytes <= 1.05 * capacity * bytes_per_row(spec, job)
