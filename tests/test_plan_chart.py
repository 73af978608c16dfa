"""The chart of a plan against the plans that it shows."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from fleet_sparse.costs import shipped_costs
from fleet_sparse.plan import Job, Machines, plan
from fleet_sparse.plan_chart import chart

COSTS = shipped_costs()
SVG = "{http://www.w3.org/2000/svg}"
JOB = Job(rows=1e9, dim=256, workers=100, compute_s=0.01)


def shown(found):
    """Curves, the mark, and all texts."""
    svg = ElementTree.fromstring(chart(found, COSTS))
    curves = [
        np.array([point.split(",") for point in line.attrib["points"].split()], float)
        for line in svg.iter(f"{SVG}polyline")
    ]
    (circle,) = svg.iter(f"{SVG}circle")
    texts = [each.text for each in svg.iter(f"{SVG}text")]
    return curves, np.array([float(circle.attrib["cx"]), float(circle.attrib["cy"])]), texts


def distance(curve, point) -> float:
    """Of a point from the straight lines between a curve's points, in pixels."""
    return abs(np.interp(point[0], curve[:, 0], curve[:, 1]) - point[1])


@pytest.mark.parametrize("count", [None, 200])
def test_the_plan_is_a_point_on_the_curve_of_its_network(count) -> None:
    curves, mark, texts = shown(plan(JOB, Machines(1e12, 10e9), COSTS, count))
    assert len(curves) == 3
    assert distance(curves[texts_of_networks(texts).index("10 Gbit/s")], mark) < 1


def texts_of_networks(texts):
    return [text for text in texts if text.endswith(" Gbit/s")]


def test_another_network_than_those_shown_has_a_curve_of_its_own() -> None:
    curves, _, texts = shown(plan(JOB, Machines(1e12, 25e9), COSTS))
    assert texts_of_networks(texts) == ["1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "100 Gbit/s"]
    assert len(curves) == 4


def test_a_slower_network_is_never_faster() -> None:
    curves, _, _ = shown(plan(JOB, Machines(1e12, 10e9), COSTS, 50))
    slow, middle, fast = (curve[:, 1] for curve in curves)  # y of SVG goes down
    assert (slow <= middle).all()
    assert (middle <= fast).all()
    assert (slow < fast).any()


def test_the_chart_says_that_it_is_a_model_what_is_chosen_and_what_limits() -> None:
    found = plan(JOB, Machines(1e12, 1e9), COSTS, 50)
    _, _, texts = shown(found)
    assert any(text.startswith("Model: a step of 100 workers, async, 1e+09 rows of dim 256") for text in texts)
    assert f"50 pservers, 1 Gbit/s: {found.limit}" in texts


def test_a_plan_without_the_memory_is_left_of_the_curves() -> None:
    found = plan(JOB, Machines(64e9, 1e9), COSTS, 2)
    assert found.least_pservers > 2
    curves, mark, _ = shown(found)
    assert all(curve[0, 0] > mark[0] for curve in curves)
