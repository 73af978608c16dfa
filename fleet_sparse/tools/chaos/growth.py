"""How memory and open files of a process grow, by samples. Pure.

The slope is the median of the slopes of all pairs of samples: Theil, "A rank-invariant method of linear and polynomial
regression analysis", Proc. Kon. Ned. Akad. v. Wetensch. A 53 (1950), and Sen, "Estimates of the regression coefficient
based on Kendall's tau", JASA 63 (1968). Fewer than 29 % of the samples, however far out, cannot move it without bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

_LEAST_SAMPLES = 8
_MOST_SAMPLES = 1000  # whose pairs are half a million
_WARM_UP = 0.25
_MIB, _HOUR_S = 1 << 20, 3600.0


class ProcessUse(NamedTuple):
    """What a process takes."""

    pid: int
    rss_bytes: int
    num_files: int
    at_s: float
    """Monotonic time."""


class Growth(NamedTuple):
    """Samples of one process, from its first to its last, and slopes without the first quarter of that time."""

    begin: ProcessUse
    end: ProcessUse
    rss_mib_per_hour: float | None
    """None of too few samples."""
    files_per_hour: float | None
    """As `rss_mib_per_hour`; exactly 0 if most pairs of samples have equal numbers."""


def growth(samples: Sequence[ProcessUse]) -> Growth:
    """Returns how the last process of samples in their order grew; those of former processes do not count."""
    own = [sample for sample in samples if sample.pid == samples[-1].pid]
    begin, end = own[0], own[-1]
    settled_at_s = begin.at_s + _WARM_UP * (end.at_s - begin.at_s)
    settled = [sample for sample in own if sample.at_s >= settled_at_s]
    if len(settled) < _LEAST_SAMPLES:
        return Growth(begin, end, None, None)
    rss_slope = slope([(each.at_s, each.rss_bytes / _MIB) for each in settled])
    files_slope = slope([(each.at_s, each.num_files) for each in settled])
    return Growth(begin, end, rss_slope * _HOUR_S, files_slope * _HOUR_S)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Returns the Theil-Sen slope of points with different x; of at most 1000 of them, evenly chosen."""
    chosen = points[:: -(-len(points) // _MOST_SAMPLES)]
    return median((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(chosen, 2))
