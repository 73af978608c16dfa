from __future__ import annotations

from typing import Any

import pytest

from fleet_sparse.plugin.schedule import Schedule


def schedule(**changes: Any) -> Schedule:
    return Schedule("model", **{"seconds": None, "steps": None, "keep_last": 3, "deltas": 0, **changes})


def saves(schedule: Schedule, times: list[float]) -> list[tuple[float, str]]:
    """Returns begin and kind of each save, for steps that end at `times`."""
    begun = []
    for now in times:
        schedule.count_step(now)
        if schedule.is_due(now):
            begun.append((now, schedule.begin(now)))
    return begun


def test_steps_are_counted_from_save_to_save() -> None:
    assert [now for now, _ in saves(schedule(steps=3), list(range(10)))] == [2, 5, 8]


def test_seconds_count_from_the_first_step_and_from_each_save() -> None:
    assert [now for now, _ in saves(schedule(seconds=10), [100, 104, 109, 111, 115, 120, 121.5])] == [111, 121.5]


def test_first_limit_counts_and_restarts_both() -> None:
    assert [now for now, _ in saves(schedule(seconds=10, steps=3), [0, 1, 2, 3, 13, 14, 15, 16])] == [2, 13, 16]


def test_waiting_save_is_due_after_each_step() -> None:
    waiting = schedule(steps=2)
    for now in range(5):
        waiting.count_step(now)
        assert waiting.is_due(now) is (now >= 1)


def test_before_the_first_step_nothing_is_due() -> None:
    assert not schedule(seconds=1e-9).is_due(1e9)


@pytest.mark.parametrize(
    ("deltas", "kinds"),
    [(0, ["full"] * 5), (1, ["full", "delta"] * 2 + ["full"]), (3, ["full"] + ["delta"] * 3 + ["full"])],
)
def test_deltas_lie_between_full_snapshots(deltas: int, kinds: list[str]) -> None:
    assert [kind for _, kind in saves(schedule(steps=1, deltas=deltas), list(range(5)))] == kinds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"seconds": 0}, "seconds .*0"),
        ({"seconds": float("nan")}, "seconds .*nan"),
        ({"steps": 0}, "steps .*0"),
        ({"steps": -1, "seconds": 5}, "steps .*-1"),
        ({"steps": 1, "deltas": -1}, "deltas .*-1"),
        ({"steps": 1, "keep_last": 1.5}, "keep_last .*1.5"),
        ({"steps": 1, "keep_last": 0}, "keep_last .*0"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^save_every: {message}"):
        schedule(**changes)
