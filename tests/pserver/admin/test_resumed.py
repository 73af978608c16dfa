from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_sparse.pserver.admin.resumed import ResumedJob
from fleet_sparse.snapshot.manifest import Manifest, WorkerPosition


def manifest(*workers: WorkerPosition) -> Manifest:
    return Manifest(
        number=2,
        kind="full",
        base=None,
        save_id="x",
        saved_at="2026-01-01T00:00:00+00:00",
        tables=("C1",),
        is_complete=True,
        files=(),
        workers=workers,
    )


def told(worker_index: int, *workers: WorkerPosition) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(ResumedJob(manifest(*workers)).json_for(worker_index))
    return value


TWO = (WorkerPosition(0, 20, {"epoch": 1, "batch": 4}), WorkerPosition(1, 18, {"epoch": 0, "batch": 9}))


def test_worker_is_told_its_own_position_only() -> None:
    assert told(1, *TWO) == {
        "snapshot": "000002-full",
        "is_whole": True,
        "tables": ["C1"],
        "num_workers": 2,
        "min_step": 18,
        "max_step": 20,
        "min_epoch": 0,
        "worker": {"step": 18, "position": {"epoch": 0, "batch": 9}},
    }


def test_worker_that_the_snapshot_does_not_have_has_no_position() -> None:
    assert told(2, *TWO)["worker"] is None


def test_answer_does_not_grow_with_the_number_of_workers() -> None:
    many = [WorkerPosition(index, 18, {"epoch": 0, "batch": 9}) for index in range(1000)]
    assert len(json.dumps(told(1, *many))) < len(json.dumps(told(1, *TWO))) + 10


@pytest.mark.parametrize("position", [None, 7, "x", {}, {"epoch": "one", "batch": 2}])
def test_one_unknown_position_leaves_the_epoch_unknown(position: Any) -> None:
    assert told(0, TWO[0], WorkerPosition(1, 18, position))["min_epoch"] is None
