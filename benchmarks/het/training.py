"""Training jobs of `het_auc` and `het_link`: their bounds, and what all workers of a job found together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.het.job import MARK
from fleet_sparse.core.row_bound import DEFAULT_SHARE

RATES = {"adagrad": 0.03, "adam": 0.001, "sgd": 0.3}
"""Learning rates, by optimizer."""
NO_CACHE, AGAIN = "no cache", "no cache again"


class Bound(NamedTuple):
    """Bound of the rows that a job caches; one without a drift and without a lag has no cache."""

    name: str
    """Name of the job in the records."""
    drift: float | None = None
    """`max_row_drift`, in learning rates."""
    lag: int | None = None
    """`max_row_lag`."""
    share: float | None = DEFAULT_SHARE
    """`max_row_lag_share`; None for none."""

    def options(self, learning_rate: float) -> Sequence[str]:
        """Returns the options of `models/train.py`."""
        if self.drift is not None:
            return "--max-row-drift", f"{self.drift * learning_rate:g}"
        if self.lag is None:
            return ()
        share = "none" if self.share is None else f"{self.share:g}"
        return "--max-row-lag", str(self.lag), "--max-row-lag-share", share


def within_drift(rates: float) -> Bound:
    """Returns the bound of a drift of so many learning rates."""
    return Bound(f"drift {rates:g} x rate", drift=rates)


def within_lag(updates: int, share: float | None = DEFAULT_SHARE) -> Bound:
    """Returns the bound of so many updates."""
    told = "no share" if share is None else f"share 1/{1 / share:g}"
    return Bound(f"lag {updates}, {told}", lag=updates, share=share)


BOUNDS = {"again": Bound(AGAIN), "drift": within_drift(2), "lag": within_lag(100), "paper": within_lag(100, None)}
"""Bounds, as options of the command line have them; `again` is none, and shows how much two runs differ."""
DRIFT, LAG = BOUNDS["drift"].name, BOUNDS["lag"].name


class Trained(NamedTuple):
    """Result of a job."""

    auc: float
    """Of the held-out examples, after all steps."""
    train_s: float
    """Seconds of training of the slowest worker."""
    examples_per_s: float
    num_rows: float
    """Rows, gradients and changes of rows that travelled."""
    num_bytes: float
    """Bytes of all frames of all workers."""
    hit_rate: float
    """Of the distinct rows of all batches, those of which there was a copy; 0 without a cache."""
    curve: Sequence[tuple[float, float]]
    """Seconds of training and AUC of each evaluation."""


def together(outputs: Sequence[str]) -> Trained:
    """Returns what all workers of a job printed as one."""
    workers = [read_output(output) for output in outputs]
    (first,) = (each for each in workers if each["worker"] == 0)
    seconds = max(each["train_s"] for each in workers)
    caches = [table for each in workers for table in each["row_cache"].values()]
    reads, hits = (sum(cache[key] for cache in caches) for key in ("reads", "hits"))
    return Trained(
        auc=first["points"][-1][2],
        train_s=seconds,
        examples_per_s=sum(each["num_examples"] for each in workers) / seconds,
        num_rows=sum(num_rows(each) for each in workers),
        num_bytes=sum(each["bytes_pulled"] + each["bytes_pushed"] for each in workers),
        hit_rate=hits / reads if reads else 0.0,
        curve=[(train_s, auc) for train_s, _, auc in first["points"]],
    )


def read_output(output: str) -> dict[str, Any]:
    """Returns what a worker printed last."""
    found: dict[str, Any] = json.loads(output.rpartition(MARK)[2])
    return found


def num_rows(of_worker: Mapping[str, Any]) -> int:
    """Returns the rows, gradients and changes that a worker sent and received. An ask is none."""
    caches = of_worker["row_cache"].values()
    pulled = sum(each["reads"] - each["hits"] + each["refreshed"] for each in caches)
    return int(of_worker["rows_pushed"] + (pulled if caches else of_worker["rows_pulled"]))


def rows_saved(cached: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """Returns the share of the rows of a job without caches that did not travel in one with caches."""
    return 1 - float(cached["num_rows"] / plain["num_rows"])


def seconds_to(curve: Sequence[tuple[float, float]], target: float) -> float:
    """Returns the seconds of training until the AUC was first `target`, between evaluations in proportion.

    Without an evaluation that good: infinity.
    """
    seconds, aucs = map(np.array, zip(*curve, strict=True))
    reached = np.flatnonzero(aucs >= target)
    if not len(reached):
        return float("inf")
    at = int(reached[0])
    return float(seconds[0] if at == 0 else np.interp(target, aucs[at - 1 : at + 1], seconds[at - 1 : at + 1]))
