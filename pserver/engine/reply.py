"""Reply: the result of a request, and how its rows are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fleet_sparse.wire.frame_format import PULLS, Action, Block, Header, Op
from fleet_sparse.wire.row_dtype import for_frame

from .early_pulls import EarlyPull
from .job import Job
from .table_map import TableEntry

_ANSWERED_WITH_ROWS = PULLS | {Op.PUSH_PULL, Op.COMMIT}


class Reply(NamedTuple):
    """The result of a request."""

    op: Op
    """WAIT if the request is deferred."""
    blocks: list[Block]
    push_seq: int
    """Newest applied push of the client."""
    step: int
    """Newest complete step."""


class DeferredReply(NamedTuple):
    """The result of a request that was deferred."""

    header: Header
    """Header of the request."""
    outcome: Reply | Exception


def read(job: Job | None, header: Header, pulls: Sequence[tuple[Block, TableEntry]]) -> tuple[Op, list[Block]]:
    """Returns op and blocks of the reply to a request that need not wait."""
    blocks = []
    for block, entry in pulls:
        blocks.append(_rows_of(block, entry))
    if job is not None:
        is_last = header.part + 1 == header.num_parts
        if header.op is Op.PULL_EARLY:
            job.early_pulls.add(header, pulls)
        elif header.op is Op.PREPARE:
            return Op.NORMS, job.prepared.norms if is_last else []
        elif is_last and header.op in (Op.PUSH_PULL, Op.COMMIT):
            blocks += map(_changed_rows, job.early_pulls.changed_by(header.client_id, header.step))
    return Op.ROWS if header.op in _ANSWERED_WITH_ROWS else Op.ACK, blocks


def _rows_of(block: Block, entry: TableEntry) -> Block:
    dtype, rows = block.dtype, for_frame(entry.table.pull(block), block.dtype)
    return Block(Action.ROWS, block.table_id, block.schema_hash, block.dim, block.count, None, rows, dtype=dtype)


def _changed_rows(early: EarlyPull) -> Block:
    block = early.block
    assert block.ids is not None, "only rows are marked as changed"
    ids = block.ids[early.changed]
    return replace(_rows_of(replace(block, count=len(ids), ids=ids), early.entry), ids=ids)
