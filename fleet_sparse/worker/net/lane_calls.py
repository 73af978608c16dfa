"""LaneCalls: the calls of one client that a lane carries, and how their replies change the links."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from fleet_sparse.wire.frame_format import HEADER_BYTES, UNCHECKED_COLUMNS, checksum_of
from fleet_sparse.wire.link_header import durable_push_of

from .lane import Lane, LaneReply
from .plain_rows import PlainRows
from .reply_placement import ReplyPlacement
from .request import Request
from .shard_link import Outcome, ShardLink


class LaneCalls:
    """The calls that a lane carries. The holder of the I/O lock uses it.

    Args:
        lane: The lane to all shards.
        links: One link for each shard.
        placement: Replies that are received into the arrays of their callers.

    Attributes:
        lane: The lane.
        headers: Header of each link.
    """

    def __init__(self, lane: Lane, links: Sequence[ShardLink], placement: ReplyPlacement) -> None:
        self.lane = lane  # constant after construction, as the next three
        self.headers = [link.header for link in links]
        self._links = links
        self._placement = placement
        for shard in range(len(links)):
            self.address(shard)

    def address(self, shard: int) -> None:
        """Takes over the header of a link, which has changed."""
        self.headers[shard] = self._links[shard].header
        self.lane.address(shard, self.headers[shard])

    def pull(self, rows: PlainRows, requests: Sequence[Request]) -> tuple[int, int, list[Outcome]]:
        """Sends the requests of a pull and receives the replies; what is not plain is left to the channel.

        Returns:
            The bytes of the frames sent, the bytes of the frames received, and the outcomes so far.
        """
        num_sent, is_sent = self.lane.send(rows, requests, self.headers)
        if not is_sent:
            for request in requests:
                request.encode()
            return num_sent, 0, []
        due_at = math.inf
        for link in self._links:
            if link.due_at < due_at:  # noqa: PLR1730  # `min` and `max` are calls, at every request
                due_at = link.due_at
        replies = self.lane.receive(requests, due_at)
        now = time.monotonic()
        num_received = 0
        outcomes: list[Outcome] = []
        for request, answer in zip(requests, replies, strict=True):
            num_received += answer.num_acks * HEADER_BYTES
            link, reply = self._links[request.shard], answer.reply
            if reply is None or not answer.is_complete:
                self._leave_reply(request, answer)
                continue
            if answer.begin < answer.end:
                self.lane.resume(request.shard, answer, ())
            _, request_id, push_seq, step, column_bytes, checksum = reply
            num_received += len(answer.head) + column_bytes
            if link.header.flags & UNCHECKED_COLUMNS:
                found = xxh3_64_intdigest(answer.head)
            else:
                found = checksum_of(answer.head, request.destinations() or (), link.header.flags)
            if found != checksum:
                request.encode()
                link.last_error = "a reply was dropped: its checksum is wrong"  # it counts as lost
                continue
            request.is_filled = True
            if link.kept is not None:
                link.note_durable(durable_push_of(answer.head))
            outcomes += link.receive_reply(request_id, push_seq, step, now, True)
        return num_sent, num_received, outcomes

    def _leave_reply(self, request: Request, answer: LaneReply) -> None:
        """Leaves a reply that the lane received in part, or not at all, to the channel."""
        request.encode()
        columns: Sequence[memoryview] = ()
        if answer.reply is not None:
            columns = request.destinations() or ()
            self._placement.placed[request.shard] = request, answer.reply, [*columns]
        self.lane.resume(request.shard, answer, columns)
