"""Kernels of a copy-on-write view: the ids of an index, and the rows at the cut while the store changes.

`positions` says for each row where its value at the cut is: 0 in the store, k > 0 in pre-image k - 1, -1 if it was
copied. A pre-image is a row followed by its state.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ids import GOLDEN_GAMMA, MIX_1, MIX_2
from .intrinsics import copy, prefetch_read, prefetch_write
from .jit import FLOAT32S, INT32S, INT64, INT64_IN, INT64S, UINT8S, UINT64, inlined, kernel
from .kernels_bitmap import has_bit
from .kernels_hash import splitmix64
from .kernels_index import cells_of

_ONE, _TWO, _LINE, _ZERO = np.uint64(1), np.uint64(2), np.uint64(16), np.uint64(0)
_AHEAD, _FAR_AHEAD = np.uint64(12), np.uint64(24)
_S30, _S60, _S27, _S54, _S31, _S62 = (np.uint64(shift) for shift in (30, 60, 27, 54, 31, 62))
NUM_PARTITIONS, NUM_DIGITS = 1 << 10, 1 << 11
_NUM_PARTITIONS, _NUM_DIGITS = np.uint64(NUM_PARTITIONS), np.uint64(NUM_DIGITS)
_PARTITION_SHIFT, _SHIFTS = np.uint64(54), (np.uint64(32), np.uint64(43))
_INSERT_UP_TO, _MOVES_PER_HASH, _NO_LIMIT = np.uint64(32), np.uint64(8), np.uint64(2**64 - 1)
_FIVE, _ELEVEN = np.uint64(5), np.uint64(11)
_UNMIX_1, _UNMIX_2 = (np.uint64(pow(int(factor), -1, 1 << 64)) for factor in (MIX_1, MIX_2))


@kernel(INT64S, UINT8S, UINT64, INT64, INT64, INT64, UINT8S, UINT64, UINT64, INT64S, INT32S, INT64, result=INT64)
def collect_hashes(
    cells: NDArray[np.int64],
    classes: NDArray[np.uint8],
    salt: np.uint64,
    first_segment: int,
    end_segment: int,
    num_rows: int,
    members: NDArray[np.uint8],
    first_hash: np.uint64,
    last_hash: np.uint64,
    hashes: NDArray[np.int64],
    row_indices: NDArray[np.int32],
    num_collected: int,
) -> int:
    """Writes the hashes in a range of the ids in some segments whose row is below `num_rows`, and these rows.

    Args:
        cells: This and the next two as in `kernels_index.find`.
        first_segment: First segment; the next argument is the end.
        num_rows: Number of rows at the cut.
        members: Bitmap of the rows of the view; empty for all rows.
        first_hash: Smallest hash that is written; the next argument is the largest.
        hashes: Output, written from `num_collected` on; one element longer than there are such ids in all segments.
        row_indices: Output, of the same length.
        num_collected: Number of hashes written before.

    Returns:
        Number of hashes written, those before included.
    """
    all_rows = members.shape[0] == 0
    to, n = np.uint64(num_collected), np.uint64(num_rows)
    for segment in range(first_segment, end_segment):
        begin, end = cells_of(np.uint64(segment), classes)
        for cell in range(begin, end):
            # Written even if the cell does not count: a branch on empty cells could not be predicted.
            h = splitmix64(np.uint64(cells[_TWO * cell]) ^ salt)
            hashes[to] = h
            row = np.uint64(cells[_TWO * cell + _ONE] - 1)
            row_indices[to] = np.int32(row)
            if all_rows:
                to += np.uint64((row < n) & (h - first_hash <= last_hash - first_hash))
            else:
                to += np.uint64((row < n) & (h - first_hash <= last_hash - first_hash) and has_bit(members, row))
    return int(to)


@kernel(INT64S, INT32S, INT64S, INT64S)
def partition_by_hash(
    hashes: NDArray[np.int64], row_indices: NDArray[np.int32], begins: NDArray[np.int64], heads: NDArray[np.int64]
) -> None:
    """Reorders pairs of hash and row in place by the highest 10 bits of the hash.

    Args:
        hashes: Overwritten.
        row_indices: Overwritten.
        begins: `(1025,)`, output: where each of the 1024 partitions begins, and the end of the last.
        heads: `(1024,)`, scratch.
    """
    heads[:] = 0
    for i in range(np.uint64(hashes.shape[0])):
        heads[np.uint64(hashes[i]) >> _PARTITION_SHIFT] += 1
    begins[0] = 0
    for k in range(_NUM_PARTITIONS):
        begins[k + _ONE] = begins[k] + heads[k]
        heads[k] = begins[k]
    for k in range(_NUM_PARTITIONS):
        while heads[k] < begins[k + _ONE]:
            here = np.uint64(heads[k])
            value, row = hashes[here], row_indices[here]
            digit = np.uint64(value) >> _PARTITION_SHIFT
            while digit != k:
                to = np.uint64(heads[digit])
                heads[digit] += 1
                next_value, next_row = hashes[to], row_indices[to]
                hashes[to], row_indices[to] = value, row
                value, row = next_value, next_row
                digit = np.uint64(value) >> _PARTITION_SHIFT
            hashes[here], row_indices[here] = value, row
            heads[k] += 1


@inlined
def _scatter_by_digit(
    hashes: NDArray[np.int64],
    row_indices: NDArray[np.int32],
    begin: np.uint64,
    out_hashes: NDArray[np.int64],
    out_row_indices: NDArray[np.int32],
    out_begin: np.uint64,
    n: np.uint64,
    shift: np.uint64,
    counts: NDArray[np.int64],
) -> None:
    """Copies `n` pairs in the order of the digit of the hash at `shift`; those with one digit stay in their order."""
    counts[:] = 0
    for i in range(begin, begin + n):
        counts[(np.uint64(hashes[i]) >> shift) % _NUM_DIGITS] += 1
    total = np.int64(out_begin)
    for k in range(_NUM_DIGITS):
        count = counts[k]
        counts[k] = total
        total += count
    for i in range(begin, begin + n):
        digit = (np.uint64(hashes[i]) >> shift) % _NUM_DIGITS
        to = np.uint64(counts[digit])
        out_hashes[to], out_row_indices[to] = hashes[i], row_indices[i]
        counts[digit] += 1


@inlined
def _insert(
    hashes: NDArray[np.int64],
    row_indices: NDArray[np.int32],
    begin: np.uint64,
    end: np.uint64,
    gap: np.uint64,
    max_moves: np.uint64,
) -> bool:
    """Sorts pairs that are `gap` apart by insertion. Returns False if that took too many moves, and was not ended."""
    num_moves = _ZERO
    for i in range(begin + gap, end):
        value, row, to = hashes[i], row_indices[i], np.uint64(i)
        while to >= begin + gap and np.uint64(hashes[to - gap]) > np.uint64(value):
            hashes[to], row_indices[to] = hashes[to - gap], row_indices[to - gap]
            to -= gap
            num_moves += _ONE
        hashes[to], row_indices[to] = value, row
        if num_moves > max_moves:
            return False
    return True


@kernel(INT64S, INT32S, INT64_IN, INT64S, INT32S, INT64S)
def sort_partitions(
    hashes: NDArray[np.int64],
    row_indices: NDArray[np.int32],
    begins: NDArray[np.int64],
    spare_hashes: NDArray[np.int64],
    spare_row_indices: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """Sorts the pairs of each partition in place, by the hash as an unsigned number.

    They are sorted by their next 22 bits, and what is left by insertion, which takes few moves for hashes; where many
    have 32 bits in common, by insertion at shrinking gaps.

    Args:
        hashes: As `partition_by_hash` left them; so are the next two.
        row_indices: Overwritten.
        begins: `(1025,)`.
        spare_hashes: Scratch, as long as the largest partition.
        spare_row_indices: Scratch, as long.
        counts: `(2048,)`, scratch.
    """
    for k in range(_NUM_PARTITIONS):
        begin, end = np.uint64(begins[k]), np.uint64(begins[k + _ONE])
        n = end - begin
        if n > _INSERT_UP_TO:
            _scatter_by_digit(hashes, row_indices, begin, spare_hashes, spare_row_indices, _ZERO, n, _SHIFTS[0], counts)
            _scatter_by_digit(spare_hashes, spare_row_indices, _ZERO, hashes, row_indices, begin, n, _SHIFTS[1], counts)
        if not _insert(hashes, row_indices, begin, end, _ONE, _MOVES_PER_HASH * n + _INSERT_UP_TO * _INSERT_UP_TO):
            gap = n // _TWO
            while gap > _ZERO:
                _insert(hashes, row_indices, begin, end, gap, _NO_LIMIT)
                gap = _ONE if gap == _TWO else gap * _FIVE // _ELEVEN


@kernel(INT64S, UINT64)
def unhash(hashes: NDArray[np.int64], salt: np.uint64) -> None:
    """Replaces each hash by its id: the inverse of `ids.hash_ids`."""
    for i in range(np.uint64(hashes.shape[0])):
        z = np.uint64(hashes[i])
        z = (z ^ (z >> _S31) ^ (z >> _S62)) * _UNMIX_2
        z = (z ^ (z >> _S27) ^ (z >> _S54)) * _UNMIX_1
        hashes[i] = ((z ^ (z >> _S30) ^ (z >> _S60)) - GOLDEN_GAMMA) ^ salt


@inlined
def _fetch(
    rows: NDArray[np.float32], row: np.uint64, d: np.uint64, states: NDArray[np.float32], state: np.uint64, s: np.uint64
) -> None:
    """Prefetches the cache lines of a row of `d` floats and its state of `s` floats that begin at these indices."""
    for j in range(_ZERO, d, _LINE):
        prefetch_read(rows, row + j)
    for j in range(_ZERO, s, _LINE):
        prefetch_read(states, state + j)


@kernel(
    *(INT64_IN, INT32S, UINT8S, FLOAT32S, INT64, FLOAT32S, INT64, INT64, INT64, INT64, FLOAT32S, INT64),
    result=INT64,
)
def keep_pre_images(
    row_indices: NDArray[np.int64],
    positions: NDArray[np.int32],
    members: NDArray[np.uint8],
    rows: NDArray[np.float32],
    row_stride: int,
    states: NDArray[np.float32],
    state_stride: int,
    state_offset: int,
    dim: int,
    state_width: int,
    images: NDArray[np.float32],
    num_images: int,
) -> int:
    """Keeps pre-images of these rows, as far as they are in the view and neither kept nor copied.

    Args:
        row_indices: None negative, repeats allowed.
        positions: For each row at the cut.
        members: As in `collect_hashes`; a row whose bit is 0 is not kept.
        rows: This and the next six say where rows and states are.
        images: `(capacity * (dim + state_width),)`.
        num_images: Number of pre-images before.

    Returns:
        Number of pre-images afterwards; -1 if `images` is full, when some rows may have been kept.
    """
    all_rows = members.shape[0] == 0
    d, s, n = np.uint64(dim), np.uint64(state_width), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    num_positions, width = np.uint64(positions.shape[0]), d + s
    to, capacity = np.uint64(num_images), np.uint64(images.shape[0]) // (d + s)
    for i in range(n):
        if i + _FAR_AHEAD < n:
            prefetch_write(positions, np.uint64(row_indices[i + _FAR_AHEAD]))
        if i + _AHEAD < n:
            ahead = np.uint64(row_indices[i + _AHEAD])
            if ahead < num_positions and positions[ahead] == 0:
                _fetch(rows, ahead * r_stride, d, states, ahead * s_stride + s_offset, s)
        row = np.uint64(row_indices[i])
        if row >= num_positions or positions[row] != 0 or not (all_rows or has_bit(members, row)):
            continue
        if to == capacity:
            return -1
        copy(images, to * width, rows, row * r_stride, d)
        copy(images, to * width + d, states, row * s_stride + s_offset, s)
        to += _ONE
        positions[row] = np.int32(to)
    return int(to)


@kernel(
    *(INT64_IN, INT32S, FLOAT32S, INT64, FLOAT32S, INT64, INT64, INT64, INT64, FLOAT32S, FLOAT32S, FLOAT32S),
    result=INT64,
)
def copy_rows_at_cut(
    row_indices: NDArray[np.int64],
    positions: NDArray[np.int32],
    rows: NDArray[np.float32],
    row_stride: int,
    states: NDArray[np.float32],
    state_stride: int,
    state_offset: int,
    dim: int,
    state_width: int,
    images: NDArray[np.float32],
    out_rows: NDArray[np.float32],
    out_states: NDArray[np.float32],
) -> int:
    """Writes these rows and their states as they were at the cut, and marks them as copied.

    Returns:
        Number of rows that were copied before; for these, the current values are written.
    """
    d, s, n = np.uint64(dim), np.uint64(state_width), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    num_copied_before = 0
    for i in range(n):
        if i + _FAR_AHEAD < n:
            prefetch_write(positions, np.uint64(row_indices[i + _FAR_AHEAD]))
        if i + _AHEAD < n:
            ahead = np.uint64(row_indices[i + _AHEAD])
            _fetch(rows, ahead * r_stride, d, states, ahead * s_stride + s_offset, s)
        row = np.uint64(row_indices[i])
        if positions[row] > 0:
            image = np.uint64(positions[row] - 1) * (d + s)
            copy(out_rows, i * d, images, image, d)
            copy(out_states, i * s, images, image + d, s)
        else:
            num_copied_before += positions[row] < 0
            copy(out_rows, i * d, rows, row * r_stride, d)
            copy(out_states, i * s, states, row * s_stride + s_offset, s)
        positions[row] = np.int32(-1)
    return num_copied_before
