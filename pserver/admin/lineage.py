"""Lineage: the snapshots that belong to a job."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Lineage:
    """The snapshots of a series that this job may remove: those that it saved, and those up to the one it loaded.

    Attributes:
        loaded: Number of the newest snapshot that the job loaded; 0 for none.
        saved: Numbers of the snapshots that the job saved.
        lacks_rows: True if the newest full snapshot was saved without some of the rows that its pservers had.
    """

    loaded: int = 0
    saved: set[int] = field(default_factory=set)
    lacks_rows: bool = False

    def add_loaded(self, number: int) -> None:
        """The job continues from a snapshot."""
        self.loaded = max(self.loaded, number)
        self.lacks_rows = False

    def has(self, number: int) -> bool:
        """Returns whether a snapshot belongs to the job."""
        return number <= self.loaded or number in self.saved


Lineages = defaultdict[str, Lineage]
"""Lineage of each series."""
