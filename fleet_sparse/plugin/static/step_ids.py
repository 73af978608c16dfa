"""StepIds: the distinct ids of steps, between their prefetch op and their update op."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.worker.rows.deduplicator import UniqueIds

NUM_KEPT = 32
"""Largest number of steps whose ids are kept."""


class StepIds:
    """Keeps ids outside of Paddle's graph: a prefetch op returns a ticket, a number that its update op reads.

    A run that fails leaves its ids here. They are dropped when no run is left, and before the ids of other runs when
    there are more than `NUM_KEPT`. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._last_ticket = 0
        self._of_ticket: dict[int, Mapping[str, UniqueIds]] = {}  # oldest first
        self._num_runs = 0

    def begin_run(self) -> None:
        """Notes that a run of a program that trains begins."""
        with self._lock:
            self._num_runs += 1

    def end_run(self) -> None:
        """Notes that such a run has ended, with or without its update op."""
        with self._lock:
            self._num_runs -= 1
            if not self._num_runs:
                self._of_ticket.clear()

    def put(self, unique_of_table: Mapping[str, UniqueIds]) -> int:
        """Keeps the ids of a step, by name of the table; returns its ticket."""
        with self._lock:
            self._last_ticket += 1
            self._of_ticket[self._last_ticket] = unique_of_table
            if len(self._of_ticket) > NUM_KEPT:
                del self._of_ticket[next(iter(self._of_ticket))]
            return self._last_ticket

    def take(self, ticket: int) -> Mapping[str, UniqueIds]:
        """Returns and forgets the ids of a step.

        Raises:
            FleetSparseError: They were dropped, or taken before.
        """
        with self._lock:
            unique_of_table = self._of_ticket.pop(ticket, None)
        if unique_of_table is None:
            raise FleetSparseError(
                f"exe.run: the ids of the step with ticket {ticket} are gone: its update op ran before, or more than "
                f"{NUM_KEPT} steps were between their prefetch op and their update op, failed ones included. Run at "
                f"most {NUM_KEPT} steps at once, and handle the error of the runs that fail"
            )
        return unique_of_table
