"""Kernels of the clocks of rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intrinsics import prefetch_write
from .jit import FLOAT32_IN, FLOAT32S, INT64, INT64_IN, UINT32_IN, UINT32S, kernel

_AHEAD, _INF = np.uint64(16), np.float32(np.inf)


@kernel(UINT32S, INT64_IN, UINT32_IN)
def advance_clocks(clocks: NDArray[np.uint32], row_indices: NDArray[np.int64], amounts: NDArray[np.uint32]) -> None:
    """Adds an amount to the clock of each row, modulo 2^32; both are `(n,)`, and no row index is negative."""
    n = np.uint64(row_indices.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(clocks, np.uint64(row_indices[i + _AHEAD]))
        clocks[np.uint64(row_indices[i])] += amounts[i]


@kernel(FLOAT32S, INT64, INT64_IN, FLOAT32_IN, INT64, FLOAT32S)
def measure_moves(
    rows: NDArray[np.float32],
    row_stride: int,
    row_indices: NDArray[np.int64],
    before: NDArray[np.float32],
    dim: int,
    out: NDArray[np.float32],
) -> None:
    """Writes by how much the value of each row that moved most differs from what it was, `(n,)`; inf if it is NaN.

    Args:
        rows: The rows, flat.
        row_stride: Floats from one row to the next.
        row_indices: `(n,)`, none negative.
        before: `(n * dim,)`, what the rows were.
        dim: Floats of a row.
        out: Output, `(n,)`.
    """
    d, stride = np.uint64(dim), np.uint64(row_stride)
    for i in range(np.uint64(row_indices.shape[0])):
        row = np.uint64(row_indices[i]) * stride
        most = total = np.float32(0)
        for j in range(d):
            moved = abs(rows[row + j] - before[i * d + j])
            most = max(most, moved)
            total += moved  # `max` drops a NaN, a sum does not
        out[i] = _INF if np.isnan(total) else most
