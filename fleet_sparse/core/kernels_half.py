"""Kernels that convert between float32 and 16-bit floats, both as unsigned integers of their bits.

They round to nearest, ties to even. A thread that flushes subnormal float32s to zero gets the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import UINT16_IN, UINT16S, UINT32_IN, UINT32S, kernel

# Numba widens every operation on 32 bits to 64, which halves the speed of loops. So every result is cut to 32 bits.
_u32 = np.uint32

_WITHOUT_SIGN, _INFINITY, _ONE, _SIXTEEN = _u32(0x7FFF_FFFF), _u32(0x7F80_0000), _u32(1), _u32(16)

# bfloat16 is the upper half of a float32.
_BELOW_MIDDLE, _QUIET = _u32(0x7FFF), _u32(0x0040)

# float16 has 5 bits of exponent and 10 of fraction, float32 8 and 23.
_DROPPED, _DROPPED_BELOW_MIDDLE = _u32(13), _u32(0x0FFF)
_OTHER_BIAS = _u32((127 - 15) << 23)
_SMALLEST_NORMAL, _BEYOND = _u32(0x3880_0000), _u32(0x4780_0000)  # 2^-14; 2^16, which becomes infinite
_WITHOUT_SIGN_16, _NORMAL_16, _INFINITY_16, _NAN_16 = _u32(0x7FFF), _u32(0x0400), _u32(0x7C00), _u32(0x7E00)
_UNIT = np.float32(2.0**-24)  # subnormal float16s are multiples of it
_HALF, _BITS_OF_HALF = np.float32(0.5), _u32(0x3F00_0000)


@kernel(UINT32_IN, UINT16S)
def to_bfloat16(values: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    """Rounds float32s to bfloat16s. Values past the largest become infinite, NaN stays NaN. Both have one length."""
    for i in range(np.uint64(values.shape[0])):
        bits = values[i]
        upper = _u32(bits >> _SIXTEEN)
        rounded = _u32(_u32(bits + _u32(_BELOW_MIDDLE + _u32(upper & _ONE))) >> _SIXTEEN)
        out[i] = np.uint16(_u32(upper | _QUIET) if _u32(bits & _WITHOUT_SIGN) > _INFINITY else rounded)


@kernel(UINT16_IN, UINT32S)
def from_bfloat16(halves: NDArray[np.uint16], out: NDArray[np.uint32]) -> None:
    """Converts bfloat16s to float32s. Both have one length."""
    for i in range(np.uint64(halves.shape[0])):
        out[i] = _u32(_u32(halves[i]) << _SIXTEEN)


@kernel(UINT32_IN, UINT16S)
def to_float16(values: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    """Rounds float32s to float16s. Values from 65520 on become infinite, NaN stays NaN. Both have one length."""
    for i in range(np.uint64(values.shape[0])):
        size = _u32(values[i] & _WITHOUT_SIGN)
        sign = _u32(_u32(values[i] ^ size) >> _SIXTEEN)
        bounded = _u32(min(size, _BEYOND))
        odd = _u32(_u32(bounded >> _DROPPED) & _ONE)
        normal = _u32(_u32(_u32(bounded - _OTHER_BIAS) + _u32(_DROPPED_BELOW_MIDDLE + odd)) >> _DROPPED)
        # float32s from 0.5 to 1 are multiples of 2^-24: the sum rounds to one; its bits minus those of 0.5 count them.
        subnormal = _u32(np.float32(_u32(size).view(np.float32) + _HALF).view(np.uint32) - _BITS_OF_HALF)
        finite = normal if size >= _SMALLEST_NORMAL else subnormal
        out[i] = np.uint16(sign | (_NAN_16 if size > _INFINITY else finite))


@kernel(UINT16_IN, UINT32S)
def from_float16(halves: NDArray[np.uint16], out: NDArray[np.uint32]) -> None:
    """Converts float16s to float32s. Both have one length."""
    for i in range(np.uint64(halves.shape[0])):
        bits = _u32(halves[i])
        size = _u32(bits & _WITHOUT_SIGN_16)
        sign = _u32(_u32(bits ^ size) << _SIXTEEN)
        shifted = _u32(size << _DROPPED)
        subnormal = np.float32(np.float32(np.int32(size)) * _UNIT).view(np.uint32)
        finite = _u32(shifted + _OTHER_BIAS) if size >= _NORMAL_16 else subnormal
        out[i] = _u32(sign | (_u32(shifted | _INFINITY) if size >= _INFINITY_16 else finite))
