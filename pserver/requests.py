"""Requests as bytes: what the data plane and the in-process channel hand to a shard."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.frames import FrameError, decode, encode

from .shard import Shard

_log = logging.getLogger(__name__)

Buffer = bytes | memoryview


def answer(shard: Shard, parts: Sequence[Buffer], max_bytes: int) -> list[Buffer]:
    """The parts of the reply to a request, as `encode` makes them. Raises nothing.

    Args:
        shard: Changed by what the request pushes.
        parts: Of the request; nothing keeps them when this returns.
        max_bytes: Largest request, and largest reply, that is accepted.
    """
    try:
        frame = decode(parts, max_bytes=max_bytes)
    except ProtocolError as error:
        _log.warning("shard %d: refused a frame: %s", shard.shard_index, error)
        return encode(shard.refuse(None, FrameError(error.code, 0, str(error))))
    try:
        return encode(shard.answer(frame))
    except Exception as error:
        _log.exception("shard %d: the reply to request %d failed", shard.shard_index, frame.header.request_id)
        error_frame = FrameError(ErrorCode.INTERNAL, 0, f"{type(error).__name__}: {error}")
        return encode(shard.refuse(frame.header, error_frame))
