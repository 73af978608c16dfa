"""Measures of goals: the figures that they compute from made rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.het.dense_link import ALL_REDUCE, BESIDE
from benchmarks.measures import (
    Figure,
    NotApplicable,
    auc_where_a_count_fails,
    misses_over_the_best_policy,
    of_bound,
    over_ring,
    time_to_auc,
    worst_time_to_auc,
)


def link_run(dim: int, *seconds: float, rate: int = 100, examples: int = 400, pservers: int = 1) -> dict[str, Any]:
    """Returns a record of the benchmark of links with these seconds to the AUC, those without caches being 1."""
    times = [
        {"drift 2 x rate": {"s_to_target": each, "has_reached": True}, "no cache": {"s_to_target": 1.0}}
        for each in seconds
    ]
    options = {"rate": rate, "dim": dim, "pservers": pservers, "dense": "workers", "examples": examples}
    return {"options": options, "rounds": times}


def test_the_worst_network_and_dim_counts_for_the_time_to_auc() -> None:
    runs = [link_run(16, 0.9, 1.1, 1.3), link_run(64, 0.5), link_run(64, 0.7)]
    worst = worst_time_to_auc({"runs": runs})
    assert worst
    assert worst.value == 1.1
    assert worst_time_to_auc({"runs": runs[1:]}) is None


@pytest.mark.parametrize("other", [{"examples": 1200}, {"pservers": 2}], ids=str)
def test_other_jobs_count_apart_and_fast_links_do_not(other: dict[str, int]) -> None:
    runs = [link_run(16, 0.5), link_run(16, 0.9, **other), link_run(16, 1.5, rate=10_000)]
    worst = worst_time_to_auc({"runs": runs})
    assert worst
    assert worst.value == 0.9


def test_an_auc_that_was_not_reached_takes_for_ever() -> None:
    run = link_run(16, 0.3)
    run["rounds"][0]["drift 2 x rate"]["has_reached"] = False
    assert time_to_auc(run).value == math.inf


def auc_round(**losses: float) -> dict[str, Any]:
    names = {"drift": "drift 2 x rate", "count": "lag 100, no share"}
    return {names[name]: {"loss_of_auc": loss} for name, loss in losses.items()}


def test_a_bound_counts_in_the_rounds_that_have_it() -> None:
    auc = of_bound("drift 2 x rate", lambda each: -each["loss_of_auc"])
    found = auc({"rounds": [auc_round(drift=0.5), auc_round(count=0.25), auc_round(drift=1.5)]})
    assert found
    assert (found.value, found.of_rounds) == (-1.0, [-0.5, -1.5])
    assert auc({"rounds": [auc_round(count=0.25)]}) is None


def test_a_drift_counts_where_a_bound_in_updates_loses() -> None:
    rounds = [auc_round(count=0.02), auc_round(drift=0.004)]
    found = auc_where_a_count_fails({"rounds": rounds})
    assert isinstance(found, Figure)
    assert found.value == -0.004
    assert isinstance(auc_where_a_count_fails({"rounds": [auc_round(count=0.005), rounds[1]]}), NotApplicable)
    assert auc_where_a_count_fails({"rounds": rounds[1:]}) is None


def test_the_best_other_policy_counts_for_a_cache_of_15_percent() -> None:
    names = ("aged LFU", "aged LFU, second", "LFU, all", "LRU, all")
    run = {"rounds": [{f"15 %: {name}": {"missed": each} for name, each in zip(names, (5, 7, 4, 6), strict=True)}]}
    measured = misses_over_the_best_policy(run)
    assert measured
    assert measured.value == 100
    assert misses_over_the_best_policy({"rounds": [{}]}) is None


def test_the_worst_job_counts_for_the_bytes_of_the_busiest_link() -> None:
    cases = {f"2, 1 kB, {BESIDE}": {"over_ring": 1.01}, f"4, 1 kB, {BESIDE}": {"over_ring": 1.02}}
    first = {**cases, f"2, 1 kB, {ALL_REDUCE}": {"over_ring": 1.5}, "2, 1 kB, pserver, sync": [0.1]}
    found = over_ring({"rounds": [first, {"2, 1 kB, pserver, sync": [0.1]}]})
    assert found
    assert found.value == 1.02
    assert over_ring({"rounds": [{"2, 1 kB, pserver, sync": [0.1]}]}) is None
