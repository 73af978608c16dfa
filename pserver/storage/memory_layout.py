"""MemoryLayout: tells code that keeps addresses of arrays when they may have moved."""

from __future__ import annotations


class MemoryLayout:
    """Changes whenever a store gets another array, its rows other indices, or a push another way. Thread-safe.

    Attributes:
        stamp: Another object after each change. A number could get the same value from two threads.
    """

    def __init__(self) -> None:
        self.stamp = object()
        self._changed: dict[int | None, None] = {None: None}  # each of its methods is atomic

    def change(self, table_id: int | None = None) -> None:
        """Declares the addresses of one table unknown; with None those of all tables, and which tables there are."""
        self._changed[table_id] = None
        self.stamp = object()

    def take_changed(self) -> set[int | None]:
        """Returns what changed since the last call: tables, and None for all. One thread may call it.

        Read `stamp` before: then a change during the call is found by the next comparison.
        """
        changed: set[int | None] = set()
        while self._changed:
            changed.add(self._changed.popitem()[0])
        return changed
