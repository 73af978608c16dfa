"""StepIds: the distinct ids of steps, between their prefetch op and their update op."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.worker.rows.deduplicator import UniqueIds

NUM_KEPT = 32
"""Number of newest steps whose ids are kept."""


class StepIds:
    """Keeps ids outside of Paddle's graph: a prefetch op returns a ticket, a number that its update op reads.

    The ids of a run that ends without its update op, because it failed, are dropped after `NUM_KEPT` later steps.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._of_ticket: dict[int, Mapping[str, UniqueIds]] = {}

    def put(self, unique_of_table: Mapping[str, UniqueIds]) -> int:
        """Keeps the ids of a step, by name of the table; returns its ticket."""
        ticket = next(self._numbers)  # atomic, as each operation on the dict
        self._of_ticket[ticket] = unique_of_table
        self._of_ticket.pop(ticket - NUM_KEPT, None)
        return ticket

    def take(self, ticket: int) -> Mapping[str, UniqueIds]:
        """Returns and forgets the ids of a step.

        Raises:
            FleetSparseError: They were dropped, or taken before.
        """
        unique_of_table = self._of_ticket.pop(ticket, None)
        if unique_of_table is None:
            raise FleetSparseError(
                f"exe.run: the ids of the step with ticket {ticket} are gone: {NUM_KEPT} steps began after it, should "
                "be fewer. Run the program in fewer threads at once"
            )
        return unique_of_table
