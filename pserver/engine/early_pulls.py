"""EarlyPulls: rows that clients pulled for the step after their next one, and which of them that next one changed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.wire.frame_format import Block, Header

from .changes import TableEntry


class EarlyPull(NamedTuple):
    """Rows of one table that a client pulled."""

    block: Block
    held: TableEntry
    changed: NDArray[np.bool_]
    """`(block.count,)`: the rows that its next step has changed since."""


class _OfStep(NamedTuple):
    step: int
    pulls: dict[tuple[int, int], EarlyPull]  # by request id and index of the block


class EarlyPulls:
    """Of each client what it pulled for the newest step that it looked ahead to."""

    def __init__(self) -> None:
        self._of_client: dict[Hashable, _OfStep] = {}

    def note(self, client: Hashable, header: Header, pulls: Sequence[tuple[Block, TableEntry]]) -> None:
        """Remembers what a request, which has this header, asks for."""
        noted = self._of_client.get(client)
        if noted is not None and header.step < noted.step:
            return  # sent again although nobody wants it any more
        if noted is None or noted.step != header.step:
            noted = self._of_client[client] = _OfStep(header.step, {})
        for index, (block, held) in enumerate(pulls):
            # One that was sent again keeps its marks: its first answer may be the one that arrives.
            noted.pulls.setdefault((header.request_id, index), EarlyPull(block, held, np.zeros(block.count, np.bool_)))

    def of_table(self, table_id: int) -> list[EarlyPull]:
        """All that clients pulled of one table."""
        pulls = (ahead for noted in self._of_client.values() for ahead in noted.pulls.values())
        return [ahead for ahead in pulls if ahead.block.table_id == table_id]

    def changed_by(self, client: Hashable, step: int) -> list[EarlyPull]:
        """What a client pulled for the step after `step`, and that one has changed."""
        noted = self._of_client.get(client)
        if noted is None or noted.step != step + 1:
            return []
        return [ahead for ahead in noted.pulls.values() if ahead.changed.any()]

    def forget(self, client: Hashable) -> None:
        """Nothing of a client is wanted any more."""
        self._of_client.pop(client, None)
