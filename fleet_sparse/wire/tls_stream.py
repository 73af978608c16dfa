"""Frames on streams of TLS 1.3, which never block either."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.keys import Keys

from .frame_format import Buffer
from .stream import READ_BYTES, FrameMemory, FrameReader, Place, Room, without

_RECORD_BYTES = 16 << 10
"""Largest number of bytes of a record of TLS."""
_MAX_READ_BYTES = 1 << 20
"""Bytes that one read takes before other connections have their turn."""


class TlsFrameReader(FrameReader):
    """Splits the bytes that a stream of TLS receives into frames.

    TLS decrypts a record as a whole, and what it holds back does not make the socket readable. So after each read
    nothing is held back: the buffer has room for a record behind what it has.
    """

    def __init__(
        self,
        max_bytes: int,
        memory: FrameMemory,
        place: Place | None = None,
        buffer: NDArray[np.int64] | None = None,
        room: Room | None = None,
    ) -> None:
        super().__init__(max_bytes, memory, place, buffer, room)
        self._buffer = memoryview(bytearray(READ_BYTES + _RECORD_BYTES))

    def read(self, source: Any) -> int:
        """As `FrameReader`."""
        received = 0
        if self.missing:
            received = source.recvmsg_into(self.missing)[0]
            self.missing = without(self.missing, received)
            if not source.pending():  # always so while some of it is missing
                self.num_bytes += received
                self.may_have_more = False
                return int(received)
        elif self.begin:
            self._buffer[: self.end - self.begin] = self._buffer[self.begin : self.end]
            self.begin, self.end = 0, self.end - self.begin
        num_bytes = source.recv_into(self._buffer[self.end :])
        self.end += num_bytes
        self.num_bytes += received + num_bytes
        self.may_have_more = False
        return int(received + num_bytes)


def client_context(keys: Keys) -> ssl.SSLContext:
    """Returns a context that makes a `TlsSocket` of a connection to a pserver."""
    context = keys.client_context()
    context.sslsocket_class = TlsSocket
    return context


def server_context(keys: Keys) -> ssl.SSLContext:
    """Returns a context that makes a `TlsSocket` of a connection that a pserver accepted."""
    context = keys.server_context()
    context.sslsocket_class = TlsSocket
    return context


class TlsSocket(ssl.SSLSocket):
    """A socket of TLS with the methods of a plain one that frames need, and their errors.

    `BlockingIOError` says that the socket must be polled: for reading by `recv_into`, for writing by `sendmsg`.
    """

    reader_type = TlsFrameReader
    """Type of the `reader` of a `Connection`."""
    _repeated: bytes = b""  # bytes that the socket did not accept; TLS wants the same ones again

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives at most one record; 0 at the end of the stream."""
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recvmsg_into(  # type: ignore[override]  # SSLSocket raises
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0
    ) -> Any:
        """Receives into several buffers, as far as bytes have arrived, at most about a MB."""
        received = 0
        try:
            for buffer in buffers:
                view = memoryview(buffer)
                while view:
                    if received >= _MAX_READ_BYTES and not self.pending():
                        return received, [], 0, None
                    num_bytes = self.recv_into(view)
                    if not num_bytes:
                        return received, [], 0, None
                    received += num_bytes
                    view = view[num_bytes:]
        except BlockingIOError:
            if not received:
                raise
        return received, [], 0, None

    def sendmsg(self, buffers: Iterable[Any], *arguments: Any) -> int:  # type: ignore[override]
        """Sends what the socket accepts, and returns the number of bytes.

        After `BlockingIOError`, or a smaller number than there are bytes, the rest is sent next, and nothing else.
        """
        sent = 0
        try:
            if self._repeated:
                sent = super().send(self._repeated)
                self._repeated = b""
            for record in _records(buffers, sent):
                try:
                    sent += super().send(record)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    self._repeated = bytes(record)
                    raise
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not sent:
                raise BlockingIOError from None
        return sent


def _records(buffers: Iterable[Buffer], skip: int) -> Iterator[Buffer]:
    """Yields the bytes of the buffers after the first `skip`, in pieces of a record: small buffers share one."""
    joined = bytearray()
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if skip:
            skipped = min(skip, len(view))
            skip -= skipped
            view = view[skipped:]
        while view:
            num_bytes = _RECORD_BYTES - len(joined)
            if not joined and len(view) >= num_bytes:
                yield view[:num_bytes]
            else:
                joined += view[:num_bytes]
                if len(joined) == _RECORD_BYTES:
                    yield bytes(joined)
                    joined = bytearray()
            view = view[num_bytes:]
    if joined:
        yield bytes(joined)
