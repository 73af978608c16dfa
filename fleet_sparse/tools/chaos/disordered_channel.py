"""DisorderedChannel: a channel between a worker and its pservers that delays, doubles and reorders frames."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet_sparse.wire.frame_format import Buffer, Op
from fleet_sparse.worker.net.channel import Channel, Place
from fleet_sparse.worker.net.lane import Lane

_SHARE_DELAYED = _SHARE_DOUBLED = 0.05
_SHARE_LONG = 0.1  # of the delays
_SHORT_S, _LONG_S = (0.0, 0.02), (0.02, 3.0)  # longer than `retry_s`, so that some frames are sent again meanwhile
_OP = slice(8, 10)  # of a header


class DisorderedChannel:
    """Implements `Channel` over another one.

    A request, or a reply, that is delayed is overtaken by those behind it; of one that is doubled the second copy comes
    late. Both may also come behind a connection that replaced theirs, or reach the next process of a pserver.

    Replies that are errors are left as they are. A pserver sends the number of the push that it expects in an error
    GAP, and a client that has an ack of that push knows from a later GAP that the pserver has lost it. So it relies on
    replies not to be overtaken by later ones; the transports of this project keep the order of a connection, and drop
    the replies of one that was replaced.

    Args:
        channel: The channel that it uses.
        seed: Seed of what happens to each frame.
        is_active: Returns whether something happens to a frame that is sent or received now.
        clock: Monotonic time in seconds.

    Attributes:
        lane: None: compiled code would not pass through here.
        num_delayed: Number of frames that were delayed.
        num_doubled: Number of frames that were doubled.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        seed: int,
        is_active: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lane: Lane | None = None
        self.num_delayed = self.num_doubled = 0
        self._channel = channel
        self._random = random.Random(seed)
        self._is_active = is_active
        self._clock = clock
        self._numbers = itertools.count()
        self._requests: list[_Held] = []  # heaps
        self._replies: list[_Held] = []

    @property
    def needs_receive(self) -> bool:
        """As `Channel`."""
        return bool(self._requests or self._replies) or self._channel.needs_receive

    def stays_on_machine(self, shard: int) -> bool:
        """As `Channel`."""
        return self._channel.stays_on_machine(shard)

    def send(self, shard: int, parts: Sequence[Buffer]) -> bool:
        """As `Channel`."""
        return self._holds(self._requests, shard, parts) or self._channel.send(shard, parts)

    def receive(self, timeout_s: float) -> tuple[int, list[Buffer]] | None:
        """As `Channel`; it may also return None early."""
        now = self._clock()
        while self._requests and self._requests[0].due_at <= now:
            request = heapq.heappop(self._requests)
            self._channel.send(request.shard, request.parts)
        if self._replies and self._replies[0].due_at <= now:
            reply = heapq.heappop(self._replies)
            return reply.shard, reply.parts
        for held in (self._requests, self._replies):
            if held:
                timeout_s = min(timeout_s, held[0].due_at - now)
        message = self._channel.receive(timeout_s)
        if message is None:
            return None
        shard, parts = message
        is_error = int.from_bytes(bytes(parts[0][_OP]), "little") == Op.ERROR
        return None if not is_error and self._holds(self._replies, shard, parts) else message

    def place_columns(self, place: Place) -> None:
        """As `Channel`: columns stay in memory of the channel, where a reply that is held may wait."""

    def withdraw(self, shard: int) -> None:
        """As `Channel`: no column is placed."""

    def watch_losses(self, on_lost: Callable[[int], None]) -> None:
        """As `Channel`."""
        self._channel.watch_losses(on_lost)

    def wake(self) -> None:
        """As `Channel`."""
        self._channel.wake()

    def reopen(self, shard: int) -> None:
        """As `Channel`."""
        self._channel.reopen(shard)

    def move(self, shard: int, stream_endpoint: str, zmq_endpoint: str) -> None:
        """As `Channel`."""
        self._channel.move(shard, stream_endpoint, zmq_endpoint)

    def condition(self, shard: int) -> str:
        """As `Channel`."""
        return self._channel.condition(shard)

    def close(self) -> None:
        """As `Channel`."""
        self._requests.clear()
        self._replies.clear()
        self._channel.close()

    def _holds(self, held: list[_Held], shard: int, parts: Sequence[Buffer]) -> bool:
        """Decides what happens to a frame; returns whether it comes later only."""
        if not self._is_active():
            return False
        lot = self._random.random()
        if lot >= _SHARE_DELAYED + _SHARE_DOUBLED:
            return False
        delay_s = self._random.uniform(*(_LONG_S if self._random.random() < _SHARE_LONG else _SHORT_S))
        # Not the parts themselves: the memory of a request changes once it is answered.
        copies: list[Buffer] = [memoryview(bytearray(part)) for part in parts]
        heapq.heappush(held, _Held(self._clock() + delay_s, next(self._numbers), shard, copies))
        is_delayed = lot < _SHARE_DELAYED
        self.num_delayed += is_delayed
        self.num_doubled += not is_delayed
        return is_delayed


class _Held(NamedTuple):
    """A frame that is on its way."""

    due_at: float
    number: int
    """Distinguishes frames of the same time."""
    shard: int
    parts: list[Buffer]
