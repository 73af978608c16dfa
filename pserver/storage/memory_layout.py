"""MemoryLayout: tells code that keeps addresses of arrays when they may have moved."""

from __future__ import annotations


class MemoryLayout:
    """Changes whenever a store gets another array, its rows other indices, or a push another way. Thread-safe.

    Attributes:
        stamp: Another object after each change. A number could get the same value from two threads.
    """

    def __init__(self) -> None:
        self.stamp = object()

    def change(self) -> None:
        """Declares all addresses unknown."""
        self.stamp = object()
