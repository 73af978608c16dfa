"""Rows of the next step that no copy is made of: pulled before the push of the present one, with exact results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.cache_policies import ALL, ESTIMATE, SECOND, Admission
from fleet_sparse.core.clip import BY_GLOBAL_NORM, Clip
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.frame_format import Action, Block
from fleet_sparse.wire.row_dtype import RowDtype
from fleet_sparse.worker.modes.step import StepClip
from fleet_sparse.worker.net.table_client import ExtraBlock
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.pulled_early import PulledEarly
from fleet_sparse.worker.rows.row_batch import RowBatch
from fleet_sparse.worker.rows.row_caches import RowCaches
from support.caching_workers import KINDS, LOOSE, Worker, cluster_of, mode_of
from support.in_process import InProcessCluster
from support.successive import SuccessiveLookups
from support.threads import in_threads

CACHED = TableSpec(name="cached", dim=2, rule="sgd", initializer=constant(0.0))
UNCACHED = TableSpec(name="uncached", dim=2, rule="sgd", initializer=constant(0.0))
HOT = [0, 1]
NUM_WARM_UP = 8


class AheadWorker:
    """A worker that looks ahead; its cache of one of two tables has room for two rows. It counts in its own column."""

    def __init__(
        self, cluster: InProcessCluster, index: int, num_workers: int, kind: str, options: dict[str, Any]
    ) -> None:
        mode = mode_of(kind, LOOSE)
        self.index = index
        self.worker = Worker(cluster, index, num_workers, [CACHED], mode, max_rows=len(HOT), **options)
        self.lookups = SuccessiveLookups(self.worker.deduplicator, [CACHED, UNCACHED])
        assert self.worker.caches is not None
        self.caches = self.worker.caches

    @property
    def pulled_early(self) -> PulledEarly | None:
        return self.caches._pulled_early

    def begin(
        self, ids: Sequence[int], coming: Sequence[int], early: EarlyRows | None = None
    ) -> tuple[list[RowBatch], EarlyRows]:
        """Reads the rows of a step of both tables, and announces those of the next one."""
        of_both, next_of_both = ({spec.name: each for spec in (CACHED, UNCACHED)} for each in (ids, coming))
        announced = self.lookups.announce(next_of_both, of_both)
        batches = [each.rows for each in self.lookups.of(of_both, early).values()]
        self.worker.training.prefetch(batches, early, announced)
        return batches, announced

    def end(self, batches: Sequence[RowBatch], clip: StepClip | None = None) -> None:
        """Adds 1 to the worker's own value of each row."""
        pushed = []
        for batch in batches:
            grads = np.zeros_like(batch.values)
            grads[:, self.index] = -1
            pushed.append(batch._replace(values=grads, learning_rate=1.0))
        self.worker.training.update(pushed, [], 1.0, clip)


def ahead_workers(
    cluster: InProcessCluster, num_workers: int, kind: str, admission: Admission = ESTIMATE, **options: Any
) -> list[AheadWorker]:
    """Workers whose caches are full of the hot rows, which they have trained for some steps."""
    for number in range(len(cluster.shards)):
        for spec in (CACHED, UNCACHED):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
    options["admission"] = admission
    workers = [AheadWorker(cluster, index, num_workers, kind, options) for index in range(num_workers)]
    for _ in range(NUM_WARM_UP):
        steps = [(worker, worker.begin(HOT, HOT)) for worker in workers]
        in_threads(*(partial(worker.end, batches) for worker, (batches, _) in steps))
        for worker, (_, coming) in steps:
            worker.worker.training.abandon_early(coming)
    return workers


