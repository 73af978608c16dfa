"""Requests as bytes: what the data plane and the in-process channel hand to a shard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Buffer, Frame, FrameError, Op

from ..engine.shard import Shard
from . import protocol

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Answer(NamedTuple):
    """A reply as `encode` makes it."""

    client_id: bytes
    """Of the client that is to have it."""
    parts: list[Buffer]
    waits: bool = False
    """Whether another reply follows, by `released`."""


def answer(shard: Shard, parts: Sequence[Buffer], max_bytes: int) -> Answer:
    """The reply to a request. Raises nothing.

    Args:
        shard: Changed by what the request pushes.
        parts: Of the request; if it waits they are kept until its reply is released.
        max_bytes: Largest request, and largest reply, that is accepted.
    """
    try:
        frame = decode(parts, max_bytes=max_bytes)
    except ProtocolError as error:
        _log.warning("shard %d: refused a frame: %s", shard.shard_index, error)
        return _encoded(shard, protocol.refuse(shard, None, FrameError(error.code, 0, str(error))))
    return _encoded(shard, protocol.answer(shard, frame))


def released(shard: Shard) -> list[Answer]:
    """The replies to requests that had to wait and need not wait any more. Raises nothing."""
    return [_encoded(shard, frame) for frame in protocol.take_deferred_replies(shard)]


@dataclass(slots=True)
class Traffic:
    """Bytes of all frames since the start."""

    bytes_received: int = 0
    bytes_sent: int = 0


class SharedShard:
    """A shard in the process of its clients: whoever holds the lock is the thread that owns it.

    Args:
        shard: Touched by nobody else.
        max_frame_bytes: Largest request, and largest reply, that is accepted.
        deliver: Has the parts of a reply reach the client of that id, at a later time than the answer to its request.

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
            self._deliver_released()
        return reply.parts

    def run(self, task: Callable[[], _Result]) -> _Result:
        """The result of a task that touches the shard.

        Raises:
            FleetSparseError: The shard is closed.
        """
        with self._lock:
            self._check_open()
            result = task()
            self._deliver_released()
        return result

    def close(self) -> None:
        """Gives the shard's memory back. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._shard.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise FleetSparseError("embedded pserver: it is closed")

    def _deliver_released(self) -> None:
        for reply in released(self._shard):
            self.traffic.bytes_sent += sum(map(len, reply.parts))
            self._deliver(reply.client_id, reply.parts)


def _encoded(shard: Shard, reply: Frame) -> Answer:
    try:
        return Answer(reply.header.client_id, encode(reply), reply.header.op is Op.WAIT)
    except Exception as error:
        _log.exception("shard %d: the reply to request %d failed", shard.shard_index, reply.header.request_id)
        error_frame = FrameError(ErrorCode.INTERNAL, 0, f"{type(error).__name__}: {error}")
        return Answer(reply.header.client_id, encode(protocol.refuse(shard, reply.header, error_frame)))
