"""A shard without a process, and a client that speaks frames to it."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net import protocol
from fleet_sparse.pserver.tables.row_limit import NO_LIMITS, RowLimits
from fleet_sparse.warm_up import warm_up
from fleet_sparse.wire.frame_format import Action, Block, Frame, Header, Op
from fleet_sparse.wire.row_dtype import FrameRows

CLUSTER, INCARNATION = 77, 88
CLIENT = b"client number 1."
# Rows of ids that were never pushed are 0.5; with dyadic gradients and learning rates SGD is exact.
SGD = TableSpec(name="sgd", dim=2, rule="sgd", initializer=constant(0.5))
ADAM = TableSpec(name="adam", dim=3, rule="adam", initializer=uniform(-1.0, 1.0), seed=7)
DENSE = DenseSpec("dense", "sgd", (), (Segment("w", 0, 5, 1.0), Segment("b", 5, 3, 2.0)))
READS = TableSpec(name="sgd", dim=2, rule="read_only", initializer=constant(0.5))


def make_shard(
    *specs: TableSpec | DenseSpec,
    shard: int = 0,
    num_shards: int = 1,
    incarnation: int = INCARNATION,
    row_limits: RowLimits = NO_LIMITS,
    only_registered: bool = False,
) -> Shard:
    """Returns a shard with these tables."""
    warm_up()
    made = Shard(
        shard,
        num_shards,
        cluster_id=CLUSTER,
        incarnation=incarnation,
        placement=Placement.even(num_shards),
        huge_pages=False,
        row_limits=row_limits,
        only_registered=only_registered,
    )
    for spec in specs:
        made.add_table(spec, declared_by="worker 0")
    return made


def ids_of(*ids: int) -> NDArray[np.int64]:
    return np.array(ids, np.int64)


def floats(*values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def pull(spec: TableSpec | DenseSpec, ids: NDArray[np.int64] | None = None, count: int = 0, **changes: Any) -> Block:
    """Returns a PULL block of ids, or of `count` dense values."""
    dim = spec.dim if isinstance(spec, TableSpec) else 1
    count = count if ids is None else len(ids)
    return _changed(Block(Action.PULL, spec.table_id, spec.schema_hash, dim, count, ids), changes)


def push(
    spec: TableSpec | DenseSpec,
    ids: NDArray[np.int64] | None,
    grads: FrameRows,
    *,
    learning_rate: float = 1.0,
    optimizer_step: int = 1,
    **changes: Any,
) -> Block:
    """Returns a PUSH block."""
    rows = grads if grads.ndim == 2 else grads.reshape(-1, 1)
    count, dim = rows.shape
    block = Block(
        Action.PUSH, spec.table_id, spec.schema_hash, dim, count, ids, rows, learning_rate, optimizer_step, 1.0
    )
    return _changed(block, changes)


def assign(spec: DenseSpec, values: NDArray[np.float32]) -> Block:
    """Returns an ASSIGN block."""
    return Block(Action.ASSIGN, spec.table_id, spec.schema_hash, 1, len(values), None, values.reshape(-1, 1))


def replace(spec: DenseSpec, values: NDArray[np.float32], optimizer_step: int) -> Block:
    """A REPLACE block."""
    rows = values.reshape(-1, 1)
    return Block(
        Action.REPLACE, spec.table_id, spec.schema_hash, 1, len(values), None, rows, optimizer_step=optimizer_step
    )


def replace_state(spec: DenseSpec, values: NDArray[np.float32], number: int) -> Block:
    """A REPLACE_STATE block."""
    block = replace(spec, values, number)
    block.action = Action.REPLACE_STATE
    return block


class RemoteShard(Protocol):
    """A shard in another process."""

    shard_index: int
    num_shards: int
    incarnation: int

    def answer(self, frame: Frame) -> Frame: ...


AnyShard = Shard | RemoteShard


def answer(shard: AnyShard, frame: Frame) -> Frame:
    """Returns the reply to a request."""
    return protocol.answer(shard, frame) if isinstance(shard, Shard) else shard.answer(frame)


def late_replies(shard: Shard) -> list[Frame]:
    """Returns the replies to deferred requests, each once."""
    return protocol.take_deferred_replies(shard)


_Answers = TypeVar("_Answers", bound=AnyShard)


class FrameClient(Generic[_Answers]):
    """Numbers requests like a worker, and sends them to a shard."""

    def __init__(self, shard: _Answers, client_id: bytes = CLIENT, epoch: int = 1) -> None:
        self.shard = shard
        self.client_id = client_id
        self.epoch = epoch
        self.seq = 0

    def frame(self, op: Op, *blocks: Block, **header: Any) -> Frame:
        """Returns a request. A push has the next number, which is not yet counted as sent."""
        values: dict[str, Any] = {
            "cluster_id": CLUSTER,
            "shard": self.shard.shard_index,
            "incarnation": self.shard.incarnation,
            "placement_version": 1,
            "client_id": self.client_id,
            "client_epoch": self.epoch,
            "request_id": 9,
            "push_seq": 0 if op is Op.PULL else self.seq + 1,
        }
        return Frame(Header(op, **{**values, **header}), list(blocks))

    def ask(self, op: Op, *blocks: Block, **header: Any) -> Frame:
        """Sends a request; returns the reply."""
        reply = answer(self.shard, self.frame(op, *blocks, **header))
        if op is not Op.PULL and reply.error is None:
            self.seq = max(self.seq, reply.header.push_seq)
        return reply

    def push(self, *blocks: Block, **header: Any) -> Frame:
        return self.ask(Op.PUSH, *blocks, **header)

    def rows(self, spec: TableSpec, *ids: int) -> list[list[float]]:
        """Returns pulled rows as lists."""
        reply = self.ask(Op.PULL, pull(spec, ids_of(*ids)))
        assert reply.error is None, reply.error
        assert reply.blocks[0].rows is not None
        rows: list[list[float]] = reply.blocks[0].rows.tolist()
        return rows

    def values(self, spec: DenseSpec) -> list[float]:
        """Returns pulled dense values as a list."""
        begin, end = spec.range_of(self.shard.shard_index, self.shard.num_shards)
        reply = self.ask(Op.PULL, pull(spec, count=end - begin))
        assert reply.error is None, reply.error
        assert reply.blocks[0].rows is not None
        values: list[float] = reply.blocks[0].rows.reshape(-1).tolist()
        return values


def code_of(reply: Frame) -> ErrorCode | None:
    """Returns the error code of a reply, or None."""
    return None if reply.error is None else reply.error.code


def message_of(reply: Frame) -> str:
    """Returns the message of an error reply."""
    assert reply.error is not None
    return reply.error.message


def _changed(block: Block, changes: dict[str, Any]) -> Block:
    for name, value in changes.items():
        setattr(block, name, value)
    return block
