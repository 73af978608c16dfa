"""HeldReplies: replies to pushes that are sent once the pushes are durable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ..log.log_writer import LogWriter

MAX_REPLIES = 4096
MAX_BYTES = 256 << 20


class HeldReplies:
    """The replies of one shard to pushes, in order. They wait for the thread of the log, which syncs for many at once.

    Args:
        writer: Writes the log of the shard.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._replies: deque[tuple[int, int, Callable[[], None]]] = deque()  # lsn that each waits for, bytes, sending
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def are_too_many(self) -> bool:
        """True if the next push should not be read before some are sent."""
        return len(self._replies) >= MAX_REPLIES or self._num_bytes >= MAX_BYTES

    def add(self, send: Callable[[], None], num_bytes: int) -> None:
        """Holds a reply until everything that is appended by now is durable.

        Args:
            send: Sends it.
            num_bytes: Its length.
        """
        self._replies.append((self._writer.newest_lsn, num_bytes, send))
        self._num_bytes += num_bytes
        if self._writer.newest_lsn > self._writer.durable_lsn:
            self._writer.request_sync()

    def take_due(self) -> Iterator[Callable[[], None]]:
        """Yields what sends the replies that need not wait any more, each once."""
        durable_lsn = self._writer.durable_lsn
        while self._replies and self._replies[0][0] <= durable_lsn:
            _, num_bytes, send = self._replies.popleft()
            self._num_bytes -= num_bytes
            yield send
