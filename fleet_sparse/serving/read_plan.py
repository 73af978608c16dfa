"""The frames of one read: which rows and dense values each shard is asked for, and where they belong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import BLOCK_BYTES, HEADER_BYTES, MAX_BLOCKS

_ID_BYTES = 8


class Piece(NamedTuple):
    """What a PULL block asks for, and where its rows belong."""

    spec: TableSpec | DenseSpec
    num_values: int
    ids: NDArray[np.int64] | None
    offset: int
    places: NDArray[np.int64] | slice

    @property
    def dim(self) -> int:
        """Number of values of each row."""
        return self.spec.dim if isinstance(self.spec, TableSpec) else 1


class ShardFrame(NamedTuple):
    """The blocks of one request."""

    shard: int
    pieces: Sequence[Piece]


def frames_of_read(
    ids: Iterable[tuple[TableSpec, NDArray[np.int64]]],
    arrays: Iterable[DenseSpec],
    placement: Placement,
    max_frame_bytes: int,
) -> list[ShardFrame]:
    """Returns the frames of a read, those of shard 0 first.

    Args:
        ids: Tables, each with its ids `(n,)`.
        arrays: Dense arrays, of which all values are read.
        placement: Placement of ids and values.
        max_frame_bytes: Size of the largest frame, and of the largest reply.
    """
    pieces = _pieces(ids, arrays, placement, max_frame_bytes // 2)
    return [ShardFrame(shard, part) for shard, each in enumerate(pieces) for part in _in_frames(each, max_frame_bytes)]


def _pieces(
    ids: Iterable[tuple[TableSpec, NDArray[np.int64]]],
    arrays: Iterable[DenseSpec],
    placement: Placement,
    max_bytes: int,
) -> list[list[Piece]]:
    """Returns what each shard is asked for, in pieces of at most `max_bytes`."""
    num_shards = placement.num_shards
    pieces: list[list[Piece]] = [[] for _ in range(num_shards)]
    for spec, its_ids in ids:
        length = max(max_bytes // (4 * spec.dim + _ID_BYTES), 1)
        ends, order = [len(its_ids)], None
        if num_shards > 1:
            shards = placement.shard_of(its_ids, spec.salt)
            if (shards[1:] < shards[:-1]).any():
                order = np.argsort(shards, kind="stable")
                shards = shards[order]
            ends = np.searchsorted(shards, np.arange(num_shards), side="right").tolist()
        first = 0
        for shard, last in enumerate(ends):
            for begin in range(first, last, length):
                end = min(begin + length, last)
                places = slice(begin, end) if order is None else order[begin:end]
                pieces[shard].append(Piece(spec, end - begin, its_ids[places], 0, places))
            first = last
    for array in arrays:
        for shard in range(num_shards):
            first, last = array.range_of(shard, num_shards)
            for begin in range(first, last, max_bytes // 4):
                end = min(begin + max_bytes // 4, last)
                pieces[shard].append(Piece(array, end - begin, None, begin - first, slice(begin, end)))
    return pieces


def _in_frames(pieces: Sequence[Piece], max_frame_bytes: int) -> Iterator[list[Piece]]:
    """Yields the pieces of each frame; both the frame and its reply are within the limit."""
    frame: list[Piece] = []
    num_bytes = HEADER_BYTES
    for piece in pieces:
        its_bytes = BLOCK_BYTES + piece.num_values * (4 * piece.dim + _ID_BYTES)
        if frame and (num_bytes + its_bytes > max_frame_bytes or len(frame) == MAX_BLOCKS):
            yield frame
            frame, num_bytes = [], HEADER_BYTES
        frame.append(piece)
        num_bytes += its_bytes
    if frame:
        yield frame
