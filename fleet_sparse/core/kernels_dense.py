"""Kernels that add up the dense gradients of several workers, and check the sums as they are written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import BOOL, FLOAT32, FLOAT32_IN, FLOAT32S, kernel

_WITHOUT_SIGN, _INFINITY = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)


@kernel(FLOAT32_IN, FLOAT32, FLOAT32_IN, FLOAT32, FLOAT32, FLOAT32S, result=BOOL)
def add_two(
    first: NDArray[np.float32],
    first_factor: np.float32,
    second: NDArray[np.float32],
    second_factor: np.float32,
    divisor: np.float32,
    out: NDArray[np.float32],
) -> bool:
    """Writes `(first * first_factor + second * second_factor) / divisor` to `out`, rounded after each operation.

    Returns whether all of it is finite. The arrays have one length, and `out` overlaps none of the others.
    """
    largest = np.uint32(0)
    for i in range(np.uint64(out.shape[0])):
        value = (first[i] * first_factor + second[i] * second_factor) / divisor
        out[i] = value
        # As in `all_finite`: a maximum of integers is vectorised.
        largest = max(largest, np.float32(value).view(np.uint32) & _WITHOUT_SIGN)
    return bool(largest < _INFINITY)


@kernel(FLOAT32S, FLOAT32_IN, FLOAT32, FLOAT32, result=BOOL)
def add_one_more(
    total: NDArray[np.float32], grads: NDArray[np.float32], factor: np.float32, divisor: np.float32
) -> bool:
    """Sets `total` to `(total + grads * factor) / divisor`; otherwise as `add_two`."""
    largest = np.uint32(0)
    for i in range(np.uint64(total.shape[0])):
        value = (total[i] + grads[i] * factor) / divisor
        total[i] = value
        largest = max(largest, np.float32(value).view(np.uint32) & _WITHOUT_SIGN)
    return bool(largest < _INFINITY)
