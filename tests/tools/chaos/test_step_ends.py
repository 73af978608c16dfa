"""Times at which workers of a chaos job ended their steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_sparse.tools.chaos.step_ends import StepEnds, longest_pause_s, num_steps, read

ENDS = [1.0, 2.0, 7.0, 8.0, 11.0, 12.0]


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
