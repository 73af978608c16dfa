"""RowSource: where the rows of a step come from. Sources stand in front of each other; the last one is the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..net.table_client import TableClient
from .row_batch import RowBatch


class RowSource(Protocol):
    """Fills batches with rows, from its own memory or from the source behind it.

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

    def note_pushed(self, batches: Sequence[RowBatch]) -> None:
        """Takes note of gradients that this worker has sent: copies of these rows are outdated."""
        ...

    def clear(self) -> None:
        """Forgets all rows: the tables on the pservers were replaced."""
        ...


class DirectRows:
    """Implements `RowSource`: every pull asks the pservers."""

    def __init__(self, client: TableClient) -> None:
        self.pull = client.pull

    def note_pushed(self, batches: Sequence[RowBatch]) -> None:
        """As `RowSource`: it has no copies."""

    def clear(self) -> None:
        """As `RowSource`: it has no copies."""
