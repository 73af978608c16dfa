"""LinkHeader: the header of the frames between one client and one shard, without an object for each frame.

Its bytes are those of `encode`. What it does not recognise in a reply is left to `decode`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .frame_format import (
    BLOCK_BYTES,
    CHECKSUM,
    CHECKSUM_OFFSET,
    HEADER,
    HEADER_BYTES,
    HEADER_OFFSETS,
    MAGIC,
    PROTOCOL_VERSION,
    Buffer,
    Header,
    Op,
    checksum_of,
    without_checksum,
)

_OP_OFFSET, _ADDRESS_OFFSET, _COUNTS_OFFSET = 8, 16, 60
_OP = struct.Struct("<4H")  # op, flags, part, num_parts
_COUNTS = struct.Struct("<I4Q2IQ")  # num_blocks to column_bytes
_REPLY = struct.Struct("<8s2H4x44sI2Q8xQ2I3Q")  # part, num_parts and push_floor are skipped
_PUSH_FLOOR = struct.Struct("<Q")
_ROWS, _ACK = int(Op.ROWS), int(Op.ACK)


PlainReply = tuple[bool, int, int, int, int, int]
"""The head of a reply: True for a ROWS frame, False for an ACK; request_id, push_seq, step, column_bytes, checksum."""


def durable_push_of(head: Buffer) -> int:
    """Returns the `push_floor` of the head of a reply: the newest push of its client that is durable."""
    seq: int = _PUSH_FLOOR.unpack_from(head, HEADER_OFFSETS["push_floor"])[0]
    return seq


class LinkHeader:
    """Writes the heads of requests and reads the heads of replies.

    Args:
        header: What all frames have in common, the flags included; its other fields are ignored.

    Attributes:
        flags: Flags of all frames.
        template: Header of a request with zeros for what differs.
    """

    def __init__(self, header: Header) -> None:
        self.flags = header.flags
        self.template = HEADER.pack(
            MAGIC,
            PROTOCOL_VERSION,
            HEADER_BYTES,
            0,
            header.flags,
            0,
            1,
            header.cluster_id,
            header.incarnation,
            header.shard,
            header.placement_version,
            header.client_id,
            header.client_epoch,
            *[0] * 10,
        )
        self._start = self.template[:_OP_OFFSET]
        self._address = self.template[_ADDRESS_OFFSET:_COUNTS_OFFSET]

    def head_of(
        self,
        op: Op,
        table: Buffer | bytearray,
        columns: Sequence[Buffer],
        column_bytes: int,
        position: tuple[int, int, int, int],
        part: int = 0,
        num_parts: int = 1,
    ) -> bytes:
        """Returns the head of a request.

        Args:
            op: Op of the request.
            table: Block table.
            columns: All columns, in order.
            column_bytes: Bytes of the columns.
            position: request_id, push_seq, push_floor and step.
            part: Number of this part of a request that was split.
            num_parts: Number of its parts.
        """
        head = bytearray(self.template)
        head += table
        _OP.pack_into(head, _OP_OFFSET, op, self.flags, part, num_parts)
        head_bytes = len(head)
        num_blocks = (head_bytes - HEADER_BYTES) // BLOCK_BYTES
        _COUNTS.pack_into(head, _COUNTS_OFFSET, num_blocks, *position, head_bytes, 0, column_bytes)
        CHECKSUM.pack_into(head, CHECKSUM_OFFSET, checksum_of(head, columns, self.flags))
        return bytes(head)

    def read_reply(self, head: Buffer) -> PlainReply | None:
        """Returns the fields of the head of a ROWS or ACK frame; None if it is another one, or not from this shard."""
        num_bytes = len(head)
        if num_bytes < HEADER_BYTES:
            return None
        (
            start,
            op,
            flags,
            address,
            num_blocks,
            request_id,
            push_seq,
            step,
            head_bytes,
            reserved,
            column_bytes,
            more_reserved,
            checksum,
        ) = _REPLY.unpack_from(head)
        if (
            start != self._start
            or address != self._address
            or flags != self.flags
            or (op != _ROWS and (op != _ACK or num_blocks))
            or head_bytes != HEADER_BYTES + BLOCK_BYTES * num_blocks
            or head_bytes != num_bytes
            or reserved
            or more_reserved
        ):
            return None
        return op == _ROWS, request_id, push_seq, step, column_bytes, checksum

    def is_intact(self, head: Buffer, columns: Sequence[Buffer], checksum: int) -> bool:
        """Returns whether a frame has this checksum."""
        return checksum_of(without_checksum(head), columns, self.flags) == checksum
