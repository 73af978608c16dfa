"""Frames on a stream socket that never blocks (docs/protocol.md, Streams)."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.reused_memory import ReusedMemory
from fleet_sparse.errors import ErrorCode, ProtocolError, SettingError
from fleet_sparse.net_addresses import Address

from .frame_format import MAX_PARTS, Buffer

MAGIC = b"FSS1"
GREETING = MAGIC + bytes(12)
"""First message of a client: it has no frame."""
SOCKET_BUFFER_BYTES = 4 << 20
"""Buffer size requested for a Unix socket, whose default is smaller than a frame; the kernel may grant less."""

_HEAD = struct.Struct("<4sIQ")
_PADDING = [bytes(-num_bytes % 8) for num_bytes in range(8)]
READ_BYTES = 16 << 10
"""One read receives any number of small messages, or the beginning of a large one."""
# A large message needs two reads: its beginning and the rest.
_MAX_READS = 2
# Memory of frames up to this size is reused; at most this number of each size is kept.
_KEPT_BYTES = 8 << 20
_NUM_KEPT = 4
# Limit of Linux for one sendmsg.
_MAX_BUFFERS = 1024
# Parts of a message whose columns may be placed: with their padding they fit into one recvmsg.
_MAX_PLACED = 500
# The heads of such a message are in the buffer if this much of it is.
_PLACING_BYTES = 8 << 10
# A peer whose machine is gone is noticed after about 30 s without traffic.
_KEEPALIVE_S, _KEEPALIVE_PROBES = 10, 2
_UCRED = struct.Struct("3i")

Place = Callable[[bytes, Sequence[int]], "Sequence[memoryview] | None"]
"""Returns the memory for the columns of a frame with this head and columns of these lengths; None to get them in memory
of their own. What was returned is written to until the frame is complete or `withdraw` is called."""
_View = TypeVar("_View", bound=Buffer)
_Taken = TypeVar("_Taken")


class FrameMemory:
    """Memory for large frames. It is reused once no view of it is left.

    Fresh memory costs a page fault for every 4 KB, which takes longer than to receive them. Thread-safe; views may be
    dropped in any thread.
    """

    def __init__(self) -> None:
        self._memory = ReusedMemory(np.uint8, num_kept=_NUM_KEPT, largest=_KEPT_BYTES)

    def lend(self, num_bytes: int) -> memoryview:
        """Returns uninitialised memory of this size, which is at least 1."""
        return self._memory.lend(num_bytes).data[:num_bytes]


class Room(NamedTuple):
    """Room of a connection for large frames, for which memory is allocated.

    Attributes:
        take: Returns whether a frame of this size may be received now. If not, it is asked again later.
        release: Called when the frame is complete.
    """

    take: Callable[[int], bool]
    release: Callable[[], None]


class Message(NamedTuple):
    """A message with a frame, as it was received.

    Attributes:
        data: The message without its first 16 bytes. In the buffer of the reader it is valid until the next read.
        num_parts: Number of parts of the frame.
        is_in_buffer: True if it is in the buffer of the reader.
    """

    data: memoryview
    num_parts: int
    is_in_buffer: bool


class FrameReader:
    """Splits the bytes that a stream receives into frames.

    Args:
        max_bytes: Largest frame to accept.
        memory: Memory for large frames; used by the same thread.
        place: Finds memory for the columns of a frame; None if every frame gets memory of its own.
        buffer: Contiguous memory of 16 KB to read into, which the caller may use between two frames; None for fresh
            memory.
        room: Room for large frames; None if there is always room.

    Attributes:
        num_messages: Number of messages that have begun, those without a frame included.
        num_bytes: Number of bytes read.
        begin, end: Range of the buffer that was not returned yet.
        missing: Where the rest of a large or placed message is received.
        may_have_more: True if the next frame may be received although the stream is not readable.
        waits_for_room: True if the next frame is large and there is no room for it. Nothing is read meanwhile.
    """

    def __init__(
        self,
        max_bytes: int,
        memory: FrameMemory,
        place: Place | None = None,
        buffer: NDArray[np.int64] | None = None,
        room: Room | None = None,
    ) -> None:
        self.num_messages = self.num_bytes = 0
        self.may_have_more = True
        self.waits_for_room = False
        self._room = room
        self._max_bytes = max_bytes
        self._memory = memory
        self._place = place
        self._buffer = (np.empty(READ_BYTES, np.uint8) if buffer is None else buffer).data.cast("B")
        self.begin = self.end = 0
        self.missing: list[memoryview] = []
        self._large: memoryview | None = None  # a message larger than the buffer, without its head
        self._large_parts = 0
        self._placed: list[Buffer] = []  # parts of a message whose columns were placed

    @property
    def is_within_message(self) -> bool:
        """True if a message has begun and is not complete."""
        return bool(self.missing) or self.begin < self.end

    def resume(self, begin: int, end: int, placed: Sequence[Buffer] = (), num_received: int = 0) -> None:
        """Continues from where the caller has used the buffer between two frames.

        Args:
            begin: Begin of the range of the buffer that was received and not used.
            end: Its end.
            placed: Parts of a frame that has arrived in part, its columns where they belong; empty without one.
            num_received: Number of bytes of its columns, padding included, that have arrived.
        """
        self.begin, self.end = begin, end
        self.may_have_more = True
        if placed:
            self.num_messages += 1
            self._placed = [*placed]
            self.missing = without(_with_padding(placed[1:]), num_received)

    def receive(self, source: socket.socket) -> list[Buffer] | None:
        """Returns the parts of the next frame, reading at most twice; None if that is not enough.

        Raises:
            BlockingIOError: Nothing has arrived.
            ProtocolError: The bytes are not messages; the stream is unusable.
            OSError: The connection ended, or is broken.
        """
        return self._received(source, self.next_frame)

    def receive_message(self, source: socket.socket) -> Message | None:
        """Returns the next message with a frame, as `receive`; for a reader that places no columns."""
        return self._received(source, self.next_message)

    def _received(self, source: socket.socket, take: Callable[[], _Taken | None]) -> _Taken | None:
        taken = take() if self.begin < self.end else None
        num_reads = 0
        while (
            taken is None
            and num_reads < _MAX_READS
            and (not num_reads or self.may_have_more)
            and not self.waits_for_room
        ):
            if not self.read(source):
                raise ConnectionResetError(errno.ECONNRESET, "the other side ended it")
            num_reads += 1
            taken = take()
        if self.begin < self.end:
            self.may_have_more = True
        return taken

    def read(self, source: socket.socket) -> int:
        """Receives once, after `next_frame` returned None. Returns the number of bytes, 0 at the end of the stream.

        Raises:
            BlockingIOError: Nothing has arrived.
            OSError: The connection is broken.
        """
        missing = self.missing
        if missing:
            if len(missing) == 1:
                num_bytes = source.recv_into(missing[0])
                self.missing = [missing[0][num_bytes:]] if num_bytes < len(missing[0]) else []
            else:
                num_bytes = source.recvmsg_into(missing)[0]
                self.missing = without(missing, num_bytes)
            self.may_have_more = False  # what is behind it keeps the stream readable
        else:
            if self.begin:
                self._buffer[: self.end - self.begin] = self._buffer[self.begin : self.end]
                self.begin, self.end = 0, self.end - self.begin
            num_bytes = source.recv_into(self._buffer[self.end :])
            self.end += num_bytes
            self.may_have_more = self.end == READ_BYTES
        self.num_bytes += num_bytes
        return num_bytes

    def next_frame(self) -> list[Buffer] | None:
        """Returns the parts of the next frame; None until more is read.

        Columns that were placed are in the memory that `place` returned; all other parts have memory of their own.

        Raises:
            ProtocolError: The bytes are not messages; the stream is unusable.
        """
        message = self.next_message()
        if message is not None:
            return self.split(message)
        if self.missing or not self._placed:
            return None
        placed, self._placed = self._placed, []
        return placed

    def next_message(self) -> Message | None:
        """Returns the next message with a frame; None until more is read, or if its columns were placed.

        Raises:
            ProtocolError: The bytes are not messages; the stream is unusable.
        """
        if self.missing or self._placed:
            return None
        if self._large is not None:
            large, self._large = self._large, None
            if self._room is not None:
                self._room.release()
            return Message(large, self._large_parts, False)
        while self.end - self.begin >= _HEAD.size:
            magic, num_parts, num_bytes = _HEAD.unpack_from(self._buffer, self.begin)
            if (
                magic != MAGIC
                or not 0 < num_parts <= MAX_PARTS
                or not 0 <= num_bytes - 8 * num_parts <= self._max_bytes
            ):
                self._check_head(magic, num_parts, num_bytes)
            begin = self.begin + _HEAD.size
            end = begin + num_bytes
            if self._place is not None and num_parts > 1 and self._place_columns(begin, end, num_parts):
                self.num_messages += 1
                return None
            if end <= self.end:
                self.num_messages += 1
                self.begin = end
                if num_parts:
                    return Message(self._buffer[begin:end], num_parts, True)
            elif _HEAD.size + num_bytes > READ_BYTES and not (
                self._place is not None and self._waits_for_head(begin, num_parts)
            ):
                self.waits_for_room = self._room is not None and not self._room.take(num_bytes)
                if not self.waits_for_room:
                    self.num_messages += 1
                    self._begin_large(begin, num_parts, num_bytes)
                return None
            else:
                break
        return None

    def place_columns(self, place: Place | None) -> None:
        """Sets `place`."""
        self._place = place

    def withdraw(self) -> None:
        """Moves a frame that has arrived in part out of the memory where its columns were placed."""
        if not self._placed:
            return
        lengths = [*map(len, self._placed)]
        large = self._memory.lend(8 * len(lengths) + sum(length + -length % 8 for length in lengths))
        struct.pack_into(f"<{len(lengths)}Q", large, 0, *lengths)
        begin = 8 * len(lengths)
        for part, length in zip(self._placed, lengths, strict=True):
            large[begin : begin + length] = part
            begin += length + -length % 8
        self.missing = [large[len(large) - sum(map(len, self.missing)) :]]
        self._large, self._large_parts = large, len(lengths)
        self._placed = []

    def close(self) -> None:
        """Drops what was read; it reads no more."""
        self._large, self._buffer = None, memoryview(bytearray())
        self.missing, self._placed = [], []
        self.begin = self.end = 0

    def _check_head(self, magic: bytes, num_parts: int, num_bytes: int) -> None:
        if magic != MAGIC:
            raise _refusal(f"a message starts with {magic.hex()}, it should start with {MAGIC.hex()}")
        if num_parts > MAX_PARTS:
            raise _refusal(f"a message of {num_parts} parts, at most {MAX_PARTS} are accepted")
        padded = num_bytes - 8 * num_parts
        if not 0 <= padded <= (self._max_bytes + 8 * num_parts if num_parts else 0):
            raise _refusal(f"a message of {num_bytes} bytes in {num_parts} parts; the limit is {self._max_bytes}")

    def _waits_for_head(self, begin: int, num_parts: int) -> bool:
        """Returns whether a message could be placed once more of it is in the buffer."""
        return 1 < num_parts <= _MAX_PLACED and self.end - begin < _PLACING_BYTES

    def _place_columns(self, begin: int, end: int, num_parts: int) -> bool:
        """Receives the columns of the message `[begin, end)` of the buffer where `place` says; False if it does not."""
        assert self._place is not None, "the caller has checked"
        here = min(end, self.end)
        at = begin + 8 * num_parts
        if num_parts > _MAX_PLACED or at > here:
            return False
        head_bytes, *lengths = struct.unpack_from(f"<{num_parts}Q", self._buffer, begin)
        first = at + head_bytes
        if first > here or head_bytes % 8:
            return False
        head = bytes(self._buffer[at:first])
        columns = self._place(head, lengths)
        if columns is None:
            return False
        missing = _with_padding(columns)
        if first + sum(map(len, missing)) != end:
            return False  # it is refused when it is split
        data = self._buffer[first:here]
        for index, view in enumerate(missing):
            num_bytes = min(len(view), len(data))
            view[:num_bytes] = data[:num_bytes]
            data = data[num_bytes:]
            if num_bytes < len(view):
                self.missing = [view[num_bytes:], *missing[index + 1 :]]
                break
        self._placed = [head, *columns]
        if end > self.end:
            self.begin = self.end = 0
        else:
            self.begin = end
        return True

    def _begin_large(self, begin: int, num_parts: int, num_bytes: int) -> None:
        self._large, self._large_parts = self._memory.lend(num_bytes), num_parts
        num_here = self.end - begin
        self._large[:num_here] = self._buffer[begin : self.end]
        self.missing = [self._large[num_here:]]
        self.begin = self.end = 0

    def split(self, message: Message) -> list[Buffer]:
        """Returns the parts of a message that was just received.

        Raises:
            ProtocolError: Its lengths are wrong; the stream is unusable.
        """
        # A copy of a small one: a view would keep the whole buffer alive.
        data = memoryview(bytes(message.data)) if message.is_in_buffer else message.data
        num_parts = message.num_parts
        begin = 8 * num_parts
        lengths = struct.unpack_from(f"<{num_parts}Q", data)
        if sum(lengths) > self._max_bytes:
            raise _refusal(f"a frame of {sum(lengths)} bytes; the limit is {self._max_bytes}")
        parts: list[Buffer] = []
        for length in lengths:
            parts.append(data[begin : begin + length])
            begin += length + -length % 8
        if begin != len(data):
            raise _refusal(f"parts of {begin} bytes in a message of {len(data)}")
        return parts


def _with_padding(columns: Sequence[Buffer]) -> list[Any]:
    """Returns memory for columns and for the padding behind each."""
    memory: list[Any] = []
    for column in columns:
        memory.append(column)
        if len(column) % 8:
            memory.append(memoryview(bytearray(-len(column) % 8)))
    return memory


def _refusal(message: str) -> ProtocolError:
    return ProtocolError(f"stream: {message}", code=ErrorCode.MALFORMED)


class FrameWriter:
    """Messages that wait to be sent on a stream, in order; their parts are not copied.

    Attributes:
        num_waiting: Number of messages, one that is sent in part included.
        num_bytes: Number of bytes that wait.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_bytes = 0
        self._messages: deque[list[Buffer]] = deque()
        self._rest: list[Buffer] = []  # rest of the first message; empty if nothing of it was sent

    def put(self, parts: Sequence[Buffer]) -> None:
        """Appends a frame. The parts must not change until they are sent."""
        message, num_bytes = _message_of(parts)
        self._append(message, num_bytes)

    def put_message(self, message: Buffer) -> None:
        """Appends a message that is complete. It must not change until it is sent."""
        self._append([message], len(message))

    def send(self, parts: Sequence[Buffer], target: socket.socket) -> bool:
        """Sends a frame behind those that wait; what the socket does not accept waits. Returns whether nothing does.

        Raises:
            OSError: The connection is broken; the frame waits.
        """
        message, num_bytes = _message_of(parts)
        return self._send(message, num_bytes, target)

    def send_message(self, message: Buffer, target: socket.socket) -> bool:
        """Sends a message that is complete, as `send`."""
        return self._send([message], len(message), target)

    def _send(self, message: list[Buffer], num_bytes: int, target: socket.socket) -> bool:
        if self.num_waiting or len(message) > _MAX_BUFFERS:
            self._append(message, num_bytes)
            return self.write(target)
        sent = 0
        try:
            sent = target.sendmsg(message)
        except BlockingIOError:
            pass
        finally:
            if sent < num_bytes:
                self._append(message, num_bytes - sent)
                self._rest = without(message, sent) if sent else []
        return sent == num_bytes

    def put_rest(self, parts: Sequence[Buffer], num_sent: int) -> None:
        """Appends a frame of whose message the first bytes were sent already, while none waits."""
        message, num_bytes = _message_of(parts)
        self._append(message, num_bytes - num_sent)
        self._rest = without(message, num_sent) if num_sent else []

    def write(self, target: socket.socket) -> bool:
        """Sends what the socket accepts. Returns whether that is everything.

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
            self._rest = [] if is_last and not is_full else without(self._rest or self._messages[0], sent)
            if not self._rest:
                self._messages.popleft()
                self.num_waiting -= 1
            if is_full:
                return False
        return True

    def begin_again(self) -> None:
        """Prepares for another stream: a message that was sent in part is sent again as a whole."""
        if self._rest:
            self.num_bytes += sum(map(len, self._messages[0])) - sum(map(len, self._rest))
            self._rest = []

    def clear(self) -> None:
        """Drops all messages."""
        self._messages.clear()
        self._rest = []
        self.num_waiting = self.num_bytes = 0

    def _append(self, message: list[Buffer], num_bytes: int) -> None:
        self._messages.append(message)
        self.num_waiting += 1
        self.num_bytes += num_bytes


def _message_of(parts: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Returns the buffers of a message, its head first, and the number of their bytes."""
    lengths = [*map(len, parts)]
    num_parts = len(lengths)
    num_bytes = 8 * num_parts
    message: list[Buffer] = [b""]
    for part, length in zip(parts, lengths, strict=True):
        message.append(part)
        num_bytes += length
        if length % 8:
            message.append(_PADDING[length % 8])
            num_bytes += -length % 8
    message[0] = struct.pack(f"<4sIQ{num_parts}Q", MAGIC, num_parts, num_bytes, *lengths)
    return message, _HEAD.size + num_bytes


