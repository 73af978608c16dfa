"""Plots as SVG: lines over a logarithmic axis, and bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, PLOT_HEIGHT = 720, 300
"""Of a picture at least, and of lines; pictures are as large as their texts ask for."""
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
COLORS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#a6761d")
BAR_HEIGHT, BAR_GAP, BAR_LENGTH = 22, 10, 400
NUM_TICKS = 5
MARGIN, LEGEND_LINE, SAMPLE_WIDTH = 8, 20, 24
FONT_SIZE, TITLE_SIZE = 13, 15
NARROW, WIDE = frozenset(" !'(),-./:;I[]fijlrt|"), frozenset("%#&+<=>@MW^mw~")
# Each plot has a background of its own, so that it can be read on a dark page too.
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    'font-family="sans-serif" font-size="{size}" fill="#222">\n<title>{title}</title>\n'
    '<rect width="{width}" height="{height}" fill="#fff"/>\n'
    '<text x="{middle}" y="22" text-anchor="middle" font-size="{title_size}">{title}</text>\n'
)


class Bar(NamedTuple):
    """A value with its spread."""

    label: str
    low: float
    middle: float
    high: float


class Mark(NamedTuple):
    """A point of a plot that the legend names."""

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
    x_ticks = list(log_ticks(10**low, 10**high))
    y_ticks = list(log_ticks(10**bottom, 10**top)) if log_y else [top * k / NUM_TICKS for k in range(NUM_TICKS + 1)]
    names = [*series, *([mark.label] if mark else [])]
    left = max(LEFT, 24 + 2 * MARGIN + widest(map(short, y_ticks)))
    right = max(RIGHT, MARGIN + widest(map(short, x_ticks)) / 2)
    beneath = max(text_width(x_label), SAMPLE_WIDTH + MARGIN + widest(names))
    width = math.ceil(max(WIDTH, width_of_title(title), left + beneath + right))
    end = width - right
    of_legend, legend_height = legend(names, left, end, TOP + PLOT_HEIGHT + BOTTOM, has_mark=mark is not None)
    height = TOP + PLOT_HEIGHT + BOTTOM + legend_height

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / ((high - low) or 1)
        up = ((math.log10(y) if log_y else y) - bottom) / ((top - bottom) or 1)
        return left + across * (end - left), TOP + PLOT_HEIGHT * (1 - up)

    parts = [head(title, width, height)]
    for tick in y_ticks:
        _, y = at(10**low, tick)
        parts.append(f'<line x1="{left:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>\n')
        parts.append(text(left - MARGIN, y + 4, short(tick), "end"))
    for tick in x_ticks:
        x, _ = at(tick, max(ys))
        parts.append(text(x, TOP + PLOT_HEIGHT + 18, short(tick), "middle"))
    parts.append(text((left + end) / 2, TOP + PLOT_HEIGHT + BOTTOM - 10, x_label, "middle"))
    parts.append(
        f'<text x="16" y="{TOP + PLOT_HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {TOP + PLOT_HEIGHT / 2})">{escape(y_label)}</text>\n'
    )
    for number, each in enumerate(series.values()):
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in each))
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{color_of(number)}" stroke-width="1.5"/>\n')
    if mark:
        x, y = at(mark.x, mark.y)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#222"/>\n')
    return "".join([*parts, of_legend, "</svg>\n"])


def legend(names: Sequence[str], left: float, end: float, top: float, *, has_mark: bool) -> tuple[str, int]:
    """Names beneath a plot, as many on a line as there is room for, and the height of all lines.

    Each has a sample of its curve before it; the last one a point, if it names a mark.
    """
    parts, x, y = [], left, top + LEGEND_LINE / 2
    for number, name in enumerate(names):
        width = SAMPLE_WIDTH + MARGIN + text_width(name)
        if x > left and x + width > end:
            x, y = left, y + LEGEND_LINE
        if has_mark and number == len(names) - 1:
            parts.append(f'<ellipse cx="{x + SAMPLE_WIDTH / 2:.1f}" cy="{y - 4:.1f}" rx="5" ry="5" fill="#222"/>\n')
        else:
            parts.append(
                f'<line x1="{x:.1f}" x2="{x + SAMPLE_WIDTH:.1f}" y1="{y - 4:.1f}" y2="{y - 4:.1f}" '
                f'stroke="{color_of(number)}" stroke-width="1.5"/>\n'
            )
        parts.append(text(x + SAMPLE_WIDTH + MARGIN, y, name, "start"))
        x += width + 3 * MARGIN
    return f'<g class="legend">\n{"".join(parts)}</g>\n', math.ceil(y + LEGEND_LINE / 2 - top)


def bars(title: str, x_label: str, each: Sequence[Bar], *, mark: float | None = None) -> str:
    """A bar for each value from 0, with a line over its spread; `mark` is a dashed line across all of them."""
    height = TOP + len(each) * (BAR_HEIGHT + BAR_GAP) + BOTTOM
    top = ceiling(max([bar.high for bar in each] + ([mark] if mark else [])))
    bottom = height - BOTTOM
    ticks = [top * k / NUM_TICKS for k in range(NUM_TICKS + 1)]
    left = 2 * MARGIN + widest(bar.label for bar in each)
    right = max(RIGHT, MARGIN + widest(map(short, ticks)) / 2)
    width = math.ceil(max(WIDTH, width_of_title(title), left + max(BAR_LENGTH, text_width(x_label)) + right))
    end = width - right

    def at(value: float) -> float:
        return left + value / top * (end - left)

    parts = [head(title, width, height)]
    for tick in ticks:
        x = at(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#ddd"/>\n')
        parts.append(text(x, bottom + 18, short(tick), "middle"))
    parts.append(text((left + end) / 2, height - 10, x_label, "middle"))
    for number, bar in enumerate(each):
        y = TOP + number * (BAR_HEIGHT + BAR_GAP) + BAR_GAP / 2
        middle = y + BAR_HEIGHT / 2
        parts.append(text(left - MARGIN, middle + 4, bar.label, "end"))
        parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{at(bar.middle) - left:.1f}" height="{BAR_HEIGHT}" '
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


def head(title: str, width: int, height: int) -> str:
    """What a picture begins with."""
    sizes = {"size": FONT_SIZE, "title_size": TITLE_SIZE}
    return _HEAD.format(width=width, height=height, title=escape(title), middle=width / 2, **sizes)


def color_of(number: int) -> str:
    """Of a curve."""
    return COLORS[number % len(COLORS)]


def text_width(what: str, font_size: int = FONT_SIZE) -> float:
    """Pixels that a text takes at most in the fonts that browsers take for sans-serif, of which DejaVu Sans is wide."""

    def ems(letter: str) -> float:
        if letter in NARROW:
            return 0.42
        return 1.0 if letter in WIDE or not letter.isascii() else 0.8 if letter.isupper() else 0.66

    return font_size * sum(map(ems, what))


def widest(texts: Iterable[str]) -> float:
    """Pixels of the longest text."""
    return max(map(text_width, texts), default=0.0)


def width_of_title(title: str) -> float:
    """Of a picture that has it."""
    return text_width(title, TITLE_SIZE) + 2 * MARGIN


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
