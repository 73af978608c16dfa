"""Workers of a step-synchronized job, which number steps, pushes and requests like real workers."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import SUM, SYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frame_format import PULLS, Block, Frame, Op

from .shards import DENSE, SGD, AnyShard, FrameClient, answer, assign, ids_of, make_shard, pull, push

SYNC_MODE, SUM_MODE = Mode(SYNC), Mode(SYNC, SUM)

_Answers = TypeVar("_Answers", bound=AnyShard)


class Worker(Generic[_Answers]):
    """Worker `index`; its client id is made of its index unless one is given.

    Attributes:
        step: The step that it pushed last.
        seq: Number of its last push.
    """

    def __init__(self, shard: _Answers, index: int, *, client_id: bytes | None = None, step: int = 0) -> None:
        self.client_id = client_id or bytes([index + 1]) * 16
        self.shard = shard
        self.index = index
        self.step = step
        self.seq = 0
        self._frames = FrameClient(shard, self.client_id)
        self._request_id = 0

    def frame(self, op: Op, *blocks: Block, **header: Any) -> Frame:
        """Its next request."""
        self._request_id += 1
        is_pull = op in PULLS
        numbers = {"push_seq": 0, "push_floor": self.seq} if is_pull else {"push_seq": self.seq + 1}
        step = 0 if op is Op.LEAVE else self.step + 1
        frame = self._frames.frame(op, *blocks, **{"request_id": self._request_id, "step": step, **numbers, **header})
        if not is_pull:
            self.seq = frame.header.push_seq
        if op in (Op.PUSH, Op.PUSH_PULL) and frame.header.part + 1 == frame.header.num_parts:
            self.step = max(self.step, frame.header.step)
        return frame

    def ask(self, op: Op, *blocks: Block, **header: Any) -> Frame:
        """The reply to its next request."""
        return answer(self.shard, self.frame(op, *blocks, **header))

    def push(self, *blocks: Block, **header: Any) -> Frame:
        return self.ask(Op.PUSH, *blocks, **header)

    def pull(self, *blocks: Block, **header: Any) -> Frame:
        return self.ask(Op.PULL, *blocks, **header)


def make_job(
    mode: Mode, num_workers: int, *specs: TableSpec | DenseSpec, shard: Shard | None = None
) -> tuple[Shard, list[Worker[Shard]]]:
    """Returns a shard with these tables, and all workers of its job."""
    made = make_shard(*specs) if shard is None else shard
    workers = [Worker(made, index) for index in range(num_workers)]
    for worker in workers:
        join(worker, num_workers, mode, begins_job=worker.index == 0)
    return made, workers


def join(worker: Worker[Shard], num_workers: int, mode: Mode = SYNC_MODE, *, begins_job: bool = False) -> None:
    """Registers a worker."""
    worker.shard.join(worker.index, num_workers, worker.client_id, mode, begins_job=begins_job)


def rows_now(shard: Shard, spec: TableSpec, *ids: int) -> list[list[float]]:
    """Returns the current rows without waiting."""
    return FrameClient(shard, b"somebody else...").rows(spec, *ids)


def rows_of(reply: Frame) -> list[list[list[float]]]:
    """Returns the rows of each block of a reply."""
    assert reply.header.op is Op.ROWS, reply
    return [block.rows.tolist() for block in reply.blocks if block.rows is not None]


def one(value: float, *ids: int, weight: float = 1.0, **changes: Any) -> Block:
    """Returns a PUSH block with one value for all floats of rows of `SGD`, by default of id 7; new rows are 0.5."""
    ids = ids or (7,)
    return push(SGD, ids_of(*ids), np.full((len(ids), 2), value, np.float32), gradient_scale=weight, **changes)


def op_of(reply: Frame) -> Op:
    """Returns the op of a reply that is not an error."""
    assert reply.error is None, reply.error
    return reply.header.op


def assign_zeros(shard: Shard) -> None:
    """Assigns 0 to all values of `DENSE`."""
    begin, end = DENSE.range_of(shard.shard_index, shard.num_shards)
    zeros = np.zeros(end - begin, np.float32)
    assert FrameClient(shard, b"somebody else...").ask(Op.ASSIGN, assign(DENSE, zeros)).error is None


def asks_for(spec: TableSpec, *ids: int) -> Block:
    """Returns a PULL block."""
    return pull(spec, ids_of(*ids))
