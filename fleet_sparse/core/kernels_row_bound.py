"""Kernels that compute what a `RowBound` allows of one row. They take the bound as its `BoundTerms`.

A row with the clock c may lag by `L = min(lag, floor(share c))`, without a share by `L = lag`. In a job of W workers

- each worker holds at most `Q = max(floor((L + W) / (2 (W - 1))) - 1, 0)` of it after its step, so that a copy lacks at
  most `(W - 1) Q` that the others hold: about half of L;
- a copy may be behind the pserver by the rest, `R = L - (W - 1) Q`;
- with a bound in updates, a copy that is behind by b is leased for `floor((R - b) / (W - 1))` further steps, in each of
  which every other worker adds at most one update. No number of steps bounds a distance.

Q is computed from the clock that the worker knows. An older one than the pserver's allows less.
"""

from __future__ import annotations

import math

import numpy as np

from .jit import inlined
from .row_bound import MAX_UNITS

_MAX_UNITS = float(MAX_UNITS)


@inlined
def max_lag(clock: int, lag: int, share: float) -> int:
    """Returns L, the largest lag of a row with this clock."""
    return min(math.floor(share * np.float64(clock)), lag) if share >= 0.0 else lag


@inlined
def max_held(clock: int, lag: int, share: float, num_workers: int) -> int:
    """Returns Q, how much of a row one of several workers may hold after its step."""
    return max((max_lag(clock, lag, share) + num_workers) // (2 * (num_workers - 1)) - 1, 0)


@inlined
def max_behind(clock: int, lag: int, share: float, num_workers: int) -> int:
    """Returns R, how far a copy of a row, of one of several workers, may be behind the pserver."""
    return max_lag(clock, lag, share) - (num_workers - 1) * max_held(clock, lag, share, num_workers)


@inlined
def lease_steps(clock: int, lag: int, share: float, num_workers: int) -> int:
    """Returns for how many further steps a copy of now, of one of several workers, is within a bound in updates."""
    return max_behind(clock, lag, share, num_workers) // (num_workers - 1)


@inlined
def units(distance: float, units_per_distance: float) -> int:
    """Returns a distance in units of the drift, rounded up and at most `MAX_UNITS`."""
    return int(min(np.ceil(np.float64(distance) * units_per_distance), _MAX_UNITS))


@inlined
def are_states_old(clock: int, lag: int) -> bool:
    """Returns whether the states of a row, with this clock and updates since they travelled, should travel again."""
    return bool(8 * np.int64(lag) >= np.int64(clock))
