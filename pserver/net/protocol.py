"""The data protocol on a shard: from request frames to calls of the engine, and from their results to reply frames."""

from __future__ import annotations

import logging

from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frames import PULLS, PUSHES, Frame, FrameError, Header, Op

from ..engine.shard import Reply, Shard
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
        outcome: Reply | Exception = shard.execute(frame.header, frame.blocks)
    except Exception as error:
        outcome = error
    return _frame_of(shard, frame.header, outcome)


def take_deferred_replies(shard: Shard) -> list[Frame]:
    """Returns the replies to requests that were answered with WAIT and are ready, each once."""
    return [_frame_of(shard, header, outcome) for header, outcome in shard.take_deferred_replies()]


def refuse(shard: Shard, request: Header | None, error: FrameError) -> Frame:
    """Returns the ERROR frame that answers a request; None for one that could not be decoded."""
    request = request or Header(Op.PULL)
    push_seq = shard.ledger.applied(request.client_id)
    return Frame(_reply_header(shard, request, Op.ERROR, push_seq, shard.complete_step), [], error)


def _frame_of(shard: Shard, request: Header, outcome: Reply | Exception) -> Frame:
    if isinstance(outcome, Reply):
        return Frame(_reply_header(shard, request, outcome.op, outcome.push_seq, outcome.step), outcome.blocks)
    if isinstance(outcome, Refusal):
        return refuse(shard, request, outcome.error)
    _log.error("shard %d: request %d failed", shard.shard_index, request.request_id, exc_info=outcome)
    return refuse(shard, request, FrameError(ErrorCode.INTERNAL, 0, f"{type(outcome).__name__}: {outcome}"))


def _reply_header(shard: Shard, request: Header, op: Op, push_seq: int, step: int) -> Header:
    return Header(
        op,
        request.flags,
        cluster_id=shard.cluster_id,
        shard=shard.shard_index,
        incarnation=shard.incarnation,
        placement_version=shard.placement.version,
        client_id=request.client_id,
        client_epoch=request.client_epoch,
        request_id=request.request_id,
        push_seq=push_seq,
        step=step,
        part=request.part,
        num_parts=request.num_parts,
    )


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
