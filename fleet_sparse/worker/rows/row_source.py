"""RowSource: where the rows of a step come from. Sources stand in front of each other; the last one is the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .row_batch import RowBatch


class RowSource(Protocol):
    """Fills batches with rows, from its own memory or from the source behind it. A `TableClient` is one.

    Op callbacks of several threads may call it at once.
    """

    def pull(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """Fills the values of each batch with the rows of its ids.

        Args:
            batches: Distinct ids of each table, and the memory for their rows.
            step: In a job that counts steps, the step that this worker pushes next.

        Raises:
            FleetSparseError: As `TableClient.pull`.
        """
        ...
