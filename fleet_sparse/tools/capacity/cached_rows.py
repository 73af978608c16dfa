"""CachedRows: what of a step's rows travels if workers cache the rows that they use often."""

from __future__ import annotations

import math
from typing import NamedTuple

from .zipf import ranks_of_zipf

DRIFT_UNITS = 4096
"""Largest lag with a bound in distance; of `core.row_bound`, which loads NumPy, as is the next one."""
DEFAULT_SHARE = 0.25
RULES_WITHOUT_MERGE = ("adamax", "ctr_adagrad", "ftrl")
"""Rules whose updates no worker holds back; of `core.rules`, which loads Numba."""
ENTERED_OF_MISSES = 0.08
"""Ids that enter, over those that a cache of the most used rows misses; as many of the most used ones miss, too.
`benchmarks/het` simulates 0.07 to 0.13 with caches of 1 to 10 % of the rows."""
_GROWTH = 8  # states travel again when a row's clock grew by an eighth


class CachedRows(NamedTuple):
    """Shares of the distinct ids of a step, and states that travel with them."""

    hit: float
    """Share that has a copy."""
    asked: float
    """Share about whose copy a pserver is asked; it includes rows that enter."""
    received: float
    """Share whose row comes with a version, because it is refreshed or enters."""
    gradients: float
    """Share that has a copy, and whose update is sent as a gradient."""
    changed: float
    """Share whose held updates are sent as a change."""
    states_received: float
    """Number of states of `dim` floats that come, over that of the distinct ids."""
    states_sent: float
    """Number of such states that are sent with changes, over that of the distinct ids."""
    entered: float
    """Share that enters the cache."""

    @property
    def plain(self) -> float:
        """Share of the ids that travel as without a cache."""
        return 1 - self.hit - self.entered

    @property
    def pulled(self) -> float:
        """Share of the ids whose row is sent to the worker."""
        return self.plain + self.received

    @property
    def pushed(self) -> float:
        """Share of the ids whose gradient, or change, is sent to a pserver."""
        return self.plain + self.gradients + self.changed


NO_CACHE = CachedRows(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class PlannedCache(NamedTuple):
    """A row cache of each worker, with a bound in updates or in distance."""

    rows: float
    """Copies of a worker."""
    row_lag: float = 0
    """`max_row_lag`; 0 with a bound in distance."""
    share: float | None = DEFAULT_SHARE
    """`max_row_lag_share`; only with a bound in updates."""
    row_drift: float = 0.0
    """`max_row_drift`; 0 with a bound in updates."""
    row_step: float = 0.0
    """With a bound in distance: the mean over updates of the largest change of a value of the row."""
    steps: float = 2000
    """Steps that each worker has made: the age of rows, of which they may lack a share."""
    holds: bool = True
    """True if updates are held back, which rules without a merge do not allow."""


class _Bound(NamedTuple):
    """A bound on the lag of one row, in updates (docs/consistency.md, Row lag)."""

    held: int
    """Updates that a worker may hold: Q."""
    behind: int
    """Updates that a copy may be behind the pserver: R."""


def cached_rows_of(
    cache: PlannedCache,
    *,
    rows: float,
    fields: int,
    batch: int,
    exponent: float,
    workers: int,
    is_sync: bool,
    num_states: int,
) -> CachedRows:
    """Returns what a cache of the rows that are used most does after some steps.

    Each field draws its ids from its share of the rows. All workers use a row equally often.

    Args:
        cache: Of each worker.
        rows: Rows of all tables.
        fields: Ids of an example.
        batch: Examples of a step.
        exponent: Power of the distribution of each field's ids.
        workers: Number of workers.
        is_sync: True if the workers take each step together.
        num_states: States of `dim` floats of the update rule.
    """
    most, others = cache.rows / fields, workers - 1
    is_any_held = not others
    hit = asked = refreshed = gradients = changed = states_received = states_sent = used_by_all = 0.0
    for last_rank, width, probability in ranks_of_zipf(rows / fields, exponent):
        used = -math.expm1(-batch * probability)  # in a step
        used_by_all += width * used
        hits = width * used * min(max((most - (last_rank - width)) / width, 0.0), 1.0)
        hit += hits
        if not hits or not others:
            continue
        clock = workers * used * cache.steps
        bound = _bound(cache, clock, workers)
        block = bound.held + 1  # updates that a push has
        uses_of_a_push, pushes_until_behind = block, bound.behind // block + 1
        # the copy is refreshed at the first use after so many pushes of others: at each use, if these come faster
        uses_of_a_copy = max(pushes_until_behind * block / others + 1 - used / 2, 1.0)
        # a copy that is used less often than its lease lasts asks at each use; leases begin with half of R left
        lease = bound.behind / 2 / others if is_sync and cache.row_lag else 0.0
        of_asked = hits / max(1.0, used * (lease + 1))
        asked += of_asked
        refreshed += min(hits / uses_of_a_copy, of_asked)
        states_received += num_states * hits / _rounded_up(clock / _GROWTH / others, uses_of_a_copy)
        if block == 1:
            gradients += hits
        else:
            is_any_held = True
            changed += hits / uses_of_a_push
            states_sent += num_states * hits / _rounded_up(clock / _GROWTH / workers, uses_of_a_push)
    entered = ENTERED_OF_MISSES * (1 - hit / used_by_all)
    scale = max(1 / used_by_all - entered / hit, 0.0) if hit else 0.0
    hit, asked, refreshed, gradients, changed, states_received, states_sent = (
        scale * value for value in (hit, asked, refreshed, gradients, changed, states_received, states_sent)
    )
    left = entered if is_any_held else 0.0  # for each that enters one leaves, with what was held of it
    return CachedRows(
        hit=hit,
        asked=asked + entered,
        received=refreshed + entered,
        gradients=gradients,
        changed=changed + left,
        states_received=states_received + num_states * entered,
        states_sent=states_sent + num_states * left,
        entered=entered,
    )


def _bound(cache: PlannedCache, clock: float, workers: int) -> _Bound:
    """Returns the bound of a row of which there were `clock` updates."""
    if cache.row_lag:
        lag = int(cache.row_lag if cache.share is None else min(cache.row_lag, cache.share * clock))
        units = 1
    else:
        lag, units = DRIFT_UNITS, math.ceil(DRIFT_UNITS * cache.row_step / cache.row_drift)
    may_hold = max(0, (lag + workers) // (2 * (workers - 1)) - 1)
    # Pservers do not know whether workers hold updates, and leave room for them.
    return _Bound(may_hold // units if cache.holds else 0, (lag - (workers - 1) * may_hold) // units)


def _rounded_up(value: float, unit: float) -> float:
    """Returns the smallest multiple of the unit that is at least the value, and at least the unit."""
    return unit * max(1, math.ceil(value / unit))
