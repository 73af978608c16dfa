"""CPU of row caches in the capacity model."""

from __future__ import annotations

from fleet_sparse.tools.capacity.cache_cost import cache_cost
from fleet_sparse.tools.capacity.cached_rows import NO_CACHE, CachedRows
from fleet_sparse.tools.capacity.job import PlannedJob

HALF = NO_CACHE._replace(hit=0.5, asked=0.25)


def job(workers: int, tables: int = 1, dim: int = 16, batch: int = 100, cached: CachedRows = HALF) -> PlannedJob:
    ids = {"rows": 1e9, "fields": 10, "batch": batch, "distinct": 1.0}
    return PlannedJob(**ids, dim=dim, workers=workers, tables=tables, cached=cached)


def test_a_job_without_a_cache_pays_nothing_for_one() -> None:
    assert cache_cost(job(4, cached=NO_CACHE), 2) == (0.0, 0.0)


def test_the_only_worker_of_a_job_pays_less() -> None:
    assert 0 < cache_cost(job(1), 2).worker_s < cache_cost(job(4), 2).worker_s


def test_pservers_of_the_only_worker_pay_less_for_its_asks() -> None:
    assert 0 < cache_cost(job(1), 2).pservers_s < cache_cost(job(4), 2).pservers_s


def test_longer_rows_cost_a_worker_more() -> None:
    assert cache_cost(job(4, dim=64), 1).worker_s > cache_cost(job(4), 1).worker_s


def test_more_tables_cost_a_worker_more() -> None:
    assert cache_cost(job(4, tables=2), 1).worker_s > cache_cost(job(4), 1).worker_s


def test_pservers_that_are_asked_nothing_pay_nothing() -> None:
    assert cache_cost(job(4, cached=HALF._replace(asked=0.0)), 8).pservers_s == 0


def test_pservers_pay_for_the_asks_that_reach_them() -> None:
    few_ids = job(4, tables=26, batch=1, cached=HALF._replace(asked=0.26))
    assert cache_cost(few_ids, 1000).pservers_s < 1.1 * cache_cost(few_ids, 10).pservers_s
