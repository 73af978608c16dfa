"""RowCache: how a worker caches rows, and the checks of it and of the bounds that come with it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

import msgspec

from fleet_sparse import machine_memory
from fleet_sparse.core.cache_policies import chosen
from fleet_sparse.core.mode import AVG, SYNC, Mode
from fleet_sparse.core.row_bound import DEFAULT_SHARE, RowBound, steps_off_lease
from fleet_sparse.core.rules import RULES
from fleet_sparse.errors import PlanError
from fleet_sparse.worker.rows.cache_job import CacheJob, GradientWeights
from fleet_sparse.worker.rows.cache_sizes import most_bytes_per_row

from .optimizer_config import OptimizerConfig

logger = logging.getLogger(__name__)

_WHERE = "PserverStrategy.row_cache"
_LAG_PER_WORKER = 10  # from which on a bound in updates saves something


class RowCache(msgspec.Struct, frozen=True, kw_only=True):
    """How each worker caches rows of the tables that it trains; a field of `PserverStrategy`, which bounds their lag.

    Attributes:
        max_bytes: Memory of all copies of a worker, in bytes, divided evenly among its tables; what a small table does
            not need goes to the others. It is reserved in the first step.
        max_rows: Largest number of copies of one table; None for what fits into `max_bytes`.
        min_dim: Smallest dim of a table that is cached. Narrow rows save few bytes for what the cache of a table costs
            a step.
        policy: Which row makes room: "aged_lfu" the one that was used least of late, whose uses are halved once in 16
            times as many reads as there are copies; "lfu" the one that was used least; "lru" the one that was not used
            for longest.
        admit: Which of the rows that are read enter: with "estimate" a row that was missed more often than the one that
            makes room was used, with "second" one that was missed before, with "all" every row.
        hold_back: Largest number of updates of a row that a worker holds back; 0 for none, None for what the bound
            allows. With several workers a rule whose updates cannot be merged holds none. With `max_row_drift`, which
            bounds a distance, only 0 and None are accepted.
        merge: How much a gradient counts, for tables that can be cached, whatever their dim and whenever they were
            declared: with "sum" it is whole, with "avg" it is divided by the number of workers. None is what the mode
            does without a cache: "avg" in sync training with the mean of gradients, where "sum" is refused, else "sum".

    Raises:
        PlanError: A value has no meaning.
    """

    max_bytes: int = 256 << 20
    max_rows: int | None = None
    min_dim: int = 1
    policy: str = "aged_lfu"
    admit: str = "estimate"
    hold_back: int | None = None
    merge: Literal["sum", "avg"] | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_bytes", self.max_bytes, 1),
            ("max_rows", self.max_rows, 1),
            ("min_dim", self.min_dim, 1),
            ("hold_back", self.hold_back, 0),
        ):
            if value is None and name in ("max_rows", "hold_back"):
                continue
            if type(value) is not int or value < least:
                raise PlanError(f"RowCache.{name}: is {value!r}, should be an integer from {least}")
        if self.merge not in ("sum", "avg", None):
            raise PlanError(f"RowCache.merge: is {self.merge!r}, should be 'sum', 'avg' or None")
        try:
            chosen(self.policy, self.admit)
        except ValueError as error:
            raise PlanError(f"RowCache: {error}") from None


def read_bound(
    lag: int | None, share: float | None, drift: float | None, row_cache: RowCache | None, *, is_geo: bool
) -> tuple[RowBound | None, RowCache | None]:
    """Returns the bound and the options of the row caches of a job; None for both if it has none.

    Args:
        lag: This and the next three are fields of `PserverStrategy`.
        share: Likewise.
        drift: Likewise.
        row_cache: Likewise.
        is_geo: True in geo training.

    Raises:
        PlanError: Two of them contradict each other, or one has no meaning.
    """
    if row_cache is not None and not isinstance(row_cache, RowCache):
        raise PlanError(f"{_WHERE}: is a {type(row_cache).__name__}, should be a fleet_sparse.RowCache or None")
    _check_share(share, lag)
    if lag is not None and drift is not None:
        raise PlanError(
            f"PserverStrategy: max_row_lag is {lag!r} and max_row_drift is {drift!r}, and rows have one bound. Leave "
            "one of both out"
        )
    if lag is None and drift is None:
        if row_cache is not None:
            raise PlanError(
                f"{_WHERE}: is given without a bound on what its rows may lack. Write max_row_lag=100, or "
                "max_row_drift=2 * learning_rate, too"
            )
        return None, None
    name, value = ("max_row_lag", lag) if drift is None else ("max_row_drift", drift)
    if type(lag) is int and lag == 0:
        return None, None
    if is_geo:
        raise PlanError(
            f"PserverStrategy.{name}: is {value!r} with k_steps above 0, whose windows cache rows already. Leave it "
            "out, or write k_steps 0"
        )
    try:
        if type(value) is not int and (drift is None or type(value) is not float):
            raise ValueError(f"is {value!r}, should be {'an integer' if drift is None else 'a number'}")
        bound = RowBound(lag, share if drift is None else None, drift)
    except (ValueError, TypeError) as error:
        raise PlanError(f"PserverStrategy.{name}: {error}") from None
    row_cache = row_cache or RowCache()
    if drift is not None and row_cache.hold_back:
        raise PlanError(
            f"RowCache.hold_back: is {row_cache.hold_back} with max_row_drift, which bounds a distance and no number "
            "of updates. Write 0, or leave it out"
        )
    return bound, row_cache


def cache_job(row_cache: RowCache, mode: Mode, num_workers: int) -> CacheJob:
    """Returns what the caches of a worker share.

    Args:
        row_cache: As `check_row_cache` returned it.
        mode: Mode of the job, with a bound of its rows.
        num_workers: Number of workers of the job.
    """
    assert mode.row_bound is not None, "the mode has a bound"
    policy, admission = chosen(row_cache.policy, row_cache.admit)
    is_mean = mode.kind == SYNC and mode.scale == AVG
    return CacheJob(
        mode.row_bound,
        num_workers,
        steps_off_lease(mode.max_step_lag) if mode.is_step_synchronized else None,
        policy,
        admission,
        row_cache.hold_back,
        is_merged=mode.kind == SYNC and num_workers > 1,
        weights=GradientWeights(
            of_worker=1 / num_workers if row_cache.merge == "avg" and not is_mean else 1.0,
            of_merge=1 / num_workers if is_mean else 1.0,
        ),
    )


def _warn_of_small_lag(mode: Mode, num_workers: int) -> None:
    """Warns if several workers can hold no update within a bound in updates (docs/consistency.md, Row lag)."""
    assert mode.row_bound is not None, "the mode has a bound"
    lag = mode.row_bound.lag
    least = 3 * num_workers - 4  # where `kernels_row_bound.max_held` begins
    if lag is not None and lag < least:
        logger.warning(
            "PserverStrategy.max_row_lag: is %d with %d workers, and no update can be held back below %d. Write at "
            "least %d",
            *(lag, num_workers, least, _LAG_PER_WORKER * num_workers),
        )


def _check_share(share: float | None, lag: int | None) -> None:
    """Refuses a share that has no meaning, or nothing to be a share of. The default one counts as not given."""
    if share is None or (share == DEFAULT_SHARE and type(share) is float):
        return
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise PlanError(f"PserverStrategy.max_row_lag_share: is {share!r}, should be above 0 and at most 1, or None")
    if lag is None:
        raise PlanError(
            f"PserverStrategy.max_row_lag_share: is {share!r} without max_row_lag, of which it is a bound. Leave it "
            "out, or write max_row_lag, too"
        )


def check_memory(row_cache: RowCache | None, config: OptimizerConfig, dims: Iterable[int]) -> None:
    """Checks that the copies of a program's tables fit into the memory that is free.

    Args:
        row_cache: As `read_bound` returned it.
        config: Optimizer of the program.
        dims: Of each of its tables.

    Raises:
        PlanError: They do not.
    """
    if row_cache is None or not (cached := [dim for dim in dims if dim >= row_cache.min_dim]):
        return
    needed = row_cache.max_bytes
    if row_cache.max_rows is not None:
        rule = RULES[config.rule]
        needed = min(needed, row_cache.max_rows * sum(most_bytes_per_row(dim, rule) for dim in cached))
    if needed > (available := machine_memory.available_bytes()):
        raise PlanError(
            f"RowCache.max_bytes: is {row_cache.max_bytes}, the copies need {needed} bytes, and {available} bytes of "
            "memory are free. Write less"
        )


def check_row_cache(
    row_cache: RowCache | None, mode: Mode, config: OptimizerConfig, num_workers: int, rows_dtype: str
) -> RowCache | None:
    """Returns the options with which the rows of a program are cached.

    Args:
        row_cache: As `read_bound` returned it.
        mode: Mode of the job.
        config: Optimizer of the program.
        num_workers: Number of workers of the job.
        rows_dtype: The setting of the job.

    Raises:
        PlanError: The optimizer or the settings do not allow it.
    """
    if row_cache is None:
        return None
    if row_cache.merge == "sum" and num_workers > 1 and mode.kind == SYNC and mode.scale == AVG:
        raise PlanError(
            "RowCache.merge: is 'sum' in sync training with scale_strategy 'avg', in which the pservers take the mean "
            "of gradients. Write scale_strategy 'sum', or leave merge out"
        )
    if row_cache.hold_back == 0 or (num_workers == 1 and rows_dtype == "float32"):
        return row_cache
    is_of_job = True  # else the tables of other programs may hold updates back
    if rows_dtype != "float32":
        reason = f"each gradient is rounded on its way (FLEET_SPARSE_ROWS_DTYPE={rows_dtype}), and a sum is not"
    elif mode.kind == SYNC and config.clip is not None and config.clip.needs_norm:
        reason = "the pservers clip the merged gradients of a step by their norm, for which they need all of them"
    elif RULES[config.rule].merge is None:
        reason, is_of_job = f"updates of rule {config.rule!r} cannot be merged", False
    else:
        _warn_of_small_lag(mode, num_workers)
        return row_cache
    if row_cache.hold_back is not None:
        raise PlanError(f"RowCache.hold_back: is {row_cache.hold_back}, and {reason}. Write 0, or leave it out")
    logger.info("row cache: no updates of this optimizer are held back: %s", reason)
    return msgspec.structs.replace(row_cache, hold_back=0) if is_of_job else row_cache
