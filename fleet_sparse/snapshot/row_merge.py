"""Merges the rows of many files in the order of their hash; for an id in several files, the newest row counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.ids import hash_ids

from .rows import Rows, joined


class DuplicateId(Exception):
    """An id occurs twice in sources of one age.

    Attributes:
        id: The repeated id.
    """

    def __init__(self, repeated: int) -> None:
        super().__init__(f"id {repeated} occurs twice")
        self.id = repeated


class Source(NamedTuple):
    """Rows, or removed ids, in the order of their hash."""

    blocks: Iterator[Rows | NDArray[np.int64]]
    """Blocks of any length. They are read one at a time, the first one when the merge reaches `begin`."""
    age: int
    """The source with the larger number is the newer one."""
    begin: int
    """Lower bound of its hashes."""


def merge(sources: Iterable[Source], salt: int) -> Iterator[Rows]:
    """Yields the rows of all sources, each id once, block by block. An id whose newest source removes it is left out.

    Holds one block of each source whose range of hashes includes the current one.

    Args:
        sources: With the same columns.
        salt: The salt of the table.

    Raises:
        DuplicateId: An id occurs twice in sources of one age.
    """
    waiting = sorted((_Stream(source, salt) for source in sources), key=lambda stream: stream.begin, reverse=True)
    active: list[_Stream] = []
    while True:
        # A source that begins after the smallest last hash contributes nothing to this round.
        while waiting and (not active or waiting[-1].begin <= min(stream.last for stream in active)):
            stream = waiting.pop()
            if stream.fill():
                active.append(stream)
        if not active:
            return
        bound = min(stream.last for stream in active)
        pieces = [piece for piece in (stream.take(bound) for stream in active) if len(piece.ids)]
        active = [stream for stream in active if stream.fill()]
        rows = _newest(pieces)
        if rows is not None and len(rows.ids):
            yield rows


class _Piece(NamedTuple):
    """A block, or a part of one."""

    age: int
    hashes: NDArray[np.uint64]
    ids: NDArray[np.int64]
    rows: Rows | None
    """None where the ids were removed."""

    def part(self, which: slice) -> _Piece:
        """A slice of it."""
        rows = None if self.rows is None else self.rows.part(which)
        return _Piece(self.age, self.hashes[which], self.ids[which], rows)


class _Stream:
    """A source with the rest of its current block."""

    def __init__(self, source: Source, salt: int) -> None:
        self.begin = source.begin
        self._blocks = source.blocks
        self._salt = salt
        self._rest = _Piece(source.age, np.empty(0, np.uint64), np.empty(0, np.int64), None)

    @property
    def last(self) -> int:
        """The last hash of the current block."""
        return int(self._rest.hashes[-1])

    def fill(self) -> bool:
        """Reads the next block if nothing is left of the current one; returns False at the end."""
        while not len(self._rest.ids):
            block = next(self._blocks, None)
            if block is None:
                return False
            rows = block if isinstance(block, Rows) else None
            ids = block.ids if isinstance(block, Rows) else block
            self._rest = _Piece(self._rest.age, hash_ids(ids, self._salt), ids, rows)
        return True

    def take(self, bound: int) -> _Piece:
        """Takes the part of the current block up to a hash."""
        count = int(np.searchsorted(self._rest.hashes, np.uint64(bound), side="right"))
        piece = self._rest.part(slice(None, count))
        self._rest = self._rest.part(slice(count, None))
        return piece


def _newest(pieces: list[_Piece]) -> Rows | None:
    """The rows of pieces that cover the same range of hashes, in order."""
    blocks = [piece.rows for piece in pieces if piece.rows is not None]
    if not blocks or len(pieces) == 1:
        return blocks[0] if blocks else None
    pieces.sort(key=lambda piece: piece.rows is None)  # so that an index below the number of rows is that of a row
    hashes = np.concatenate([piece.hashes for piece in pieces])
    ages = np.repeat([piece.age for piece in pieces], [len(piece.ids) for piece in pieces])
    order = np.lexsort((ages, hashes))
    is_replaced = hashes[order[1:]] == hashes[order[:-1]]
    if (twice := np.flatnonzero(is_replaced & (ages[order[1:]] == ages[order[:-1]]))).size:
        raise DuplicateId(int(np.concatenate([piece.ids for piece in pieces])[order[twice[0]]]))
    newest = order[~np.append(is_replaced, False)]
    rows = joined(blocks)
    return rows.part(newest[newest < len(rows.ids)])


def side_by_side(first: Iterator[Rows], second: Iterator[Rows], salt: int) -> Iterator[tuple[Rows | None, Rows | None]]:
    """Cuts two sequences of rows, in the order of their hash, at the same hashes: a common id is in both of one pair.

    Args:
        first: Blocks of any length.
        second: Blocks of any length, with the same or other columns.
        salt: The salt of the table.
    """
    streams = [_Stream(Source(blocks, 0, 0), salt) for blocks in (first, second)]
    while active := [stream for stream in streams if stream.fill()]:
        bound = min(stream.last for stream in active)
        one, other = (stream.take(bound).rows for stream in streams)
        yield one, other
