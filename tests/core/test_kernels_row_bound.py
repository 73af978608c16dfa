"""The bound of one row, as kernels compute it, against the reference in NumPy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.kernels_row_bound import are_states_old, lease_steps, max_behind, max_held, units
from fleet_sparse.core.row_bound import MIN_DRIFT, RowBound
from support import row_bounds

BOUNDS = st.builds(RowBound, st.integers(1, 2000), st.none() | st.floats(0.01, 1)) | st.builds(
    RowBound, drift=st.floats(MIN_DRIFT, 1e6)
)
CLOCKS = st.integers(0, 2**32 - 1)


@given(BOUNDS, CLOCKS, st.integers(2, 64))
def test_kernels_allow_to_hold_as_much_as_the_bound(bound: RowBound, clock: int, num_workers: int) -> None:
    (expected,) = row_bounds.max_held(bound, np.array([clock], np.uint32), num_workers)
    assert max_held(clock, bound.terms.lag, bound.terms.share, num_workers) == expected


@given(BOUNDS, CLOCKS, st.integers(2, 64))
def test_kernels_allow_copies_to_be_behind_as_the_bound(bound: RowBound, clock: int, num_workers: int) -> None:
    (expected,) = row_bounds.max_behind(bound, np.array([clock], np.uint32), num_workers)
    assert max_behind(clock, bound.terms.lag, bound.terms.share, num_workers) == expected


@given(st.builds(RowBound, st.integers(1, 2000), st.none() | st.floats(0.01, 1)), CLOCKS, st.integers(2, 64))
def test_kernels_lease_for_as_many_steps_as_the_bound(bound: RowBound, clock: int, num_workers: int) -> None:
    (expected,) = row_bounds.lease_steps(bound, np.array([clock], np.uint32), np.zeros(1, np.int64), num_workers)
    assert lease_steps(clock, bound.terms.lag, bound.terms.share, num_workers) == expected


@given(st.floats(MIN_DRIFT, 1e6), st.floats(0, 1e9, width=32))
def test_kernels_count_distances_in_the_units_of_the_bound(drift: float, distance: float) -> None:
    bound = RowBound(drift=drift)
    (expected,) = bound.units(np.array([distance], np.float32))
    assert units(distance, bound.terms.units_per_distance) == expected


@given(CLOCKS, CLOCKS)
def test_kernels_find_states_old_that_the_bound_does(clock: int, lag: int) -> None:
    (expected,) = row_bounds.are_states_old(np.array([clock], np.uint32), np.array([lag]))
    assert are_states_old(clock, lag) == expected
