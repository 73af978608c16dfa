"""A channel to shards in this process, for tests of the client of frames: no sockets, no copies, the same bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from fleet_sparse.wire.frame_format import Buffer
from fleet_sparse.worker.net.channel import Place
from fleet_sparse.worker.net.lane import Lane

Answer = Callable[[int, Sequence[Buffer]], Sequence[Buffer]]


class InProcessChannel:
    """Implements `Channel` over a function that answers a request.

    A request is answered inside `receive`, by the thread that calls it. Its arrays are those of the sender, not
    copies; so are the arrays of a reply. `deliver` adds deferred replies.

    Args:
        num_shards: Number of shards of the job.
        answer: Returns the parts of the reply to a request to a shard.
    """

    def __init__(self, num_shards: int, answer: Answer) -> None:
        self.lane: Lane | None = None  # constant after construction, as the next two
        self._num_shards = num_shards
        self._answer = answer
        self._wakes: SimpleQueue[None] = SimpleQueue()  # a signal handler may use it in the middle of an operation
        self._queue: deque[tuple[int, list[Buffer]]] = deque()
        self._delivered: deque[tuple[int, list[Buffer]]] = deque()
        self._closed = False

    @property
    def needs_receive(self) -> bool:
        """As `Channel`."""
        return bool(self._queue or self._delivered)

    def stays_on_machine(self, shard: int) -> bool:
        """As `Channel`."""
        return True

    def send(self, shard: int, parts: Sequence[Buffer]) -> bool:
        """As `Channel`; the queue is never full."""
        if not 0 <= shard < self._num_shards:
            raise ValueError(f"channel: shard {shard}, it should be below {self._num_shards}")
        if not self._closed:
            self._queue.append((shard, list(parts)))
        return True

    def receive(self, timeout_s: float) -> tuple[int, list[Buffer]] | None:
        """As `Channel`; computes the reply."""
        if not (self._queue or self._delivered):
            with suppress(Empty):
                self._wakes.get(timeout=timeout_s)
        for _ in range(self._wakes.qsize()):
            self._wakes.get_nowait()
        if self._delivered:
            return self._delivered.popleft()
        if not self._queue:
            return None
        shard, parts = self._queue.popleft()
        return shard, list(self._answer(shard, parts))

    def deliver(self, shard: int, parts: Sequence[Buffer]) -> None:
        """Adds a deferred reply of a shard, which `receive` returns. Safe to call from any thread."""
        self._delivered.append((shard, list(parts)))
        self._wakes.put(None)

    def place_columns(self, place: Place) -> None:
        """As `Channel`: no column is copied here."""

    def withdraw(self, shard: int) -> None:
        """As `Channel`: no column is placed."""

    def watch_losses(self, on_lost: Callable[[int], None]) -> None:
        """As `Channel`."""

    def wake(self) -> None:
        """As `Channel`."""
        self._wakes.put(None)

    def reopen(self, shard: int) -> None:
        """As `Channel`."""
        self._queue = deque((other, parts) for other, parts in self._queue if other != shard)

    def move(self, shard: int, stream_endpoint: str, zmq_endpoint: str) -> None:
        """As `Channel`: there are no addresses."""
        self.reopen(shard)

    def condition(self, shard: int) -> str:
        """As `Channel`."""
        return "in this process"

    def close(self) -> None:
        """As `Channel`."""
        self._closed = True
        self._queue.clear()
        self._delivered.clear()