def without(buffers: list[_View], sent: int) -> list[_View]:
    """Returns the buffers without their first `sent` bytes."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            first: Any = memoryview(buffer)[sent:]
            return [first, *buffers[index + 1 :]]
        sent -= len(buffer)
    return []


class Connection:
    """One end of a stream: frames in and out of a connected socket that never blocks. Both sides use it.

    Args:
        stream: Connected, and set up by `set_up`.
        max_bytes: Largest frame to accept.
        memory: Memory for large frames.
        on_events: Called when `events` has changed.
        writer: Messages that wait already; they are sent first.
        place: As `FrameReader`, as are the next two.
        buffer: As `FrameReader`.
        room: As `FrameReader`.

    Attributes:
        socket: The socket.
        number: File descriptor of the socket while it is open.
        reader: Frames that were received in part.
        receive: `FrameReader.receive` from the socket.
        receive_message: `FrameReader.receive_message` from the socket.
        writer: Messages that wait to be sent.
        events: The epoll events that it waits for.
        is_reading: False while frames are not read.
    """

    def __init__(
        self,
        stream: socket.socket,
        max_bytes: int,
        memory: FrameMemory,
        on_events: Callable[[], None],
        writer: FrameWriter | None = None,
        place: Place | None = None,
        buffer: NDArray[np.int64] | None = None,
        room: Room | None = None,
    ) -> None:
        self.socket = stream
        self.number = stream.fileno()
        # One of TLS has a reader of its own.
        reader_type: type[FrameReader] = getattr(stream, "reader_type", FrameReader)
        self.reader = reader_type(max_bytes, memory, place, buffer, room)
        self.receive = partial(self.reader.receive, stream)
        self.receive_message = partial(self.reader.receive_message, stream)
        self._on_events = on_events
        self.writer = FrameWriter() if writer is None else writer
        self.is_reading = True
        self.events = select.EPOLLIN

    def fileno(self) -> int:
        """File descriptor of the socket; -1 once it is closed."""
        return self.socket.fileno()

    @property
    def num_received(self) -> int:
        """Bytes received so far."""
        return self.reader.num_bytes

    @property
    def num_messages(self) -> int:
        """Number of messages that have begun, the greeting included."""
        return self.reader.num_messages

    @property
    def is_within_message(self) -> bool:
        """True if a message is received or sent in part."""
        return self.reader.is_within_message or self.writer.num_waiting > 0

    @property
    def may_have_more(self) -> bool:
        """True if the next frame may have been read although the socket is not readable."""
        return self.reader.may_have_more

    def flush(self) -> None:
        """Sends what the socket accepts. Raises `OSError` if the connection is broken."""
        self.writer.write(self.socket)
        self.update_events()

    def update_events(self) -> None:
        """Recomputes `events`, after `is_reading` or the waiting messages changed."""
        events = (select.EPOLLIN if self.is_reading else 0) | (select.EPOLLOUT if self.writer.num_waiting else 0)
        if events != self.events:
            self.events = events
            self._on_events()

    def close(self) -> None:
        """Closes the socket and drops what was received; waiting messages stay in `writer`."""
        self.reader.close()
        with suppress(OSError):  # the other side closed it first
            self.socket.shutdown(socket.SHUT_RDWR)  # a forked child may have it open too
        self.socket.close()


def socket_to(endpoint: str) -> tuple[socket.socket, Any]:
    """Returns a new socket, and the address to connect it to, for a `stream_endpoint`.

    Raises:
        SettingError: It is not a stream endpoint.
    """
    kind, _, rest = endpoint.partition(":")
    if kind == "unix" and rest:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"\0{rest}"
    if kind == "tcp":
        host, port = Address.parse(rest)
        return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM), (host, port)
    raise SettingError(f"stream endpoint {endpoint!r}: should be unix:<name> or tcp:<host>:<port>")


def set_up(stream: socket.socket, buffer_bytes: int, *, gone_after_s: float | None = None) -> None:
    """Makes a socket non-blocking, without delay of small messages.

    Args:
        stream: A socket, connected or not.
        buffer_bytes: Buffer size of a Unix socket; the kernel sizes those of TCP.
        gone_after_s: Seconds after which a TCP connection ends whose peer takes nothing of what was sent to it.
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
        if gone_after_s is not None:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * gone_after_s))


def is_trusted(stream: socket.socket) -> bool:
    """Returns whether the peer of a connected socket may be trusted: over a Unix socket only its own user and root."""
    if stream.family is not socket.AF_UNIX:
        return True
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return _UCRED.unpack(credentials)[1] in (os.geteuid(), 0)
