"""A link of a given delay and rate: a TCP proxy in three processes of its own. Only the standard library is imported.

`python -m benchmarks.shaped_link 127.0.0.1:0=127.0.0.1:4000` listens on the first address of each route and forwards
to the second one. All routes together are one link: per direction the bytes of all connections pass one after the other
at its rate, without a burst, and each arrives its one-way delay later. One process forwards each direction, and the
third one accepts connections. The first line of output has the process ids of all three and the bound addresses, as
JSON. Each line of standard input, one-way delay in seconds and rate in bits a second, changes the link for the bytes
that arrive after it, and is answered by a line. The proxy ends with its standard input.

It does not imitate the TCP of a long link: connections are established at once, and a sender that is not slowed by the
link itself never waits for a window. Bytes leave in chunks, a chunk when its last byte would.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

CHUNK_BYTES = 64 << 10
QUEUE_BYTES = 4 << 20  # of a connection, besides what the link holds; then its sender waits
_PR_SET_TIMERSLACK = 29  # prctl(2); by default a timer may be 50 us late
_SHAPE = struct.Struct("dd")
_CONNECT_S = 10.0


class Pipe:
    """One direction of a connection: bytes that are on the link, each with the time when they leave it."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.chunks: deque[tuple[float, memoryview]] = deque()
        self.num_bytes = 0
        self.has_ended = False
        """True once the source has sent its last byte."""
        self.is_blocked = False
        """True while the sink accepts nothing."""
        self.is_closed = False

    def send_due(self, now: float) -> None:
        """Sends the chunks that have left the link, as far as the sink accepts them."""
        try:
            while self.chunks and self.chunks[0][0] <= now:
                due, chunk = self.chunks[0]
                if not chunk:
                    self.sink.shutdown(socket.SHUT_WR)
                    self.close()
                    return
                num_sent = self.sink.send(chunk)
                self.num_bytes -= num_sent
                if num_sent < len(chunk):
                    self.chunks[0] = (due, chunk[num_sent:])
                else:
                    self.chunks.popleft()
            self.is_blocked = False
        except BlockingIOError:
            self.is_blocked = True
        except OSError:  # the receiver is gone
            self.close()

    def close(self) -> None:
        """Ends this direction; the sockets stay open until the other one has ended too."""
        if not self.has_ended:
            with suppress(OSError):
                self.source.shutdown(socket.SHUT_RDWR)
        self.is_closed = True
        self.source.close()
        self.sink.close()


class Direction:
    """One direction of a link, with the connections and shapes that arrive at `control`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._delay_s, self._bytes_per_s = 0.0, math.inf
        self._free_at = 0.0
        self._pipes: list[Pipe] = []

    def run(self) -> None:
        """Forwards until `control` ends."""
        while True:
            reading = [pipe.source for pipe in self._pipes if self._has_room(pipe)]
            blocked = [pipe.sink for pipe in self._pipes if pipe.is_blocked]
            readable, _, _ = select.select([self._control, *reading], blocked, [], self._timeout_s())
            if self._control in readable and not self._obey():
                return
            for pipe in self._pipes:
                if pipe.source in readable:
                    self._receive(pipe)
                pipe.send_due(time.monotonic())
            self._pipes = [pipe for pipe in self._pipes if not pipe.is_closed]

    def _has_room(self, pipe: Pipe) -> bool:
        held = self._delay_s * self._bytes_per_s if self._delay_s else 0.0
        return not pipe.has_ended and pipe.num_bytes < QUEUE_BYTES + held

    def _timeout_s(self) -> float | None:
        dues = [pipe.chunks[0][0] for pipe in self._pipes if pipe.chunks and not pipe.is_blocked]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _obey(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, _SHAPE.size, 2)
        if fds:
            source, sink = (socket.socket(fileno=fd) for fd in fds)
            self._pipes.append(Pipe(source, sink))
        elif message:
            self._delay_s, bits_per_s = _SHAPE.unpack(message)
            self._bytes_per_s = bits_per_s / 8
        return bool(message)

    def _receive(self, pipe: Pipe) -> None:
        try:
            chunk = pipe.source.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # the sender is gone
            chunk = b""
        self._free_at = max(self._free_at, time.monotonic()) + len(chunk) / self._bytes_per_s
        pipe.chunks.append((self._free_at + self._delay_s, memoryview(chunk)))
        pipe.num_bytes += len(chunk)
        pipe.has_ended = not chunk


def forked() -> tuple[int, socket.socket]:
    """Forks a process for one direction; returns its process id and its control socket."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        near.close()
        try:
            Direction(far).run()
        finally:
            os._exit(0)
    far.close()
    return pid, near


def accept(listener: socket.socket, target: tuple[str, int], controls: Sequence[socket.socket]) -> None:
    """Accepts a connection and hands it to both directions."""
    near, _ = listener.accept()
    with near:
        try:
            far = socket.create_connection(target, _CONNECT_S)
        except OSError:
            return  # nothing listens there: the client finds its connection closed
        with far:
            for each in (near, far):
                each.setblocking(False)
                if each.family != socket.AF_UNIX:
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for control, ends in zip(controls, ((near, far), (far, near)), strict=True):
                socket.send_fds(control, [b"+"], [each.fileno() for each in ends])


def address(text: str) -> tuple[str, int]:
    """Returns the address that `host:port` names."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def listening(text: str) -> socket.socket:
    """Returns a socket that listens on `host:port`, or on the path of a Unix socket."""
    if not text.startswith("/"):
        return socket.create_server(address(text))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(text)
    listener.listen()
    return listener


def name_of(listener: socket.socket) -> str:
    """Returns the `host:port` or the path on which a socket listens."""
    bound = listener.getsockname()
    return bound if isinstance(bound, str) else "{}:{}".format(*bound)


def serve(routes: Sequence[str]) -> NoReturn:
    """Runs the proxy until its standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    targets = {}
    pids, controls = zip(*(forked() for _ in range(2)), strict=True)
    for route in routes:
        near, _, far = route.partition("=")
        targets[listening(near)] = address(far)
    addresses = [name_of(listener) for listener in targets]
    print(json.dumps([[os.getpid(), *pids], addresses]), flush=True)
    while True:
        readable, _, _ = select.select([sys.stdin.fileno(), *targets], [], [])
        for listener, target in targets.items():
            if listener in readable:
                accept(listener, target, controls)
        if sys.stdin.fileno() not in readable:
            continue
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        delay_s, bits_per_s = map(float, line.split())
        for control in controls:
            control.send(_SHAPE.pack(delay_s, bits_per_s))
        print("shaped", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
