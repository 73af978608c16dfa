"""Pauses: how long the workers of a chaos job waited for each of its faults. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from .faults import FaultKind


class Moment(NamedTuple):
    """The beginning of a fault."""

    kind: FaultKind | None
    """None for the moment that ends the last fault."""
    num_steps: Sequence[int]
    """By worker, how many steps had ended."""
    num_restarts: Mapping[str, int]
    """By supervised process, how often it had been started again."""


class Pause(NamedTuple):
    """How long workers waited for a fault, or for what it left behind until the next one."""

    took_s: float
    """Longest time between the ends of two steps of one worker, one after the other."""
    backoff_s: float
    """Seconds for which a supervisor waited on purpose, because its process had been started again before."""
    num_backoffs: int
    """Restarts before which supervisors waited."""

    @property
    def own_s(self) -> float:
        """The pause without back-off."""
        return max(self.took_s - self.backoff_s, 0.0)


def pauses(
    moments: Sequence[Moment], ends: Sequence[Sequence[float]], backoffs_s: Mapping[str, Sequence[float]]
) -> list[tuple[FaultKind, Pause]]:
    """Returns the pause of each fault, in their order.

    Args:
        moments: Beginnings of the faults, and the end of the last one.
        ends: By worker, the times at which it ended its steps, in seconds.
        backoffs_s: By supervised process, the seconds for which its supervisor waited before each restart.
    """
    found = []
    for begin, end in pairwise(moments):
        assert begin.kind is not None, "only the last moment has none"
        took_s = max(map(longest_pause_s, ends, begin.num_steps, end.num_steps))
        waited_s = [each[begin.num_restarts[name] : end.num_restarts[name]] for name, each in backoffs_s.items()]
        num_backoffs = sum(backoff_s > 0 for each in waited_s for backoff_s in each)
        found.append((begin.kind, Pause(took_s, max(map(sum, waited_s)), num_backoffs)))
    return found


def longest_pause_s(ends: Sequence[float], begin: int, end: int) -> float:
    """Returns the longest time between the ends of two steps, one after the other.

    Args:
        ends: Times of a worker.
        begin: Number of steps that had ended when the part to look at began.
        end: As `begin`, when it ended.

    Returns:
        Seconds; the time since the last step before the part counts as well. 0 if no step ended in the part.
    """
    part = ends[max(begin - 1, 0) : end]
    return max((after - before for before, after in pairwise(part)), default=0.0)
