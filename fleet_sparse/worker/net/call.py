"""Call: the requests of one call of the client, and what became of them."""

from __future__ import annotations

import time
from queue import SimpleQueue

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.wire.frame_format import PULLS

from .request import Request
from .shard_link import Outcome


class Call:
    """The requests of one call of the client. Once started, the caller waits for it or forgets it.

    A call without requests is done when all calls before it were accepted or failed.

    Args:
        requests: Its requests; dropped when the call is accepted into the window.
        wants_answers: False for a push, which is done when it is accepted into the window.
        is_flush: True for a call without requests that is done when all pushes before it are acked.
        owns_memory: True if nothing else uses the arrays of its replies until it is done, and nothing at all if it
            fails: the thread that does the I/O may receive into them.

    Attributes:
        num_missing: Number of outcomes that are missing; the call is done when it is 0, or less with `error`.
        outcomes: Outcomes so far; empty for a call without answers.
        error: The first error.
        done: Gets an item when the call is done.
        is_push: True if it changes something on the shards.
        is_accepted: True once it is accepted into the window: what it pushes is sent, whatever its caller does.
        is_abandoned: True if its caller does not wait any more.
        flush_to: The seq that each link must have acked, once a flush was accepted.
    """

    __slots__ = (
        "__weakref__",
        "done",
        "error",
        "flush_to",
        "is_abandoned",
        "is_accepted",
        "is_flush",
        "is_push",
        "num_missing",
        "outcomes",
        "owns_memory",
        "requests",
        "started_at",
        "wants_answers",
    )

    def __init__(
        self,
        requests: list[Request],
        wants_answers: bool = True,
        *,
        is_flush: bool = False,
        owns_memory: bool = False,
    ) -> None:
        self.requests = requests
        self.wants_answers = wants_answers
        self.is_flush = is_flush
        self.owns_memory = owns_memory
        self.num_missing = len(requests) if wants_answers else 1
        self.outcomes: list[Outcome] = []
        self.error: FleetSparseError | None = None
        self.done: SimpleQueue[None] = SimpleQueue()
        self.is_push = bool(requests) and requests[0].op not in PULLS
        self.is_accepted = False
        self.is_abandoned = False
        self.flush_to: list[int] = []
        self.started_at = time.monotonic()

    def end(self, error: FleetSparseError | None = None) -> None:
        """Ends the call, whatever is missing."""
        self.error = error
        self.num_missing = 0
        self.done.put(None)
