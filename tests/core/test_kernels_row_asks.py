"""Answers to asks about copies, as the kernel decides them, against the reference in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.kernels_row_asks import answer_asks
from fleet_sparse.core.row_bound import MIN_DRIFT, NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW, RowBound
from support.row_bounds import answers

BOUNDS = st.builds(RowBound, st.integers(1, 3000), st.none() | st.floats(0.01, 1)) | st.builds(
    RowBound, drift=st.floats(MIN_DRIFT, 1e6)
)
CLOCKS = st.integers(0, 3000) | st.integers(2**32 - 3000, 2**32 - 1) | st.integers(0, 2**32 - 1)
LAGS = st.integers(0, 20) | st.integers(0, 6000) | st.integers(0, 2**32 - 1)
NONE = int(NO_VERSION)


class Ask(NamedTuple):
    """An ask about one copy.

    Attributes:
        clock: Of the row; None without one.
        version: Of the copy.
    """

    clock: int | None
    version: int


class Listed(NamedTuple):
    """The ids of one code: themselves, their row indices and clocks."""

    ids: list[int]
    row_indices: list[int]
    clocks: list[int]


class Found(NamedTuple):
    """The answers that the kernel wrote, and the lists of what follows."""

    slack: NDArray[np.uint8]
    due: Listed
    full: Listed


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    clock = draw(st.none() | CLOCKS)
    behind = draw(LAGS)
    return Ask(clock, draw(st.sampled_from([((clock or 0) - behind) % 2**32, NONE])))


def found_for(
    listed: list[Ask], bound: RowBound, num_workers: int, *, has_states: bool = True, gives_steps: bool = True
) -> Found:
    """Has asks answered by the kernel; the rows lie in the reverse order, and the id of ask i is 100 + i."""
    n, clocks = len(listed), np.array([each.clock or 0 for each in reversed(listed)], np.uint32)
    row_indices = np.array([-1 if each.clock is None else n - 1 - i for i, each in enumerate(listed)], np.int64)
    slack, num_found = np.empty(n, np.uint8), np.empty(2, np.int64)
    due, full = ([*np.empty((2, n), np.int64), np.empty(n, np.uint32)] for _ in range(2))
    answer_asks(
        *(np.arange(100, 100 + n), row_indices, np.array([each.version for each in listed], np.uint32)),
        *(clocks if num_workers > 1 else np.empty(0, np.uint32), bound.terms.lag, bound.terms.share, num_workers),
        *(has_states, gives_steps, slack, *due, *full, num_found),
    )
    lists = ([array[:k].tolist() for array in of] for of, k in zip((due, full), num_found, strict=True))
    return Found(slack, *(Listed(*each) for each in lists))


def clocks_of(listed: list[Ask], num_workers: int) -> NDArray[np.uint32]:
    return np.array([each.clock or 0 if num_workers > 1 else 0 for each in listed], np.uint32)


@given(st.lists(asks(), max_size=40), BOUNDS, st.integers(1, 8), st.booleans())
def test_the_kernel_answers_as_the_bound(
    listed: list[Ask], bound: RowBound, num_workers: int, has_states: bool
) -> None:
    found = found_for(listed, bound, num_workers, has_states=has_states, gives_steps=bound.has_leases)
    versions = np.array([each.version for each in listed], np.uint32)
    expected = answers(bound, clocks_of(listed, num_workers), versions, num_workers, has_states=has_states)
    np.testing.assert_array_equal(found.slack, expected)


@given(st.lists(asks(), max_size=40), BOUNDS, st.integers(1, 8), st.booleans())
def test_without_steps_slack_of_copies_within_the_bound_is_0(
    listed: list[Ask], bound: RowBound, num_workers: int, has_states: bool
) -> None:
    found, with_steps = (
        found_for(listed, bound, num_workers, has_states=has_states, gives_steps=each) for each in (False, True)
    )
    follow = with_steps.slack >= ROW_FOLLOWS
    np.testing.assert_array_equal(found.slack, np.where(follow, with_steps.slack, 0))
    assert (found.due, found.full) == (with_steps.due, with_steps.full)


@given(st.lists(asks(), max_size=40), BOUNDS, st.integers(1, 8), st.booleans())
def test_what_follows_is_listed_in_the_order_of_the_ask(
    listed: list[Ask], bound: RowBound, num_workers: int, has_states: bool
) -> None:
    found, clocks = found_for(listed, bound, num_workers, has_states=has_states), clocks_of(listed, num_workers)
    for code, of_code in ((ROW_FOLLOWS, found.due), (STATES_FOLLOW, found.full)):
        places = np.flatnonzero(found.slack == code)
        rows = [-1 if listed[i].clock is None else len(listed) - 1 - i for i in places]
        assert of_code == Listed((100 + places).tolist(), rows, clocks[places].tolist())


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (Ask(2, 2**32 - 3), 0),  # 5 behind, of two workers all that a lag of 10 allows
        (Ask(2, 2**32 - 4), STATES_FOLLOW),
        (Ask(2**32 - 1, 2**32 - 7), ROW_FOLLOWS),
        (Ask(2**32 - 1, 2**32 - 1), STATES_FOLLOW),  # a clock may have the value of NO_VERSION
        (Ask(None, 0), 5),
        (Ask(None, NONE), STATES_FOLLOW),
    ],
)
def test_clocks_that_wrap_are_answered(ask: Ask, expected: int) -> None:
    assert found_for([ask], RowBound(lag=10), 2).slack.tolist() == [expected]


@pytest.mark.parametrize("bound", [RowBound(lag=1, share=0.1), RowBound(drift=1.0)])
def test_the_only_worker_has_the_longest_lease_for_any_version(bound: Any) -> None:
    found = found_for([Ask(7, 0), Ask(7, 1), Ask(None, 2**31)], bound, 1)
    assert found.slack.tolist() == [ROW_FOLLOWS - 1] * 3
