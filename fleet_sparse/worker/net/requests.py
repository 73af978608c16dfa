"""A call's arrays as blocks of frames: which part goes to which shard, and where each reply goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import BLOCK_BYTES, HEADER_BYTES, MAX_BLOCKS, Action, Block
from fleet_sparse.wire.row_dtype import RowDtype, copy_from_frame, for_frame

from ..rows.deduplicator import UniqueIds

Outs = Sequence[NDArray[np.float32]]
"""`(n, dim)` each: rows go into them one after the other."""


class Piece(NamedTuple):
    """A block, and the parts of the caller's arrays that the reply to it goes into; None if nothing comes back."""

    block: Block
    outs: Outs | None


class CallBlocks:
    """The blocks of one call, by shard. Float32 arrays are views of the caller's where they are contiguous.

    Args:
        num_shards: Of the job.
        rows_dtype: In which rows of tables are pulled and pushed.
    """

    def __init__(self, num_shards: int, rows_dtype: RowDtype = RowDtype.FLOAT32) -> None:
        self._rows_dtype = rows_dtype
        self._of_shard: list[list[Piece]] = [[] for _ in range(num_shards)]

    def add_pull(self, spec: TableSpec, unique: UniqueIds, out: NDArray[np.float32], *, presence: bool = False) -> None:
        """The rows of `unique`, into `out` `(k, dim)`; with `presence` ones for an id that has a row, else zeros.

        Raises `ValueError` if shapes or dtypes do not fit.
        """
        ranges = self._checked_ranges(spec, unique, out, "out")
        if not out.flags.writeable:
            raise ValueError(f"table {spec.name!r}: out is read-only, rows are written into it")
        key = _key_of(spec)
        for shard, begin, end in ranges:
            if begin == end:
                continue
            ids = np.ascontiguousarray(unique.ids[begin:end])
            block = Block(
                Action.PULL,
                key.table_id,
                key.schema_hash,
                spec.dim,
                end - begin,
                ids,
                optimizer_step=int(presence),
                dtype=self._rows_dtype,
            )
            self._of_shard[shard].append(Piece(block, [out[begin:end]]))

    def add_push(
        self,
        spec: TableSpec,
        unique: UniqueIds,
        grads: NDArray[np.float32],
        *,
        learning_rate: float,
        optimizer_step: int,
        weight: float = 1.0,
        to_all: bool = False,
    ) -> None:
        """Gradients `(k, dim)` of the rows of `unique`; with `to_all` shards without ids have a block too.

        Raises `ValueError` if shapes or dtypes do not fit.
        """
        ranges = self._checked_ranges(spec, unique, grads, "gradients")
        key = _key_of(spec)
        for shard, begin, end in ranges:
            if begin == end and not to_all:
                continue
            ids, rows = np.ascontiguousarray(unique.ids[begin:end]), for_frame(grads[begin:end], self._rows_dtype)
            block = Block(
                Action.PUSH,
                key.table_id,
                key.schema_hash,
                spec.dim,
                end - begin,
                ids,
                rows,
                learning_rate,
                optimizer_step,
                weight,
                self._rows_dtype,
            )
            self._of_shard[shard].append(Piece(block, None))

    def add_dense_pull(self, spec: DenseSpec, outs: Sequence[NDArray[np.float32]], *, state: int = 0) -> None:
        """Dense values, into arrays of any shape that have `num_values` together, one after the other.

        With `state` from 1 on that state of their rule instead. Raises `ValueError` if sizes or dtypes do not fit.
        """
        check_outs(spec, outs)
        key = _key_of(spec)
        for shard, begin, end in self._dense_ranges(spec):
            block = Block(Action.PULL, key.table_id, key.schema_hash, 1, end - begin, optimizer_step=state)
            self._of_shard[shard].append(Piece(block, _range_of(outs, begin, end)))

    def add_dense_push(
        self,
        spec: DenseSpec,
        grads: NDArray[np.float32],
        *,
        learning_rate: float,
        optimizer_step: int,
        weight: float = 1.0,
    ) -> None:
        """Gradients `(num_values,)` of dense values. Raises `ValueError` if their shape or dtype does not fit."""
        self._add_dense_rows(Action.PUSH, spec, grads, "gradients", learning_rate, optimizer_step, weight)

    def add_dense_assign(self, spec: DenseSpec, values: NDArray[np.float32]) -> None:
        """Dense values `(num_values,)`. Raises `ValueError` if their shape or dtype does not fit."""
        self._add_dense_rows(Action.ASSIGN, spec, values, "values", 0.0, 0)

    def add_factors(self, spec: TableSpec | DenseSpec, factors: NDArray[np.float32]) -> None:
        """What the gradients of a table, or of each segment of a dense array, are multiplied with; for all shards."""
        key = _key_of(spec)
        rows = np.ascontiguousarray(factors, np.float32).reshape(-1, 1)
        for of_shard in self._of_shard:
            of_shard.append(Piece(Block(Action.FACTORS, key.table_id, key.schema_hash, 1, len(rows), None, rows), None))

    def frames(self, shard: int, max_bytes: int) -> list[list[Piece]]:
        """The pieces for a shard, in as many frames as the limits ask for; a block may be cut between two ids.

        Raises:
            ValueError: Dense values, which cannot be cut, or one row do not fit into a frame.
        """
        pieces = self._of_shard[shard]
        budget = max_bytes - HEADER_BYTES
        if len(pieces) <= MAX_BLOCKS and sum(_cost(piece.block) for piece in pieces) <= budget:
            return [pieces] if pieces else []
        return _split(pieces, budget)

    def _add_dense_rows(
        self,
        action: Action,
        spec: DenseSpec,
        values: NDArray[np.float32],
        what: str,
        learning_rate: float,
        optimizer_step: int,
        weight: float = 1.0,
    ) -> None:
        self._check_dense(spec, values, what)
        key = _key_of(spec)
        for shard, begin, end in self._dense_ranges(spec):
            rows = np.ascontiguousarray(values[begin:end]).reshape(-1, 1)
            block = Block(
                action, key.table_id, key.schema_hash, 1, end - begin, None, rows, learning_rate, optimizer_step, weight
            )
            self._of_shard[shard].append(Piece(block, None))

    def _dense_ranges(self, spec: DenseSpec) -> list[tuple[int, int, int]]:
        num_shards = len(self._of_shard)
        ranges = [(shard, *spec.range_of(shard, num_shards)) for shard in range(num_shards)]
        return [(shard, begin, end) for shard, begin, end in ranges if begin < end]

    def _checked_ranges(
        self, spec: TableSpec, unique: UniqueIds, rows: NDArray[np.float32], what: str
    ) -> list[tuple[int, int, int]]:
        """Shard, begin and end of every range of ids."""
        ids, counts = unique.ids, unique.num_per_shard.tolist()
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ValueError(f"table {spec.name!r}: ids are {ids.dtype} with {ids.ndim} axes, should be int64 with 1")
        if len(counts) != len(self._of_shard) or min(counts) < 0 or sum(counts) != len(ids):
            raise ValueError(
                f"table {spec.name!r}: num_per_shard is {counts}, should be {len(self._of_shard)} counts of "
                f"{len(ids)} ids"
            )
        if rows.dtype != np.float32:
            raise ValueError(f"table {spec.name!r}: {what} are {rows.dtype}, should be float32")
        if rows.shape != (len(ids), spec.dim):
            if rows.ndim == 2 and rows.shape[1] != spec.dim:
                raise ValueError(f"table {spec.name!r}: {what} have dim {rows.shape[1]}, the table has dim {spec.dim}")
            raise ValueError(f"table {spec.name!r}: {what} have shape {rows.shape}, should be {(len(ids), spec.dim)}")
        ends = list(accumulate(counts))
        return [(shard, end - count, end) for shard, (count, end) in enumerate(zip(counts, ends, strict=True))]

    @staticmethod
    def _check_dense(spec: DenseSpec, values: NDArray[np.float32], what: str) -> None:
        if values.dtype != np.float32 or values.shape != (spec.num_values,):
            raise ValueError(
                f"dense {spec.name!r}: {what} are {values.dtype} {values.shape}, should be float32 {(spec.num_values,)}"
            )


