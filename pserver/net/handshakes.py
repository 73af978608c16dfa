"""Handshakes: accepts connections and completes their TLS handshakes, in a thread of its own."""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from typing import NamedTuple

from fleet_sparse.keys import Keys, role_of
from fleet_sparse.wire.stream import set_up
from fleet_sparse.wire.tls_stream import server_context

from ..throttled_log import ThrottledLog

_log = logging.getLogger(__name__)
_refusals = ThrottledLog(_log)

MAX_HANDSHAKES = 64
HANDSHAKE_S = 5.0
# A machine that is gone says nothing, and TCP alone would send to it for a quarter of an hour. A suspended client that
# takes nothing of a reply for as long is cut off as well: it connects again and asks again.
GONE_AFTER_S = 30.0
MAX_DONE = 1024
CHECK_S = 0.5


class Known(NamedTuple):
    """A connection whose peer has shown a certificate of the authority."""

    stream: socket.socket
    role: str


class _Handshake(NamedTuple):
    stream: ssl.SSLSocket
    until: float


class Handshakes:
    """Takes the connections of a listener until it is closed. `take` is called by one thread.

    Args:
        listener: Listening socket, which is closed with it.
        keys: Keys of this pserver.
        buffer_bytes: As of `set_up`.

    Attributes:
        fd: Readable when `take` has something to return.
    """

    def __init__(self, listener: socket.socket, keys: Keys, buffer_bytes: int) -> None:
        self._listener = listener
        self._authority = keys.authority
        self._context = server_context(keys)
        self._buffer_bytes = buffer_bytes
        self._done: deque[Known] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._under_way: dict[int, _Handshake] = {}  # only the thread uses it, as all down to the blank line
        self._epoll = select.epoll()
        self._epoll.register(self._ended_fd, select.EPOLLIN)
        self._is_accepting = False
        self._accepts_at = 0.0

        self._thread = threading.Thread(target=self._run, name="handshakes", daemon=True)
        self._thread.start()

    def take(self) -> list[Known]:
        """Returns the connections whose handshakes are complete, each once."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Ends the listener, and the handshakes under way. A second call does nothing."""
        if self._epoll.closed:
            return
        os.eventfd_write(self._ended_fd, 1)
        self._thread.join()
        self._listener.close()
        for handshake in self._under_way.values():
            handshake.stream.close()
        for known in self._done:
            known.stream.close()
        self._epoll.close()
        os.close(self.fd)
        os.close(self._ended_fd)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            self._accept_if_room(now)
            for number, _ in self._epoll.poll(CHECK_S):
                if number == self._ended_fd:
                    return
                if number == self._listener.fileno():
                    self._accept()
                elif number in self._under_way:
                    self._continue(number)
            now = time.monotonic()
            for number in [number for number, each in self._under_way.items() if each.until < now]:
                _refusals.warning("stream: no TLS handshake in %g s; ended the connection", HANDSHAKE_S)
                self._end(number)

    def _accept_if_room(self, now: float) -> None:
        accepts = len(self._under_way) < MAX_HANDSHAKES and len(self._done) < MAX_DONE and now >= self._accepts_at
        if accepts != self._is_accepting:
            self._is_accepting = accepts
            if accepts:
                self._epoll.register(self._listener, select.EPOLLIN)
            else:
                self._epoll.unregister(self._listener)

    def _accept(self) -> None:
        try:
            plain, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it went away meanwhile
        except OSError as error:
            _refusals.warning("stream: cannot take a connection: %s", error)
            self._accepts_at = time.monotonic() + 2 * CHECK_S
            return
        try:
            set_up(plain, self._buffer_bytes, gone_after_s=GONE_AFTER_S)
            stream = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError) as error:  # ValueError: it sent data and ended
            _refusals.warning("stream: ended a new connection: %s", error)
            plain.close()
            return
        number = stream.fileno()
        self._under_way[number] = _Handshake(stream, time.monotonic() + HANDSHAKE_S)
        self._epoll.register(number, select.EPOLLIN)

    def _continue(self, number: int) -> None:
        stream = self._under_way[number].stream
        try:
            stream.do_handshake()
        except ssl.SSLWantReadError:
            self._epoll.modify(number, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._epoll.modify(number, select.EPOLLOUT)
        except ssl.SSLError as error:
            _refusals.warning(
                "stream: a TLS handshake failed (%s); keys of this pserver are of authority %s",
                error.reason or error,
                self._authority,
            )
            self._end(number)
        except OSError:  # it went away
            self._end(number)
        else:
            del self._under_way[number]
            self._epoll.unregister(number)
            self._done.append(Known(stream, role_of(stream.getpeercert())))
            os.eventfd_write(self.fd, 1)

    def _end(self, number: int) -> None:
        handshake = self._under_way.pop(number)
        self._epoll.unregister(number)
        handshake.stream.close()
