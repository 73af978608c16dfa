"""The straight path of a pserver, for tests that send a shard frames without a socket."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net.requests import answer
from fleet_sparse.pserver.net.straight_path import StraightPath
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Buffer, Frame
from fleet_sparse.wire.stream import Message

PREFIX_BYTES = 16


def message_of(parts: Sequence[Buffer]) -> Message:
    """Returns the message with these parts, as a stream receives it."""
    data = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    data += b"".join(bytes(part) + bytes(-len(part) % 8) for part in parts)
    memory = np.zeros(-(-len(data) // 8), np.int64).data.cast("B")[: len(data)]
    memory[:] = data
    return Message(memory, len(parts), False)


def parts_of(message: Buffer) -> list[bytes]:
    """Returns the parts of a message with its prefix, whose lengths and zeros of padding are right."""
    magic, num_parts, num_bytes = struct.unpack_from("<4sIQ", message)
    assert (magic, num_bytes) == (b"FSS1", len(message) - PREFIX_BYTES)
    begin, parts = PREFIX_BYTES + 8 * num_parts, []
    for length in struct.unpack_from(f"<{num_parts}Q", message, PREFIX_BYTES):
        end = begin + length + -length % 8
        parts.append(bytes(message[begin : begin + length]))
        assert not any(message[begin + length : end])
        begin = end
    assert begin == len(message)
    return parts


class ReadableAnswers:
    """A shard behind its readable path."""

    def __init__(self, shard: Shard, max_bytes: int) -> None:
        self._shard = shard
        self._max_bytes = max_bytes

    def answer(self, parts: Sequence[Buffer]) -> list[bytes]:
        """Returns the parts of the reply to a request."""
        return [bytes(part) for part in answer(self._shard, parts, self._max_bytes).parts]

    def answer_frame(self, frame: Frame) -> Frame:
        """Returns the reply to a request."""
        return decode(self.answer(encode(frame)), max_bytes=self._max_bytes)


class StraightAnswers(ReadableAnswers):
    """A shard behind its straight path; what is not plain is answered by the readable one.

    Attributes:
        is_straight: For each request so far, True if the straight path answered it.
    """

    def __init__(self, shard: Shard, max_bytes: int) -> None:
        super().__init__(shard, max_bytes)
        self._path = StraightPath(shard, max_bytes)
        self.is_straight: list[bool] = []

    def answer(self, parts: Sequence[Buffer]) -> list[bytes]:
        """Returns the parts of the reply to a request."""
        reply = self._path.answer(message_of(parts))
        self.is_straight.append(reply is not None)
        if reply is None:
            return super().answer(parts)
        sent = parts_of(reply.message)
        assert reply.num_bytes_received == sum(map(len, parts))
        assert reply.num_bytes_sent == sum(map(len, sent))
        return sent
