"""Growth of the processes of a chaos job."""

from __future__ import annotations

import random

import pytest

from fleet_sparse.tools.chaos.growth import ProcessUse, growth, slope


def samples(pid: int, mib: list[float], *, every_s: float = 60.0, num_files: int = 9) -> list[ProcessUse]:
    return [ProcessUse(pid, int(each * 2**20), num_files, number * every_s) for number, each in enumerate(mib)]


def test_a_process_that_grows_evenly_has_that_slope() -> None:
    found = growth(samples(1, [100 + 0.5 * minute for minute in range(40)]))
    assert found.rss_mib_per_hour == pytest.approx(30.0)
    assert found.files_per_hour == 0.0
    assert (found.begin.at_s, found.end.at_s) == (0.0, 39 * 60.0)


def test_the_first_quarter_of_the_time_does_not_count() -> None:
    often = [ProcessUse(1, number << 20, number, float(number)) for number in range(600)]
    later = [ProcessUse(1, 600 << 20, 9, 600.0 + 60 * minute) for minute in range(31)]
    found = growth([*often, *later])
    assert found.rss_mib_per_hour == 0.0
    assert found.files_per_hour == 0.0


def test_samples_of_a_former_process_do_not_count() -> None:
    found = growth([*samples(1, [500.0] * 20), *samples(2, [100.0] * 20)])
    assert found.begin.pid == 2
    assert found.rss_mib_per_hour == 0.0


def test_few_samples_have_no_slope() -> None:
    found = growth(samples(1, [1.0, 2.0, 3.0]))
    assert found.rss_mib_per_hour is None
    assert found.files_per_hour is None


def test_a_file_that_is_open_in_a_few_samples_is_no_growth() -> None:
    uses = samples(1, [100.0] * 40)
    for number in (12, 25, 39):
        uses[number] = uses[number]._replace(num_files=10)
    assert growth(uses).files_per_hour == 0.0


def test_a_file_that_stays_open_now_and_then_is_growth() -> None:
    uses = [use._replace(num_files=number // 10) for number, use in enumerate(samples(1, [100.0] * 100))]
    assert growth(uses).files_per_hour == pytest.approx(6.0, rel=0.05)


def test_samples_that_are_far_out_do_not_move_the_slope() -> None:
    points = [(float(x), 2.0 * x) for x in range(100)]
    for x in random.Random(1).sample(range(100), 20):
        points[x] = (float(x), 1e9)
    assert slope(points) == pytest.approx(2.0, rel=0.5)


def test_the_slope_is_the_median_of_those_of_pairs() -> None:
    assert slope([(0.0, 0.0), (1.0, 1.0), (2.0, 0.0), (4.0, 8.0)]) == 1.5  # -1, 0, 1, 2, 7/3, 4


def test_many_points_are_thinned() -> None:
    assert slope([(float(x), 3.0 * x) for x in range(50_000)]) == 3.0
