from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_sparse.worker.control.resumed import Position, Resumed, parse_resumed
from fleet_sparse.worker.modes.step import Progress

TABLES = ("C1", "C2")


def text(*workers: tuple[int, int, Any], is_whole: bool = True) -> str:
    """Of a snapshot by workers (index, step, position)."""
    marks = [{"worker": worker, "step": step, "position": position} for worker, step, position in workers]
    told = {"snapshot": "000002-full", "is_whole": is_whole, "tables": TABLES}
    return json.dumps({**told, "num_workers": len(marks), "workers": marks})


TWO = text((0, 20, {"epoch": 1, "batch": 4}), (1, 18, {"epoch": 0, "batch": 9}))


def test_without_a_snapshot_a_worker_is_at_the_beginning() -> None:
    assert parse_resumed("", 0, 2, in_step=False) == Resumed("", 0, None, 0)


@pytest.mark.parametrize(("worker", "step", "position"), [(0, 20, Position(1, 4)), (1, 18, Position(0, 9))])
def test_each_of_as_many_workers_is_where_it_was(worker: int, step: int, position: Position) -> None:
    assert parse_resumed(TWO, worker, 2, in_step=False) == Resumed("000002-full", step, position, 2, TABLES)


def test_workers_whose_steps_are_the_jobs_count_from_the_most_of_any() -> None:
    assert parse_resumed(TWO, 1, 2, in_step=True) == Resumed("000002-full", 20, Position(0, 9), 2, TABLES)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_another_number_of_workers_begins_with_the_earliest_epoch_and_the_fewest_steps(num_workers: int) -> None:
    assert parse_resumed(TWO, num_workers - 1, num_workers, in_step=False) == Resumed(
        "000002-full", 18, Position(0, 0), 2, TABLES
    )


def test_where_one_position_is_not_known_no_epoch_is() -> None:
    resumed = parse_resumed(text((0, 20, {"epoch": 1, "batch": 4}), (1, 18, None)), 0, 1, in_step=False)
    assert (resumed.step, resumed.position) == (18, None)


def test_a_worker_that_the_snapshot_does_not_name_counts_as_one_of_another_number() -> None:
    assert parse_resumed(text((0, 20, {"epoch": 1, "batch": 4}), (2, 18, None)), 1, 2, in_step=False).step == 18


@pytest.mark.parametrize("position", [None, 7, "x", {}, {"epoch": 1}, {"epoch": "one", "batch": 2}])
def test_a_position_that_is_none_of_ours_is_not_known(position: Any) -> None:
    assert parse_resumed(text((0, 3, position)), 0, 1, in_step=False).position is None


def test_steps_go_on_counting() -> None:
    resumed = Resumed("000002-full", 18, Position(0, 9), 2)
    assert resumed.plus(Progress(3, "{}")) == Progress(21, "{}")


def test_before_its_first_step_a_worker_stands_where_it_stood() -> None:
    position = Position(0, 9)
    assert Resumed("000002-full", 18, position, 2).plus(Progress(0, None)) == Progress(18, position.to_json())
    assert Resumed().plus(Progress(0, None)) == Progress(0, "")


def test_a_snapshot_of_some_tables_is_nothing_to_go_on_from() -> None:
    resumed = parse_resumed(text((0, 20, {"epoch": 1, "batch": 4}), is_whole=False), 0, 1, in_step=False)
    assert (resumed.step, resumed.position) == (0, None)
    assert resumed.warnings(TABLES) == ["snapshot 000002-full has some tables only: 'C1', 'C2'; all else begins anew"]


def test_tables_that_only_the_job_or_only_the_snapshot_has_are_told() -> None:
    resumed = parse_resumed(TWO, 0, 2, in_step=False)
    assert resumed.warnings(TABLES) == []
    assert resumed.warnings(["C1", "C3"]) == [
        "snapshot 000002-full has no 'C3'; these tables begin anew",
        "snapshot 000002-full has 'C2', which no program here looks up so far",
    ]


def test_without_a_snapshot_there_is_nothing_to_tell() -> None:
    assert Resumed().warnings(TABLES) == []
