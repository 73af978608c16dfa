"""StraightPath: plain pulls and pushes of rows on streams, from a received message to the message of the reply.

The time in Python is the same for one table and for many. A frame that is not plain, or not right, is left unchanged to
`requests`: the replies and tables are those of that path.
"""

from __future__ import annotations

import logging
import struct

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from fleet_sparse.wire.decode import HEADER_IN_ONE_PIECE, HEADER_PREFIX
from fleet_sparse.wire.frame_format import (
    BLOCK_BYTES,
    CHECKSUM,
    CHECKSUM_OFFSET,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    UNCHECKED_COLUMNS,
    Buffer,
    Header,
    Op,
    without_checksum,
)
from fleet_sparse.wire.message_words import PREFIX_WORDS, WORD_BYTES
from fleet_sparse.wire.stream import MAGIC as STREAM_MAGIC
from fleet_sparse.wire.stream import Message

from ..engine.reply import Reply
from ..engine.shard import Shard

_log = logging.getLogger(__name__)

_PREFIX_BYTES = PREFIX_WORDS * WORD_BYTES
_PULL, _PUSH = int(Op.PULL), int(Op.PUSH)
_ACK_HEAD = struct.Struct("<4sI2Q").pack(STREAM_MAGIC, 1, WORD_BYTES + HEADER_BYTES, HEADER_BYTES)


class PlainReply(msgspec.Struct, frozen=True, eq=False):
    """The reply to a plain request.

    Attributes:
        message: The message of the stream.
        num_bytes_received: Bytes of the parts of the request.
        num_bytes_sent: Bytes of the parts of the reply.
        is_to_push: True if the request is a push.
    """

    message: Buffer
    num_bytes_received: int
    num_bytes_sent: int
    is_to_push: bool = False


