"""Growth of the processes of a chaos job."""

from __future__ import annotations

import pytest

from fleet_sparse.tools.chaos.growth import ProcessUse, growth


def samples(pid: int, mib: list[float], *, every_s: float = 60.0, num_files: int = 9) -> list[ProcessUse]:
    return [ProcessUse(pid, int(each * 2**20), num_files, number * every_s) for number, each in enumerate(mib)]


def test_a_line_through_samples_is_their_slope() -> None:
    found = growth(samples(1, [100 + 0.5 * minute for minute in range(40)]))
    assert found.rss_mib_per_hour == pytest.approx(30.0)
    assert (found.begin.at_s, found.end.at_s) == (0.0, 39 * 60.0)


def test_the_time_in_which_a_process_settles_does_not_count() -> None:
    found = growth(samples(1, [*range(10), *[10.0] * 30]))
    assert found.rss_mib_per_hour == pytest.approx(0.0)


def test_samples_of_a_former_process_do_not_count() -> None:
    found = growth([*samples(1, [500.0] * 20), *samples(2, [100.0] * 20)])
    assert found.begin.pid == 2
    assert found.rss_mib_per_hour == pytest.approx(0.0)


def test_few_samples_have_no_slope() -> None:
    assert growth(samples(1, [1.0, 2.0, 3.0])).rss_mib_per_hour is None
