"""Stream connections of a pserver: who is there, which request is next, which replies wait.

Nothing here waits: the data thread asks when `fileno` is ready. docs/protocol.md, Streams, has the bytes and bounds.
"""

from __future__ import annotations

import errno
import logging
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from fleet_sparse.errors import ProtocolError, SettingError
from fleet_sparse.net_addresses import LOOPBACK, Address
from fleet_sparse.wire.frames import Buffer
from fleet_sparse.wire.stream import SOCKET_BUFFER_BYTES, FrameMemory, FrameReader, FrameWriter, is_trusted, set_up

_log = logging.getLogger(__name__)

GREETING_S = 5.0
STALL_S = 30.0
CHECK_MS = 1000
# Requests that are taken before all peers are looked at again.
BURST = 16
# While more than this waits for a peer, its requests are not read.
PAUSE_BYTES = 8 << 20
MAX_WAITING_REPLIES = 256
# Times the largest frame.
MAX_WAITING_FRAMES = 4
MAX_CONNECTIONS = 16_384
BACKLOG = 128
LAST_REPLIES_S = 1.0


class Connection:
    """One peer: what it sends, and what waits for it.

    Args:
        stream: Connected; does not block.
        max_frame_bytes: Largest frame to accept.
        memory: For large frames.
        watch: Is called when other events than before are waited for, or none because it is broken.

    Attributes:
        events: Of epoll, that it waits for.
        is_queued: Its owner's: whether it is among those that may have a request.
    """

    def __init__(
        self,
        stream: socket.socket,
        max_frame_bytes: int,
        memory: FrameMemory,
        watch: Callable[[Connection], None],
    ) -> None:
        self._stream = stream
        self._reader = FrameReader(max_frame_bytes, memory)
        self._writer = FrameWriter()
        self._max_waiting_bytes = MAX_WAITING_FRAMES * max_frame_bytes
        self._watch = watch
        self._moved_at = time.monotonic()
        self._is_broken = False
        self._is_last = False
        self.events = select.EPOLLIN
        self.is_queued = False

    def fileno(self) -> int:
        """Of the socket."""
        return self._stream.fileno()

    @property
    def is_broken(self) -> bool:
        """Whether it is of no use any more."""
        return self._is_broken

    @property
    def is_paused(self) -> bool:
        """Whether requests are not read: too much waits for the peer, or what waits is the last."""
        return self._is_last or self._writer.num_bytes > PAUSE_BYTES

    def next_request(self) -> list[Buffer] | None:
        """The parts of a request, of what was read or by reading now; None if it takes more than that.

        Raises:
            BlockingIOError: There is nothing now.
            ProtocolError: The peer sends something else.
            OSError: The connection ended, or is broken.
        """
        before = self._reader.num_bytes
        try:
            return self._reader.receive(self._stream)
        finally:
            if self._reader.num_bytes != before:
                self._moved_at = time.monotonic()

    @property
    def may_have_more(self) -> bool:
        """Whether the next request may be here although the socket is not readable."""
        return self._reader.may_have_more

    def send(self, parts: Sequence[Buffer]) -> None:
        """Sends a reply, or keeps what does not fit; drops it if the connection ended or too much waits already."""
        writer = self._writer
        if self._is_broken or writer.num_waiting >= MAX_WAITING_REPLIES or writer.num_bytes > self._max_waiting_bytes:
            return
        writer.put(parts)
        if writer.num_waiting == 1:
            self._moved_at = time.monotonic()
            self.write()
        else:
            self._update_events()

    def write(self) -> None:
        """Sends what waits, as far as it fits."""
        before = self._writer.num_bytes
        try:
            self._writer.write(self._stream)
        except OSError:
            self.end()
        if self._writer.num_bytes != before:
            self._moved_at = time.monotonic()
        self._update_events()

    def _update_events(self) -> None:
        events = (0 if self.is_paused else select.EPOLLIN) | (select.EPOLLOUT if self._writer.num_waiting else 0)
        if events != self.events or self._is_broken:
            self.events = events
            self._watch(self)

    def fault(self, now: float) -> str:
        """Why it should be ended by now; empty if it should not."""
        idle_s = now - self._moved_at
        if not self._reader.num_messages:
            return f"no greeting in {GREETING_S:g} s" if idle_s > GREETING_S else ""
        is_amid = self._reader.is_within_message or self._writer.num_waiting
        return f"nothing moved in {STALL_S:g} s in the middle of a message" if is_amid and idle_s > STALL_S else ""

    def end_requests(self) -> None:
        """Reads no more; what waits for the peer is still sent."""
        self._is_last = True
        self._update_events()

    def end(self) -> None:
        """Has it closed by its owner."""
        self._is_broken = True
        self._writer.clear()

    @property
    def num_waiting(self) -> int:
        """Replies that wait."""
        return self._writer.num_waiting

    def close(self) -> None:
        """Ends it. Whoever still holds it, to answer, holds no memory of what was read."""
        self.end()
        self._reader.close()
        self._stream.close()


