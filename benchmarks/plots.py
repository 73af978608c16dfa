"""Plots of the benchmark page as SVG text. The same figures make the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Text stays text, and ids and metadata do not depend on the run.
_STYLE: Any = {
    "svg.hashsalt": "fleet_sparse",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_METADATA = {"Date": None, "Creator": None}


class Bar(NamedTuple):
    """A median with its quartiles."""

    label: str
    low: float
    median: float
    high: float


def bar(label: str, values: Sequence[float]) -> Bar:
    """Returns the bar of some values."""
    return Bar(label, *np.percentile(values, [25, 50, 75]).tolist())


def bars(title: str, unit: str, each: Sequence[Bar], mark: float | None = None) -> str:
    """Returns horizontal bars from 0 with their quartiles; `mark` is a dashed line across them."""

    def draw(axes: Axes) -> None:
        medians = [bar.median for bar in each]
        spreads = [[bar.median - bar.low for bar in each], [bar.high - bar.median for bar in each]]
        axes.barh([bar.label for bar in each], medians, xerr=spreads, color="#1f77b4", alpha=0.7)
        axes.invert_yaxis()
        axes.grid(axis="x", color="#ddd")
        axes.set(title=title, xlabel=unit)
        if mark is not None:
            axes.axvline(mark, color="#d95f02", linestyle="--")

    return _svg(draw, 1 + 0.32 * len(each))


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    is_logarithmic: bool = True,
    begins_at_0: bool = True,
) -> str:
    """Returns one curve for each series of (x, y), by default over a logarithmic x axis, and from 0 on."""

    def draw(axes: Axes) -> None:
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), label=name)
        axes.set(title=title, xlabel=x_label, ylabel=y_label, xscale="log" if is_logarithmic else "linear")
        if begins_at_0:
            axes.set_ylim(0, None)
        axes.grid(color="#ddd")
        axes.legend(fontsize="small")

    return _svg(draw, 4)


def _svg(draw: Callable[[Axes], None], height_inches: float) -> str:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8, height_inches), layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=_METADATA)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
