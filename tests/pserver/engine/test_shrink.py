"""Shrinking tables with statistics on any number of shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.criteria import Criterion, smallest_ids
from fleet_sparse.core.entries import Entry
from fleet_sparse.pserver.tables.shrunk import ShrunkTable
from support.admissions import CountedJob, count_filter, table
from support.shards import push

SHOW_CLICK = table(Entry("show_click", (("threshold", 0.0),)))
CRITERIA = [Criterion("min_score", 1.0), Criterion("min_norm", 1.0)]


class ClickedJob(CountedJob):
    """A client that pushes shows and clicks to all shards of a table."""

    def push_clicks(self, ids: NDArray[np.int64], show: NDArray[np.float32], click: NDArray[np.float32]) -> None:
        owners = self.placement.shard_of(ids, self.spec.salt)
        for index, client in enumerate(self.clients):
            mine = owners == index
            grads = -np.ones((int(mine.sum()), self.spec.dim), np.float32) * (ids[mine] % 3)[:, None].astype(np.float32)
            said = {"show": show[mine], "click": click[mine]}
            assert client.push(push(self.spec, ids[mine], grads, statistics=said)).error is None

    def shrink(self, **options: Any) -> list[ShrunkTable]:
        return [shard.shrink(CRITERIA, **options)["emb"] for shard in self.shards]


def clicked(num_shards: int) -> ClickedJob:
    job = ClickedJob(SHOW_CLICK, num_shards=num_shards)
    ids = np.arange(300)
    job.push_clicks(ids, (ids % 20).astype(np.float32), (ids % 5 == 0).astype(np.float32))
    return job


def shrunk(num_shards: int, *, decay: float, dry_run: bool) -> tuple[list[Any], list[float]]:
    """Returns numbers and examples of each criterion, and the first value of each row afterwards."""
    job = clicked(num_shards)
    parts = job.shrink(decay=decay, dry_run=dry_run)
    found = []
    for of_shards in zip(*(part.removals for part in parts), strict=True):
        ids = np.array([id_ for each in of_shards for id_ in each.examples], np.int64)
        found.append((sum(each.num_removed for each in of_shards), smallest_ids(ids, SHOW_CLICK.salt)))
    rows = job.rows(np.arange(300))
    job.close()
    return found, rows


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_the_same_rows_go_on_1_3_and_7_shards(decay: float) -> None:
    first = shrunk(1, decay=decay, dry_run=False)
    assert 0 < first[0][1][0] < first[0][0][0] < 300
    assert len(first[0][0][1]) == 5
    for num_shards in (3, 7):
        assert shrunk(num_shards, decay=decay, dry_run=False) == first


def test_scores_are_those_after_the_decay() -> None:
    ids = np.arange(300)
    show, click = np.float32(0.5) * (ids % 20), np.float32(0.5) * (ids % 5 == 0)
    score = 0.1 * (show.astype(np.float64) - click) + click
    found, _ = shrunk(3, decay=0.5, dry_run=False)
    assert found[0][0] == (score < 1.0).sum()


def test_a_dry_run_reports_the_same_and_changes_nothing() -> None:
    before, planned = shrunk(1, decay=0.5, dry_run=True), shrunk(3, decay=0.5, dry_run=False)
    assert before[0] == planned[0]
    job = clicked(2)
    job.shrink(decay=0.5, dry_run=True)
    assert job.shrink(decay=0.5, dry_run=True) == job.shrink(decay=0.5, dry_run=True)
    assert job.num_rows == 300
    job.close()


def test_a_second_decay_removes_more_rows() -> None:
    job = clicked(2)
    numbers = []
    for _ in range(2):
        job.shrink(decay=0.9)
        numbers.append(job.num_rows)
    assert 0 < numbers[1] < numbers[0]
    job.close()


def test_shows_of_ids_without_a_row_decay_too() -> None:
    job = ClickedJob(table(Entry("show_click", (("nonclick_coeff", 1.0), ("threshold", 3.0)))))
    ids = np.arange(10)
    shows, no_clicks = np.full(10, 4, np.float32), np.zeros(10, np.float32)
    job.push_clicks(ids, shows, no_clicks)
    assert all(job.rows(ids))
    job.shrink(decay=0.5)
    assert not any(job.rows(ids))
    job.close()


def test_counts_are_the_score_where_there_are_no_clicks() -> None:
    job = CountedJob(count_filter(0), num_shards=2)
    for ids in ([1, 2, 3], [1, 2], [1]):
        job.push(np.array(ids))
    for shard in job.shards:
        shard.shrink([Criterion("min_score", 2.0)], decay=0.5)
    assert job.num_rows == 2
    job.close()


def test_rows_of_a_table_without_statistics_have_no_score() -> None:
    job = CountedJob(table(None))
    job.push(np.array([1, 2]))
    (shard,) = job.shards
    assert shard.shrink([Criterion("min_score", 100.0)])["emb"].removals[0].num_removed == 0
    job.close()


@pytest.mark.parametrize(
    ("criteria", "options", "message"),
    [
        ([], {}, "unseen_days"),
        ([Criterion("age", 1.0)], {}, "'age'"),
        ([Criterion("unseen_days", 1.5)], {}, r"1\.5"),
        ([Criterion("min_norm", float("inf"))], {}, "inf"),
        ([Criterion("min_norm", 1.0)], {"decay": 1.5}, r"1\.5"),
        ([Criterion("min_norm", 1.0)], {"tables": ["none"]}, "'none'"),
    ],
)
def test_a_shrink_that_cannot_be_meant_is_refused(criteria: Any, options: Any, message: str) -> None:
    job = CountedJob(table(None))
    with pytest.raises(ValueError, match=message):
        job.shards[0].shrink(criteria, **options)
    assert not job.shards[0].fault
    job.close()
