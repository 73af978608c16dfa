"""Checks of requests, as functions of tables and job. A failed check raises `Refusal`; none changes anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAX_OPTIMIZER_STEP,
    Action,
    Block,
    FrameError,
    Header,
    Op,
)
from fleet_sparse.wire.row_dtype import RowDtype, from_frame

from ..refusal import Refusal
from ..tables.mutations import Mutation
from ..tables.row_asks import CacheTerms
from ..tables.table import Table
from .job import Job
from .table_map import TableEntry, TableMap

_FLOAT_BYTES = 4
_VERSION_AND_SLACK_BYTES = 5
_MAX_ANSWER_BLOCKS = 3
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


def find_pulls(
    tables: TableMap,
    header: Header,
    blocks: Sequence[Block],
    *,
    max_reply_bytes: int,
    cache_terms: CacheTerms | None = None,
) -> list[tuple[Block, TableEntry]]:
    """Returns the PULL blocks and their tables.

    Args:
        tables: Tables of the shard.
        header: Header of the request.
        blocks: Its blocks.
        max_reply_bytes: Largest reply to a request that asks about copies.
        cache_terms: As of `Jobs`.
    """
    pulls, has_asks = [], False
    for index, block in enumerate(blocks):
        if block.action is Action.PULL:
            entry = tables.get(block.table_id)
            if entry is None or block.schema_hash not in entry.schema_hashes:
                raise _unknown(entry, index, block)
            entry.table.check(block)
            if block.copies:
                _check_ask(entry, header, block, cache_terms)
                has_asks = True
            pulls.append((block, entry))
    if has_asks:
        num_bytes = HEADER_BYTES + sum(_most_reply_bytes(*each) for each in pulls)
        if num_bytes > max_reply_bytes:
            raise Refusal(
                ErrorCode.TOO_LARGE,
                f"frame: its reply could have {num_bytes} bytes, the limit is {max_reply_bytes}. Split the request",
            )
    return pulls


def _check_ask(entry: TableEntry, header: Header, block: Block, cache_terms: CacheTerms | None) -> None:
    where = entry.table.where
    if cache_terms is None:
        raise Refusal(ErrorCode.MALFORMED, f"{where}: asks about copies, the job has no row cache")
    if header.op is Op.PULL_EARLY:
        raise Refusal(ErrorCode.MALFORMED, f"{where}: asks about copies in a {header.op.name}")
    if block.optimizer_step:
        raise Refusal(ErrorCode.MALFORMED, f"{where}: asks about copies and for the presence of rows")


def _most_reply_bytes(block: Block, entry: TableEntry) -> int:
    """Returns the size of the largest answer to a PULL block."""
    row_bytes = block.dim * block.dtype.in_frames.itemsize
    if not block.copies:
        return BLOCK_BYTES + block.count * row_bytes
    num_states = entry.spec.update_rule.num_states
    return _MAX_ANSWER_BLOCKS * BLOCK_BYTES + block.count * (
        _VERSION_AND_SLACK_BYTES + row_bytes + _FLOAT_BYTES * num_states * block.dim
    )


def find_mutations(
    tables: TableMap, blocks: Sequence[Block], *, is_staged: bool = False, cache_terms: CacheTerms | None = None
) -> list[Mutation]:
    """Returns what all blocks but those of a pull change.

    Args:
        tables: Tables of the shard.
        blocks: Blocks of a request.
        is_staged: The mutations wait for their sync step.
        cache_terms: As of `Jobs`.
    """
    changed: set[tuple[int, int]] = set()
    mutations: list[Mutation] = []
    for index, block in enumerate(blocks):
        if block.action is Action.PULL:
            continue
        if block.action is Action.CHANGE or (block.action is Action.ASSIGN and block.ids is not None):
            changed.add((block.table_id, 0))  # its gradients come before: they are applied first
            mutations.append(_mutation_of_copies(tables, index, block, cache_terms))
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


def _mutation_of_copies(tables: TableMap, index: int, block: Block, cache_terms: CacheTerms | None) -> Mutation:
    table, rows = _changed_table(tables, index, block)
    if cache_terms is None:
        raise Refusal(
            ErrorCode.MALFORMED, f"{table.where}: action {block.action.name} of rows, the job has no row cache"
        )
    if block.optimizer_step == 0:
        raise Refusal(ErrorCode.MALFORMED, f"{table.where}: optimizer step is 0, the first push has 1")
    if block.action is Action.CHANGE:
        return table.check_change(block, rows)
    if cache_terms.num_workers > 1:
        raise Refusal(
            ErrorCode.MALFORMED,
            f"{table.where}: rows are assigned in a job of {cache_terms.num_workers} workers, should be one",
        )
    return table.check_assignment(block, rows)


def _changed_table(tables: TableMap, index: int, block: Block) -> tuple[Table, NDArray[np.float32]]:
    """Returns the table that a block changes, and its rows as float32."""
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
    return table, rows


def _mutation_of(tables: TableMap, index: int, block: Block, *, is_staged: bool) -> Mutation:
    table, rows = _changed_table(tables, index, block)
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
