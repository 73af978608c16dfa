"""Checks of requests, as functions of tables and job. A failed check raises `Refusal`; none changes anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import MAX_OPTIMIZER_STEP, Action, Block, FrameError, Header, Op
from fleet_sparse.wire.row_dtype import RowDtype, from_frame

from ..refusal import Refusal
from ..tables.mutations import Mutation
from .job import Job
from .table_map import TableEntry, TableMap

SYNC_OPS = frozenset({Op.PULL_EARLY, Op.PREPARE, Op.COMMIT})
STEP_OPS = SYNC_OPS | {Op.LEAVE}


def check_step(job: Job | None, ended: FrameError | None, header: Header) -> None:
    """Checks a request with a step, or with an op of `STEP_OPS`.

    Args:
        job: The job whose steps are counted; None if there is none.
        ended: Why the job before it ended; None if none did.
        header: Header of the request.
    """
    if ended is not None and (job is None or job.worker_of(header) is None):
        raise Refusal.because(ended)
    if job is None:
        if header.op in STEP_OPS:
            raise Refusal(ErrorCode.MALFORMED, f"header: op {header.op.name} in a job that does not count steps")
        return
    if job.worker_of(header) is None:
        raise Refusal(ErrorCode.MALFORMED, "header: its client is not a worker of the job. Register it first")
    if header.op in SYNC_OPS and not job.is_sync:
        raise Refusal(ErrorCode.MALFORMED, f"header: op {header.op.name} in a job that is not sync")
    if header.op is Op.ASSIGN:
        raise Refusal(ErrorCode.MALFORMED, f"header: ASSIGN with step {header.step}, should have none")
    if job.failure is not None:
        raise Refusal.because(job.failure)


def find_pulls(tables: TableMap, blocks: Sequence[Block]) -> list[tuple[Block, TableEntry]]:
    """Returns the PULL blocks and their tables."""
    pulls = []
    for index, block in enumerate(blocks):
        if block.action is Action.PULL:
            entry = tables.get(block.table_id)
            if entry is None or block.schema_hash not in entry.schema_hashes:
                raise _unknown(entry, index, block)
            entry.table.check(block)
            pulls.append((block, entry))
    return pulls


def find_mutations(tables: TableMap, blocks: Sequence[Block], *, is_staged: bool = False) -> list[Mutation]:
    """Returns what all blocks but those of a pull change.

    Args:
        tables: Tables of the shard.
        blocks: Blocks of a request.
        is_staged: The mutations wait for their sync step.
    """
    changed: set[tuple[int, int]] = set()
    mutations = []
    for index, block in enumerate(blocks):
        if block.action is Action.PULL:
            continue
        changes = block.table_id, block.optimizer_step if block.action is Action.REPLACE_STATE else 0
        if changes in changed:
            raise Refusal(ErrorCode.MALFORMED, f"block {index}: its table has another push in this frame")
        changed.add(changes)
        mutations.append(_mutation_of(tables, index, block, is_staged=is_staged))
    return mutations


def find_factors(tables: TableMap, blocks: Sequence[Block]) -> dict[int, NDArray[np.float32]]:
    """Returns the factors of the FACTORS blocks, by table id."""
    factors = {}
    for index, block in enumerate(blocks):
        if block.action is Action.FACTORS:
            entry = tables.get(block.table_id)
            if entry is None or block.schema_hash not in entry.schema_hashes:
                raise _unknown(entry, index, block)
            table = entry.table
            count = table.num_parameters
            if block.rows is None or block.rows.shape != (count, 1):
                raise Refusal(ErrorCode.MALFORMED, f"{table.where}: {block.count} factors, there should be {count}")
            factors[block.table_id] = from_frame(block.rows, block.dtype).reshape(-1)
            if not np.all((block.rows >= 0) & (block.rows <= 1)):
                raise Refusal(ErrorCode.NOT_FINITE, f"{table.where}: factors are not all from 0 to 1")
    return factors


def _mutation_of(tables: TableMap, index: int, block: Block, *, is_staged: bool) -> Mutation:
    entry = tables.get(block.table_id)
    if entry is None or block.schema_hash not in entry.schema_hashes:
        raise _unknown(entry, index, block)
    table = entry.table
    table.check(block)
    if not entry.schema_hashes[block.schema_hash]:
        raise Refusal(ErrorCode.SCHEMA, f"{table.where}: it is read-only for this client, nothing can be pushed")
    if block.rows is None:
        raise Refusal(ErrorCode.MALFORMED, f"{table.where}: action {block.action.name} without rows")
    if block.optimizer_step > MAX_OPTIMIZER_STEP:
        raise Refusal(
            ErrorCode.MALFORMED,
            f"{table.where}: optimizer step is {block.optimizer_step}, at most {MAX_OPTIMIZER_STEP} is accepted",
        )
    rows: NDArray[np.float32] = block.rows  # type: ignore[assignment]  # float32 if its dtype says so
    if block.dtype is not RowDtype.FLOAT32:
        rows = table.widened(block.rows, block.dtype)
    if block.action is Action.ASSIGN:
        return table.check_assignment(block, rows)
    if block.action in (Action.REPLACE, Action.REPLACE_STATE):
        return table.check_replacement(block, rows)
    if block.action is not Action.PUSH:
        raise Refusal(ErrorCode.MALFORMED, f"{table.where}: action {block.action.name} in a push")
    if block.optimizer_step == 0:
        raise Refusal(ErrorCode.MALFORMED, f"{table.where}: optimizer step is 0, the first push has 1")
    return table.check_push(block, rows, is_staged=is_staged)


def _unknown(entry: TableEntry | None, index: int, block: Block) -> Refusal:
    """Returns why a block is refused that names no table of the shard, or none of its specs."""
    if entry is None:
        return Refusal(ErrorCode.UNKNOWN_TABLE, f"block {index}: no table has number {block.table_id:#010x} here")
    return Refusal(
        ErrorCode.SCHEMA,
        f"{entry.table.where}: schema {block.schema_hash:016x} is not one that a worker registered",
    )
