"""Lines: parsed lines of a data set in flat arrays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)


class Origin(NamedTuple):
    """The place in a file that a run of lines is from.

    Attributes:
        first: Index of the first of them.
        path: Their file.
        number: Number of the first one in its file, or in the output of the `pipe_command`, from 1.
    """

    first: int
    path: str
    number: int


class Lines(NamedTuple):
    """Lines, whose values lie in flat arrays, line after line; `core.kernels_lines` describes them.

    Attributes:
        num_slots: Number of slots.
        counts: `(num_lines * num_slots,)` int32: number of values of each slot of each line.
        id_starts: `(num_lines + 1,)` int64: index of each line's first integer in `ids`.
        ids: int64, values of the integer slots.
        float_starts: `(num_lines + 1,)` int64: index of each line's first float in `floats`.
        floats: float32, values of the float slots.
        origins: Where the lines are from, in ascending order.
    """

    num_slots: int
    counts: NDArray[np.int32]
    id_starts: NDArray[np.int64]
    ids: NDArray[np.int64]
    float_starts: NDArray[np.int64]
    floats: NDArray[np.float32]
    origins: tuple[Origin, ...] = ()

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return len(self.id_starts) - 1

    def part(self, begin: int, end: int) -> Lines:
        """The lines `[begin, end)`; the values are shared."""
        return self._replace(
            counts=self.counts[begin * self.num_slots : end * self.num_slots],
            id_starts=self.id_starts[begin : end + 1],
            float_starts=self.float_starts[begin : end + 1],
            origins=_origins_from(self.origins, begin),
        )

    def where(self, line: int) -> tuple[str, int]:
        """File and number of a line; an empty name if it is not known."""
        at = bisect_right(self.origins, line, key=lambda origin: origin.first) - 1
        if at < 0:
            return "", 0
        origin = self.origins[at]
        return origin.path, origin.number + line - origin.first


def joined(parts: list[Lines]) -> Lines:
    """All lines of at least one part, in order. The list is emptied, so that each array is freed once it is copied."""
    if len(parts) == 1:
        return parts.pop()
    sizes = np.cumsum([0, *(part.num_lines for part in parts)]).tolist()
    num_slots = parts[0].num_slots
    origins = tuple(
        origin._replace(first=origin.first + size)
        for part, size in zip(parts, sizes, strict=False)
        for origin in part.origins
    )
    counts = [part.counts for part in parts]
    id_starts = [part.id_starts for part in parts]
    ids = [part.ids[part.id_starts[0] : part.id_starts[-1]] for part in parts]
    float_starts = [part.float_starts for part in parts]
    floats = [part.floats[part.float_starts[0] : part.float_starts[-1]] for part in parts]
    parts.clear()
    return Lines(
        num_slots,
        _drained(counts),
        _joined_starts(id_starts),
        _drained(ids),
        _joined_starts(float_starts),
        _drained(floats),
        origins,
    )


def no_lines(num_slots: int) -> Lines:
    """Lines of which there are none."""
    start = np.zeros(1, np.int64)
    return Lines(num_slots, np.empty(0, np.int32), start, np.empty(0, np.int64), start, np.empty(0, np.float32))


def taken(lines: Lines, which: NDArray[np.int64]) -> Lines:
    """A copy of the lines with the indices `which`, without their origins."""
    id_starts, ids = _taken(lines.id_starts, lines.ids, which)
    float_starts, floats = _taken(lines.float_starts, lines.floats, which)
    counts = lines.counts.reshape(-1, lines.num_slots)[which].reshape(-1)
    return Lines(lines.num_slots, counts, id_starts, ids, float_starts, floats)


def in_batches(parts: Iterable[Lines], size: int) -> Iterator[Lines]:
    """Yields the same lines in batches of `size` lines; the last one may have fewer."""
    begun: list[Lines] = []
    num_missing = size
    for part in parts:
        begin = 0
        while part.num_lines - begin >= num_missing:
            begun.append(part.part(begin, begin + num_missing))
            begin += num_missing
            yield joined(begun)
            begun, num_missing = [], size
        if begin < part.num_lines:
            begun.append(part.part(begin, part.num_lines))
            num_missing -= part.num_lines - begin
    if begun:
        yield joined(begun)


def _origins_from(origins: tuple[Origin, ...], begin: int) -> tuple[Origin, ...]:
    moved = []
    for origin, after in zip(origins, [*origins[1:], None], strict=True):
        if after is None or after.first > begin:
            ahead = max(0, begin - origin.first)
            moved.append(Origin(origin.first + ahead - begin, origin.path, origin.number + ahead))
    return tuple(moved)


def _joined_starts(starts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    ends = np.cumsum([0, *(each[-1] - each[0] for each in starts)])
    moved = [each[:-1] - (each[0] - end) for each, end in zip(starts, ends, strict=False)]
    return np.concatenate([*moved, ends[-1:]])


def _taken(
    starts: NDArray[np.int64], values: NDArray[_Scalar], which: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[_Scalar]]:
    begins = starts[which]
    sizes = starts[which + 1] - begins
    new_starts = np.concatenate([[0], np.cumsum(sizes)])
    sources = np.arange(new_starts[-1]) + np.repeat(begins - new_starts[:-1], sizes)
    return new_starts, values[sources]


def _drained(arrays: list[NDArray[_Scalar]]) -> NDArray[_Scalar]:
    whole = np.empty(sum(map(len, arrays)), arrays[0].dtype)
    end = len(whole)
    while arrays:
        array = arrays.pop()
        whole[end - len(array) : end] = array
        end -= len(array)
    return whole
