"""CPU of row caches in the capacity model."""

from __future__ import annotations

import pytest

from fleet_sparse.tools.capacity.cache_cost import ASKED_ROW_NS, ASKED_TABLE_NS, cache_cost
from fleet_sparse.tools.capacity.cached_rows import NO_CACHE
from fleet_sparse.tools.capacity.job import PlannedJob

HALF = NO_CACHE._replace(hit=0.5, asked=0.25)


def job(workers: int, tables: int = 1, dim: int = 16, cached: object = HALF) -> PlannedJob:
    ids = {"rows": 1e9, "fields": 10, "batch": 100, "distinct": 1.0}
    return PlannedJob(**ids, dim=dim, workers=workers, tables=tables, cached=cached)


def test_a_job_without_a_cache_pays_nothing_for_one() -> None:
    assert cache_cost(job(4, cached=NO_CACHE), 2) == (0.0, 0.0)


def test_the_only_worker_of_a_job_pays_less_and_asks_nobody() -> None:
    alone, one_of_four = cache_cost(job(1), 2), cache_cost(job(4), 2)
    assert 0 < alone.worker_s < one_of_four.worker_s
    assert alone.pservers_s == 0


def test_pservers_pay_for_each_row_and_for_each_ask_of_a_table() -> None:
    found = cache_cost(job(4, tables=3), 2).pservers_s
    assert found == pytest.approx(1e-9 * (250 * ASKED_ROW_NS + 6 * ASKED_TABLE_NS))


def test_more_tables_and_longer_rows_cost_a_worker_more() -> None:
    least = cache_cost(job(4), 1).worker_s
    assert cache_cost(job(4, tables=2), 1).worker_s > least
    assert cache_cost(job(4, dim=64), 1).worker_s > least
