"""Plots as SVG: lines over a logarithmic axis, and bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, PLOT_HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
COLORS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#a6761d")
BAR_HEIGHT, BAR_GAP, LABEL_WIDTH = 22, 10, 300
NUM_TICKS = 5
# Each plot has a background of its own, so that it can be read on a dark page too.
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    'font-family="sans-serif" font-size="13" fill="#222">\n<title>{title}</title>\n'
    '<rect width="{width}" height="{height}" fill="#fff"/>\n'
    '<text x="{middle}" y="22" text-anchor="middle" font-size="15">{title}</text>\n'
)


class Bar(NamedTuple):
    """A value with its spread."""

    label: str
    low: float
    middle: float
    high: float


class Mark(NamedTuple):
    """A point of a plot that is named."""

    x: float
    y: float
    label: str


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log_y: bool = False,
    mark: Mark | None = None,
) -> str:
    """A curve for each series of (x, y), x on a logarithmic axis; y from 0, or with `log_y` on such an axis too."""
    points = [point for each in series.values() for point in each] + ([(mark.x, mark.y)] if mark else [])
    xs, ys = zip(*points, strict=True)
    low, high = (math.log10(pick(xs)) for pick in (min, max))
    bottom, top = map(math.log10, log_span(min(ys), max(ys))) if log_y else (0.0, ceiling(max(ys)))
    height = TOP + PLOT_HEIGHT + BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / ((high - low) or 1)
        up = ((math.log10(y) if log_y else y) - bottom) / ((top - bottom) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + PLOT_HEIGHT * (1 - up)

    parts = [_HEAD.format(width=WIDTH, height=height, title=escape(title), middle=WIDTH / 2)]
    for tick in log_ticks(10**bottom, 10**top) if log_y else (top * k / NUM_TICKS for k in range(NUM_TICKS + 1)):
        _, y = at(10**low, tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>\n')
        parts.append(text(LEFT - 8, y + 4, short(tick), "end"))
    for tick in log_ticks(10**low, 10**high):
        x, _ = at(tick, max(ys))
        parts.append(text(x, TOP + PLOT_HEIGHT + 18, short(tick), "middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, height - 10, x_label, "middle"))
    parts.append(
        f'<text x="16" y="{TOP + PLOT_HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {TOP + PLOT_HEIGHT / 2})">{escape(y_label)}</text>\n'
    )
    for number, (name, each) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in each))
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="1.5"/>\n')
        y = TOP + PLOT_HEIGHT - 10 - 16 * number  # below the curves, which are seldom near 0
        parts.append(f'<line x1="{LEFT + 10}" x2="{LEFT + 34}" y1="{y - 4}" y2="{y - 4}" stroke="{color}"/>\n')
        parts.append(text(LEFT + 40, y, name, "start"))
    if mark:
        x, y = at(mark.x, mark.y)
        is_left = x < WIDTH / 2
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#222"/>\n')
        parts.append(text(x + (9 if is_left else -9), y - 9, mark.label, "start" if is_left else "end"))
    return "".join([*parts, "</svg>\n"])


def bars(title: str, x_label: str, each: Sequence[Bar], *, mark: float | None = None) -> str:
    """A bar for each value from 0, with a line over its spread; `mark` is a dashed line across all of them."""
    height = TOP + len(each) * (BAR_HEIGHT + BAR_GAP) + BOTTOM
    top = ceiling(max([bar.high for bar in each] + ([mark] if mark else [])))
    bottom = height - BOTTOM

    def at(value: float) -> float:
        return LABEL_WIDTH + value / top * (WIDTH - LABEL_WIDTH - RIGHT)

    parts = [_HEAD.format(width=WIDTH, height=height, title=escape(title), middle=WIDTH / 2)]
    for k in range(NUM_TICKS + 1):
        x = at(top * k / NUM_TICKS)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#ddd"/>\n')
        parts.append(text(x, bottom + 18, short(top * k / NUM_TICKS), "middle"))
    parts.append(text((LABEL_WIDTH + WIDTH - RIGHT) / 2, height - 10, x_label, "middle"))
    for number, bar in enumerate(each):
        y = TOP + number * (BAR_HEIGHT + BAR_GAP) + BAR_GAP / 2
        middle = y + BAR_HEIGHT / 2
        parts.append(text(LABEL_WIDTH - 8, middle + 4, bar.label, "end"))
        parts.append(
            f'<rect x="{LABEL_WIDTH}" y="{y:.1f}" width="{at(bar.middle) - LABEL_WIDTH:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{COLORS[0]}" fill-opacity="0.7"/>\n'
        )
        parts.append(
            f'<line x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
            'stroke="#222" stroke-width="2"/>\n'
        )
    if mark is not None:
        x = at(mark)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="{COLORS[1]}" stroke-dasharray="4"/>\n'
        )
    return "".join([*parts, "</svg>\n"])


def text(x: float, y: float, what: str, anchor: str) -> str:
    """A line of text at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>\n'


def ceiling(value: float) -> float:
    """The next number, no less, that is good for the end of an axis."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def log_span(low: float, high: float) -> tuple[float, float]:
    """The ticks of a logarithmic axis between which all from `low` to `high` lies."""
    ticks = list(log_ticks(low / 10, high * 10))
    below = max(tick for tick in ticks if tick <= low * (1 + 1e-9))
    return below, min(tick for tick in ticks if tick >= high * (1 - 1e-9) and tick > below)


def log_ticks(low: float, high: float) -> Iterator[float]:
    """1, 2 and 5 times the powers of ten between two numbers."""
    power = 10.0 ** math.floor(math.log10(low))
    while power <= high:
        yield from (step * power for step in (1, 2, 5) if low <= step * power * 1.001 and step * power <= high * 1.001)
        power *= 10


def short(value: float) -> str:
    """20 000 000 as 20 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
