"""RowDtype: how the floats of rows are written in frames, and the way there and back (`docs/protocol.md`, Dtypes)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_half import from_bfloat16, from_float16, to_bfloat16, to_float16

FrameRows = NDArray[np.float32] | NDArray[np.uint16]
"""Rows in a frame: float32, or the bits of what is half as long."""


class RowDtype(IntEnum):
    """The floats of a block's rows."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3

    @property
    def in_frames(self) -> np.dtype[np.float32] | np.dtype[np.uint16]:
        """Of the array that a frame has."""
        return _FLOAT32 if self is RowDtype.FLOAT32 else _UINT16


def for_frame(rows: NDArray[np.float32], dtype: RowDtype) -> FrameRows:
    """Rows as a frame has them, contiguous: the same array if they are so already, else a fresh one."""
    rows = np.ascontiguousarray(rows)
    if dtype is RowDtype.FLOAT32:
        return rows
    halves = np.empty(rows.shape, np.uint16)
    shorten = to_bfloat16 if dtype is RowDtype.BFLOAT16 else to_float16
    shorten(rows.reshape(-1).view(np.uint32), halves.reshape(-1))
    return halves


def from_frame(rows: FrameRows, dtype: RowDtype) -> NDArray[np.float32]:
    """Rows of a frame, contiguous, as float32: the same array if they are, else a fresh one."""
    if dtype is RowDtype.FLOAT32:
        return rows.astype(np.float32, copy=False)
    values = np.empty(rows.shape, np.float32)
    copy_from_frame(rows, dtype, values)
    return values


def copy_from_frame(rows: FrameRows, dtype: RowDtype, out: NDArray[np.float32]) -> None:
    """Writes rows of a frame, contiguous, to `out`, of their shape."""
    if dtype is RowDtype.FLOAT32:
        np.copyto(out, rows)
    elif out.flags.carray:
        lengthen = from_bfloat16 if dtype is RowDtype.BFLOAT16 else from_float16
        lengthen(rows.view(np.uint16).reshape(-1), out.reshape(-1).view(np.uint32))
    else:
        np.copyto(out, from_frame(rows, dtype))


_FLOAT32, _UINT16 = np.dtype(np.float32), np.dtype(np.uint16)
