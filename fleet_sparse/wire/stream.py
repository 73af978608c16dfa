"""Frames on a stream: from a socket that never blocks to lists of parts, and back. docs/protocol.md, Streams."""

from __future__ import annotations

import errno
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import ErrorCode, ProtocolError, SettingError
from fleet_sparse.net_addresses import Address

from .frames import MAX_PARTS, Buffer

MAGIC = b"FSS1"
GREETING = MAGIC + bytes(12)
"""What a client sends first: a message without a frame."""
SOCKET_BUFFER_BYTES = 4 << 20
"""What is asked of the kernel for a Unix socket, which has less than a frame by itself; it may give less."""

_HEAD = struct.Struct("<4sIQ")
_PADDING = [bytes(-num_bytes % 8) for num_bytes in range(8)]
# One read takes in any number of small messages, or the beginning of a large one.
_READ_BYTES = 16 << 10
# A large message takes two reads: its beginning and the rest.
_MAX_READS = 2
# Memory for a frame is kept for the next one up to this size, and so many of each size.
_KEPT_BYTES = 8 << 20
_NUM_KEPT = 4
# Linux takes no more buffers at once.
_MAX_BUFFERS = 1024
# A peer whose machine is gone is noticed after about 30 s in which nothing was sent.
_KEEPALIVE_S, _KEEPALIVE_PROBES = 10, 2
_UCRED = struct.Struct("3i")


