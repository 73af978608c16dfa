"""Requests as bytes, between the data plane and a shard."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Buffer, Frame, FrameError, Op

from ..throttled_log import ThrottledLog
from . import protocol
from .protocol import AnyShard

_log = logging.getLogger(__name__)
_refusals = ThrottledLog(_log)


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


def answer(shard: AnyShard, parts: Sequence[Buffer], max_bytes: int) -> Answer:
    """The reply to a request. Raises nothing.

    Args:
        shard: The shard that answers.
        parts: Parts of the request; those of a deferred request are kept until its reply is sent.
        max_bytes: Largest request, and largest reply, that is accepted.
    """
    try:
        frame = decode(parts, max_bytes=max_bytes)
    except ProtocolError as error:
        _refusals.warning("shard %d: refused a frame: %s", shard.shard_index, error)
        return _encoded(shard, protocol.refuse(shard, None, FrameError(error.code, 0, str(error))))
    return _encoded(shard, protocol.answer(shard, frame))


def deferred_answers(shard: AnyShard) -> list[Answer]:
    """The deferred replies that are due now. Raises nothing."""
    return [_encoded(shard, frame) for frame in protocol.take_deferred_replies(shard)]


@dataclass(slots=True)
class Traffic:
    """Bytes of all frames since the start."""

    bytes_received: int = 0
    bytes_sent: int = 0


def _encoded(shard: AnyShard, reply: Frame) -> Answer:
    try:
        return Answer(reply.header.client_id, encode(reply), reply.header.op is Op.WAIT)
    except Exception as error:
        _log.exception("shard %d: the reply to request %d failed", shard.shard_index, reply.header.request_id)
        error_frame = FrameError(ErrorCode.INTERNAL, 0, f"{type(error).__name__}: {error}")
        return Answer(reply.header.client_id, encode(protocol.refuse(shard, reply.header, error_frame)))
