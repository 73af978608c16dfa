"""RowDtype: how frames encode the floats of rows, and the conversions (`docs/protocol.md`, Dtypes)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_half import from_bfloat16, from_float16, to_bfloat16, to_float16

FrameRows = NDArray[np.float32] | NDArray[np.uint16]
"""Rows in a frame: float32, or the bits of 16-bit floats."""


class RowDtype(IntEnum):
    """Encoding of a block's rows.

    Attributes:
        in_frames: Type of the array in a frame; 16-bit floats are uint16.
    """

    in_frames: np.dtype[np.float32] | np.dtype[np.uint16]

    def __new__(cls, number: int) -> RowDtype:
        """Makes a member."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.in_frames = np.dtype(np.float32) if number == 1 else np.dtype(np.uint16)
        return member

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3


def for_frame(rows: NDArray[np.float32], dtype: RowDtype) -> FrameRows:
    """Returns rows as a frame carries them, contiguous: the same array if nothing must be converted, else a new one."""
    rows = np.ascontiguousarray(rows)
    if dtype is RowDtype.FLOAT32:
        return rows
    halves = np.empty(rows.shape, np.uint16)
    shorten(rows, dtype, halves.reshape(-1))
    return halves


def shorten(rows: NDArray[np.float32], dtype: RowDtype, out: NDArray[np.uint16]) -> None:
    """Writes rows, contiguous, to `out` `(n,)` as a frame carries them in a dtype of 16 bits."""
    convert = to_bfloat16 if dtype is RowDtype.BFLOAT16 else to_float16
    convert(rows.reshape(-1).view(np.uint32), out)


def from_frame(rows: FrameRows, dtype: RowDtype) -> NDArray[np.float32]:
    """Returns rows of a frame, contiguous, as float32: the same array if they are float32, else a new one."""
    if dtype is RowDtype.FLOAT32:
        return rows.astype(np.float32, copy=False)
    values = np.empty(rows.shape, np.float32)
    copy_from_frame(rows, dtype, values)
    return values


def copy_from_frame(rows: FrameRows, dtype: RowDtype, out: NDArray[np.float32]) -> None:
    """Converts rows of a frame, contiguous, to float32 in `out`, which has the same shape."""
    if dtype is RowDtype.FLOAT32:
        np.copyto(out, rows)
    elif out.flags.carray:
        lengthen = from_bfloat16 if dtype is RowDtype.BFLOAT16 else from_float16
        lengthen(rows.view(np.uint16).reshape(-1), out.reshape(-1).view(np.uint32))
    else:
        np.copyto(out, from_frame(rows, dtype))


def rounded(rows: NDArray[np.float32], dtype: RowDtype) -> NDArray[np.float32]:
    """Returns rows as the other side reads them: the same array if nothing is rounded, else a new one."""
    return rows if dtype is RowDtype.FLOAT32 else from_frame(for_frame(rows, dtype), dtype)
