"""Kernel for the norms of gradients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import FLOAT32_IN, FLOAT64S, INT64_IN, kernel

_ONE, _TWO, _THREE = np.uint64(1), np.uint64(2), np.uint64(3)


@kernel(FLOAT32_IN, INT64_IN, FLOAT64S)
def sums_of_squares(values: NDArray[np.float32], cuts: NDArray[np.int64], out: NDArray[np.float64]) -> None:
    """Writes the sum of squares of `values[cuts[k] : cuts[k + 1]]` to `out[k]`, in float64 and in a fixed order.

    Args:
        values: `(n,)`.
        cuts: `(len(out) + 1,)`, ascending, each in `[0, n]`.
        out: Output.
    """
    for k in range(np.uint64(out.shape[0])):
        first, last = np.uint64(cuts[k]), np.uint64(cuts[k + _ONE])
        quads = (last - first) >> _TWO
        # Four sums, because the additions of one sum would wait for each other; four on every machine, for equal bits.
        a = b = c = d = 0.0
        for quad in range(quads):
            i = first + (quad << _TWO)
            w, x = np.float64(values[i]), np.float64(values[i + _ONE])
            y, z = np.float64(values[i + _TWO]), np.float64(values[i + _THREE])
            a += w * w
            b += x * x
            c += y * y
            d += z * z
        for tail in range(first + (quads << _TWO), last):
            w = np.float64(values[tail])
            a += w * w
        out[k] = (a + b) + (c + d)


@kernel(FLOAT64S, FLOAT64S)
def sum_in_order(values: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """Writes the sum of `values` to `out[0]`, added one after the other."""
    total = 0.0
    for i in range(np.uint64(values.shape[0])):
        total += values[i]
    out[0] = total
