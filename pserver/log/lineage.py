"""Lineage: the snapshots that belong to a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec


class LineageChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of the lineage of a series.

    Attributes:
        series: Path or URL of the directory of its snapshots.
        loaded: Number of a snapshot from which the job continues; 0 for none.
        saved: Number of a snapshot that the job saved; 0 for none.
        lacks_rows: True if the newest full snapshot was saved without some rows, False if with all; None for no change.
    """

    series: str
    loaded: int = 0
    saved: int = 0
    lacks_rows: bool | None = None


class Lineage(msgspec.Struct, forbid_unknown_fields=True):
    """The snapshots of a series that this job may remove: those that it saved, and those up to the one it loaded.

    Attributes:
        loaded: Number of the newest snapshot that the job loaded; 0 for none.
        saved: Numbers of the snapshots that the job saved.
        lacks_rows: True if the newest full snapshot was saved without some of the rows that its pservers had.
    """

    loaded: int = 0
    saved: set[int] = set()
    lacks_rows: bool = False

    def apply(self, change: LineageChange) -> None:
        """Adds a change."""
        if change.loaded:
            self.loaded, self.lacks_rows = max(self.loaded, change.loaded), False
        if change.saved:
            self.saved.add(change.saved)
        if change.lacks_rows is not None:
            self.lacks_rows = change.lacks_rows

    def has(self, number: int) -> bool:
        """Returns whether a snapshot belongs to the job."""
        return number <= self.loaded or number in self.saved


class Lineages:
    """The lineage of each series.

    Args:
        known: Lineages to continue with.
        on_change: Called with each change.
    """

    def __init__(self, known: Mapping[str, Lineage], on_change: Callable[[LineageChange], object]) -> None:
        self._by_series = {
            series: Lineage(each.loaded, set(each.saved), each.lacks_rows) for series, each in known.items()
        }
        self._on_change = on_change

    def of(self, series: str) -> Lineage:
        """Returns the lineage of a series."""
        return self._by_series.get(series) or Lineage()

    def add(self, change: LineageChange) -> None:
        """Adds a change."""
        self._by_series.setdefault(change.series, Lineage()).apply(change)
        self._on_change(change)