def counts_of(batches: Sequence[RowBatch], ids: Sequence[int], worker: int = 0) -> list[list[float]]:
    """Returns, by table, what rows have of a worker's updates."""
    return [[batch.values[batch.unique.ids.tolist().index(each), worker] for each in ids] for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_copy_are_pulled_before_the_push(kind: str) -> None:
    with cluster_of(2) as cluster:
        (worker,) = ahead_workers(cluster, 1, kind)
        begun = worker.worker.client.num_pulled_rows
        batches, coming = worker.begin(HOT, [1, 5, 6])
        assert worker.pulled_early is not None
        found = {name: {*table.rows.unique.ids.tolist()} for name, table in worker.pulled_early.tables.items()}
        assert found == {CACHED.name: {5, 6}, UNCACHED.name: {5, 6}}
        worker.end(batches)
        batches, _ = worker.begin([1, 5, 6], HOT, coming)
        assert counts_of(batches, [1, 5, 6]) == [[NUM_WARM_UP + 1, 0, 0]] * 2
        # All rows of the table without a cache, with the one of the next step; of the other one those without a copy.
        assert worker.worker.client.num_pulled_rows - begun == (2 + 3 + 1) + 2


@pytest.mark.parametrize("num_shards", [1, 2])
def test_early_rows_have_what_others_changed_in_the_step(num_shards: int) -> None:
    with cluster_of(num_shards) as cluster:
        first, second = ahead_workers(cluster, 2, "sync")
        (of_first, coming), (of_second, _) = first.begin(HOT, [0, 5, 6]), second.begin([5], HOT)
        first.end(of_first)
        second.end(of_second)
        (of_first, _), (of_second, _) = first.begin([0, 5, 6], HOT, coming), second.begin([7], HOT)
        assert counts_of(of_first, [5, 6], worker=1) == [[1, 0]] * 2
        assert counts_of(of_first, [0, 5, 6]) == [[NUM_WARM_UP + 1, 0, 0]] * 2
        first.end(of_first)
        second.end(of_second)


def test_early_rows_of_another_dim_are_refused() -> None:
    ids = np.array([5])
    rows = np.ones((1, 1), RowDtype.FLOAT32.in_frames)
    changed = Block(Action.ROWS, UNCACHED.table_id, 0, 1, 1, ids, rows, dtype=RowDtype.FLOAT32)
    with cluster_of(1) as cluster:
        (worker,) = ahead_workers(cluster, 1, "async")
        worker.begin(HOT, [5, 6])
        assert worker.pulled_early is not None
        early, batch = worker.pulled_early.tables[UNCACHED.name], worker.worker.batch(UNCACHED, np.array([5, 6]))
        with pytest.raises(ProtocolError, match=r"dim 1.* dim 2") as caught:
            early.fill(batch, [ExtraBlock(0, changed)], worker.worker.deduplicator)
        assert caught.value.code == ErrorCode.MALFORMED


@pytest.mark.parametrize("kind", KINDS)
def test_early_rows_of_several_workers_have_all_own_updates(kind: str) -> None:
    steps = [HOT, [0, 5, 6], [5, 7], [1, 6], [5, 6], HOT]
    with cluster_of(2) as cluster:
        workers = ahead_workers(cluster, 2, kind)
        early: list[EarlyRows | None] = [None, None]
        for number, (ids, coming) in enumerate(pairwise(steps)):
            own = [NUM_WARM_UP * (each in HOT) + sum(each in before for before in steps[:number]) for each in ids]
            begun = []
            for worker in workers:
                batches, early[worker.index] = worker.begin(ids, coming, early[worker.index])
                assert counts_of(batches, ids, worker.index) == [own] * 2
                begun.append(partial(worker.end, batches))
            assert all(worker.pulled_early for worker in workers)
            in_threads(*begun)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_early_rows_are_dropped_if_another_batch_is_pushed(kind: str) -> None:
    with cluster_of(2) as cluster:
        (worker,) = ahead_workers(cluster, 1, kind)
        _, coming = worker.begin(HOT, [5, 6])
        worker.end([worker.worker.batch(spec, np.array([5])) for spec in (CACHED, UNCACHED)])
        batches, _ = worker.begin([5, 6], HOT, coming)
        assert counts_of(batches, [5, 6]) == [[1, 0]] * 2


@pytest.mark.parametrize("admission", [ALL, SECOND])
def test_no_row_is_pulled_early_where_many_enter(admission: Admission) -> None:
    with cluster_of(2) as cluster:
        (worker,) = ahead_workers(cluster, 1, "async", admission)
        worker.begin(HOT, [1, 5, 6])
        assert worker.pulled_early is not None
        assert [*worker.pulled_early.tables] == [UNCACHED.name]


def test_no_row_is_pulled_early_for_a_cache_with_room() -> None:
    with cluster_of(2) as cluster:
        (worker,) = ahead_workers(cluster, 1, "async")
        worker.caches.clear()
        worker.begin(HOT, [1, 5, 6])
        assert worker.pulled_early is not None
        assert [*worker.pulled_early.tables] == [UNCACHED.name]


@pytest.mark.parametrize(
    "change",
    [RowCaches.clear, RowCaches.drop_ahead, lambda caches: caches.start_flush({CACHED.name: NUM_WARM_UP})],
    ids=["load", "barrier", "flush"],
)
def test_rows_that_were_pulled_before_a_change_are_dropped(change: Callable[[RowCaches], object]) -> None:
    with cluster_of(2) as cluster:
        (worker,) = ahead_workers(cluster, 1, "async")
        batches, coming = worker.begin(HOT, [5, 6])
        assert worker.pulled_early is not None
        change(worker.caches)
        assert worker.pulled_early is None
        worker.end(batches)
        batches, _ = worker.begin([5, 6], HOT, coming)
        assert counts_of(batches, [5, 6]) == [[0, 0]] * 2


def test_early_rows_of_a_batch_that_is_not_run_are_dropped() -> None:
    with cluster_of(2) as cluster:
        (worker,) = ahead_workers(cluster, 1, "async")
        batches, coming = worker.begin(HOT, [5, 6])
        assert worker.pulled_early is not None
        worker.worker.training.abandon_early(coming)
        worker.end(batches)
        assert worker.pulled_early is None
        assert worker.caches._ahead is None


def test_steps_of_two_phases_pull_no_row_twice() -> None:
    clip = StepClip(Clip(BY_GLOBAL_NORM, norm=100.0), (True, True))
    with cluster_of(2) as cluster:
        workers = ahead_workers(cluster, 2, "sync", max_held=0)
        early: list[EarlyRows | None] = [None, None]
        num_pulled = []
        for ids, coming in pairwise([HOT, [5, 6], [7, 8], [9, 10], [11, 12]]):
            begun = []
            for worker in workers:
                batches, early[worker.index] = worker.begin(ids, coming, early[worker.index])
                begun.append(partial(worker.end, batches, clip))
            in_threads(*begun)
            num_pulled.append(workers[0].worker.client.num_pulled_rows)
    # The first of these steps does not know yet that it has two phases. Each has two rows of two tables.
    assert np.diff(num_pulled)[1:].tolist() == [4, 4]
