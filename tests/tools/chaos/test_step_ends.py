"""Times at which workers of a chaos job ended their steps."""

from __future__ import annotations

from pathlib import Path

from fleet_sparse.tools.chaos.step_ends import StepEnds, num_steps, read


def test_all_lives_of_a_worker_append_to_one_file(tmp_path: Path) -> None:
    for life in range(2):
        ends = StepEnds(tmp_path / "ends")
        assert len(ends) == 2 * life
        ends.append(10.0 * life)
        ends.append(10.0 * life + 1)
    assert list(read(tmp_path / "ends")) == [0.0, 1.0, 10.0, 11.0]
    assert num_steps(tmp_path / "ends") == 4


def test_a_worker_that_never_began_made_no_steps(tmp_path: Path) -> None:
    assert num_steps(tmp_path / "ends") == 0