def check_outs(spec: DenseSpec, outs: Sequence[NDArray[np.float32]]) -> None:
    """Whether dense values can go into these arrays, one after the other. Raises `ValueError` if they cannot."""
    for out in outs:
        if out.dtype != np.float32 or not out.flags.carray:
            raise ValueError(f"dense {spec.name!r}: out is {out.dtype}, should be writable contiguous float32")
    num_values = sum(out.size for out in outs)
    if num_values != spec.num_values:
        raise ValueError(f"dense {spec.name!r}: out has {num_values} values, should have {spec.num_values}")


def column_bytes(block: Block) -> int:
    """Bytes of a block's columns."""
    return (0 if block.ids is None else block.ids.nbytes) + (0 if block.rows is None else block.rows.nbytes)


def fill(asked: Sequence[Block], outs: Sequence[Outs], replies: Sequence[Block]) -> str | None:
    """Copies the rows of a reply to where they go.

    Args:
        asked: The blocks of the request; its PULL blocks are answered.
        outs: Of each PULL block, where its rows go.
        replies: The blocks of the reply; those after the answers are not looked at.

    Returns:
        What is wrong with the reply; None if nothing is, and only then is anything copied.
    """
    pulls = [block for block in asked if block.action is Action.PULL]
    replies = replies[: len(pulls)]
    if [(b.table_id, b.count, b.dim, b.dtype) for b in replies] != [
        (b.table_id, b.count, b.dim, b.dtype) for b in pulls
    ]:
        return "the reply has other tables, counts, dims or dtypes than were asked for"
    for reply, of_block in zip(replies, outs, strict=True):
        assert reply.rows is not None
        begin = 0
        for out in of_block:
            copy_from_frame(reply.rows[begin : begin + len(out)], reply.dtype, out)
            begin += len(out)
    return None


