"""Computes in NumPy what a `RowBound` allows of many rows: tests compare the kernels of bounds and asks with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.row_bound import ANY_AMOUNT, DRIFT_UNITS, NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW, RowBound

Clocks = NDArray[np.uint32]
Numbers = NDArray[np.int64]


def max_lag(bound: RowBound, clocks: Clocks) -> Numbers:
    """Returns the largest lag of rows with these clocks; both are `(n,)`."""
    lag = DRIFT_UNITS if bound.lag is None else bound.lag
    if bound.share is None:
        return np.full(len(clocks), lag, np.int64)
    return np.minimum(np.floor(bound.share * clocks.astype(np.float64)), lag).astype(np.int64)


def max_held(bound: RowBound, clocks: Clocks, num_workers: int) -> Numbers:
    """Returns how much of each row one worker may hold after its step, at least 0.

    Args:
        bound: Of the job.
        clocks: `(n,)`, clocks that the worker knows. Older ones than the pserver's allow less.
        num_workers: Number of workers of the job.
    """
    if num_workers == 1:
        return np.full(len(clocks), ANY_AMOUNT, np.int64)
    return np.maximum((max_lag(bound, clocks) + num_workers) // (2 * (num_workers - 1)) - 1, 0)


def max_behind(bound: RowBound, clocks: Clocks, num_workers: int) -> Numbers:
    """Returns how far a copy of each row may be behind the pserver, whose clocks `(n,)` these are; at least 0."""
    if num_workers == 1:
        return np.full(len(clocks), ANY_AMOUNT, np.int64)
    return max_lag(bound, clocks) - (num_workers - 1) * max_held(bound, clocks, num_workers)


def lease_steps(bound: RowBound, clocks: Clocks, lags: Numbers, num_workers: int) -> Numbers:
    """Returns for how many further steps each copy is within the bound, if every worker ends one step in each.

    Args:
        bound: Of the job.
        clocks: `(n,)`, the pserver's clocks.
        lags: `(n,)`, by how much each copy is behind them.
        num_workers: Number of workers of the job.

    Returns:
        `(n,)`: -1 for a copy that is too far behind already, 0 with a bound in distance.
    """
    left = max_behind(bound, clocks, num_workers) - lags
    steps = left // max(num_workers - 1, 1) if bound.has_leases else np.zeros_like(left)
    return np.where(left < 0, -1, steps)


def answers(
    bound: RowBound, clocks: Clocks, versions: Clocks, num_workers: int, *, has_states: bool
) -> NDArray[np.uint8]:
    """Returns a pserver's answer to each ask: a lease, `ROW_FOLLOWS` or `STATES_FOLLOW`.

    Args:
        bound: Of the job.
        clocks: `(n,)`, the pserver's clocks.
        versions: `(n,)`, of the copies.
        num_workers: Number of workers of the job.
        has_states: True if the table's rule has states.
    """
    lags = lag_of(clocks, versions)
    steps = lease_steps(bound, clocks, lags, num_workers)
    is_new = versions == NO_VERSION
    found = np.minimum(steps, ROW_FOLLOWS - 1)
    found[is_new | (steps < 0)] = ROW_FOLLOWS
    if has_states:
        found[is_new | ((steps < 0) & are_states_old(clocks, lags))] = STATES_FOLLOW
    return found.astype(np.uint8)


def are_states_old(clocks: Clocks, lags: Numbers) -> NDArray[np.bool_]:
    """Returns for which rows, with these clocks and updates since states travelled, states should travel again."""
    return 8 * lags >= clocks.astype(np.int64)


def lag_of(clocks: Clocks, versions: Clocks) -> Numbers:
    """Returns by how much copies with these versions are behind clocks, which may have wrapped; all are `(n,)`."""
    return (clocks - versions).astype(np.int64)
