"""The chart of a plan."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.tools.capacity.chart import chart, curves
from fleet_sparse.tools.capacity.coefficients import shipped_coefficients
from fleet_sparse.tools.capacity.job import Machines, PlannedJob
from fleet_sparse.tools.capacity.plan import plan

COEFFICIENTS = shipped_coefficients()
JOB = PlannedJob(rows=1e9, dim=256, workers=100, compute_s=0.01)
FOUND = plan(JOB, Machines(64e9, 25e9), COEFFICIENTS, 50)


def test_the_plan_is_a_point_on_the_curve_of_its_bandwidth() -> None:
    by_bandwidth = curves(FOUND, COEFFICIENTS)
    assert list(by_bandwidth) == [1e9, 10e9, 25e9, 100e9]
    least = plan(JOB, Machines(64e9, 25e9), COEFFICIENTS, FOUND.least_pservers)
    assert by_bandwidth[25e9][0] == (least.num_pservers, 1e3 * least.step_s)


def test_the_chart_names_the_model_the_job_and_the_limit() -> None:
    svg = chart(FOUND, COEFFICIENTS)
    texts = [each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "Model: 100 workers, async, 1e+09 rows of dim 256, adagrad" in texts
    assert f"50 pservers, 25 Gbit/s: {FOUND.limit}" in texts
    assert {"1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "100 Gbit/s"} <= set(texts)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingError, match=r"fleet-sparse\[plot\]"):
        chart(FOUND, COEFFICIENTS)
