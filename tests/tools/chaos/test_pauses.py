"""Pauses of the workers of a chaos job."""

from __future__ import annotations

import pytest

from fleet_sparse.tools.chaos.faults import FaultKind
from fleet_sparse.tools.chaos.pauses import Moment, Pause, longest_pause_s, pauses

ENDS = [1.0, 2.0, 7.0, 8.0, 11.0, 12.0]


@pytest.mark.parametrize(
    ("begin", "end", "pause_s"),
    [(2, 4, 5.0), (3, 6, 3.0), (0, 2, 1.0), (5, 6, 1.0), (3, 3, 0.0), (0, 1, 0.0)],
    ids=[
        "from the step before the part",
        "the longest of several",
        "from the first step",
        "one step",
        "no step",
        "the first step",
    ],
)
def test_the_longest_pause_of_a_part(begin: int, end: int, pause_s: float) -> None:
    assert longest_pause_s(ENDS, begin, end) == pause_s


def test_a_fault_has_the_longest_pause_until_the_next_one() -> None:
    moments = [
        Moment(FaultKind.kill, [2, 2], {"a": 0}),
        Moment(FaultKind.worker, [4, 4], {"a": 0}),
        Moment(None, [6, 6], {"a": 0}),
    ]
    found = pauses(moments, [ENDS, [1.0, 2.0, 3.0, 4.0, 5.0, 15.0]], {"a": []})
    assert found == [(FaultKind.kill, Pause(5.0, 0.0, 0)), (FaultKind.worker, Pause(10.0, 0.0, 0))]


def test_supervisors_that_wait_at_the_same_time_count_once() -> None:
    moments = [
        Moment(FaultKind.kill_all, [2], {"a": 1, "b": 0}),
        Moment(FaultKind.kill, [4], {"a": 2, "b": 1}),
        Moment(None, [6], {"a": 3, "b": 1}),
    ]
    found = pauses(moments, [ENDS], {"a": [8.0, 2.0, 0.0], "b": [0.5]})
    assert found == [(FaultKind.kill_all, Pause(5.0, 2.0, 2)), (FaultKind.kill, Pause(3.0, 0.0, 0))]
    assert [pause.own_s for _, pause in found] == [3.0, 3.0]


def test_a_pause_without_backoff_is_no_less_than_0() -> None:
    assert Pause(1.0, 1.5, 1).own_s == 0.0
