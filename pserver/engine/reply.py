"""Reply: the result of a request, and how its rows are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.wire.frame_format import PULLS, Action, Block, Header, Op
from fleet_sparse.wire.row_dtype import RowDtype, for_frame

from ..tables.row_asks import CacheTerms
from .early_pulls import EarlyPull
from .job import Job
from .table_map import TableEntry

REPLIES = dict.fromkeys(PULLS | {Op.PUSH_PULL, Op.COMMIT}, Op.ROWS) | {Op.PREPARE: Op.NORMS}
"""Ops of the replies to requests; ACK to all others."""

Outs = Sequence[NDArray[np.float32] | None]
"""Contiguous float32 memory `(count, dim)` for the rows of each PULL block of a request, or None; empty for none."""


class Reply(msgspec.Struct, frozen=True, eq=False):
    """The result of a request.

    Attributes:
        op: Op of the reply; WAIT if the request is deferred.
        blocks: The rows, or norms.
        push_seq: Newest applied push of the client.
        step: Newest complete step.
    """

    op: Op
    blocks: list[Block]
    push_seq: int
    step: int


class DeferredReply(NamedTuple):
    """The result of a request that was deferred."""

    header: Header
    """Header of the request."""
    outcome: Reply | Exception


def rows_of(block: Block, entry: TableEntry) -> Block:
    """Returns the rows that a PULL block asks for."""
    rows, dtype = entry.table.pull(block), block.dtype
    sent = rows if dtype is RowDtype.FLOAT32 else for_frame(rows, dtype)
    return Block(Action.ROWS, block.table_id, block.schema_hash, block.dim, block.count, None, sent, dtype=dtype)


def answer_of(block: Block, entry: TableEntry, terms: CacheTerms) -> list[Block]:
    """Returns the answer to a PULL block that asks about copies: blocks without rows are left out."""
    answer = entry.table.ask(block, terms)
    slack = _block_of_answer(block, None, {"slack": answer.slack})
    slack.optimizer_step = answer.clock_epoch
    blocks = [
        slack,
        _block_of_answer(block, answer.rows, {"versions": answer.versions}),
        _block_of_answer(block, answer.full_rows, {"versions": answer.full_versions, "states": answer.states}),
    ]
    return [each for each in blocks if each.count]


def _block_of_answer(asked: Block, rows: NDArray[np.float32] | None, copies: Mapping[str, NDArray[Any]]) -> Block:
    sent = rows if rows is None or asked.dtype is RowDtype.FLOAT32 else for_frame(rows, asked.dtype)
    count = len(next(iter(copies.values())))
    dtype = RowDtype.FLOAT32 if rows is None else asked.dtype
    return Block(
        Action.ROWS, asked.table_id, asked.schema_hash, asked.dim, count, None, sent, dtype=dtype, copies=copies
    )


def finish_step(
    job: Job, header: Header, pulls: Sequence[tuple[Block, TableEntry]], blocks: list[Block]
) -> list[Block]:
    """Returns the blocks of a reply in a job that counts steps, after what the request itself asks for."""
    is_last = header.part + 1 == header.num_parts
    if header.op is Op.PULL_EARLY:
        job.early_pulls.add(header, pulls)
    elif header.op is Op.PREPARE:
        return job.prepared.norms if is_last else []
    elif is_last and header.op in (Op.PUSH_PULL, Op.COMMIT):
        blocks += map(_changed_rows, job.early_pulls.changed_by(header.client_id, header.step))
    return blocks


def _changed_rows(early: EarlyPull) -> Block:
    block = early.block
    assert block.ids is not None, "only rows are marked as changed"
    ids = block.ids[early.changed]
    rows = rows_of(msgspec.structs.replace(block, count=len(ids), ids=ids), early.entry)
    rows.ids = ids
    return rows
