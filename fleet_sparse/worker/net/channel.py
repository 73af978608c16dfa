"""Channel: carries parts of bytes between one client and its shards; it does not interpret them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fleet_sparse.wire.frame_format import Buffer

from .lane import Lane

Place = Callable[[int, bytes, Sequence[int]], Sequence[memoryview] | None]
"""Returns memory for the columns of a frame, given its shard, its head and the lengths of the columns; None to get them
in memory of the channel."""


class Channel(Protocol):
    """Transport of a client.

    One thread at a time calls everything but `wake` and `needs_receive`. Messages to a shard arrive in order or not at
    all: they may be lost in either direction, and after `reopen` some that were sent before it may arrive among those
    sent after it.

    Attributes:
        lane: Sends and receives plain frames in compiled code; None if only `send` and `receive` do.
    """

    lane: Lane | None

    @property
    def needs_receive(self) -> bool:
        """True if only a call of `receive` makes progress: it sends the rest of a message, or computes a reply.

        Safe to read from any thread.
        """
        ...

    def stays_on_machine(self, shard: int) -> bool:
        """Returns whether messages to and from a shard are copied in memory and cross no network."""
        ...

    def send(self, shard: int, parts: Sequence[Buffer]) -> bool:
        """Queues a message without waiting; returns False if it was dropped because the queue is full.

        The parts must not change until the shard has answered.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[int, list[Buffer]] | None:
        """Returns the next message and its shard; None after `timeout_s`, or soon after `wake`."""
        ...

    def place_columns(self, place: Place) -> None:
        """Sets the function that a channel that copies columns may ask, inside `receive`, where to copy them."""
        ...

    def withdraw(self, shard: int) -> None:
        """Moves a message that has arrived in part out of the memory where its columns were placed."""
        ...

    def watch_losses(self, on_lost: Callable[[int], None]) -> None:
        """Sets the function to call inside `receive` or `send` with the shard of a connection that is lost.

        ZeroMQ does not report that.
        """
        ...

    def wake(self) -> None:
        """Makes the running, or else the next, `receive` return.

        Safe to call from any thread, from a signal handler, and after `close`.
        """
        ...

    def reopen(self, shard: int) -> None:
        """Replaces the connection to a shard; its queued messages are dropped."""
        ...

    def move(self, shard: int, stream_endpoint: str, zmq_endpoint: str) -> None:
        """Replaces the connection to a shard by one to another address: its pserver was started again."""
        ...

    def condition(self, shard: int) -> str:
        """Describes the connection to a shard for error messages: `connected`, `not connected`."""
        ...

    def close(self) -> None:
        """Drops queued messages and ends all connections. A second call does nothing."""
        ...
