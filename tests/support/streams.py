"""Both ends of streams: a listener that answers, and a client socket."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from fleet_sparse.pserver.net.streams import Streams
from fleet_sparse.wire.stream import GREETING, Buffer, FrameMemory, FrameReader, FrameWriter, socket_to

MAX_BYTES = 64 << 20


class StreamServer:
    """Answers every frame with `answer`, through a pserver's streams, until it is closed.

    Attributes:
        endpoint: To connect to.
    """

    def __init__(self, answer: Callable[[Sequence[Buffer]], Sequence[Buffer]], **options: object) -> None:
        self._answer = answer
        self._streams = Streams(**{"max_frame_bytes": MAX_BYTES, **options})  # type: ignore[arg-type]
        self.endpoint = self._streams.endpoint
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._streams.close()

    def _run(self) -> None:
        while not self._stopping:
            self._streams.poll(0.02)
            request = self._streams.receive()
            while request is not None:
                connection, parts = request
                connection.send(list(self._answer(parts)))
                request = self._streams.receive()


class StreamSocket:
    """A client's end that waits, with the methods of a ZeroMQ socket that tests use."""

    def __init__(self, endpoint: str, *, greets: bool = True, timeout_s: float = 20.0) -> None:
        self.stream, address = socket_to(endpoint)
        self.stream.settimeout(timeout_s)
        self.stream.connect(address)
        self._reader = FrameReader(2 * MAX_BYTES, FrameMemory())
        if greets:
            self.stream.sendall(GREETING)

    def send_multipart(self, parts: Sequence[Buffer]) -> None:
        writer = FrameWriter()
        writer.put(parts)
        while not writer.write(self.stream):
            pass

    def recv_multipart(self) -> list[bytes]:
        """The next frame.

        Raises:
            ConnectionError: The other side ended it.
        """
        while True:
            parts = self._reader.next_frame()
            if parts is not None:
                return [bytes(part) for part in parts]
            if not self._reader.read(self.stream):
                raise ConnectionResetError("the other side ended it")

    def poll(self, timeout_ms: int) -> bool:
        """Returns whether there are bytes to receive or the stream has ended."""
        return bool(select.select([self.stream], [], [], timeout_ms / 1000)[0])

    def is_ended(self, within_s: float = 20.0) -> bool:
        """Returns whether the peer closes the connection in time, and discards earlier bytes."""
        until = time.monotonic() + within_s
        self.stream.settimeout(within_s)
        try:
            while time.monotonic() < until:
                if not self.stream.recv(1 << 20):
                    return True
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return False

    def close(self) -> None:
        self.stream.close()


def pair(buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Two ends of a stream that do not block, with buffers as small as the kernel has them."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        if buffer_bytes is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return ends
