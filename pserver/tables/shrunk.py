"""ShrunkTable: what a shrink removes of one shard's part of a table."""

from __future__ import annotations

from typing import NamedTuple


class TableRemoval(NamedTuple):
    """The rows that a criterion removes of one shard's part of a table."""

    num_removed: int
    examples: tuple[int, ...]
    """The removed ids with the smallest hashes."""


class ShrunkTable(NamedTuple):
    """The rows that a shrink removes of a table."""

    num_rows: int
    """Rows of the table before."""
    removals: tuple[TableRemoval, ...]
    """The rows that each criterion removes."""
