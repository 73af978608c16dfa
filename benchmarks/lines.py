"""The limit of kernels that read or change rows: the same loop that only reads their cache lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.intrinsics import prefetch_read
from fleet_sparse.core.jit import FLOAT32S, INT64, INT64_IN, kernel

_AHEAD, _LINE, _ZERO = np.uint64(16), np.uint64(16), np.uint64(0)


@kernel(FLOAT32S, INT64, FLOAT32S, INT64, INT64, INT64_IN, INT64, INT64, FLOAT32S)
def read_lines(
    rows: NDArray[np.float32],
    row_stride: int,
    states: NDArray[np.float32],
    state_stride: int,
    state_offset: int,
    row_indices: NDArray[np.int64],
    width: int,
    state_width: int,
    out: NDArray[np.float32],
) -> None:
    """Adds up one float of every cache line of each row and its state in `out[i]`; prefetches 16 rows ahead.

    Args:
        rows: At least one cache line's floats longer than its rows; as `states`.
        row_stride: As in a rule's kernel, like the next four.
        states: May be `rows`.
        state_stride: Stride of states in floats.
        state_offset: Offset of a state in floats.
        row_indices: `(n,)`, none negative.
        width: Floats of a row that are read.
        state_width: Floats of its state; 0 reads none.
        out: Output, `(n,)`.
    """
    n = np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    w, s_width = np.uint64(width), np.uint64(state_width)
    for i in range(n):
        if i + _AHEAD < n:
            index = np.uint64(row_indices[i + _AHEAD])
            for j in range(_ZERO, w, _LINE):
                prefetch_read(rows, index * r_stride + j)
            for j in range(_ZERO, s_width, _LINE):
                prefetch_read(states, index * s_stride + s_offset + j)
        index = np.uint64(row_indices[i])
        total = np.float32(0)
        for j in range(_ZERO, w, _LINE):
            total += rows[index * r_stride + j]
        for j in range(_ZERO, s_width, _LINE):
            total += states[index * s_stride + s_offset + j]
        out[i] = total