def _range_of(arrays: Sequence[NDArray[np.float32]], begin: int, end: int) -> Outs:
    """The values `[begin, end)` of all that the arrays have together, as views."""
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
    """What stands for a spec in a block; computing it takes longer than sending a small frame."""
    return _Key(spec.table_id, spec.schema_hash)


def max_dense_values(max_frame_bytes: int) -> int:
    """Largest number of values of a dense array on one shard: they travel in one frame."""
    return (max_frame_bytes - HEADER_BYTES - BLOCK_BYTES) // 4


def _cost(block: Block) -> int:
    """Bytes that a block takes of its frame or of the reply to it, whichever is more."""
    reply = block.count * block.dim * block.dtype.in_frames.itemsize if block.action is Action.PULL else 0
    return BLOCK_BYTES + max(column_bytes(block), reply)


def _split(pieces: Sequence[Piece], budget: int) -> list[list[Piece]]:
    frames: list[list[Piece]] = [[]]
    free = budget
    rest = deque(pieces)
    while rest:
        piece = rest.popleft()
        block = piece.block
        bytes_per_row = (_cost(block) - BLOCK_BYTES) // max(block.count, 1)
        num_rows = (free - BLOCK_BYTES) // max(bytes_per_row, 1) if len(frames[-1]) < MAX_BLOCKS else 0
        if num_rows >= block.count:
            frames[-1].append(piece)
            free -= _cost(block)
            continue
        if block.ids is not None and num_rows > 0:
            frames[-1].append(_rows_of(piece, slice(None, num_rows)))
            rest.appendleft(_rows_of(piece, slice(num_rows, None)))
        elif frames[-1]:
            rest.appendleft(piece)
        else:
            what = "a row" if block.ids is not None else f"{block.count} dense values"
            raise ValueError(
                f"request: {what} of dim {block.dim} cannot go into a frame of {budget + HEADER_BYTES} bytes. "
                "Set FLEET_SPARSE_MAX_FRAME_BYTES higher, for workers and pservers"
            )
        frames.append([])
        free = budget
    return frames


def _rows_of(piece: Piece, rows: slice) -> Piece:
    block, outs = piece
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
    return Piece(part, None if outs is None else [out[rows] for out in outs])