class StraightPath:
    """Answers plain requests to one shard.

    Args:
        shard: The shard; used by the same thread.
        max_bytes: Largest request, and largest reply, that is accepted.
    """

    def __init__(self, shard: Shard, max_bytes: int) -> None:
        self._shard = shard
        self._max_bytes = max_bytes

    def answer(self, message: Message) -> PlainReply | None:  # noqa: PLR0911  # runs for every request
        """Returns the reply to a plain request; None, with nothing changed, if `requests.answer` has to answer it."""
        data, num_parts, _ = message
        begin = WORD_BYTES * num_parts
        if len(data) < begin + HEADER_BYTES or len(data) % WORD_BYTES:
            return None
        (
            prefix,
            op,
            flags,
            part,
            num_parts_of_request,
            cluster_id,
            incarnation,
            shard_index,
            placement_version,
            client_id,
            client_epoch,
            num_blocks,
            request_id,
            push_seq,
            push_floor,
            step,
            head_bytes,
            reserved,
            column_bytes,
            more_reserved,
            checksum,
        ) = HEADER_IN_ONE_PIECE.unpack_from(data, begin)
        shard, is_push = self._shard, op == _PUSH
        if (
            prefix != HEADER_PREFIX
            or (not is_push and op != _PULL)
            or (push_seq > 0) is not is_push
            or head_bytes != HEADER_BYTES + BLOCK_BYTES * num_blocks
            or len(data) < begin + head_bytes
            or head_bytes + column_bytes > self._max_bytes
            or part >= num_parts_of_request
            or flags & ~UNCHECKED_COLUMNS
            or reserved
            or more_reserved
            or incarnation != shard.incarnation
            or cluster_id != shard.cluster_id
            or shard_index != shard.shard_index
            or placement_version != shard.placement.version
        ):
            return None
        try:
            frame = shard.plain_frames.find(
                data, num_parts, num_blocks, is_push=is_push, is_staged=is_push and shard.commits_at_once()
            )
            if (
                frame is None
                or frame.column_bytes != column_bytes
                or checksum
                != (
                    xxh3_64_intdigest(without_checksum(data[begin : begin + head_bytes]))
                    if flags & UNCHECKED_COLUMNS
                    else _checksum_of(data, begin, head_bytes, column_bytes)
                )
            ):
                return None
            header = Header(
                Op.PUSH if is_push else Op.PULL,
                flags,
                cluster_id,
                shard_index,
                incarnation,
                placement_version,
                client_id,
                client_epoch,
                request_id,
                push_seq,
                push_floor,
                step,
                part,
                num_parts_of_request,
            )
            num_bytes_received = head_bytes + column_bytes
            if is_push:
                result = shard.push_plain(header, frame)
                if result is None:
                    return None
                reply = bytearray(len(_ACK_HEAD) + HEADER_BYTES)
                reply[: len(_ACK_HEAD)] = _ACK_HEAD
                num_bytes_sent = self._finish(memoryview(reply), 1, 0, 0, header, result)
                shard.counters.num_requests += 1
                return PlainReply(bytes(reply), num_bytes_received, num_bytes_sent, True)
            if head_bytes + frame.reply_column_bytes > self._max_bytes:
                return None
            pulled = shard.pull_plain(header, frame)
            if pulled is None:
                return None
            rows, result = pulled
            view = rows.data.cast("B")
            num_bytes_sent = self._finish(view, 1 + num_blocks, num_blocks, frame.reply_column_bytes, header, result)
            shard.counters.num_requests += 1
            return PlainReply(view, num_bytes_received, num_bytes_sent)
        except MemoryError:  # there is no room for new rows, which the other path refuses
            return None
        except Exception:  # the other path refuses it, or fails in the same way
            _log.exception("shard %d: a plain request failed", shard.shard_index)
            return None

    def _finish(
        self, message: memoryview, num_parts: int, num_blocks: int, column_bytes: int, request: Header, reply: Reply
    ) -> int:
        """Writes the header of a reply; returns the number of bytes of its parts."""
        shard = self._shard
        begin = _PREFIX_BYTES + WORD_BYTES * num_parts
        head_bytes = HEADER_BYTES + BLOCK_BYTES * num_blocks
        HEADER.pack_into(
            message,
            begin,
            MAGIC,
            PROTOCOL_VERSION,
            HEADER_BYTES,
            reply.op,
            request.flags,
            request.part,
            request.num_parts,
            shard.cluster_id,
            shard.incarnation,
            shard.shard_index,
            shard.placement.version,
            request.client_id,
            request.client_epoch,
            num_blocks,
            request.request_id,
            reply.push_seq,
            0 if shard.log is None else shard.log.durable_push(request.client_id),
            reply.step,
            head_bytes,
            0,
            column_bytes,
            0,
            0,
        )
        if request.flags & UNCHECKED_COLUMNS:  # its checksum is still 0
            checksum = xxh3_64_intdigest(message[begin : begin + head_bytes])
        else:
            checksum = _checksum_of(message[_PREFIX_BYTES:], begin - _PREFIX_BYTES, head_bytes, column_bytes)
        CHECKSUM.pack_into(message, begin + CHECKSUM_OFFSET, checksum)
        return head_bytes + column_bytes


def _checksum_of(data: memoryview, begin: int, head_bytes: int, column_bytes: int) -> int:
    """Returns the checksum of head and columns of a message without its prefix, whose lengths are right.

    Args:
        data: The message.
        begin: Where its head begins.
        head_bytes: Length of the head.
        column_bytes: Length of all columns.
    """
    end = begin + head_bytes
    digest = xxh3_64(without_checksum(data[begin:end]))
    if len(data) - end == column_bytes:  # there is no padding
        digest.update(data[end:])
        return digest.intdigest()
    for length in struct.unpack_from(f"<{begin // WORD_BYTES - 1}Q", data, WORD_BYTES):
        digest.update(data[end : end + length])
        end += length + -length % WORD_BYTES
    return digest.intdigest()
