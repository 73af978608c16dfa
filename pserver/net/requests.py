"""Requests as bytes, between the data plane and a shard."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.decode import HEADER_IN_ONE_PIECE, decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import HEADER_BYTES, PUSHES, Buffer, Frame, FrameError, Header, Op
from fleet_sparse.wire.message_words import WORD_BYTES
from fleet_sparse.wire.stream import Message

from ..permissions import may_ask
from ..throttled_log import ThrottledLog
from . import protocol
from .protocol import AnyShard

_log = logging.getLogger(__name__)
_refusals = ThrottledLog(_log)
_OPS = frozenset(Op)


class Answer(msgspec.Struct, frozen=True, eq=False):
    """A reply as `encode` makes it.

    Attributes:
        client_id: Client that it is sent to.
        parts: Parts of the frame.
        is_deferred: True if another reply follows, from `deferred_answers`.
        is_to_push: True if it answers a push.
    """

    client_id: bytes
    parts: list[Buffer]
    is_deferred: bool = False
    is_to_push: bool = False


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
    return _encoded(shard, protocol.answer(shard, frame), frame.header.op)


def forbid(shard: AnyShard, role: str, message: Message) -> Answer | None:
    """The refusal of a request for which its client has not the role; None if the role may ask for it.

    Of the request only the header is looked at. One that is too short for a header is left to `answer`.
    """
    begin = WORD_BYTES * message.num_parts
    if len(message.data) < begin + HEADER_BYTES:
        return None
    fields = HEADER_IN_ONE_PIECE.unpack_from(message.data, begin)
    op = fields[1]
    if may_ask(role, op):
        return None
    known = Op(op) if op in _OPS else Op.PULL
    part, num_parts = fields[3:5] if fields[3] < fields[4] else (0, 1)
    header = Header(
        known,
        client_id=fields[9],
        client_epoch=fields[10],
        request_id=fields[12],
        part=part,
        num_parts=num_parts,
    )
    _refusals.warning("shard %d: %s: role %s may not ask for it", shard.shard_index, known.name, role)
    error = FrameError(ErrorCode.FORBIDDEN, 0, f"{role} {known.name}")
    return _encoded(shard, protocol.refuse(shard, header, error))


def deferred_answers(shard: AnyShard) -> list[Answer]:
    """The deferred replies that are due now. Raises nothing."""
    return [
        _encoded(shard, protocol.deferred_reply(shard, reply), reply.header.op)
        for reply in shard.take_deferred_replies()
    ]


@dataclass(slots=True)
class Traffic:
    """Bytes of all frames since the start."""

    bytes_received: int = 0
    bytes_sent: int = 0


def _encoded(shard: AnyShard, reply: Frame, op: Op = Op.PULL) -> Answer:
    """Encodes the reply to a request with that op."""
    is_to_push = op in PUSHES
    try:
        return Answer(reply.header.client_id, encode(reply), reply.header.op is Op.WAIT, is_to_push)
    except Exception as error:
        _log.exception("shard %d: the reply to request %d failed", shard.shard_index, reply.header.request_id)
        error_frame = FrameError(ErrorCode.INTERNAL, 0, f"{type(error).__name__}: {error}")
        refusal = encode(protocol.refuse(shard, reply.header, error_frame))
        return Answer(reply.header.client_id, refusal, is_to_push=is_to_push)
