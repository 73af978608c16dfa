"""Plots as SVG."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from fleet_sparse import plot

WIDTHS = [
    ("async, max_step_lag 4, stream: pservers, looking ahead", 366.2),
    ("16 pservers, 10 Gbit/s: pserver network", 258.8),
    ("2 x 2: MKL with AVX2", 138.0),
    ("WORKERS MAY WAIT", 134.3),
    ("illicit fjords", 70.7),
]
"""Texts, and the pixels that DejaVu Sans takes for them at this size."""
SVG = "{http://www.w3.org/2000/svg}"


def points_of(svg: str) -> np.ndarray:
    """Of the only curve."""
    (line,) = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    return np.array([point.split(",") for point in line.attrib["points"].split()], float)


def texts_of(element):
    return [each for each in element.iter(f"{SVG}text") if "transform" not in each.attrib]


def extent_of(text, default_size=plot.FONT_SIZE):
    """From where to where a text goes, at most."""
    width = plot.text_width(text.text or "", int(text.attrib.get("font-size", default_size)))
    begin = float(text.attrib["x"]) - {"start": 0, "middle": width / 2, "end": width}[text.attrib["text-anchor"]]
    return begin, begin + width


def assert_texts_are_inside(svg: str) -> None:
    picture = ElementTree.fromstring(svg)
    for each in texts_of(picture):
        begin, end = extent_of(each)
        assert begin >= 0, each.text
        assert end <= float(picture.attrib["width"]), each.text
        assert float(each.attrib["y"]) >= plot.FONT_SIZE, each.text
        assert float(each.attrib["y"]) < float(picture.attrib["height"]), each.text


LONG = "async, max_step_lag 4, stream: pservers, looking ahead"
CURVE = [(1, 300e6), (40e6, 2e6), (500e6, 1.0)]


@pytest.mark.parametrize("title", ["short", "Examples a second of all workers, over those of plain Paddle, " * 2])
@pytest.mark.parametrize("label", ["1", LONG, "W" * 60])
def test_texts_of_bars_are_inside_of_the_picture(title, label) -> None:
    assert_texts_are_inside(plot.bars(title, "times the floor", [plot.Bar(label, 1, 2, 3), plot.Bar("b", 1, 5e9, 6e9)]))


@pytest.mark.parametrize("title", ["short", "Model: a step of 4,000 workers, async, rows of dim 16 " * 2])
@pytest.mark.parametrize("label", ["1", LONG, "W" * 60])
@pytest.mark.parametrize("log_y", [False, True])
def test_texts_of_lines_are_inside_of_the_picture(title, label, log_y) -> None:
    series = {f"{label}{number}": CURVE for number in range(9)}
    assert_texts_are_inside(plot.lines(title, "n", "ms", series, log_y=log_y, mark=plot.Mark(500e6, 2e6, f"{LONG} 9")))


@pytest.mark.parametrize("label", ["1", LONG])
def test_the_legend_is_beneath_the_plot_and_the_texts_of_its_axis(label) -> None:
    series = {f"{label}{number}": CURVE for number in range(9)}
    svg = ElementTree.fromstring(plot.lines("title", "n", "ms", series, mark=plot.Mark(40e6, 2e6, "the plan")))
    (legend,) = svg.iter(f"{SVG}g")
    assert [each.text for each in texts_of(legend)] == [*series, "the plan"]
    top = min(float(each.attrib["y"]) for each in texts_of(legend)) - plot.FONT_SIZE
    assert top >= max(float(each.attrib["y2"]) for each in svg.findall(f"{SVG}line"))
    assert top >= max(float(each.attrib["y"]) for each in svg.findall(f"{SVG}text"))


def test_names_of_a_legend_do_not_overlap() -> None:
    svg = ElementTree.fromstring(plot.lines("title", "n", "ms", {f"{LONG}{n}"[-9 * n - 3 :]: CURVE for n in range(9)}))
    (legend,) = svg.iter(f"{SVG}g")
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in texts_of(legend):
        lines.setdefault(each.attrib["y"], []).append(extent_of(each))
    assert any(len(extents) > 1 for extents in lines.values())
    assert len(lines) > 1
    for extents in lines.values():
        for (_, end), (begin, _) in pairwise(extents):
            assert end + plot.SAMPLE_WIDTH <= begin


@pytest.mark.parametrize(("text", "pixels"), WIDTHS)
def test_no_text_is_wider_than_its_estimate(text, pixels) -> None:
    assert pixels <= plot.text_width(text) <= 1.3 * pixels


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
