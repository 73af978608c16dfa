"""What of a step's rows travels with a row cache, by the model."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_sparse.tools.capacity.cached_rows import CachedRows, cached_rows_of
from fleet_sparse.tools.capacity.job import PlannedJob
from fleet_sparse.tools.capacity.traffic import traffic_of

CRITEO: dict[str, Any] = {"rows": 10e6, "fields": 26, "batch": 512, "exponent": 1.1}


def cached(workers: int, lag: int = 100, cache_rows: float = 500e3, mode: str = "sync") -> CachedRows:
    return cached_rows_of(cache_rows, lag, workers=workers, is_sync=mode == "sync", **CRITEO)


def test_rows_of_one_worker_do_not_travel() -> None:
    found = cached(1)
    assert 0.5 < found.hit < 1
    assert found == CachedRows(found.hit, 0.0, 0.0, 0.0)


def test_one_use_in_q_plus_1_is_sent_and_in_a_lag_refreshed() -> None:
    found = cached(8)
    held = (100 + 8) // 14 - 1
    assert found.pushed == pytest.approx(found.hit / (held + 1))
    assert found.refreshed == pytest.approx(found.hit / ((100 - 7 * held) // 7 + 1))


def test_a_cache_of_all_rows_has_all_ids() -> None:
    assert cached(8, cache_rows=10e6).hit == pytest.approx(1.0)
    assert cached(8, cache_rows=0).hit == 0.0


def test_every_hit_of_async_training_asks() -> None:
    found = cached(8, mode="async")
    assert found.asked == pytest.approx(found.hit)
    assert cached(8).asked < found.asked


def test_a_looser_bound_saves_more_bytes() -> None:
    bytes_of = [
        traffic_of(PlannedJob(rows=10e6, dim=64, workers=8, cached=cached(8, lag)), 1).num_bytes
        for lag in (10, 30, 100, 1000)
    ]
    assert bytes_of == sorted(bytes_of, reverse=True)
    without = traffic_of(PlannedJob(rows=10e6, dim=64, workers=8), 1).num_bytes
    assert bytes_of[2] / without == pytest.approx(0.33, abs=0.05)