class FrameMemory:
    """Memory for large frames, in powers of two. It is used again once nobody holds a view of it any more.

    Fresh memory costs a page fault for every 4 KB, which is more than to receive them. For one thread; views may be
    dropped in any.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def lend(self, num_bytes: int) -> memoryview:
        """So many bytes, at least 1, with anything in them."""
        if num_bytes > _KEPT_BYTES:
            return np.empty(num_bytes, np.uint8).data
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else np.empty(size, np.uint8)
        lent = memory[:num_bytes]  # views of the result refer to this array, not to `memory`
        weakref.finalize(lent, _give_back, free, memory).atexit = False
        return lent.data


def _give_back(free: list[NDArray[np.uint8]], memory: NDArray[np.uint8]) -> None:
    if len(free) < _NUM_KEPT:
        free.append(memory)


class FrameReader:
    """What a stream receives, as frames.

    Args:
        max_bytes: Largest frame to accept.
        memory: For large frames; of the same thread.

    Attributes:
        num_messages: That have begun, those without a frame too.
        num_bytes: That were read.
    """

    def __init__(self, max_bytes: int, memory: FrameMemory) -> None:
        self.num_messages = self.num_bytes = 0
        self._max_bytes = max_bytes
        self._memory = memory
        self._buffer = np.empty(_READ_BYTES, np.uint8).data
        self._begin = self._end = 0  # of what is in the buffer and was not taken out
        self._large: memoryview | None = None  # a message that does not fit into the buffer, without its head
        self._filled = 0
        self._large_parts = 0
        self._may_have_more = True

    @property
    def is_within_message(self) -> bool:
        """Whether a message has begun and is not complete."""
        return self._large is not None or self._begin < self._end

    @property
    def may_have_more(self) -> bool:
        """Whether the next frame may be here although the stream is not readable."""
        return self._may_have_more or self.is_within_message

    def receive(self, source: socket.socket) -> list[Buffer] | None:
        """The parts of the next frame, of what was read or by reading now; None if it takes more reads than two.

        Raises:
            BlockingIOError: There is nothing now.
            ProtocolError: These are no messages; the stream is of no use any more.
            OSError: The connection ended, or is broken.
        """
        frame = self.next_frame()
        num_reads = 0
        while frame is None and num_reads < _MAX_READS and (not num_reads or self._may_have_more):
            if not self.read(source):
                raise ConnectionResetError(errno.ECONNRESET, "the other side ended it")
            num_reads += 1
            frame = self.next_frame()
        return frame

    def read(self, source: socket.socket) -> int:
        """Receives once, when `next_frame` has nothing more; how many bytes, 0 at the end of the stream.

        Raises:
            BlockingIOError: There is nothing now.
            OSError: The connection is broken.
        """
        if self._large is not None:
            into = self._large[self._filled :]
            num_bytes = source.recv_into(into)
            self._filled += num_bytes
        else:
            if self._begin:
                self._buffer[: self._end - self._begin] = self._buffer[self._begin : self._end]
                self._begin, self._end = 0, self._end - self._begin
            into = self._buffer[self._end :]
            num_bytes = source.recv_into(into)
            self._end += num_bytes
        self.num_bytes += num_bytes
        self._may_have_more = num_bytes == len(into)  # of what it asked for
        return num_bytes

    def next_frame(self) -> list[Buffer] | None:
        """The parts of the next frame, in memory that is theirs; None until more is read.

        Raises:
            ProtocolError: These are no messages; the stream is of no use any more.
        """
        if self._large is not None:
            if self._filled < len(self._large):
                return None
            large, self._large = self._large, None
            return self._split(large, self._large_parts)
        while self._end - self._begin >= _HEAD.size:
            magic, num_parts, num_bytes = _HEAD.unpack_from(self._buffer, self._begin)
            self._check_head(magic, num_parts, num_bytes)
            begin, end = self._begin + _HEAD.size, self._begin + _HEAD.size + num_bytes
            if end <= self._end:
                self.num_messages += 1
                self._begin = end
                if num_parts:
                    # A copy: a small frame that is kept would keep all of the buffer.
                    return self._split(memoryview(bytes(self._buffer[begin:end])), num_parts)
            elif _HEAD.size + num_bytes > len(self._buffer):
                self.num_messages += 1
                self._begin_large(begin, num_parts, num_bytes)
                return None
            else:
                break
        return None

    def close(self) -> None:
        """Drops what was read, and reads no more."""
        self._large, self._buffer = None, memoryview(bytearray())
        self._begin = self._end = 0

    def _check_head(self, magic: bytes, num_parts: int, num_bytes: int) -> None:
        if magic != MAGIC:
            raise _refusal(f"a message starts with {magic.hex()}, it should start with {MAGIC.hex()}")
        if num_parts > MAX_PARTS:
            raise _refusal(f"a message of {num_parts} parts, at most {MAX_PARTS} are accepted")
        padded = num_bytes - 8 * num_parts
        if not 0 <= padded <= (self._max_bytes + 8 * num_parts if num_parts else 0):
            raise _refusal(f"a message of {num_bytes} bytes in {num_parts} parts; the limit is {self._max_bytes}")

    def _begin_large(self, begin: int, num_parts: int, num_bytes: int) -> None:
        self._large, self._large_parts = self._memory.lend(num_bytes), num_parts
        self._filled = self._end - begin
        self._large[: self._filled] = self._buffer[begin : self._end]
        self._begin = self._end = 0

    def _split(self, message: memoryview, num_parts: int) -> list[Buffer]:
        begin = 8 * num_parts
        lengths = struct.unpack_from(f"<{num_parts}Q", message)
        if sum(lengths) > self._max_bytes:
            raise _refusal(f"a frame of {sum(lengths)} bytes; the limit is {self._max_bytes}")
        parts: list[Buffer] = []
        for length in lengths:
            parts.append(message[begin : begin + length])
            begin += length + -length % 8
        if begin != len(message):
            raise _refusal(f"parts of {begin} bytes in a message of {len(message)}")
        return parts


def _refusal(message: str) -> ProtocolError:
    return ProtocolError(f"stream: {message}", code=ErrorCode.MALFORMED)


class FrameWriter:
    """Messages that wait to be sent on a stream, in order; their parts are not copied.

    Attributes:
        num_waiting: Messages, one that is sent in part included.
        num_bytes: That wait.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_bytes = 0
        self._messages: deque[list[Buffer]] = deque()
        self._rest: list[Buffer] = []  # of the first message; empty if nothing of it was sent

    def put(self, parts: Sequence[Buffer]) -> None:
        """Appends a frame. The parts must not change until they are sent."""
        lengths = list(map(len, parts))
        num_bytes = 8 * len(lengths)
        message: list[Buffer] = [b""]
        for part, length in zip(parts, lengths, strict=True):
            num_bytes += length + -length % 8
            message.append(part)
            if length % 8:
                message.append(_PADDING[length % 8])
        message[0] = _HEAD.pack(MAGIC, len(lengths), num_bytes) + struct.pack(f"<{len(lengths)}Q", *lengths)
        self._messages.append(message)
        self.num_waiting += 1
        self.num_bytes += _HEAD.size + num_bytes

    def write(self, target: socket.socket) -> bool:
        """Sends what the socket takes; whether that is all.

        Raises:
            OSError: The connection is broken.
        """
        while self._messages:
            buffers = (self._rest or self._messages[0])[:_MAX_BUFFERS]
            try:
                sent = target.sendmsg(buffers)
            except BlockingIOError:
                return False
            self.num_bytes -= sent
            is_full = sent < sum(map(len, buffers))
            is_last = len(buffers) < _MAX_BUFFERS or len(self._rest or self._messages[0]) == _MAX_BUFFERS
            self._rest = [] if is_last and not is_full else _without(self._rest or self._messages[0], sent)
            if not self._rest:
                self._messages.popleft()
                self.num_waiting -= 1
            if is_full:
                return False
        return True

    def begin_again(self) -> None:
        """Has a message that was sent in part sent as a whole, on another stream."""
        if self._rest:
            self.num_bytes += sum(map(len, self._messages[0])) - sum(map(len, self._rest))
            self._rest = []

    def clear(self) -> None:
        """Drops what waits."""
        self._messages.clear()
        self._rest = []
        self.num_waiting = self.num_bytes = 0


def _without(buffers: list[Buffer], sent: int) -> list[Buffer]:
    """What is left of buffers after their first `sent` bytes."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return []


def socket_to(endpoint: str) -> tuple[socket.socket, Any]:
    """A new socket, and what to connect it to, for a `stream_endpoint`.

    Raises:
        SettingError: It is none.
    """
    kind, _, rest = endpoint.partition(":")
    if kind == "unix" and rest:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"\0{rest}"
    if kind == "tcp":
        host, port = Address.parse(rest)
        return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM), (host, port)
    raise SettingError(f"stream endpoint {endpoint!r}: should be unix:<name> or tcp:<host>:<port>")


def set_up(stream: socket.socket, buffer_bytes: int) -> None:
    """Has a socket never block, and send at once.

    Args:
        stream: Connected or not.
        buffer_bytes: To ask of the kernel for a Unix socket; TCP sizes its buffers by itself.
    """
    stream.setblocking(False)
    if stream.family is socket.AF_UNIX:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    else:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


def is_trusted(stream: socket.socket) -> bool:
    """Whether the peer of a connected socket may talk to this process: over a Unix socket its own user, and root."""
    if stream.family is not socket.AF_UNIX:
        return True
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return _UCRED.unpack(credentials)[1] in (os.geteuid(), 0)
