"""StreamChannel: one Unix socket or TCP connection for each shard; the thread that sends and receives does its I/O."""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.credentials import NO_KEYS, Credentials
from fleet_sparse.errors import ProtocolError
from fleet_sparse.keys import SERVER_NAME
from fleet_sparse.net_addresses import LOOPBACK
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Buffer
from fleet_sparse.wire.stream import (
    GREETING,
    SOCKET_BUFFER_BYTES,
    Connection,
    FrameMemory,
    FrameWriter,
    is_trusted,
    set_up,
    socket_to,
)
from fleet_sparse.wire.stream import Place as StreamPlace
from fleet_sparse.wire.tls_stream import client_context

from .channel import Place
from .lane import Lane

logger = logging.getLogger(__name__)

_SEND_QUEUE = 4096  # messages; far more than a client has in flight, so that only a fault fills it
_RECONNECT_S, _RECONNECT_MAX_S = 0.05, 1.0


class StreamChannel:
    """Implements `Channel` over streams.

    Args:
        endpoints: `stream_endpoint` of each pserver, in the order of the shards.
        settings: Settings with the largest frame; an answer to a push may be twice as large.
        buffer_bytes: Buffer size of each Unix socket.
        credentials: Credentials of this process; with keys, connections over TCP are TLS.
        on_lost: Called inside `receive` or `send` with the shard of a stream that was connected and is lost.

    Raises:
        SettingError: An endpoint is malformed.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        settings: Settings,
        *,
        buffer_bytes: int = SOCKET_BUFFER_BYTES,
        credentials: Credentials = NO_KEYS,
        on_lost: Callable[[int], None] | None = None,
    ) -> None:
        self._are_near = [_is_near(endpoint) for endpoint in endpoints]  # constant after construction
        self._lock = threading.RLock()  # guards closing `_wake_fd`; a signal handler may take it again
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()  # one thread at a time, from here down
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        memory = FrameMemory()
        tls = None if credentials.keys is None else client_context(credentials.keys)
        self._by_fd: dict[int, _ShardStream] = {}
        self._ready: deque[_ShardStream] = deque()  # streams that may have a frame
        self._connections = [
            _ShardStream(
                shard,
                endpoint,
                2 * settings.max_frame_bytes,
                buffer_bytes,
                memory,
                self._epoll,
                self._by_fd,
                tls if credentials.has_keys_for(endpoint) else None,
            )
            for shard, endpoint in enumerate(endpoints)
        ]
        self.lane: Lane | None = None
        # It reads and writes plain sockets.
        if settings.straight_path and not any(map(credentials.has_keys_for, endpoints)):
            self.lane = Lane(self._connections, self._ready, self._wake_fd)
        try:
            for connection in self._connections:
                connection.on_lost = on_lost
                connection.connect()
        except BaseException:
            self.close()
            raise

    @property
    def needs_receive(self) -> bool:
        """As `Channel`."""
        for connection in self._connections:  # noqa: SIM110  # `any` makes a generator, on the hot path
            if connection.writer.num_waiting:
                return True
        return False

    def stays_on_machine(self, shard: int) -> bool:
        """As `Channel`."""
        return self._are_near[shard]

    def send(self, shard: int, parts: Sequence[Buffer]) -> bool:
        """As `Channel`."""
        stream = self._connections[shard]
        if stream.connection is None or stream.writer.num_waiting:
            return stream.put(parts)
        try:
            if not stream.writer.send(parts, stream.connection.socket):
                stream.connection.update_events()
        except OSError as error:
            stream.fail(error)
        return True

    def receive(self, timeout_s: float) -> tuple[int, list[Buffer]] | None:  # noqa: PLR0912  # runs for every message
        """As `Channel`."""
        until = None
        is_woken = False
        while True:
            while self._ready:
                stream = self._ready.popleft()
                if stream.connection is None:
                    continue  # it was reopened since
                try:
                    frame = stream.connection.receive()
                except BlockingIOError:
                    continue
                except (ProtocolError, OSError) as error:
                    stream.fail(error)
                    continue
                if frame is not None:
                    stream.pause_s = 0.0
                    if stream.connection.reader.may_have_more:
                        self._ready.append(stream)
                    return stream.shard, frame
            if until is None:
                until = time.monotonic() + timeout_s
            else:
                timeout_s = until - time.monotonic()
                if is_woken or timeout_s <= 0:
                    return None
            for stream in self._connections:
                if stream.connects_at != math.inf:
                    timeout_s = min(timeout_s, stream.reconnect())
            for fd, events in self._epoll.poll(timeout_s):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    is_woken = True
                elif fd in self._by_fd:
                    stream = self._by_fd[fd]
                    if (events == select.EPOLLIN and stream.connection is not None) or stream.handle(events):
                        self._ready.append(stream)

    def place_columns(self, place: Place) -> None:
        """As `Channel`."""
        for stream in self._connections:
            stream.place_columns(partial(place, stream.shard))

    def withdraw(self, shard: int) -> None:
        """As `Channel`."""
        self._connections[shard].withdraw()

    def watch_losses(self, on_lost: Callable[[int], None]) -> None:
        """As `Channel`."""
        for connection in self._connections:
            connection.on_lost = on_lost

    def wake(self) -> None:
        """As `Channel`."""
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def reopen(self, shard: int) -> None:
        """As `Channel`; the pserver sees a new connection."""
        self._connections[shard].drop()
        self._connections[shard].connect()

    def move(self, shard: int, stream_endpoint: str, zmq_endpoint: str) -> None:
        """As `Channel`."""
        self._connections[shard].drop()
        self._connections[shard].move(stream_endpoint)

    def condition(self, shard: int) -> str:
        """As `Channel`."""
        return "connected" if self._connections[shard].connection is not None else "not connected"

    def close(self) -> None:
        """As `Channel`."""
        with self._lock:
            if self._wake_fd < 0:
                return
            fd, self._wake_fd = self._wake_fd, -1
            os.close(fd)
        for connection in self._connections:
            connection.drop()
        self._ready.clear()
        self._epoll.close()


def _is_near(endpoint: str) -> bool:
    return endpoint.startswith(("unix:", f"tcp:{LOOPBACK}:"))


class _ShardStream:
    """The stream to one shard, which is replaced when it breaks. Messages wait until there is one again."""

    def __init__(
        self,
        shard: int,
        endpoint: str,
        max_bytes: int,
        buffer_bytes: int,
        memory: FrameMemory,
        epoll: select.epoll,
        by_fd: dict[int, _ShardStream],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.shard = shard  # constant after construction, as all down to `_tls` but the next one
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._buffer_bytes = buffer_bytes
        self._memory = memory
        self._epoll = epoll
        self._by_fd = by_fd
        self._tls = tls
        self.on_lost: Callable[[int], None] | None = None
        """Called with the shard when a stream that was connected is lost."""
        self.writer = FrameWriter()
        self.buffer: NDArray[np.int64] | None = None  # set by a lane, once
        self._place: StreamPlace | None = None
        self._stream: socket.socket | None = None
        self._handshake: ssl.SSLSocket | None = None  # the stream, while keys are shown
        self.connection: Connection | None = None
        """None until the stream is connected."""
        self.pause_s = 0.0
        """Time between the end of the stream and the next attempt."""
        self.connects_at = math.inf
        """Time of the next attempt to connect; infinity while there is a stream."""

    def reconnect(self) -> float:
        """Connects again if it is time for that. Returns the seconds until the next attempt."""
        now = time.monotonic()
        if self.connects_at <= now:
            self.connect()
        return max(self.connects_at - now, 0.0)

    def place_columns(self, place: StreamPlace) -> None:
        """Sets the function that finds memory for columns."""
        self._place = place
        if self.connection is not None:
            self.connection.reader.place_columns(place)

    def withdraw(self) -> None:
        """As `Channel`."""
        if self.connection is not None:
            self.connection.reader.withdraw()

    def connect(self) -> None:
        """Starts to connect."""
        self.connects_at = math.inf
        try:
            self._stream, address = socket_to(self._endpoint)
            set_up(self._stream, self._buffer_bytes)
            self._epoll.register(self._stream, select.EPOLLOUT)  # ready once it is connected, or has failed
            self._by_fd[self._stream.fileno()] = self
            try:
                self._stream.connect(address)
            except BlockingIOError:
                if self._stream.family is socket.AF_UNIX:
                    raise  # too many wait to be accepted
            else:
                self._begin(self._stream)
        except OSError as error:
            self.fail(error)

    def move(self, endpoint: str) -> None:
        """Connects to another address; called after `drop`."""
        self._endpoint = endpoint
        self.pause_s = 0.0
        self.connect()

    def put(self, parts: Sequence[Buffer]) -> bool:
        """Keeps a message until the stream accepts it; False if too many messages wait already."""
        if self.writer.num_waiting >= _SEND_QUEUE:
            return False
        self.writer.put(parts)
        return True

    def handle(self, events: int) -> bool:
        """Handles epoll events. Returns whether there may be a frame."""
        assert self._stream is not None, "it is polled"
        try:
            if self._handshake is not None:
                self._shake_hands(self._handshake)
                return False
            if self.connection is None:
                number = self._stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if number:
                    raise OSError(number, os.strerror(number))
                self._begin(self._stream)
                return False
            if events & select.EPOLLOUT:
                self.connection.flush()
            return bool(events & ~select.EPOLLOUT)
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(error)
        return False

    def drop(self) -> None:
        """Ends the stream, and drops waiting messages."""
        self._end()
        self.writer.clear()

    def _begin(self, stream: socket.socket) -> None:
        if self._tls is not None:
            self._stream = self._handshake = self._tls.wrap_socket(
                stream, do_handshake_on_connect=False, server_hostname=SERVER_NAME
            )
            self._shake_hands(self._handshake)
            return
        if not is_trusted(stream):
            raise PermissionError(errno.EPERM, "the pserver runs as another user")
        self._use(stream)

    def _shake_hands(self, stream: ssl.SSLSocket) -> None:
        """Continues the handshake with the pserver, as far as it has answered."""
        try:
            stream.do_handshake()
        except ssl.SSLWantReadError:
            self._epoll.modify(stream, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._epoll.modify(stream, select.EPOLLOUT)
        else:
            self._handshake = None
            self._use(stream)

    def _use(self, stream: socket.socket) -> None:
        stream.send(GREETING)
        self.connection = Connection(
            stream,
            self._max_bytes,
            self._memory,
            self._watch,
            self.writer,
            self._place,
            self.buffer,
        )
        self._epoll.modify(stream, self.connection.events)
        self.connection.flush()

    def _watch(self) -> None:
        assert self.connection is not None, "its events have changed"
        self._epoll.modify(self.connection, self.connection.events)

    def fail(self, error: Exception) -> None:
        """Ends a broken stream; it connects again."""
        logger.debug("shard %d at %s: %s", self.shard, self._endpoint, error)
        was_connected = self.connection is not None
        self._end()
        self.writer.begin_again()
        self.connects_at = time.monotonic() + self.pause_s
        self.pause_s = min(max(2 * self.pause_s, _RECONNECT_S), _RECONNECT_MAX_S)
        if was_connected and self.on_lost is not None:
            self.on_lost(self.shard)

    def _end(self) -> None:
        stream, self._stream, self._handshake = self._stream, None, None
        connection, self.connection = self.connection, None
        if stream is not None and self._by_fd.pop(stream.fileno(), None) is not None:
            self._epoll.unregister(stream)
        if connection is not None:
            connection.close()
        elif stream is not None:
            stream.close()
