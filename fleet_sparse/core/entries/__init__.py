"""Entry policies: which ids get a row. A new policy is a module of this package and an entry of `ENTRIES`."""

from __future__ import annotations

from .entry import ENTRIES, EXACT, SKETCH, Entry, checked
from .policy import CLICK, COUNTS, KERNEL_TYPES, SETS_OF_STATISTICS, SHOW, STATISTICS, EntryPolicy

__all__ = [
    "CLICK",
    "COUNTS",
    "ENTRIES",
    "EXACT",
    "KERNEL_TYPES",
    "SETS_OF_STATISTICS",
    "SHOW",
    "SKETCH",
    "STATISTICS",
    "Entry",
    "EntryPolicy",
    "checked",
]
