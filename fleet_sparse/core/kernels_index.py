"""Kernels of the index: id -> row index, by open addressing in 1024 segments that grow alone.

A segment is chosen by 10 bits of the id's hash, below the 14 that choose the bucket, so that every bucket spreads over
all segments. A segment of class c has 2^c cells; segment s of class c begins at cell `(1024 + s) << c` of one reserved
array, so that each class of each segment has a place of its own. A segment grows by moving into the next class; the
memory of the old one may be returned to the system.

A cell is two int64: the id, and its row index + 1. Fresh memory is zero, so a cell whose second number is 0 is empty,
and all 2^64 ids are ids.

Segments grow one after the other in the order of their addresses, the first at a total load of 0.55, the last at 0.70:
a doubling takes work and memory in small portions, at addresses that are known ahead. A segment whose own load reaches
0.75 before its turn grows at once. `growth` has the state: (rows, next segment in turn, its class).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ids import BUCKET_BITS
from .intrinsics import prefetch_read, prefetch_write
from .jit import FLOAT32_IN, FLOAT32S, FLOAT64_IN, INT32_IN, INT64, INT64_IN, INT64S, UINT8S, UINT64, inlined, kernel
from .kernels_bitmap import has_bit
from .kernels_hash import splitmix64
from .kernels_initial import write_initial

NUM_SEGMENTS = 1024
FIRST_CLASS = 2
CELL_BYTES = 16

_SEGMENTS, _SEGMENT_SHIFT, _SEGMENT_MASK = np.uint64(NUM_SEGMENTS), np.uint64(40), np.uint64(NUM_SEGMENTS - 1)
_BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
_FIRST_LOAD, _LOAD_STEP, _LOAD_SHIFT = np.uint64(563 << 10), np.uint64(153), np.uint64(10)  # 2^20 is a load of 1
_AHEAD, _ZERO, _ONE, _TWO, _THREE = np.uint64(16), np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)


@inlined
def _segment_of(h: np.uint64) -> np.uint64:
    return (h >> _SEGMENT_SHIFT) & _SEGMENT_MASK


@inlined
def _begin(segment: np.uint64, size_class: np.uint64) -> np.uint64:
    return (_SEGMENTS + segment) << size_class


@inlined
def cells_of(segment: np.uint64, classes: NDArray[np.uint8]) -> tuple[np.uint64, np.uint64]:
    """The cells of a segment, `[begin, end)`."""
    size_class = np.uint64(classes[segment])
    return _begin(segment, size_class), _begin(segment + _ONE, size_class)


@inlined
def _rows_before_turn(segment: np.uint64, size_class: np.uint64) -> np.uint64:
    return ((_FIRST_LOAD + _LOAD_STEP * segment) << size_class) >> _LOAD_SHIFT


@inlined
def _limit(size_class: np.uint64) -> np.uint64:
    # Below the number of cells in every class, so that a search always ends at an empty one.
    return (_THREE << size_class) >> _TWO


@inlined
def _home(h: np.uint64, classes: NDArray[np.uint8]) -> np.uint64:
    segment = _segment_of(h)
    size_class = np.uint64(classes[segment])
    return _begin(segment, size_class) + (h & ((_ONE << size_class) - _ONE))


@inlined
def _search(cells: NDArray[np.int64], begin: np.uint64, mask: np.uint64, h: np.uint64, id_: np.int64) -> np.uint64:
    """The cell that holds the id, or the empty one where it would be."""
    cell = h & mask
    while cells[_TWO * (begin + cell) + _ONE] != 0 and cells[_TWO * (begin + cell)] != id_:
        cell = (cell + _ONE) & mask
    return begin + cell


@kernel(INT64S, UINT8S, UINT64, INT64_IN, INT64S)
def find(
    cells: NDArray[np.int64],
    classes: NDArray[np.uint8],
    salt: np.uint64,
    ids: NDArray[np.int64],
    row_indices: NDArray[np.int64],
) -> None:
    """Writes the row index of each id, -1 for one without a row."""
    n = np.uint64(ids.shape[0])
    # First all hashes, stored in the output: this loop is vectorised, and each hash is needed twice below.
    for i in range(n):
        row_indices[i] = splitmix64(np.uint64(ids[i]) ^ salt)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_read(cells, _TWO * _home(np.uint64(row_indices[i + _AHEAD]), classes))
        h = np.uint64(row_indices[i])
        segment = _segment_of(h)
        size_class = np.uint64(classes[segment])
        cell = _search(cells, _begin(segment, size_class), (_ONE << size_class) - _ONE, h, ids[i])
        row_indices[i] = cells[_TWO * cell + _ONE] - 1


@kernel(INT64S, UINT8S, UINT64, INT32_IN, INT64, INT64_IN, INT64S, result=INT64)
def find_owned(
    cells: NDArray[np.int64],
    classes: NDArray[np.uint8],
    salt: np.uint64,
    shard_of_bucket: NDArray[np.int32],
    shard: int,
    ids: NDArray[np.int64],
    row_indices: NDArray[np.int64],
) -> int:
    """Does what `find` does, and counts the ids that another shard owns, without hashing them a second time.

    Args:
        cells: With `classes`, `salt`, `ids` and `row_indices`, as in `find`.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        shard: The shard that should own the ids.

    Returns:
        The number of misrouted ids.
    """
    n = np.uint64(ids.shape[0])
    num_misrouted = 0
    for i in range(n):
        row_indices[i] = splitmix64(np.uint64(ids[i]) ^ salt)
    for i in range(n):
        num_misrouted += shard_of_bucket[np.uint64(row_indices[i]) >> _BUCKET_SHIFT] != shard
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_read(cells, _TWO * _home(np.uint64(row_indices[i + _AHEAD]), classes))
        h = np.uint64(row_indices[i])
        segment = _segment_of(h)
        size_class = np.uint64(classes[segment])
        cell = _search(cells, _begin(segment, size_class), (_ONE << size_class) - _ONE, h, ids[i])
        row_indices[i] = cells[_TWO * cell + _ONE] - 1
    return num_misrouted


@kernel(INT64_IN, UINT64, INT64S)
def hash_each(ids: NDArray[np.int64], salt: np.uint64, hashes: NDArray[np.int64]) -> None:
    """Writes the hash of each id."""
    for i in range(np.uint64(ids.shape[0])):
        hashes[i] = splitmix64(np.uint64(ids[i]) ^ salt)


@inlined
def _grow(cells: NDArray[np.int64], classes: NDArray[np.uint8], salt: np.uint64, segment: np.uint64) -> bool:
    """Moves a segment into the next class; returns False and changes nothing if the reserved array is too short."""
    size_class = np.uint64(classes[segment])
    old_begin, old_end = _begin(segment, size_class), _begin(segment + _ONE, size_class)
    begin, mask = _begin(segment, size_class + _ONE), (_TWO << size_class) - _ONE
    if _TWO * (begin + mask) + _ONE >= np.uint64(cells.shape[0]):
        return False
    for cell in range(old_begin, old_end):
        row = cells[_TWO * cell + _ONE]
        if row != 0:
            id_ = cells[_TWO * cell]
            target = _search(cells, begin, mask, splitmix64(np.uint64(id_) ^ salt), id_)
            cells[_TWO * target] = id_
            cells[_TWO * target + _ONE] = row
    classes[segment] = np.uint8(size_class + _ONE)
    return True


@inlined
def _grow_in_turn(
    cells: NDArray[np.int64], classes: NDArray[np.uint8], salt: np.uint64, growth: NDArray[np.int64]
) -> bool:
    """Grows the segments whose turn it is at the present number of rows."""
    while np.uint64(growth[0]) >= _rows_before_turn(np.uint64(growth[1]), np.uint64(growth[2])):
        segment = np.uint64(growth[1])
        if np.int64(classes[segment]) == growth[2] and not _grow(cells, classes, salt, segment):
            return False
        growth[1] += 1
        if growth[1] == NUM_SEGMENTS:
            growth[1] = 0
            growth[2] += 1
    return True


@kernel(
    *(INT64S, UINT8S, INT64S, INT64S, UINT64, INT64_IN, INT64_IN, INT64S),
    *(FLOAT32S, INT64, FLOAT32S, INT64, INT64, INT64, INT64, FLOAT64_IN, UINT64, FLOAT32_IN),
    result=INT64,
)
def find_or_create(
    cells: NDArray[np.int64],
    classes: NDArray[np.uint8],
    num_used: NDArray[np.int64],
    growth: NDArray[np.int64],
    salt: np.uint64,
    ids: NDArray[np.int64],
    hashes: NDArray[np.int64],
    row_indices: NDArray[np.int64],
    rows: NDArray[np.float32],
    row_stride: int,
    states: NDArray[np.float32],
    state_stride: int,
    state_offset: int,
    dim: int,
    kind: int,
    values: NDArray[np.float64],
    stream: np.uint64,
    initial_state: NDArray[np.float32],
) -> int:
    """Writes the row index of each id; creates a row, with initial value and state, for an id without one.

    Index, rows and `growth` always agree when it returns. `num_used` counts the cells in use of each segment. The
    caller makes sure that `rows` and `states` have room for all of `ids`. `hashes` has the hash of each id; it may be
    the same array as `row_indices`.

    Returns:
        The number of `ids` done: all, or fewer if a segment had to grow and the reserved array has no room.
    """
    n = np.uint64(ids.shape[0])
    d, num_states = np.uint64(dim), np.uint64(initial_state.shape[0])
    next_turn = _rows_before_turn(np.uint64(growth[1]), np.uint64(growth[2]))
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(cells, _TWO * _home(np.uint64(hashes[i + _AHEAD]), classes))
        h = np.uint64(hashes[i])
        segment = _segment_of(h)
        size_class = np.uint64(classes[segment])
        cell = _search(cells, _begin(segment, size_class), (_ONE << size_class) - _ONE, h, ids[i])
        if cells[_TWO * cell + _ONE] != 0:
            row_indices[i] = cells[_TWO * cell + _ONE] - 1
            continue
        if np.uint64(num_used[segment]) >= _limit(size_class) and not _grow(cells, classes, salt, segment):
            return int(i)
        row = np.uint64(growth[0])
        if row >= next_turn:
            if not _grow_in_turn(cells, classes, salt, growth):
                return int(i)
            next_turn = _rows_before_turn(np.uint64(growth[1]), np.uint64(growth[2]))
        if np.uint64(classes[segment]) != size_class:
            size_class = np.uint64(classes[segment])
            cell = _search(cells, _begin(segment, size_class), (_ONE << size_class) - _ONE, h, ids[i])
        write_initial(ids[i], d, kind, values, stream, rows, row * np.uint64(row_stride))
        state = row * np.uint64(state_stride) + np.uint64(state_offset)
        for k in range(num_states):
            for j in range(d):
                states[state + k * d + j] = initial_state[k]
        growth[0] += 1
        num_used[segment] += 1
        cells[_TWO * cell] = ids[i]
        cells[_TWO * cell + _ONE] = growth[0]
        row_indices[i] = row
    return int(n)


@kernel(INT64S, UINT8S, UINT8S, INT64S, INT64S)
def list_ids(
    cells: NDArray[np.int64],
    classes: NDArray[np.uint8],
    is_wanted: NDArray[np.uint8],
    ids: NDArray[np.int64],
    row_indices: NDArray[np.int64],
) -> None:
    """Writes ids and row indices of the rows whose bit in `is_wanted` is 1, in the order of the cells.

    Both outputs have as many elements as there are such rows.
    """
    num_found = np.uint64(0)
    for segment in range(_SEGMENTS):
        begin, end = cells_of(np.uint64(segment), classes)
        for cell in range(begin, end):
            row = cells[_TWO * cell + _ONE] - 1
            if row >= 0 and has_bit(is_wanted, np.uint64(row)):
                ids[num_found] = cells[_TWO * cell]
                row_indices[num_found] = row
                num_found += _ONE


@inlined
def _find_turn(growth: NDArray[np.int64]) -> None:
    """Sets the segment next in turn, and its class, as if there had never been more rows."""
    growth[1] = 0
    growth[2] = FIRST_CLASS
    while np.uint64(growth[0]) >= _rows_before_turn(np.uint64(growth[1]), np.uint64(growth[2])):
        growth[1] += 1
        if growth[1] == NUM_SEGMENTS:
            growth[1] = 0
            growth[2] += 1


@kernel(UINT8S, INT64S, INT64)
def set_classes(classes: NDArray[np.uint8], growth: NDArray[np.int64], num_rows: int) -> None:
    """Gives the segments of an index without rows the classes that they have once it grew to `num_rows` rows."""
    growth[0] = num_rows
    _find_turn(growth)
    growth[0] = 0
    for s in range(NUM_SEGMENTS):
        classes[s] = np.uint8(growth[2] + (1 if s < growth[1] else 0))


@kernel(INT64S, UINT8S, INT64S, INT64S, UINT64, UINT8S, INT64_IN, INT64S, INT64S)
def remove_cells(
    cells: NDArray[np.int64],
    classes: NDArray[np.uint8],
    num_used: NDArray[np.int64],
    growth: NDArray[np.int64],
    salt: np.uint64,
    removed: NDArray[np.uint8],
    targets: NDArray[np.int64],
    removed_ids: NDArray[np.int64],
    scratch: NDArray[np.int64],
) -> None:
    """Removes the ids of rows, renumbers the rows that moved, and shrinks segments that have too few ids left.

    A segment that stays in its class and loses no id stays as it is.

    Args:
        cells: With the next four, as in `find_or_create`.
        removed: A bit a row; as many are 1 as `targets` is long.
        targets: As `kernels_bitmap.plan_moves` makes it.
        removed_ids: Output, as long as `targets`.
        scratch: Twice as long as the largest number in `num_used`.
    """
    first = growth[0] - targets.shape[0]
    growth[0] = first
    _find_turn(growth)
    num_removed = np.uint64(0)
    for s in range(NUM_SEGMENTS):
        segment = np.uint64(s)
        begin, end = cells_of(segment, classes)
        num_left = np.uint64(0)
        for cell in range(begin, end):
            row = cells[_TWO * cell + _ONE] - 1
            if row < 0:
                continue
            if has_bit(removed, np.uint64(row)):
                removed_ids[num_removed] = cells[_TWO * cell]
                num_removed += _ONE
                continue
            if row >= first:
                row = targets[np.uint64(row - first)]
                cells[_TWO * cell + _ONE] = row + 1
            scratch[_TWO * num_left] = cells[_TWO * cell]
            scratch[_TWO * num_left + _ONE] = row + 1
            num_left += _ONE
        size_class = np.uint64(growth[2]) + (_ONE if s < growth[1] else _ZERO)
        while num_left > _limit(size_class):
            size_class += _ONE
        if size_class == np.uint64(classes[segment]) and num_left == np.uint64(num_used[segment]):
            continue
        # The cells of its former classes still have values, and the segment may use them again.
        for left in range(size_class, np.uint64(classes[segment]) + _ONE):
            old_class = np.uint64(left)
            cells[_TWO * _begin(segment, old_class) : _TWO * _begin(segment + _ONE, old_class)] = 0
        classes[segment] = np.uint8(size_class)
        num_used[segment] = num_left
        begin, mask = _begin(segment, size_class), (_ONE << size_class) - _ONE
        for i in range(num_left):
            id_ = scratch[_TWO * i]
            target = _search(cells, begin, mask, splitmix64(np.uint64(id_) ^ salt), id_)
            cells[_TWO * target] = id_
            cells[_TWO * target + _ONE] = scratch[_TWO * i + _ONE]
