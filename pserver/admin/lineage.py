"""Lineage: which snapshots are a job's own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Lineage:
    """Which snapshots of a series are this job's to remove: those that it saved, and what it began with or before it.

    Attributes:
        began_with: Number of the newest one that it began with, or loaded; 0 for none.
        saved: Numbers.
    """

    began_with: int = 0
    saved: set[int] = field(default_factory=set)

    def begin_with(self, number: int) -> None:
        """The job goes on from that one."""
        self.began_with = max(self.began_with, number)

    def has(self, number: int) -> bool:
        """Whether a snapshot belongs to it."""
        return number <= self.began_with or number in self.saved


Lineages = defaultdict[str, Lineage]
"""By series."""
