"""Rows of many files as one stream in the order of their hash; of an id that several have, the newest counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.ids import hash_ids

from .rows import Rows


class DuplicateId(Exception):
    """An id occurs twice in sources of one age.

    Attributes:
        id: The id.
    """

    def __init__(self, repeated: int) -> None:
        super().__init__(f"id {repeated} occurs twice")
        self.id = repeated


class Source(NamedTuple):
    """Rows, or removed ids, in the order of their hash."""

    blocks: Iterator[Rows | NDArray[np.int64]]
    """Each of any length. Taken one at a time, the first one only once `begin` is reached."""
    age: int
    """Of two sources that have an id, the one with the larger number is the newer."""
    begin: int
    """No hash is smaller."""


def merge(sources: Iterable[Source], salt: int) -> Iterator[Rows]:
    """The rows of all sources, each id once, block by block; an id that was removed last is not among them.

    Holds one block of each source whose hashes have been reached and not passed.

    Args:
        sources: All with states and last days of the same shapes.
        salt: Of the table.

    Raises:
        DuplicateId: An id occurs twice in sources of one age.
    """
    waiting = sorted((_Stream(source, salt) for source in sources), key=lambda stream: stream.begin, reverse=True)
    active: list[_Stream] = []
    while True:
        # A source that begins after the smallest last hash has nothing for this round.
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
        """Some of it."""
        rows = None if self.rows is None else part_of(self.rows, which)
        return _Piece(self.age, self.hashes[which], self.ids[which], rows)


class _Stream:
    """A source with what is left of the block that it is at."""

    def __init__(self, source: Source, salt: int) -> None:
        self.begin = source.begin
        self._blocks = source.blocks
        self._salt = salt
        self._rest = _Piece(source.age, np.empty(0, np.uint64), np.empty(0, np.int64), None)

    @property
    def last(self) -> int:
        """The last hash of the block."""
        return int(self._rest.hashes[-1])

    def fill(self) -> bool:
        """Goes on to the next block if nothing of this one is left; False where there is none."""
        while not len(self._rest.ids):
            block = next(self._blocks, None)
            if block is None:
                return False
            rows = block if isinstance(block, Rows) else None
            ids = block.ids if isinstance(block, Rows) else block
            self._rest = _Piece(self._rest.age, hash_ids(ids, self._salt), ids, rows)
        return True

    def take(self, bound: int) -> _Piece:
        """What the block has up to a hash; it keeps the rest."""
        count = int(np.searchsorted(self._rest.hashes, np.uint64(bound), side="right"))
        piece = self._rest.part(slice(None, count))
        self._rest = self._rest.part(slice(count, None))
        return piece


def part_of(rows: Rows, which: slice | NDArray[np.int64] | NDArray[np.bool_]) -> Rows:
    """Some of the rows, with states and days."""
    days = rows.last_days
    return Rows(rows.ids[which], rows.rows[which], rows.states[which], None if days is None else days[which])


def joined(blocks: Sequence[Rows]) -> Rows:
    """Rows of at least one block, one after the other."""
    if len(blocks) == 1:
        return blocks[0]
    ids, rows, states, days = zip(*blocks, strict=True)
    last_days = None if days[0] is None else np.concatenate(days)
    return Rows(np.concatenate(ids), np.concatenate(rows), np.concatenate(states), last_days)


def _newest(pieces: list[_Piece]) -> Rows | None:
    """The rows of pieces that lie in the same hashes, in order."""
    blocks = [piece.rows for piece in pieces if piece.rows is not None]
    if not blocks or len(pieces) == 1:
        return blocks[0] if blocks else None
    pieces.sort(key=lambda piece: piece.rows is None)  # so that a place below the number of rows is that of a row
    hashes = np.concatenate([piece.hashes for piece in pieces])
    ages = np.repeat([piece.age for piece in pieces], [len(piece.ids) for piece in pieces])
    order = np.lexsort((ages, hashes))
    is_replaced = hashes[order[1:]] == hashes[order[:-1]]
    if (twice := np.flatnonzero(is_replaced & (ages[order[1:]] == ages[order[:-1]]))).size:
        raise DuplicateId(int(np.concatenate([piece.ids for piece in pieces])[order[twice[0]]]))
    newest = order[~np.append(is_replaced, False)]
    rows = joined(blocks)
    return part_of(rows, newest[newest < len(rows.ids)])


def side_by_side(first: Iterator[Rows], second: Iterator[Rows], salt: int) -> Iterator[tuple[Rows | None, Rows | None]]:
    """Two sequences of rows in the order of their hash, cut at the same hashes: an id of both is in both of a pair.

    Args:
        first: Block by block, each of any length.
        second: Likewise, with rows of any other shape.
        salt: Of the table.
    """
    streams = [_Stream(Source(blocks, 0, 0), salt) for blocks in (first, second)]
    while active := [stream for stream in streams if stream.fill()]:
        bound = min(stream.last for stream in active)
        one, other = (stream.take(bound).rows for stream in streams)
        yield one, other
