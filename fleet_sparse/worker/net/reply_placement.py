"""ReplyPlacement: the replies that a channel receives into the arrays of their callers."""

from __future__ import annotations

from collections.abc import Sequence

from fleet_sparse.wire.frame_format import HEADER_BYTES, Buffer
from fleet_sparse.wire.link_header import PlainReply

from .call import Call
from .channel import Channel
from .request import Request
from .shard_link import ShardLink


class ReplyPlacement:
    """Decides for each reply where its columns are received. The holder of the I/O lock uses it.

    Args:
        channel: Channel to the shards; it asks `place`.
        links: One link for each shard.

    Attributes:
        served: The call whose caller does the I/O; replies may be received into its arrays.
        placed: By shard, a reply that is received into the arrays of its caller: its request, its head and the memory
            of its columns.
    """

    def __init__(self, channel: Channel, links: Sequence[ShardLink]) -> None:
        self.served: Call | None = None
        self.placed: dict[int, tuple[Request, PlainReply, list[memoryview]]] = {}
        self._channel = channel  # constant after construction, as the next one
        self._links = links
        channel.place_columns(self.place)

    def place(self, shard: int, head: bytes, lengths: Sequence[int]) -> Sequence[memoryview] | None:
        """As `Channel`: the arrays of a call that owns them or whose caller does the I/O, unless rows are converted."""
        reply = self._links[shard].header.read_reply(head)
        request = None if reply is None else self.awaited(shard, reply, head, lengths)
        call: Call | None = None if request is None else request.tag
        if reply is None or request is None or call is None or not (call is self.served or call.owns_memory):
            return None
        columns = request.destinations()
        if columns is not None:
            self.placed[shard] = request, reply, columns
        return columns

    def awaited(self, shard: int, reply: PlainReply, head: Buffer, lengths: Sequence[int]) -> Request | None:
        """Returns the request that waits for exactly these columns."""
        request = self._links[shard].outstanding.get(reply[1])
        if request is None or head[HEADER_BYTES:] != request.reply_table or lengths != request.reply_lengths:
            return None
        return request

    def withdraw(self) -> None:
        """Ends all writes to the arrays of the call: its caller may return, and reuse them."""
        for shard in self.placed:
            self._channel.withdraw(shard)
        self.placed.clear()
