"""How memory and open files of a process grow, by samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import linear_regression
from typing import NamedTuple

_LEAST_SAMPLES = 8
_MIB, _HOUR_S = 1 << 20, 3600.0


class ProcessUse(NamedTuple):
    """What a process takes."""

    pid: int
    rss_bytes: int
    num_files: int
    at_s: float
    """Monotonic time."""


class Growth(NamedTuple):
    """Samples of one process, from its first to its last."""

    begin: ProcessUse
    end: ProcessUse
    rss_mib_per_hour: float | None
    """Slope of a line through the samples without the first quarter, in which a process settles; None of too few."""


def growth(samples: Sequence[ProcessUse]) -> Growth:
    """Returns how the last process of samples in their order grew; those of former processes do not count."""
    own = [sample for sample in samples if sample.pid == samples[-1].pid]
    settled = own[len(own) // 4 :]
    slope = None
    if len(settled) >= _LEAST_SAMPLES:
        fit = linear_regression([each.at_s for each in settled], [each.rss_bytes / _MIB for each in settled])
        slope = fit.slope * _HOUR_S
    return Growth(own[0], own[-1], slope)
