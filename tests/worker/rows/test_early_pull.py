"""Rows of the next step that no copy is made of: pulled before the push of the present one, with exact results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import ESTIMATE
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.caching_workers import KINDS, LOOSE, Worker, cluster_of, mode_of
from support.in_process import InProcessCluster
from support.successive import SuccessiveLookups

CACHED = TableSpec(name="cached", dim=1, rule="sgd", initializer=constant(0.0))
UNCACHED = TableSpec(name="uncached", dim=1, rule="sgd", initializer=constant(0.0))
HOT = [0, 1]


class AheadWorker:
    """A worker whose cache of one of two tables is full of rows that it uses all the time."""

    def __init__(self, cluster: InProcessCluster, index: int, num_workers: int, kind: str) -> None:
        self.worker = Worker(
            cluster, index, num_workers, [CACHED], mode_of(kind, LOOSE), max_rows=len(HOT), admission=ESTIMATE
        )
        self.lookups = SuccessiveLookups(self.worker.deduplicator, [CACHED, UNCACHED])

    def begin(
        self, ids: Sequence[int], coming: Sequence[int], early: EarlyRows | None = None
    ) -> tuple[list[RowBatch], EarlyRows]:
        """Reads the rows of a step of both tables, and announces those of the next one."""
        of_both, next_of_both = ({spec.name: each for spec in (CACHED, UNCACHED)} for each in (ids, coming))
        announced = self.lookups.announce(next_of_both, of_both)
        batches = [each.rows for each in self.lookups.of(of_both, early).values()]
        self.worker.training.prefetch(batches, early, announced)
        return batches, announced

    def end(self, batches: Sequence[RowBatch]) -> None:
        """Adds 1 to each row."""
        grads = [each._replace(values=np.full_like(each.values, -1), learning_rate=1.0) for each in batches]
        self.worker.training.update(grads, [], 1.0)

    @property
    def num_pulled(self) -> int:
        """Number of rows that arrived as without a cache."""
        return self.worker.client.num_pulled_rows


def ahead_workers(cluster: InProcessCluster, num_workers: int, kind: str) -> list[AheadWorker]:
    """Workers that have trained their hot rows 8 times."""
    for number in range(len(cluster.shards)):
        for spec in (CACHED, UNCACHED):
            cluster.run(number, partial(cluster.shards[number].add_table, spec))
    workers = [AheadWorker(cluster, index, num_workers, kind) for index in range(num_workers)]
    for _ in range(8):
        steps = [(worker, worker.begin(HOT, HOT)) for worker in workers]
        for worker, (batches, coming) in steps:
            worker.end(batches)
            worker.worker.training.abandon_early(coming)
    return workers


def rows_of(batches: Sequence[RowBatch], ids: Sequence[int]) -> NDArray[np.float32]:
    """Returns the values of rows, `(tables, ids)`."""
    return np.array([[batch.values[batch.unique.ids.tolist().index(id_), 0] for id_ in ids] for batch in batches])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_copy_are_pulled_before_the_push(kind: str) -> None:
    with cluster_of(2) as cluster:
        (worker,) = ahead_workers(cluster, 1, kind)
        begun = worker.num_pulled
        batches, coming = worker.begin(HOT, [1, 5, 6])
        assert worker.worker.caches is not None
        early = worker.worker.caches._early
        assert early is not None
        assert {name: set(table.rows.unique.ids.tolist()) for name, table in early.tables.items()} == {
            CACHED.name: {5, 6},
            UNCACHED.name: {5, 6},
        }
        worker.end(batches)
        batches, _ = worker.begin([1, 5, 6], HOT, coming)
        assert rows_of(batches, [1, 5, 6]).tolist() == [[9.0, 0.0, 0.0]] * 2
        # All rows of the table without a cache, with the one of the next step; of the other one those without a copy.
        assert worker.num_pulled - begun == (2 + 3 + 1) + 2


@pytest.mark.parametrize("num_shards", [1, 2])
def test_early_rows_have_what_others_changed_in_the_step(num_shards: int) -> None:
    with cluster_of(num_shards) as cluster:
        first, second = ahead_workers(cluster, 2, "sync")
        (of_first, coming), (of_second, _) = first.begin(HOT, [0, 5, 6]), second.begin([5], HOT)
        first.end(of_first)
        second.end(of_second)
        (of_first, _), (of_second, _) = first.begin([0, 5, 6], HOT, coming), second.begin([7], HOT)
        assert rows_of(of_first, [5, 6]).tolist() == [[1.0, 0.0]] * 2
        assert rows_of(of_first, [0])[1] == 17.0
        first.end(of_first)
        second.end(of_second)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_early_rows_are_dropped_if_another_batch_is_pushed(kind: str) -> None:
    with cluster_of(2) as cluster:
        (worker,) = ahead_workers(cluster, 1, kind)
        _, coming = worker.begin(HOT, [5, 6])
        worker.end([worker.worker.batch(spec, np.array([5])) for spec in (CACHED, UNCACHED)])
        batches, _ = worker.begin([5, 6], HOT, coming)
        assert rows_of(batches, [5, 6]).tolist() == [[1.0, 0.0]] * 2


def test_rows_are_not_pulled_early_where_most_enter() -> None:
    with cluster_of(2) as cluster:
        (worker,) = ahead_workers(cluster, 1, "async")
        caches = worker.worker.caches
        assert caches is not None
        exchange = caches._exchange(CACHED)
        assert exchange is not None
        assert exchange.table.plain_ahead(np.array([1, 5, 6])).tolist() == [1, 2]
        exchange.forget()
        assert exchange.table.plain_ahead(np.array([1, 5, 6])).tolist() == []
