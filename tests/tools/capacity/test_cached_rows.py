"""What of a step's rows travels with a row cache, by the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.het.trace import draw
from benchmarks.het.traffic import simulated
from fleet_sparse.core import row_bound, rules
from fleet_sparse.tools.capacity import cached_rows as model
from fleet_sparse.tools.capacity.cached_rows import CachedRows, PlannedCache, cached_rows_of
from fleet_sparse.tools.capacity.coefficients import shipped_coefficients
from fleet_sparse.tools.capacity.job import PlannedJob
from fleet_sparse.tools.capacity.traffic import traffic_of
from support.row_bounds import max_behind

CRITEO: dict[str, Any] = {"rows": 10e6, "fields": 26, "batch": 512, "exponent": 1.1}
LAG = PlannedCache(500e3, 100, share=None)
NUM_STATES = {"sgd": 0, "adagrad": 1, "adam": 2, "ftrl": 2}


def cached(workers: int, cache: PlannedCache = LAG, rule: str = "adagrad", *, is_sync: bool = True) -> CachedRows:
    return cached_rows_of(cache, workers=workers, is_sync=is_sync, num_states=NUM_STATES[rule], **CRITEO)


def bytes_of(found: CachedRows, **job: Any) -> float:
    return traffic_of(PlannedJob(**{"rows": 10e6, "dim": 64, "workers": 8} | job, cached=found), 1).num_bytes


def test_rows_of_one_worker_travel_when_they_enter_and_leave() -> None:
    found = cached(1)
    assert 0.5 < found.hit < 1
    assert found.received == found.changed == found.asked == found.states_sent == found.entered > 0
    assert found.gradients == 0


def test_one_use_in_q_plus_1_is_sent() -> None:
    found = cached(8)
    held = (100 + 8) // 14 - 1
    assert found.changed - found.entered == pytest.approx(found.hit / (held + 1))


def test_a_cache_of_all_rows_has_all_ids() -> None:
    assert cached(8, LAG._replace(rows=10e6)).hit == pytest.approx(1.0)
    assert cached(8, LAG._replace(rows=0)).hit == 0.0


def test_every_hit_of_async_training_asks() -> None:
    found = cached(8, is_sync=False)
    assert found.asked - found.entered == pytest.approx(found.hit)
    assert cached(8).asked < found.asked


def test_a_looser_bound_saves_more_bytes() -> None:
    of_lags = [bytes_of(cached(8, LAG._replace(row_lag=lag))) for lag in (10, 30, 100, 1000)]
    assert of_lags == sorted(of_lags, reverse=True)


def test_a_share_saves_less_the_younger_the_rows_are() -> None:
    caches = [LAG, *(LAG._replace(share=0.25, steps=steps) for steps in (1e6, 2000, 100))]
    of_ages = [bytes_of(cached(8, cache, "sgd")) for cache in caches]
    assert of_ages == sorted(of_ages)
    assert of_ages[2] > 1.1 * of_ages[0]


def test_states_of_the_rule_travel() -> None:
    of_rules = [bytes_of(cached(8, rule=rule)) for rule in ("sgd", "adagrad", "adam")]
    assert of_rules == sorted(of_rules)
    assert of_rules[2] > 1.1 * of_rules[0]


def test_updates_of_a_rule_without_merge_go_as_gradients() -> None:
    found = cached(8, LAG._replace(holds=False), "ftrl")
    assert found.gradients == pytest.approx(found.hit)
    assert found.changed == found.states_sent == 0
    planned = shipped_coefficients().num_states
    assert {name for name in planned if rules.RULES[name].merge is None} == {*model.RULES_WITHOUT_MERGE}


def test_copies_lag_as_pservers_allow_where_none_is_held() -> None:
    behind = int(max_behind(row_bound.RowBound(lag=100), np.array([1000], np.uint32), 8)[0])
    in_every_step: dict[str, Any] = {"rows": 26 * 64, "fields": 26, "batch": 512, "exponent": 1e-6}
    cache = LAG._replace(holds=False)
    found = cached_rows_of(cache, workers=8, is_sync=True, num_states=NUM_STATES["ftrl"], **in_every_step)
    assert found.received == pytest.approx(1 / ((behind + 1) / 7 + 0.5), rel=0.01)


def test_a_drift_of_100_steps_of_a_row_is_about_a_lag_of_100() -> None:
    drift = PlannedCache(500e3, row_drift=0.1, row_step=0.001)
    lag = bytes_of(cached(8, is_sync=False))
    assert bytes_of(cached(8, drift)) == pytest.approx(lag, rel=0.05)


@pytest.mark.parametrize("workers", [2, 8, 32])
@pytest.mark.parametrize(
    "cache",
    [
        *(LAG._replace(row_lag=lag, share=share) for lag in (1, 5, 20) for share in (None, 0.25)),
        *(LAG._replace(row_lag=0, row_drift=drift, row_step=0.0006) for drift in (0.0006, 0.0012, 0.06)),
    ],
    ids=str,
)
def test_no_more_rows_come_than_are_read(workers: int, cache: PlannedCache) -> None:
    found = cached(workers, cache)
    assert found.received - found.entered <= found.hit * (1 + 1e-9)
    assert found.pulled <= 1 + 1e-9


def test_numbers_are_those_of_the_bound() -> None:
    assert (model.DRIFT_UNITS, model.DEFAULT_SHARE) == (row_bound.DRIFT_UNITS, row_bound.DEFAULT_SHARE)


@pytest.mark.parametrize(("rule", "within"), [("sgd", 0.04), ("adagrad", 0.04), ("adam", 0.06)])
@pytest.mark.parametrize("share", [None, 0.25], ids=["any share", "share 1/4"])
@pytest.mark.parametrize("workers", [1, 4, 8])
def test_bytes_saved_are_about_the_simulated_ones(workers: int, share: float | None, rule: str, within: float) -> None:
    rows, fields, batch, steps, dim = 52_000, 26, 128, 400, 64
    of_batch = {"exponent": 1.1, "batch": batch, "num_steps": steps}
    traces = [draw(np.full(fields, rows // fields), **of_batch, seed=seed) for seed in range(workers)]
    expected = simulated(
        traces, capacity=rows // 20, lag=100, share=share, has_leases=True, first_counted=steps // 2
    ).saved(dim, NUM_STATES[rule], num_workers=workers)
    found = cached_rows_of(
        PlannedCache(rows // 20, 100, share, steps=0.75 * steps),  # the simulation counts the second half
        rows=rows,
        fields=fields,
        batch=batch,
        exponent=1.1,
        workers=workers,
        is_sync=True,
        num_states=NUM_STATES[rule],
    )
    job = PlannedJob(rows=rows, dim=dim, workers=workers, distinct=0.5, batch=10 * batch)  # so that heads are few
    with_cache, without = (
        traffic_of(each, 1).num_bytes for each in (PlannedJob(**{**vars(job), "cached": found}), job)
    )
    assert 1 - with_cache / without == pytest.approx(expected, abs=within)
