"""The simulator estimates how many rows each bound saves."""

from __future__ import annotations

import pytest

from benchmarks.het import limits


def test_a_looser_bound_saves_more_and_first_reads_stay() -> None:
    found = limits.jobs(4, 20_000, 5_000, 50)
    saved = [traffic.rows_saved for bound, traffic in found.items() if bound.share is None]
    assert saved == sorted(saved)
    assert saved[-1] > saved[0] + 0.3
    assert len({traffic.entered for traffic in found.values()}) == 1


def test_each_job_has_a_row_for_each_bound(capsys: pytest.CaptureFixture[str]) -> None:
    limits.main(["--workers", "2", "3", "--examples", "1000", "--ids", "2000", "--batch", "50"])
    rows = [line for line in capsys.readouterr().out.splitlines() if "1,000" in line]
    assert len(rows) == 2 * len(limits.BOUNDS)
