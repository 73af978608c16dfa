"""A channel carries parts of bytes between one client and its shards; it knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fleet_sparse.wire.frame_format import Buffer


class Channel(Protocol):
    """What a client talks through.

    One thread at a time calls everything but `wake` and `has_unsent`. What was sent to a shard arrives in order, or not
    at all: messages may be lost in either direction, and after `reopen` some that were sent before may come beside
    those sent after.
    """

    @property
    def num_shards(self) -> int:
        """How many shards there are; they count from 0."""
        ...

    @property
    def answers_in_receive(self) -> bool:
        """Whether shards compute only while some thread is in `receive`."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Whether something that was sent waits here until a socket takes it, which is looked at in `receive`.

        From any thread.
        """
        ...

    def stays_on_machine(self, shard: int) -> bool:
        """Whether what is sent to a shard, and comes from it, is copied in memory and goes through no network."""
        ...

    def send(self, shard: int, parts: Sequence[Buffer]) -> bool:
        """Queues a message without waiting; False if it was dropped because the queue is full.

        The parts must not change until the shard has answered.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[int, list[Buffer]] | None:
        """The next message and the shard it is from; None after `timeout_s`, or soon after `wake`."""
        ...

    def wake(self) -> None:
        """Makes the running, or else the next, `receive` return.

        From any thread, also from a signal's handler, and after `close`.
        """
        ...

    def reopen(self, shard: int) -> None:
        """Starts the connection to a shard anew; what is queued for it is dropped."""
        ...

    def condition(self, shard: int) -> str:
        """What is known of the connection to a shard, for error messages: `connected`, `not connected`."""
        ...

    def close(self) -> None:
        """Drops what is queued and ends all connections. A second call does nothing."""
        ...
