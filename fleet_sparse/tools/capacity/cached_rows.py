"""CachedRows: what of a step's rows travels if workers cache the rows that they use often."""

from __future__ import annotations

import math
from typing import NamedTuple

from .zipf import ranks_of_zipf

HIT_NS, HIT_NS_PER_FLOAT = 110.0, 2.0
"""CPU of a worker for a row in its cache: found, read, trained with Adagrad and noted. Measured at dims 16 and 64."""


class CachedRows(NamedTuple):
    """Shares of the distinct ids of a step."""

    hit: float
    """That have a copy."""
    asked: float
    """About whose copy a pserver is asked."""
    refreshed: float
    """Whose copy is refreshed."""
    pushed: float
    """Of copies whose change is sent."""

    @property
    def pulled(self) -> float:
        """Share of the ids whose row is sent to the worker."""
        return 1 - self.hit + self.refreshed

    @property
    def sent(self) -> float:
        """Share of the ids whose gradient, or change, is sent to a pserver."""
        return 1 - self.hit + self.pushed


NO_CACHE = CachedRows(0.0, 0.0, 0.0, 0.0)


def cached_rows_of(
    cache_rows: float,
    row_lag: int,
    *,
    rows: float,
    fields: int,
    batch: int,
    exponent: float,
    workers: int,
    is_sync: bool,
) -> CachedRows:
    """Returns what a cache of the rows that are used most does in its steady state, with a bound on updates alone.

    Each field draws its ids from its share of the rows. With W workers and the lag L, Q updates are held and a copy may
    be R behind (docs/consistency.md, Row lag); so one use in Q + 1 sends a change, and one in R // (W - 1) + 1
    refreshes the copy. Where steps are counted a copy is leased for about as many steps.

    Args:
        cache_rows: Copies of a worker.
        row_lag: `max_row_lag`.
        rows: Rows of all tables.
        fields: Ids of an example.
        batch: Examples of a step.
        exponent: Power of the distribution of each field's ids.
        workers: Number of workers.
        is_sync: True if the workers take each step together.
    """
    inside = outside = asked = 0.0
    most = cache_rows / fields
    held = max(0, (row_lag + workers) // (2 * (workers - 1)) - 1) if workers > 1 else 0
    uses_of_a_copy = (row_lag - (workers - 1) * held) // (workers - 1) + 1 if workers > 1 else math.inf
    for last_rank, width, probability in ranks_of_zipf(rows / fields, exponent):
        used = -math.expm1(-batch * probability)  # in a step
        share = min(max((most - (last_rank - width)) / width, 0.0), 1.0)
        inside += width * used * share
        outside += width * used * (1 - share)
        if workers > 1:  # a copy that is used less often than its lease lasts asks at each use
            lease = max(uses_of_a_copy - 1, 0) if is_sync else 0
            asked += width * used * share / max(1.0, used * (lease + 1))
    total = inside + outside
    if workers == 1:
        return CachedRows(inside / total, 0.0, 0.0, 0.0)
    hit = inside / total
    return CachedRows(hit, asked / total, hit / uses_of_a_copy, hit / (held + 1))
