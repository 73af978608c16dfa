"""The data protocol on a shard: from request frames to calls of the engine, and from their results to reply frames."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import PUSHES, READS, Block, Frame, FrameError, Header, Op

from ..engine.reply import DeferredReply, Reply
from ..engine.shard import Counters
from ..refusal import Refusal

_log = logging.getLogger(__name__)


class AnyShard(Protocol):
    """The calls that a data plane makes on the shard that it serves: a `Shard`, or a `ReadOnlyShard`.

    Attributes:
        shard_index, cluster_id, incarnation, placement, counters, deferred_replies: As of a `Shard`.
        requests: Ops that it answers, be it by a refusal; all others are MALFORMED.
    """

    shard_index: int
    cluster_id: int
    incarnation: int
    placement: Placement
    counters: Counters
    deferred_replies: list[DeferredReply]
    requests: frozenset[Op]

    @property
    def complete_step(self) -> int:
        """The `step` of replies that are errors."""
        ...

    def acked_push(self, request: Header) -> int:
        """The `push_seq` of the reply to a request that is an error."""
        ...

    def durable_push(self, client_id: bytes) -> int:
        """The `push_floor` of replies to a client."""
        ...

    def execute(self, header: Header, blocks: Sequence[Block]) -> Reply:
        """Carries out a request, as `Shard.execute`."""
        ...

    def take_deferred_replies(self) -> list[DeferredReply]:
        """Returns the replies to deferred requests that are ready, each once."""
        ...


def answer(shard: AnyShard, frame: Frame) -> Frame:
    """Returns the reply to a request; WAIT if the reply follows by `take_deferred_replies`.

    Raises nothing: a refusal is an ERROR frame.
    """
    shard.counters.num_requests += 1
    header = frame.header
    try:
        if (
            header.incarnation != shard.incarnation
            or header.cluster_id != shard.cluster_id
            or header.shard != shard.shard_index
            or header.placement_version != shard.placement.version
            or header.op not in shard.requests
            or (not header.push_seq and header.op in PUSHES)
        ):
            raise _fault_of(shard, header)
        return _reply_frame(shard, header, shard.execute(header, frame.blocks))
    except Exception as error:
        return _error_frame(shard, header, error)


def take_deferred_replies(shard: AnyShard) -> list[Frame]:
    """Returns the replies to requests that were answered with WAIT and are ready, each once."""
    return [deferred_reply(shard, reply) for reply in shard.take_deferred_replies()]


def deferred_reply(shard: AnyShard, reply: DeferredReply) -> Frame:
    """Returns the reply to a request that was deferred."""
    header, outcome = reply
    if isinstance(outcome, Exception):
        return _error_frame(shard, header, outcome)
    return _reply_frame(shard, header, outcome)


def refuse(shard: AnyShard, request: Header | None, error: FrameError) -> Frame:
    """Returns the ERROR frame that answers a request; None for one that could not be decoded."""
    request = request or Header(Op.PULL)
    return _reply_frame(shard, request, Reply(Op.ERROR, [], shard.acked_push(request), shard.complete_step), error)


def _error_frame(shard: AnyShard, request: Header, error: Exception) -> Frame:
    if isinstance(error, Refusal):
        return refuse(shard, request, error.error)
    _log.error("shard %d: request %d failed", shard.shard_index, request.request_id, exc_info=error)
    return refuse(shard, request, FrameError(ErrorCode.INTERNAL, 0, f"{type(error).__name__}: {error}"))


def _reply_frame(shard: AnyShard, request: Header, reply: Reply, error: FrameError | None = None) -> Frame:
    header = Header(
        reply.op,
        request.flags,
        shard.cluster_id,
        shard.shard_index,
        shard.incarnation,
        shard.placement.version,
        request.client_id,
        request.client_epoch,
        request.request_id,
        reply.push_seq,
        shard.durable_push(request.client_id),
        reply.step,
        request.part,
        request.num_parts,
    )
    return Frame(header, reply.blocks, error)


def _fault_of(shard: AnyShard, header: Header) -> Refusal:
    """Returns why a request is refused that is no request to this shard."""
    if header.op not in shard.requests:
        why = "needs a version, and this pserver trains" if header.op in READS else "is not a request"
        return Refusal(ErrorCode.MALFORMED, f"header: op {header.op.name} {why}")
    if header.cluster_id != shard.cluster_id:
        return Refusal(
            ErrorCode.WRONG_SHARD, f"header: cluster {header.cluster_id:016x}, this one is {shard.cluster_id:016x}"
        )
    if header.shard != shard.shard_index:
        return Refusal(ErrorCode.WRONG_SHARD, f"header: shard {header.shard}, this one is {shard.shard_index}")
    if header.incarnation != shard.incarnation:
        return Refusal(
            ErrorCode.WRONG_INCARNATION,
            f"header: incarnation {header.incarnation:016x}, this one is {shard.incarnation:016x}",
        )
    if header.placement_version != shard.placement.version:
        return Refusal(
            ErrorCode.WRONG_SHARD,
            f"header: placement version {header.placement_version}, this one is {shard.placement.version}",
        )
    return Refusal(ErrorCode.MALFORMED, "header: push_seq is 0; pushes count from 1")
