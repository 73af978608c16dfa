"""Plots as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from fleet_sparse import plot

SVG = "{http://www.w3.org/2000/svg}"


def points_of(svg: str) -> np.ndarray:
    """Of the only curve."""
    (line,) = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    return np.array([point.split(",") for point in line.attrib["points"].split()], float)


def test_a_plot_is_xml_and_its_bars_are_as_long_as_their_values() -> None:
    svg = ElementTree.fromstring(plot.bars("a < b", "ms", [plot.Bar("one", 1, 2, 3), plot.Bar("two", 3, 4, 5)], mark=1))
    widths = [float(each.attrib["width"]) for each in svg.iter(f"{SVG}rect")][1:]
    assert widths[1] == pytest.approx(2 * widths[0])


def test_a_curve_goes_up_where_its_values_do() -> None:
    points = points_of(plot.lines("rate", "rows", "M/s", {"round 1": [(1e5, 1.0), (1e6, 2.0), (1e7, 3.0)]}))
    assert (np.diff(points[:, 0]) > 0).all()
    assert (np.diff(points[:, 1]) < 0).all()


def test_on_two_logarithmic_axes_a_power_is_a_straight_line() -> None:
    points = points_of(plot.lines("time", "n", "ms", {"1/n": [(1, 100.0), (10, 10.0), (1000, 0.1)]}, log_y=True))
    slopes = np.diff(points[:, 1]) / np.diff(points[:, 0])
    assert slopes == pytest.approx(slopes[0])
    assert slopes[0] > 0  # y of SVG goes down


def test_a_mark_lies_on_the_curve_whose_point_it_is() -> None:
    svg = plot.lines("time", "n", "ms", {"a": [(1, 3.0), (10, 2.0), (100, 1.0)]}, mark=plot.Mark(10, 2.0, "ten <"))
    (circle,) = ElementTree.fromstring(svg).iter(f"{SVG}circle")
    assert [float(circle.attrib[name]) for name in ("cx", "cy")] == points_of(svg)[1].tolist()
    assert "ten <" in [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]
