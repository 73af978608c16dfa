from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_sparse.wire.control import WorkerProgress
from fleet_sparse.worker.control.resumed import Position, Resumed, begun_behind, parse_resumed
from fleet_sparse.worker.modes.step import Progress
from fleet_sparse.worker.net.shard_link import Registration

TABLES = ("C1", "C2")


def text(worker: tuple[int, Any] | None, *, is_whole: bool = True, min_epoch: int | None = 0) -> str:
    """The answer to a worker with this step and position in a snapshot of two workers."""
    return json.dumps(
        {
            "snapshot": "000002-full",
            "is_whole": is_whole,
            "tables": TABLES,
            "num_workers": 2,
            "min_step": 18,
            "max_step": 20,
            "min_epoch": min_epoch,
            "worker": None if worker is None else {"step": worker[0], "position": worker[1]},
        }
    )


FIRST = text((20, {"epoch": 1, "batch": 4}))
SECOND = text((18, {"epoch": 0, "batch": 9}))


def test_without_a_snapshot_a_worker_is_at_the_beginning() -> None:
    assert parse_resumed("", 2, in_step=False) == Resumed("", 0, None, 0)


@pytest.mark.parametrize(("answer", "step", "position"), [(FIRST, 20, Position(1, 4)), (SECOND, 18, Position(0, 9))])
def test_each_of_as_many_workers_is_where_it_was(answer: str, step: int, position: Position) -> None:
    assert parse_resumed(answer, 2, in_step=False) == Resumed("000002-full", step, position, 2, TABLES)


def test_workers_that_count_the_jobs_steps_take_the_largest() -> None:
    assert parse_resumed(SECOND, 2, in_step=True) == Resumed("000002-full", 20, Position(0, 9), 2, TABLES)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_another_number_of_workers_has_the_earliest_epoch(num_workers: int) -> None:
    assert parse_resumed(FIRST, num_workers, in_step=False) == Resumed("000002-full", 18, Position(0, 0), 2, TABLES)


def test_without_a_known_epoch_there_is_no_position() -> None:
    resumed = parse_resumed(text((20, None), min_epoch=None), 1, in_step=False)
    assert (resumed.step, resumed.position) == (18, None)


def test_worker_not_in_the_snapshot_has_the_fewest_steps() -> None:
    assert parse_resumed(text(None), 2, in_step=False).step == 18


@pytest.mark.parametrize("position", [None, 7, "x", {}, {"epoch": 1}, {"epoch": "one", "batch": 2}])
def test_unreadable_position_is_unknown(position: Any) -> None:
    assert parse_resumed(text((3, position)), 2, in_step=False).position is None


def test_steps_are_added() -> None:
    resumed = Resumed("000002-full", 18, Position(0, 9), 2)
    assert resumed.plus(Progress(3, "{}")) == Progress(21, "{}")


def test_before_its_first_step_a_worker_stands_where_it_stood() -> None:
    position = Position(0, 9)
    assert Resumed("000002-full", 18, position, 2).plus(Progress(0, None)) == Progress(18, position.to_json())
    assert Resumed().plus(Progress(0, None)) == Progress(0, "")


def test_snapshot_of_some_tables_has_no_position() -> None:
    resumed = parse_resumed(text((20, {"epoch": 1, "batch": 4}), is_whole=False), 2, in_step=False)
    assert (resumed.step, resumed.position) == (0, None)
    (warning,) = resumed.warnings(TABLES)
    assert "'C1', 'C2'" in warning


def test_tables_that_only_job_or_snapshot_has_are_named() -> None:
    resumed = parse_resumed(FIRST, 2, in_step=False)
    assert resumed.warnings(TABLES) == []
    new, unused = resumed.warnings(["C1", "C3"])
    assert "'C3'" in new
    assert "'C2'" in unused


def test_without_a_snapshot_there_is_no_warning() -> None:
    assert Resumed().warnings(TABLES) == []


# A worker that takes the place of another one in a job with a bounded step lag


def registrations(*pushed_steps: int, reported: int | None, is_restart: bool = False) -> list[Registration]:
    """Answers of shards that have these steps of the worker; shard 0 knows its position after step `reported`."""
    progress = None if reported is None else WorkerProgress(5, "", reported)
    return [
        Registration(1, shard, 2, 3, 1, "", is_restart=is_restart, progress=progress, pushed_step=step)
        for shard, step in enumerate(pushed_steps)
    ]


@pytest.mark.guarantee("A9")
def test_a_worker_begins_behind_the_reported_step() -> None:
    assert begun_behind(registrations(9, 8, reported=6)) == 6


def test_a_worker_that_reported_nothing_begins_at_the_beginning() -> None:
    assert begun_behind(registrations(9, 8, reported=None)) == 0


def test_a_worker_of_a_job_begun_again_begins_at_its_beginning() -> None:
    assert begun_behind(registrations(0, 0, reported=6)) == 0


@pytest.mark.guarantee("A9")
def test_a_restarted_pserver_does_not_move_the_begin() -> None:
    assert begun_behind(registrations(0, 8, reported=6, is_restart=True)) == 6


def test_no_step_is_made_again_whose_position_is_lost() -> None:
    assert begun_behind(registrations(0, 8, reported=None, is_restart=True)) == 8
