"""SharedShard: a shard in the process of its clients, which call it without frames."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.wire.frame_format import Block, Header

from .engine.reply import DeferredReply, Outs, Reply
from .engine.shard import Shard
from .net.requests import Traffic

_Result = TypeVar("_Result")


class SharedShard:
    """A shard that several threads use; the one that holds the lock owns it.

    Args:
        shard: Accessed only through this object.
        deliver: Called with each deferred reply, by the thread that caused it, which holds the lock. It must not call
            this object.

    Attributes:
        traffic: Bytes of the ids, gradients and rows of all requests so far; there are no frames.
    """

    def __init__(self, shard: Shard, deliver: Callable[[DeferredReply], None]) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()  # guards all below
        self._shard = shard
        self._is_closed = False
        self.traffic = Traffic()

    def execute(
        self, header: Header, blocks: Sequence[Block], outs: Outs, num_bytes_received: int, num_bytes_sent: int
    ) -> Reply:
        """Carries out a request, as `Shard.execute`.

        Args:
            header: As of `Shard.execute`.
            blocks: As of `Shard.execute`.
            outs: As of `Shard.execute`.
            num_bytes_received: Bytes of the columns of the request.
            num_bytes_sent: Bytes of those of its reply.

        Raises:
            Refusal: As `Shard.execute`.
            FleetSparseError: The shard is closed.
        """
        with self._lock:
            if self._is_closed:
                self._check_open()
            shard, traffic = self._shard, self.traffic
            shard.counters.num_requests += 1
            traffic.bytes_received += num_bytes_received
            traffic.bytes_sent += num_bytes_sent
            try:
                return shard.execute(header, blocks, outs)
            finally:
                if shard.deferred_replies:
                    self._deliver_deferred()

    def run(self, task: Callable[[], _Result]) -> _Result:
        """Runs a task that accesses the shard, and returns its result.

        Raises:
            FleetSparseError: The shard is closed.
        """
        with self._lock:
            self._check_open()
            result = task()
            self._deliver_deferred()
        return result

    def close(self) -> None:
        """Releases the shard's memory. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._shard.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise FleetSparseError("embedded pserver: it is closed")

    def _deliver_deferred(self) -> None:
        for reply in self._shard.take_deferred_replies():
            self._deliver(reply)
