"""Requests: the frames of one call, which part of the caller's arrays goes to which shard, and where replies go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import BLOCK_BYTES, HEADER_BYTES, MAX_BLOCKS, Action, Block, Op
from fleet_sparse.wire.row_dtype import RowDtype, copy_from_frame, for_frame

from ..rows.deduplicator import UniqueIds
from ..rows.row_batch import RowBatch
from .shard_link import Outs, Request


class DenseUpdate(NamedTuple):
    """Gradients of one dense array in one step, and where its new values go."""

    spec: DenseSpec
    grads: NDArray[np.float32]
    """`(spec.num_values,)`."""
    outs: Sequence[NDArray[np.float32]] | None
    """Contiguous arrays of any shape, with `spec.num_values` values together; the values are written to one after the
    other. None: the new values are not read."""
    learning_rate: float
    optimizer_step: int = 0
    """Step count t of the update rule, from 1."""


class Requests:
    """Builds the requests of one call. Float32 arrays are sent from the caller's memory where they are contiguous.

    Args:
        op: Op of every request.
        num_shards: Number of shards of the job.
        step: Step number in every request; 0 in a job that does not count steps.
        rows_dtype: Dtype of rows of tables on the wire.
        weight: Factor on all gradients.
        to_all: Every shard gets a request, and every table that is pushed has a block in it, even without ids.
    """

    def __init__(
        self,
        op: Op,
        num_shards: int,
        *,
        step: int = 0,
        rows_dtype: RowDtype = RowDtype.FLOAT32,
        weight: float = 1.0,
        to_all: bool = False,
    ) -> None:
        self._op = op
        self._step = step
        self._rows_dtype = rows_dtype
        self._weight = weight
        self._to_all = to_all
        self._num_shards = num_shards
        self._blocks: list[list[Block]] = [[] for _ in range(num_shards)]
        self._outs: list[list[Outs]] = [[] for _ in range(num_shards)]  # one for each PULL block

    def add_pull(self, batch: RowBatch, *, presence: bool = False) -> None:
        """Asks for rows, which are written to `batch.values`; with `presence`, for ones if an id has a row, else zeros.

        Raises `ValueError` if shapes or dtypes do not fit.
        """
        spec, unique, values = batch.spec, batch.unique, batch.values
        counts = _checked_counts(self._num_shards, spec, unique, values, "out")
        if not values.flags.writeable:
            raise ValueError(f"table {spec.name!r}: out is read-only, rows are written into it")
        key, begin = _key_of(spec), 0
        for shard, count in enumerate(counts):
            if count:
                end = begin + count
                ids = np.ascontiguousarray(unique.ids[begin:end])
                self._blocks[shard].append(
                    Block(
                        Action.PULL,
                        key.table_id,
                        key.schema_hash,
                        spec.dim,
                        count,
                        ids,
                        optimizer_step=int(presence),
                        dtype=self._rows_dtype,
                    )
                )
                self._outs[shard].append((values[begin:end],))
                begin = end

    def add_push(self, batch: RowBatch) -> None:
        """Sends the gradients `batch.values`. Raises `ValueError` if shapes or dtypes do not fit."""
        spec, unique, grads = batch.spec, batch.unique, batch.values
        counts = _checked_counts(self._num_shards, spec, unique, grads, "gradients")
        key, begin = _key_of(spec), 0
        for shard, count in enumerate(counts):
            if not count and not self._to_all:
                continue
            end = begin + count
            self._blocks[shard].append(
                Block(
                    Action.PUSH,
                    key.table_id,
                    key.schema_hash,
                    spec.dim,
                    count,
                    np.ascontiguousarray(unique.ids[begin:end]),
                    for_frame(grads[begin:end], self._rows_dtype),
                    batch.learning_rate,
                    batch.optimizer_step,
                    self._weight,
                    self._rows_dtype,
                )
            )
            begin = end

    def add_dense_pull(self, spec: DenseSpec, outs: Outs, *, state: int = 0) -> None:
        """Asks for dense values, which are written to arrays of any shape with `num_values` together, in order.

        With `state` from 1 on, asks for that state of their rule instead. Raises `ValueError` if sizes or dtypes do
        not fit.
        """
        check_outs(spec, outs)
        key = _key_of(spec)
        for shard, begin, end in self._dense_ranges(spec):
            self._blocks[shard].append(
                Block(Action.PULL, key.table_id, key.schema_hash, 1, end - begin, optimizer_step=state)
            )
            self._outs[shard].append(_range_of(outs, begin, end))

    def add_dense_push(self, update: DenseUpdate) -> None:
        """Sends gradients of dense values. Raises `ValueError` if their shape or dtype does not fit."""
        spec, grads = update.spec, update.grads
        self._add_dense(Action.PUSH, spec, grads, "gradients", update.learning_rate, update.optimizer_step)

    def add_dense_assign(self, spec: DenseSpec, values: NDArray[np.float32]) -> None:
        """Sends dense values `(num_values,)`. Raises `ValueError` if their shape or dtype does not fit."""
        self._add_dense(Action.ASSIGN, spec, values, "values", 0.0, 0)

    def add_dense_replacement(
        self, spec: DenseSpec, values: NDArray[np.float32], states: Sequence[NDArray[np.float32]], optimizer_step: int
    ) -> None:
        """Sends dense values `(num_values,)`, each state `(num_values,)` of their rule, and the rule's t.

        Raises `ValueError` if a shape or dtype does not fit.
        """
        self._add_dense(Action.REPLACE, spec, values, "values", 0.0, optimizer_step)
        for number, state in enumerate(states, start=1):
            self._add_dense(Action.REPLACE_STATE, spec, state, f"states {number}", 0.0, number)

    def add_factors(self, spec: TableSpec | DenseSpec, factors: NDArray[np.float32]) -> None:
        """Sends all shards the factors on the gradients of a table, or of each segment of a dense array."""
        key = _key_of(spec)
        rows = np.ascontiguousarray(factors, np.float32).reshape(-1, 1)
        for blocks in self._blocks:
            blocks.append(Block(Action.FACTORS, key.table_id, key.schema_hash, 1, len(rows), None, rows))

    def build(self, max_frame_bytes: int) -> dict[int, list[Request]]:
        """The requests by shard: one frame for each, or several if the limits demand it.

        A block may be split between two ids.

        Raises:
            ValueError: One row, or dense values, which cannot be split, do not fit into a frame.
        """
        budget = max_frame_bytes - HEADER_BYTES
        built: dict[int, list[Request]] = {}
        for shard, blocks in enumerate(self._blocks):
            if not blocks and not self._to_all:
                continue
            num_bytes, cost = _sizes_of(blocks)
            if cost <= budget and len(blocks) <= MAX_BLOCKS:
                built[shard] = [Request(self._op, blocks, num_bytes, self._step, shard=shard, outs=self._outs[shard])]
                continue
            frames = _split(blocks, self._outs[shard], budget)
            built[shard] = [
                Request(self._op, of_frame, _sizes_of(of_frame)[0], self._step, part, len(frames), shard, outs)
                for part, (of_frame, outs) in enumerate(frames)
            ]
        return built

    def _add_dense(
        self,
        action: Action,
        spec: DenseSpec,
        values: NDArray[np.float32],
        what: str,
        learning_rate: float,
        optimizer_step: int,
    ) -> None:
        if values.dtype != np.float32 or values.shape != (spec.num_values,):
            raise ValueError(
                f"dense {spec.name!r}: {what} are {values.dtype} {values.shape}, should be float32 {(spec.num_values,)}"
            )
        key = _key_of(spec)
        weight = self._weight if action is Action.PUSH else 1.0
        for shard, begin, end in self._dense_ranges(spec):
            rows = np.ascontiguousarray(values[begin:end]).reshape(-1, 1)
            self._blocks[shard].append(
                Block(
                    action,
                    key.table_id,
                    key.schema_hash,
                    1,
                    end - begin,
                    None,
                    rows,
                    learning_rate,
                    optimizer_step,
                    weight,
                )
            )

    def _dense_ranges(self, spec: DenseSpec) -> list[tuple[int, int, int]]:
        """Shard, begin and end of every range that is not empty."""
        ranges = [(shard, *spec.range_of(shard, self._num_shards)) for shard in range(self._num_shards)]
        return [(shard, begin, end) for shard, begin, end in ranges if begin < end]


def max_dense_values(max_frame_bytes: int) -> int:
    """Returns the largest number of values of a dense array on one shard: they travel in one frame."""
    return (max_frame_bytes - HEADER_BYTES - BLOCK_BYTES) // 4


def check_outs(spec: DenseSpec, outs: Outs) -> None:
    """Raises `ValueError` if dense values cannot be written to these arrays, one after the other."""
    for out in outs:
        if out.dtype != np.float32 or not out.flags.carray:
            raise ValueError(f"dense {spec.name!r}: out is {out.dtype}, should be writable contiguous float32")
    num_values = sum(out.size for out in outs)
    if num_values != spec.num_values:
        raise ValueError(f"dense {spec.name!r}: out has {num_values} values, should have {spec.num_values}")


def fill(request: Request, replies: Sequence[Block]) -> str | None:
    """Copies the rows of a reply into the arrays that wait for them.

    Args:
        request: Its PULL blocks are answered, in order.
        replies: Blocks of the reply; those after the answers are ignored.

    Returns:
        What is wrong with the reply; None if it is right, and only then is anything copied.
    """
    outs = request.outs
    if not outs:
        return None
    number = 0
    for block in request.blocks:
        if block.action is not Action.PULL:
            continue
        reply = replies[number] if number < len(replies) else None
        if (
            reply is None
            or reply.table_id != block.table_id
            or reply.count != block.count
            or reply.dim != block.dim
            or reply.dtype is not block.dtype
        ):
            return "the reply has other tables, counts, dims or dtypes than the request"
        number += 1
    for reply, of_block in zip(replies, outs, strict=False):
        assert reply.rows is not None
        begin = 0
        for out in of_block:
            copy_from_frame(reply.rows[begin : begin + len(out)], reply.dtype, out)
            begin += len(out)
    return None


def _checked_counts(
    num_shards: int, spec: TableSpec, unique: UniqueIds, rows: NDArray[np.float32], what: str
) -> list[int]:
    """Number of ids of each shard."""
    ids = unique.ids
    counts: list[int] = unique.num_per_shard.tolist()
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(f"table {spec.name!r}: ids are {ids.dtype} with {ids.ndim} axes, should be int64 with 1")
    if len(counts) != num_shards or min(counts) < 0 or sum(counts) != len(ids):
        raise ValueError(
            f"table {spec.name!r}: num_per_shard is {counts}, should be {num_shards} counts of {len(ids)} ids"
        )
    if rows.dtype != np.float32:
        raise ValueError(f"table {spec.name!r}: {what} are {rows.dtype}, should be float32")
    if rows.shape != (len(ids), spec.dim):
        if rows.ndim == 2 and rows.shape[1] != spec.dim:
            raise ValueError(f"table {spec.name!r}: {what} have dim {rows.shape[1]}, the table has dim {spec.dim}")
        raise ValueError(f"table {spec.name!r}: {what} have shape {rows.shape}, should be {(len(ids), spec.dim)}")
    return counts


def _range_of(arrays: Outs, begin: int, end: int) -> Outs:
    """Values `[begin, end)` of all values that the arrays have together, as views."""
    parts, offset = [], 0
    for array in arrays:
        first, last = max(begin - offset, 0), min(end - offset, array.size)
        if first < last:
            parts.append(array.reshape(-1, 1)[first:last])
        offset += array.size
    return parts


class _Key(NamedTuple):
    table_id: int
    schema_hash: int


@lru_cache(maxsize=4096)
def _key_of(spec: TableSpec | DenseSpec) -> _Key:
    """Identifies a spec in a block; computing it takes longer than sending a small frame."""
    return _Key(spec.table_id, spec.schema_hash)


def _sizes_of(blocks: Sequence[Block]) -> tuple[int, int]:
    """Bytes of the columns of these blocks, and bytes of a frame of them or of its reply, whichever is larger."""
    num_bytes = cost = 0
    for block in blocks:
        of_block = (0 if block.ids is None else block.ids.nbytes) + (0 if block.rows is None else block.rows.nbytes)
        num_bytes += of_block
        if block.action is Action.PULL:
            of_block = max(of_block, block.count * block.dim * block.dtype.in_frames.itemsize)
        cost += BLOCK_BYTES + of_block
    return num_bytes, cost


def _split(blocks: Sequence[Block], outs: Sequence[Outs], budget: int) -> list[tuple[list[Block], list[Outs]]]:
    frames: list[tuple[list[Block], list[Outs]]] = [([], [])]
    free = budget
    outs_left = deque(outs)
    left = deque((block, outs_left.popleft() if block.action is Action.PULL else None) for block in blocks)
    while left:
        block, of_block = left.popleft()
        of_frame, frame_outs = frames[-1]
        cost = _sizes_of([block])[1]
        bytes_per_row = (cost - BLOCK_BYTES) // max(block.count, 1)
        num_rows = (free - BLOCK_BYTES) // max(bytes_per_row, 1) if len(of_frame) < MAX_BLOCKS else 0
        if num_rows >= block.count:
            of_frame.append(block)
            if of_block is not None:
                frame_outs.append(of_block)
            free -= cost
            continue
        if block.ids is not None and num_rows > 0:
            part, part_outs = _rows_of(block, of_block, slice(None, num_rows))
            of_frame.append(part)
            if part_outs is not None:
                frame_outs.append(part_outs)
            left.appendleft(_rows_of(block, of_block, slice(num_rows, None)))
        elif of_frame:
            left.appendleft((block, of_block))
        else:
            what = "a row" if block.ids is not None else f"{block.count} dense values"
            raise ValueError(
                f"request: {what} of dim {block.dim} cannot go into a frame of {budget + HEADER_BYTES} bytes. "
                "Set FLEET_SPARSE_MAX_FRAME_BYTES higher, for workers and pservers"
            )
        frames.append(([], []))
        free = budget
    return frames


def _rows_of(block: Block, outs: Outs | None, rows: slice) -> tuple[Block, Outs | None]:
    assert block.ids is not None
    ids = block.ids[rows]
    part = Block(
        block.action,
        block.table_id,
        block.schema_hash,
        block.dim,
        len(ids),
        ids,
        None if block.rows is None else block.rows[rows],
        block.learning_rate,
        block.optimizer_step,
        block.gradient_scale,
        block.dtype,
    )
    return part, None if outs is None else [out[rows] for out in outs]
