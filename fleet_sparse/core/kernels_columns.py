"""Kernels of columns: they copy the elements of rows, `width` bytes each. One set serves every dtype and shape.

A column is a flat array of bytes; the element of row `r` is `values[r * width : (r + 1) * width]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intrinsics import copy, prefetch_read, prefetch_write
from .jit import INT32S, INT64, INT64_IN, UINT8_IN, UINT8S, kernel

_AHEAD = np.uint64(16)


@kernel(UINT8S, INT64, INT64_IN, UINT8_IN)
def scatter_elements(
    values: NDArray[np.uint8], width: int, row_indices: NDArray[np.int64], source: NDArray[np.uint8]
) -> None:
    """Writes `source`, one element after another, over the elements of these rows. No index is negative."""
    w, n = np.uint64(width), np.uint64(row_indices.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(values, np.uint64(row_indices[i + _AHEAD]) * w)
        copy(values, np.uint64(row_indices[i]) * w, source, i * w, w)


@kernel(UINT8S, INT64, INT64, INT64_IN)
def move_elements(values: NDArray[np.uint8], width: int, first: int, targets: NDArray[np.int64]) -> None:
    """Copies the element of row `first + j` over that of row `targets[j]` unless that is -1."""
    w = np.uint64(width)
    for j in range(np.uint64(targets.shape[0])):
        if targets[j] >= 0:
            copy(values, np.uint64(targets[j]) * w, values, (np.uint64(first) + j) * w, w)


@kernel(UINT8S, INT64, INT64_IN, INT32S, INT64, UINT8S)
def keep_elements(
    values: NDArray[np.uint8],
    width: int,
    row_indices: NDArray[np.int64],
    positions: NDArray[np.int32],
    num_before: int,
    images: NDArray[np.uint8],
) -> None:
    """Copies the elements of the rows that `kernels_cow_view.keep_pre_images` has just kept into their pre-images.

    Args:
        values: The column.
        width: Bytes of an element.
        row_indices: The rows that `keep_pre_images` was called with.
        positions: As `keep_pre_images` left them.
        num_before: Number of pre-images before that call.
        images: `(capacity * width,)`, the pre-images of this column.
    """
    w, n, num_positions = np.uint64(width), np.uint64(row_indices.shape[0]), np.uint64(positions.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_read(values, np.uint64(row_indices[i + _AHEAD]) * w)
        row = np.uint64(row_indices[i])
        if row < num_positions and positions[row] > num_before:
            copy(images, np.uint64(positions[row] - 1) * w, values, row * w, w)


@kernel(UINT8S, INT64, INT64_IN, INT32S, UINT8S, UINT8S)
def copy_elements(
    values: NDArray[np.uint8],
    width: int,
    row_indices: NDArray[np.int64],
    positions: NDArray[np.int32],
    images: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> None:
    """Writes the elements that these rows had at the cut to `out`.

    To be called before `kernels_cow_view.copy_rows_at_cut`, which marks the rows as copied.

    Args:
        values: The column.
        width: Bytes of an element.
        row_indices: Rows of the cut.
        positions: Where the value of each row is, as in `kernels_cow_view`.
        images: The pre-images of this column.
        out: `(n * width,)`.
    """
    w, n = np.uint64(width), np.uint64(row_indices.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_read(values, np.uint64(row_indices[i + _AHEAD]) * w)
        row = np.uint64(row_indices[i])
        if positions[row] > 0:
            copy(out, i * w, images, np.uint64(positions[row] - 1) * w, w)
        else:
            copy(out, i * w, values, row * w, w)
