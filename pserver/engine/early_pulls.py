"""EarlyPulls: rows that clients pulled for the step after their next one, and which of them that next step changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.wire.frame_format import Block, Header

from ..tables.mutations import CopyMutation, Push
from .table_map import TableEntry, TableMap


class EarlyPull(NamedTuple):
    """Rows of one table that a client pulled early."""

    block: Block
    entry: TableEntry
    changed: NDArray[np.bool_]
    """`(block.count,)`: True for rows that changed since."""


class _StepPulls(NamedTuple):
    step: int
    pulls: dict[tuple[int, int], EarlyPull]  # by request id and index of the block


class EarlyPulls:
    """The rows that each client pulled early, for the newest step of such a pull."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, _StepPulls] = {}

    @property
    def is_empty(self) -> bool:
        """True if no client has pulled early."""
        return not self._by_client

    def add(self, header: Header, pulls: Sequence[tuple[Block, TableEntry]]) -> None:
        """Remembers what a PULL_EARLY request pulled."""
        known = self._by_client.get(header.client_id)
        if known is not None and header.step < known.step:
            return  # a resend that its client no longer waits for
        if known is None or known.step != header.step:
            known = self._by_client[header.client_id] = _StepPulls(header.step, {})
        for index, (block, entry) in enumerate(pulls):
            # A resend keeps the changes marked so far: the first reply may be the one that arrives.
            key = (header.request_id, index)
            known.pulls.setdefault(key, EarlyPull(block, entry, np.zeros(block.count, np.bool_)))

    def mark(self, pushes: Sequence[Push | CopyMutation], tables: TableMap) -> None:
        """Marks the rows that the pushes of a step changed."""
        for push in pushes:
            for early in self._of_table(push.table_id):
                early.changed[tables[push.table_id].table.changes(push, early.block)] = True

    def mark_all(self, table_id: int) -> None:
        """Marks all rows of a table: rows were removed, and they read as initial ones now."""
        for early in self._of_table(table_id):
            early.changed[:] = True

    def changed_by(self, client_id: bytes, step: int) -> list[EarlyPull]:
        """Returns what a client pulled early for the step after `step` and `step` changed."""
        known = self._by_client.get(client_id)
        if known is None or known.step != step + 1:
            return []
        return [early for early in known.pulls.values() if early.changed.any()]

    def forget(self, client_id: bytes) -> None:
        """Forgets what a client pulled early."""
        self._by_client.pop(client_id, None)

    def _of_table(self, table_id: int) -> list[EarlyPull]:
        pulls = (early for known in self._by_client.values() for early in known.pulls.values())
        return [early for early in pulls if early.block.table_id == table_id]
