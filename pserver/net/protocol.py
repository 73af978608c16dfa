"""The data protocol on a shard: from request frames to calls of the engine, and from their results to reply frames."""

from __future__ import annotations

import logging

from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import PULLS, PUSHES, Frame, FrameError, Header, Op

from ..engine.reply import Reply
from ..engine.shard import Shard
from ..refusal import Refusal

_log = logging.getLogger(__name__)

_REQUESTS = PUSHES | PULLS


def answer(shard: Shard, frame: Frame) -> Frame:
    """Returns the reply to a request; WAIT if the reply follows by `take_deferred_replies`.

    Raises nothing: a refusal is an ERROR frame.
    """
    shard.counters.num_requests += 1
    try:
        _check_header(shard, frame.header)
        return _reply_frame(shard, frame.header, shard.execute(frame.header, frame.blocks))
    except Exception as error:
        return _error_frame(shard, frame.header, error)


def take_deferred_replies(shard: Shard) -> list[Frame]:
    """Returns the replies to requests that were answered with WAIT and are ready, each once."""
    return [
        _error_frame(shard, header, outcome) if isinstance(outcome, Exception) else _reply_frame(shard, header, outcome)
        for header, outcome in shard.take_deferred_replies()
    ]


def refuse(shard: Shard, request: Header | None, error: FrameError) -> Frame:
    """Returns the ERROR frame that answers a request; None for one that could not be decoded."""
    request = request or Header(Op.PULL)
    push_seq = shard.ledger.applied(request.client_id)
    return _reply_frame(shard, request, Reply(Op.ERROR, [], push_seq, shard.complete_step), error)


def _error_frame(shard: Shard, request: Header, error: Exception) -> Frame:
    if isinstance(error, Refusal):
        return refuse(shard, request, error.error)
    _log.error("shard %d: request %d failed", shard.shard_index, request.request_id, exc_info=error)
    return refuse(shard, request, FrameError(ErrorCode.INTERNAL, 0, f"{type(error).__name__}: {error}"))


def _reply_frame(shard: Shard, request: Header, reply: Reply, error: FrameError | None = None) -> Frame:
    header = Header(
        reply.op,
        request.flags,
        cluster_id=shard.cluster_id,
        shard=shard.shard_index,
        incarnation=shard.incarnation,
        placement_version=shard.placement.version,
        client_id=request.client_id,
        client_epoch=request.client_epoch,
        request_id=request.request_id,
        push_seq=reply.push_seq,
        step=reply.step,
        part=request.part,
        num_parts=request.num_parts,
    )
    return Frame(header, reply.blocks, error)


def _check_header(shard: Shard, header: Header) -> None:
    """Checks that a request is addressed to this shard."""
    if header.op not in _REQUESTS:
        raise Refusal(ErrorCode.MALFORMED, f"header: op {header.op.name} is not a request")
    if header.cluster_id != shard.cluster_id:
        raise Refusal(
            ErrorCode.WRONG_SHARD, f"header: cluster {header.cluster_id:016x}, this one is {shard.cluster_id:016x}"
        )
    if header.shard != shard.shard_index:
        raise Refusal(ErrorCode.WRONG_SHARD, f"header: shard {header.shard}, this one is {shard.shard_index}")
    if header.incarnation != shard.incarnation:
        raise Refusal(
            ErrorCode.WRONG_INCARNATION,
            f"header: incarnation {header.incarnation:016x}, this one is {shard.incarnation:016x}",
        )
    if header.placement_version != shard.placement.version:
        raise Refusal(
            ErrorCode.WRONG_SHARD,
            f"header: placement version {header.placement_version}, this one is {shard.placement.version}",
        )
    if header.push_seq == 0 and header.op in PUSHES:
        raise Refusal(ErrorCode.MALFORMED, "header: push_seq is 0; pushes count from 1")
