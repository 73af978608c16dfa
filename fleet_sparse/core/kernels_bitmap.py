"""Kernels of bitmaps with one bit for each row, and of the moves that a removal of rows takes.

The bit of row r is bit r % 8 of byte r / 8. Bits from the number of rows on are 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import INT64, INT64_IN, INT64S, UINT8S, UINT16S, inlined, kernel

_ONE, _THREE, _SEVEN, _EIGHT = np.uint64(1), np.uint64(3), np.uint64(7), np.uint64(8)


@inlined
def has_bit(bits: NDArray[np.uint8], row: np.uint64) -> bool:
    """Returns whether the bit of a row is 1."""
    return bool((np.uint64(bits[row >> _THREE]) >> (row & _SEVEN)) & _ONE)


@inlined
def _set_bit(bits: NDArray[np.uint8], row: np.uint64) -> None:
    bits[row >> _THREE] |= np.uint8(_ONE << (row & _SEVEN))


@inlined
def _clear_bit(bits: NDArray[np.uint8], row: np.uint64) -> None:
    bits[row >> _THREE] &= ~np.uint8(_ONE << (row & _SEVEN))


@kernel(UINT8S, INT64_IN)
def set_bits(bits: NDArray[np.uint8], row_indices: NDArray[np.int64]) -> None:
    """Sets the bits of these rows. No index is negative."""
    for i in range(np.uint64(row_indices.shape[0])):
        _set_bit(bits, np.uint64(row_indices[i]))


@kernel(UINT8S, INT64_IN, result=INT64)
def count_and_set_bits(bits: NDArray[np.uint8], row_indices: NDArray[np.int64]) -> int:
    """Sets the bits of these rows and returns how many were 0. Negative indices are ignored."""
    num_set = 0
    for i in range(np.uint64(row_indices.shape[0])):
        if row_indices[i] >= 0 and not has_bit(bits, np.uint64(row_indices[i])):
            _set_bit(bits, np.uint64(row_indices[i]))
            num_set += 1
    return num_set


@kernel(UINT8S, INT64_IN)
def clear_bits(bits: NDArray[np.uint8], row_indices: NDArray[np.int64]) -> None:
    """Clears the bits of these rows. No index is negative."""
    for i in range(np.uint64(row_indices.shape[0])):
        _clear_bit(bits, np.uint64(row_indices[i]))


@kernel(UINT8S, UINT16S, INT64)
def write_days(bits: NDArray[np.uint8], last_update_days: NDArray[np.uint16], day: int) -> None:
    """Sets the last update day of each row whose bit is 1, then clears all bits."""
    for byte in range(np.uint64(bits.shape[0])):
        if bits[byte] == 0:
            continue
        for bit in range(_EIGHT):
            row = (byte << _THREE) + bit
            if has_bit(bits, row):
                last_update_days[row] = np.uint16(day)
        bits[byte] = np.uint8(0)


@kernel(UINT8S, INT64, INT64S)
def plan_moves(removed: NDArray[np.uint8], first: int, targets: NDArray[np.int64]) -> None:
    """Plans where the rows from `first` on move when the rows whose bit is 1 are removed, so that `[0, first)` is full.

    Args:
        removed: Bitmap with as many bits set as `targets` is long.
        first: The number of rows that stay.
        targets: Output. Row `first + j` becomes row `targets[j]`; -1 if it is removed itself.
    """
    hole = np.uint64(0)
    for j in range(np.uint64(targets.shape[0])):
        if has_bit(removed, np.uint64(first) + j):
            targets[j] = -1
            continue
        while not has_bit(removed, hole):
            hole += _EIGHT if hole & _SEVEN == 0 and removed[hole >> _THREE] == 0 else _ONE
        targets[j] = hole
        hole += _ONE


@kernel(UINT8S, INT64, INT64_IN)
def move_bits(bits: NDArray[np.uint8], first: int, targets: NDArray[np.int64]) -> None:
    """Moves bits with their rows, as `plan_moves` planned, and clears the bits from `first` on."""
    for j in range(np.uint64(targets.shape[0])):
        row = np.uint64(first) + j
        if targets[j] >= 0:
            _clear_bit(bits, np.uint64(targets[j]))
            if has_bit(bits, row):
                _set_bit(bits, np.uint64(targets[j]))
        _clear_bit(bits, row)
