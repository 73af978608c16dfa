"""Streams: the stream connections of a pserver.

Only `poll` waits. docs/protocol.md, Streams, has the bytes and bounds.
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
from functools import partial
from typing import TypeVar

from fleet_sparse.credentials import NO_KEYS, Credentials
from fleet_sparse.errors import ProtocolError, SettingError
from fleet_sparse.keys import TRAINER
from fleet_sparse.net_addresses import LOOPBACK, Address
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Buffer
from fleet_sparse.wire.stream import (
    SOCKET_BUFFER_BYTES,
    Connection,
    FrameMemory,
    Message,
    Room,
    is_trusted,
    set_up,
)

from ..throttled_log import ThrottledLog
from .handshakes import GONE_AFTER_S, Handshakes
from .receiving import ReceivingBytes

_log = logging.getLogger(__name__)
_refusals = ThrottledLog(_log)
_Reply = TypeVar("_Reply")

GREETING_S = 5.0
STALL_S = 30.0
CHECK_MS = 1000
# While more bytes than this wait for a peer, its requests are not read.
PAUSE_BYTES = 8 << 20
MAX_WAITING_REPLIES = 256
# In units of the largest frame.
MAX_WAITING_FRAMES = 4
MAX_CONNECTIONS = 16_384
BACKLOG = 128
LAST_REPLIES_S = 1.0


class Peer:
    """The connection of one client, with the bounds of what it may send and of what waits for it.

    Args:
        stream: Connected, and set up by `set_up`.
        max_frame_bytes: Largest frame to accept.
        memory: Memory for large frames.
        receiving: Bound for the large frames of all peers.
        watch: Called when the events it waits for have changed, or it is broken.
        role: Role in the certificate of the client; that of a trainer if there are no keys.

    Attributes:
        role: Role of the client.
        connection: The connection.
        next_request: As `Connection.receive_message`: returns the message of the next request.
        is_queued: Set by the owner: True if it is among the peers that may have a request.
        is_paused: True if requests are not read: too many bytes wait for the peer, it gets its last replies, or its
            next request is large and has to wait for those of other peers.
        is_broken: True if the connection must be closed.
    """

    def __init__(
        self,
        stream: socket.socket,
        max_frame_bytes: int,
        memory: FrameMemory,
        receiving: ReceivingBytes[Peer],
        watch: Callable[[Peer], None],
        role: str = TRAINER,
    ) -> None:
        self.role = role
        room = Room(partial(receiving.take, self), partial(receiving.release, self))
        self.connection = Connection(stream, max_frame_bytes, memory, self._on_events, room=room)
        self._receiving = receiving
        self._waits_for_room = False
        self._max_waiting_bytes = MAX_WAITING_FRAMES * max_frame_bytes
        self._watch = watch
        self._num_moves = 0  # times that replies began to wait, or left
        self._progress = (0, 0)
        self._moved_at = time.monotonic()
        self._is_last = False
        self.next_request = self.connection.receive_message
        self.is_paused = False
        self.is_broken = False
        self.is_queued = False

    def fileno(self) -> int:
        """File descriptor of the socket; -1 once it is closed."""
        return self.connection.fileno()

    @property
    def events(self) -> int:
        """The epoll events that it waits for."""
        return self.connection.events

    @property
    def num_waiting(self) -> int:
        """Number of replies that wait."""
        return self.connection.writer.num_waiting

    def send(self, parts: Sequence[Buffer]) -> None:
        """Sends a reply, or keeps what the socket does not accept.

        It is dropped if the connection ended or too much waits already.
        """
        writer = self.connection.writer
        self._send(parts, writer.send, writer.put)

    def send_message(self, message: Buffer) -> None:
        """Sends a reply that is a complete message, as `send`."""
        writer = self.connection.writer
        self._send(message, writer.send_message, writer.put_message)

    def _send(
        self, reply: _Reply, send: Callable[[_Reply, socket.socket], bool], put: Callable[[_Reply], None]
    ) -> None:
        writer = self.connection.writer
        if self.is_broken or writer.num_waiting >= MAX_WAITING_REPLIES or writer.num_bytes > self._max_waiting_bytes:
            return
        if not writer.num_waiting:
            self._num_moves += 1
            try:
                if send(reply, self.connection.socket):
                    return
                self.connection.update_events()
            except OSError:
                self._end()
                return
        else:
            put(reply)  # the socket is full; it is polled
        self._update_reading()

    def flush(self) -> None:
        """Sends waiting replies, as far as the socket accepts them."""
        num_bytes = self.connection.writer.num_bytes
        try:
            self.connection.flush()
        except OSError:
            self._end()
            return
        if self.connection.writer.num_bytes != num_bytes:
            self._num_moves += 1
        self._update_reading()

    def pause(self) -> None:
        """Leaves a large request where it is until `resume`."""
        self._waits_for_room = True
        self._update_reading()

    def resume(self) -> None:
        """Reads the large request that waited for those of others."""
        self._waits_for_room = False
        self._moved_at = time.monotonic()
        self._update_reading()

    def fault(self, now: float) -> str:
        """Returns why it should be ended now; empty if it should not. To be called regularly: it looks for progress."""
        progress = (self.connection.num_received, self._num_moves)
        if progress != self._progress:
            self._progress, self._moved_at = progress, now
        idle_s = now - self._moved_at
        if not self.connection.num_messages:
            return f"no greeting in {GREETING_S:g} s" if idle_s > GREETING_S else ""
        is_stalled = self.connection.is_within_message and not self._waits_for_room and idle_s > STALL_S
        return f"nothing moved in {STALL_S:g} s in the middle of a message" if is_stalled else ""

    def end_requests(self) -> None:
        """Reads no more; waiting replies are still sent."""
        self._is_last = True
        self._update_reading()

    def close(self) -> None:
        """Ends it. References to it, as for a deferred reply, keep no memory of requests."""
        self.is_broken = True
        self.connection.writer.clear()
        self.connection.close()
        self._receiving.withdraw(self)

    def _end(self) -> None:
        self.is_broken = True
        self.connection.writer.clear()
        self._watch(self)

    def _update_reading(self) -> None:
        has_many_replies = self.connection.writer.num_bytes > PAUSE_BYTES
        self.is_paused = self._is_last or self._waits_for_room or has_many_replies
        if self.connection.is_reading == self.is_paused:
            self.connection.is_reading = not self.is_paused
            self.connection.update_events()

    def _on_events(self) -> None:
        if not self.is_broken:
            self._watch(self)


class Streams:
    """Listens for stream connections, receives their requests and sends their replies.

    Args:
        host: Address to listen on with TCP; None for a Unix socket, or TCP on 127.0.0.1 if there are none.
        advertised_host: Host that workers connect to; None for `host`.
        max_frame_bytes: Largest frame to accept.
        buffer_bytes: Buffer size of each Unix socket.
        max_receiving_bytes: As `Settings`.
        credentials: Credentials of this process; with keys, connections over TCP are TLS.

    Attributes:
        endpoint: Endpoint that workers connect to.
        ready: Peers that may have a request.
        permits: Returns whether a request of a client that is no trainer is passed on; if not, it has answered it.

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
        max_receiving_bytes: int = Settings.max_receiving_bytes,
        credentials: Credentials = NO_KEYS,
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer_bytes = buffer_bytes
        self._memory = FrameMemory()
        self._receiving: ReceivingBytes[Peer] = ReceivingBytes(max_receiving_bytes, Peer.pause, Peer.resume)
        self._listener, self.endpoint = _listen(host, advertised_host)
        self.connections: dict[int, Peer] = {}
        self.ready: deque[Peer] = deque()
        self._receiving.now = self._checked_at = time.monotonic()
        self._epoll = select.epoll()
        self._watched: list[int] = []
        self.permits: Callable[[Peer, Message], bool] = lambda _peer, _message: False
        self._is_listening = False
        self._handshakes: Handshakes | None = None
        if credentials.keys is not None and credentials.has_keys_for(self.endpoint):
            self._handshakes = Handshakes(self._listener, credentials.keys, buffer_bytes)
            self._epoll.register(self._handshakes.fd, select.EPOLLIN)
        self._listen(True)

    def watch(self, fd: int) -> None:
        """Makes `poll` wait for this file descriptor too, until it is readable."""
        self._epoll.register(fd, select.EPOLLIN)
        self._watched.append(fd)

    def poll(self, timeout_s: float | None = None) -> list[int]:
        """Waits until `receive` may have something to return, or a watched file descriptor is readable.

        Args:
            timeout_s: Longest wait; None for ever.

        Returns:
            Which file descriptors are readable; those of peers are left out.
        """
        if self.ready:
            timeout_s = 0.0
        elif self.connections or not self._is_listening:
            check_s = CHECK_MS / 1000
            timeout_s = check_s if timeout_s is None else min(timeout_s, check_s)
        others = []
        for number, events in self._epoll.poll(timeout_s):
            peer = self.connections.get(number)
            if peer is None:
                if self._handshakes is not None and number == self._handshakes.fd:
                    self._take_known(self._handshakes)
                elif number == self._listener.fileno():
                    self._accept()
                else:
                    others.append(number)
                continue
            if events & select.EPOLLOUT:
                peer.flush()
            if events & select.EPOLLIN:
                if not peer.is_queued:
                    peer.is_queued = True
                    self.ready.append(peer)
            elif events & (select.EPOLLHUP | select.EPOLLERR):
                self._close(peer)
        now = time.monotonic()
        if now > self._checked_at + CHECK_MS / 1000:
            self._checked_at = now
            self._check(now)
        return others

    def receive(self) -> tuple[Peer, list[Buffer]] | None:
        """Returns the next request that has arrived, of all peers in turn; None if `poll` is to be called first."""
        while (request := self.receive_message()) is not None:
            parts = self.split(*request)
            if parts is not None:
                return request[0], parts
        return None

    def split(self, peer: Peer, message: Message) -> list[Buffer] | None:
        """Returns the parts of a message that was just received; None if it is none, which ends the connection."""
        try:
            return peer.connection.reader.split(message)
        except ProtocolError as error:
            _refusals.warning("%s; ended its connection", error)
            self._close(peer)
            return None

    def receive_message(self) -> tuple[Peer, Message] | None:
        """Returns the next request as `receive`, as a message, which is to be used before the next one is received."""
        while self.ready:
            peer = self.ready.popleft()
            peer.is_queued = False
            if peer.is_broken or peer.is_paused:
                continue
            try:
                request = peer.next_request()
            except BlockingIOError:
                continue
            except ProtocolError as error:
                _refusals.warning("%s; ended its connection", error)
                self._close(peer)
                continue
            except OSError:  # it went away
                self._close(peer)
                continue
            if request is not None:
                reader = peer.connection.reader
                if reader.begin < reader.end:  # the next one may have been read: epoll would not report it
                    self._queue(peer)
                return peer, request
        return None

    def close(self) -> None:
        """Sends waiting replies, for at most a second, and ends all connections. A second call does nothing."""
        if self._epoll.closed:
            return
        self._listen(False)
        if self._handshakes is not None:
            self._epoll.unregister(self._handshakes.fd)
            self._handshakes.close()
        self._listener.close()
        for fd in self._watched:
            self._epoll.unregister(fd)
        until = time.monotonic() + LAST_REPLIES_S
        for peer in list(self.connections.values()):
            if peer.num_waiting:
                peer.end_requests()
            else:
                self._close(peer)
        while self.connections and time.monotonic() < until:
            for number, _ in self._epoll.poll(max(until - time.monotonic(), 0.0)):
                peer = self.connections[number]
                peer.flush()
                if not peer.num_waiting:
                    self._close(peer)
        for peer in list(self.connections.values()):
            self._close(peer)
        self._epoll.close()

    def _check(self, now: float) -> None:
        for peer in list(self.connections.values()):
            fault = peer.fault(now)
            if fault and not peer.is_queued:  # else this process is late, not the peer
                _refusals.warning("stream: %s; ended the connection", fault)
                self._close(peer)
        self._receiving.now = now
        slowest = self._receiving.slowest(now - STALL_S)
        if slowest is not None:
            _refusals.warning(
                "stream: others wait, and a frame is not complete after %g s; ended its connection", STALL_S
            )
            self._close(slowest)
        self._listen(len(self.connections) < MAX_CONNECTIONS)

    def _queue(self, peer: Peer) -> None:
        if not peer.is_queued:
            peer.is_queued = True
            self.ready.append(peer)

    def _listen(self, is_listening: bool) -> None:
        if is_listening == self._is_listening:
            return
        self._is_listening = is_listening
        if self._handshakes is not None:
            return  # which accepts
        if is_listening:
            self._epoll.register(self._listener, select.EPOLLIN)
        else:
            self._epoll.unregister(self._listener)

    def _accept(self) -> None:
        if len(self.connections) >= MAX_CONNECTIONS:
            _refusals.warning("stream: %d connections; more wait until one ends", len(self.connections))
            self._listen(False)
            return
        try:
            stream, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it went away meanwhile
        except OSError as error:
            _refusals.warning("stream: cannot take a connection beside %d: %s", len(self.connections), error)
            self._listen(False)  # until the next check
            return
        try:
            self._take(stream)
        except OSError as error:
            _refusals.warning("stream: ended a new connection: %s", error)
            stream.close()

    def _take_known(self, handshakes: Handshakes) -> None:
        for known in handshakes.take():
            if len(self.connections) >= MAX_CONNECTIONS:
                _refusals.warning("stream: %d connections; ended a new one", len(self.connections))
                known.stream.close()
            else:
                self._add(known.stream, known.role)

    def _take(self, stream: socket.socket) -> None:
        if not is_trusted(stream):
            raise PermissionError(errno.EPERM, "the peer runs as another user")
        set_up(stream, self._buffer_bytes, gone_after_s=GONE_AFTER_S)
        self._add(stream, TRAINER)

    def _add(self, stream: socket.socket, role: str) -> None:
        peer = Peer(stream, self._max_frame_bytes, self._memory, self._receiving, self._watch, role)
        self._epoll.register(peer, peer.events)
        self.connections[peer.fileno()] = peer
        if role != TRAINER:
            peer.next_request = partial(self._next_permitted, peer)

    def _next_permitted(self, peer: Peer) -> Message | None:
        message = peer.connection.receive_message()
        if message is None or self.permits(peer, message):
            return message
        if peer.connection.reader.begin < peer.connection.reader.end:
            self._queue(peer)
        return None

    def _watch(self, peer: Peer) -> None:
        if peer.is_broken:
            self._close(peer)
            return
        self._epoll.modify(peer, peer.events)
        if peer.events & select.EPOLLIN:
            self._queue(peer)  # epoll does not report what was read before the pause

    def _close(self, peer: Peer) -> None:
        if self.connections.pop(peer.fileno(), None) is not None:
            self._epoll.unregister(peer)
        peer.close()


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
