"""Kernels that copy rows. Row `r` of an array is `values[r * stride + offset : +width]`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intrinsics import copy, prefetch_read, prefetch_write
from .jit import FLOAT32_IN, FLOAT32S, FLOAT64_IN, INT64, INT64_IN, UINT64, kernel
from .kernels_initial import write_initial

_AHEAD, _LINE, _ZERO, _ONE = np.uint64(16), np.uint64(16), np.uint64(0), np.uint64(1)


@kernel(FLOAT32S, INT64, INT64_IN, INT64_IN, INT64, INT64, FLOAT64_IN, UINT64, FLOAT32S)
def gather_or_initialize(
    rows: NDArray[np.float32],
    row_stride: int,
    row_indices: NDArray[np.int64],
    ids: NDArray[np.int64],
    dim: int,
    kind: int,
    values: NDArray[np.float64],
    stream: np.uint64,
    out: NDArray[np.float32],
) -> None:
    """Writes the row of each id to `out`, one after another; where the row index is -1, the initial value of the id."""
    d, stride, n = np.uint64(dim), np.uint64(row_stride), np.uint64(row_indices.shape[0])
    for i in range(n):
        if i + _AHEAD < n and row_indices[i + _AHEAD] >= 0:
            ahead = np.uint64(row_indices[i + _AHEAD]) * stride
            for j in range(_ZERO, d, _LINE):
                prefetch_read(rows, ahead + j)
        if row_indices[i] >= 0:
            copy(out, i * d, rows, np.uint64(row_indices[i]) * stride, d)
        else:
            write_initial(ids[i], d, kind, values, stream, out, i * d)


@kernel(FLOAT32S, INT64, INT64, INT64_IN, INT64, FLOAT32_IN, FLOAT32S)
def gather_states(
    states: NDArray[np.float32],
    stride: int,
    offset: int,
    row_indices: NDArray[np.int64],
    dim: int,
    initial: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Writes the states of each row to `out`, one after another; where the row index is -1, the initial ones.

    Args:
        states: The states, flat.
        stride: Floats from the states of one row to those of the next.
        offset: Floats before the states of the first row.
        row_indices: `(n,)`.
        dim: Floats of a row.
        initial: `(num_states,)`, the value that each state begins with.
        out: Output, `(n * num_states * dim,)`.
    """
    d, num_states, n = np.uint64(dim), np.uint64(initial.shape[0]), np.uint64(row_indices.shape[0])
    w = num_states * d
    for i in range(n):
        if i + _AHEAD < n and row_indices[i + _AHEAD] >= 0:
            ahead = np.uint64(row_indices[i + _AHEAD]) * np.uint64(stride) + np.uint64(offset)
            for j in range(_ZERO, w, _LINE):
                prefetch_read(states, ahead + j)
        if row_indices[i] >= 0:
            copy(out, i * w, states, np.uint64(row_indices[i]) * np.uint64(stride) + np.uint64(offset), w)
            continue
        for k in range(num_states):
            for j in range(i * w + k * d, i * w + (k + _ONE) * d):
                out[j] = initial[k]


@kernel(FLOAT32S, INT64, INT64, INT64_IN, INT64, FLOAT32S)
def gather(
    values: NDArray[np.float32],
    stride: int,
    offset: int,
    row_indices: NDArray[np.int64],
    width: int,
    out: NDArray[np.float32],
) -> None:
    """Writes the rows of these indices to `out`, one after another. No index is negative."""
    w, n = np.uint64(width), np.uint64(row_indices.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            ahead = np.uint64(row_indices[i + _AHEAD]) * np.uint64(stride) + np.uint64(offset)
            for j in range(_ZERO, w, _LINE):
                prefetch_read(values, ahead + j)
        copy(out, i * w, values, np.uint64(row_indices[i]) * np.uint64(stride) + np.uint64(offset), w)


@kernel(FLOAT32S, INT64, INT64, INT64_IN, INT64, FLOAT32_IN)
def scatter(
    values: NDArray[np.float32],
    stride: int,
    offset: int,
    row_indices: NDArray[np.int64],
    width: int,
    source: NDArray[np.float32],
) -> None:
    """Writes the rows in `source`, one after another, over the rows of these indices. No index is negative."""
    w, n = np.uint64(width), np.uint64(row_indices.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            ahead = np.uint64(row_indices[i + _AHEAD]) * np.uint64(stride) + np.uint64(offset)
            for j in range(_ZERO, w, _LINE):
                prefetch_write(values, ahead + j)
        copy(values, np.uint64(row_indices[i]) * np.uint64(stride) + np.uint64(offset), source, i * w, w)


@kernel(FLOAT32S, INT64, INT64, INT64_IN)
def move_rows(values: NDArray[np.float32], stride: int, first: int, targets: NDArray[np.int64]) -> None:
    """Copies row `first + j`, the whole stride, over row `targets[j]` unless that is -1."""
    w = np.uint64(stride)
    for j in range(np.uint64(targets.shape[0])):
        if targets[j] >= 0:
            copy(values, np.uint64(targets[j]) * w, values, (np.uint64(first) + j) * w, w)