class Streams:
    """Listens for stream connections, and has their requests and replies.

    Args:
        host: Address to listen on with TCP; None for a Unix socket, and TCP on 127.0.0.1 only if there is none.
        advertised_host: That workers find it at; None for `host`.
        max_frame_bytes: Largest frame to accept.
        buffer_bytes: To ask of the kernel for each Unix socket.

    Attributes:
        endpoint: That workers connect to.

    Raises:
        SettingError: The address cannot be bound.
    """

    def __init__(
        self,
        *,
        max_frame_bytes: int,
        host: str | None = None,
        advertised_host: str | None = None,
        buffer_bytes: int = SOCKET_BUFFER_BYTES,
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer_bytes = buffer_bytes
        self._memory = FrameMemory()
        self._listener, self.endpoint = _listen(host, advertised_host)
        self._connections: dict[int, Connection] = {}
        self._ready: deque[Connection] = deque()  # that may have a request
        self._num_taken = 0  # of them, since all peers were looked at
        self._checked_at = time.monotonic()
        self._epoll = select.epoll()
        self._is_listening = False
        self._listen(True)

    def fileno(self) -> int:
        """Readable when there is something to do; to be polled for not longer than `wait_ms`."""
        return self._epoll.fileno()

    def wait_ms(self) -> int | None:
        """How long there is nothing to do unless `fileno` becomes readable; None for ever."""
        if self._ready:
            return 0
        return CHECK_MS if self._connections or not self._is_listening else None

    def receive(self) -> tuple[Connection, list[Buffer]] | None:
        """The next request that is here, of all peers by turns; None if there is none."""
        if not self._ready or self._num_taken >= BURST:
            self._look_around()
        while self._ready:
            connection = self._ready.popleft()
            connection.is_queued = False
            request = self._next_request(connection)
            if request is not None:
                self._num_taken += 1
                if connection.may_have_more:
                    self._queue(connection)
                return connection, request
        return None

    def close(self) -> None:
        """Sends the replies on their way, for a second at most, and ends all. A second call does nothing."""
        if self._epoll.closed:
            return
        self._listen(False)
        self._listener.close()
        until = time.monotonic() + LAST_REPLIES_S
        for connection in list(self._connections.values()):
            if connection.num_waiting:
                connection.end_requests()
            else:
                self._close(connection)
        while self._connections and time.monotonic() < until:
            for number, _ in self._epoll.poll(max(until - time.monotonic(), 0.0)):
                connection = self._connections[number]
                connection.write()
                if not connection.num_waiting:
                    self._close(connection)
        for connection in list(self._connections.values()):
            self._close(connection)
        self._epoll.close()

    def _next_request(self, connection: Connection) -> list[Buffer] | None:
        if connection.is_broken or connection.is_paused:
            return None
        try:
            return connection.next_request()
        except BlockingIOError:
            return None
        except ProtocolError as error:
            _log.warning("%s; ended its connection", error)
        except OSError:
            pass  # it went away
        self._close(connection)
        return None

    def _look_around(self) -> None:
        self._num_taken = 0
        for number, events in self._epoll.poll(0):
            if number == self._listener.fileno():
                self._accept()
                continue
            connection = self._connections.get(number)
            if connection is None:
                continue  # it was closed since
            if events & select.EPOLLOUT:
                connection.write()
            if events & select.EPOLLIN:
                self._queue(connection)
            elif events & (select.EPOLLHUP | select.EPOLLERR):
                self._close(connection)
        now = time.monotonic()
        if now > self._checked_at + CHECK_MS / 1000:
            self._checked_at = now
            self._check(now)

    def _check(self, now: float) -> None:
        for connection in list(self._connections.values()):
            fault = connection.fault(now)
            if fault and not connection.is_queued:  # else this process is late, not the peer
                _log.warning("stream: %s; ended the connection", fault)
                self._close(connection)
        self._listen(len(self._connections) < MAX_CONNECTIONS)

    def _queue(self, connection: Connection) -> None:
        if not connection.is_queued:
            connection.is_queued = True
            self._ready.append(connection)

    def _listen(self, is_listening: bool) -> None:
        if is_listening == self._is_listening:
            return
        self._is_listening = is_listening
        if is_listening:
            self._epoll.register(self._listener, select.EPOLLIN)
        else:
            self._epoll.unregister(self._listener)

    def _accept(self) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            _log.warning("stream: %d connections; more wait until one ends", len(self._connections))
            self._listen(False)
            return
        try:
            stream, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it went away meanwhile
        except OSError as error:
            _log.warning("stream: cannot take a connection: %s", error)
            self._listen(False)  # until the next check
            return
        try:
            self._take(stream)
        except OSError as error:
            _log.warning("stream: ended a new connection: %s", error)
            stream.close()

    def _take(self, stream: socket.socket) -> None:
        if not is_trusted(stream):
            raise PermissionError(errno.EPERM, "its user is another one")
        set_up(stream, self._buffer_bytes)
        connection = Connection(stream, self._max_frame_bytes, self._memory, self._watch)
        self._epoll.register(connection, connection.events)
        self._connections[connection.fileno()] = connection

    def _watch(self, connection: Connection) -> None:
        if connection.is_broken:
            self._close(connection)
            return
        self._epoll.modify(connection, connection.events)
        if connection.events & select.EPOLLIN:
            self._queue(connection)  # what was read before it was paused is not announced again

    def _close(self, connection: Connection) -> None:
        if self._connections.pop(connection.fileno(), None) is not None:
            self._epoll.unregister(connection)
        connection.close()


def _listen(host: str | None, advertised_host: str | None) -> tuple[socket.socket, str]:
    """A listening socket, and its endpoint."""
    if host is None:
        name = f"fleet_sparse-{secrets.token_hex(8)}"
        try:
            with ExitStack() as undo:
                listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.setblocking(False)
                listener.bind(f"\0{name}")
                listener.listen(BACKLOG)
                undo.pop_all()
            return listener, f"unix:{name}"
        except OSError as error:
            _log.info("stream: no Unix socket (%s), TCP instead", error)
    host = host or LOOPBACK
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingError(f"stream: cannot bind to {host!r}: {error}") from error
    listener.setblocking(False)
    return listener, f"tcp:{Address(advertised_host or host, listener.getsockname()[1])}"
