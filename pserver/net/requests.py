"""Requests as bytes, between the data plane or the in-process channel and a shard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Buffer, Frame, FrameError, Op

from ..engine.shard import Shard
from . import protocol

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Answer(msgspec.Struct, frozen=True, eq=False):
    """A reply as `encode` makes it.

    Attributes:
        client_id: Client that it is sent to.
        parts: Parts of the frame.
        is_deferred: True if another reply follows, from `deferred_answers`.
    """

    client_id: bytes
    parts: list[Buffer]
    is_deferred: bool = False


def answer(shard: Shard, parts: Sequence[Buffer], max_bytes: int) -> Answer:
    """The reply to a request. Raises nothing.

    Args:
        shard: The shard that answers.
        parts: Parts of the request; those of a deferred request are kept until its reply is sent.
        max_bytes: Largest request, and largest reply, that is accepted.
    """
    try:
        frame = decode(parts, max_bytes=max_bytes)
    except ProtocolError as error:
        _log.warning("shard %d: refused a frame: %s", shard.shard_index, error)
        return _encoded(shard, protocol.refuse(shard, None, FrameError(error.code, 0, str(error))))
    return _encoded(shard, protocol.answer(shard, frame))


def deferred_answers(shard: Shard) -> list[Answer]:
    """The deferred replies that are due now. Raises nothing."""
    return [_encoded(shard, frame) for frame in protocol.take_deferred_replies(shard)]


@dataclass(slots=True)
class Traffic:
    """Bytes of all frames since the start."""

    bytes_received: int = 0
    bytes_sent: int = 0


class SharedShard:
    """A shard in the process of its clients: the thread that holds the lock owns it.

    Args:
        shard: Accessed only through this object.
        max_frame_bytes: Largest request, and largest reply, that is accepted.
        deliver: Sends a deferred reply to the client of that id.

    Attributes:
        traffic: Bytes so far.
    """

    def __init__(self, shard: Shard, max_frame_bytes: int, deliver: Callable[[bytes, Sequence[Buffer]], None]) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._deliver = deliver
        self._lock = threading.Lock()  # guards all below
        self._shard = shard
        self._is_closed = False
        self.traffic = Traffic()

    def answer(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """The reply to a request.

        Raises:
            FleetSparseError: The shard is closed.
        """
        with self._lock:
            self._check_open()
            reply = answer(self._shard, parts, self._max_frame_bytes)
            self.traffic.bytes_received += sum(map(len, parts))
            self.traffic.bytes_sent += sum(map(len, reply.parts))
            if self._shard.deferred_replies:
                self._deliver_deferred()
        return reply.parts

    def run(self, task: Callable[[], _Result]) -> _Result:
        """Runs a task that accesses the shard, and returns its result.

        Raises:
            FleetSparseError: The shard is closed.
        """
        with self._lock:
            self._check_open()
            result = task()
            self._deliver_deferred()
        return result

    def close(self) -> None:
        """Releases the shard's memory. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._shard.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise FleetSparseError("embedded pserver: it is closed")

    def _deliver_deferred(self) -> None:
        for reply in deferred_answers(self._shard):
            self.traffic.bytes_sent += sum(map(len, reply.parts))
            self._deliver(reply.client_id, reply.parts)


def _encoded(shard: Shard, reply: Frame) -> Answer:
    try:
        return Answer(reply.header.client_id, encode(reply), reply.header.op is Op.WAIT)
    except Exception as error:
        _log.exception("shard %d: the reply to request %d failed", shard.shard_index, reply.header.request_id)
        error_frame = FrameError(ErrorCode.INTERNAL, 0, f"{type(error).__name__}: {error}")
        return Answer(reply.header.client_id, encode(protocol.refuse(shard, reply.header, error_frame)))
