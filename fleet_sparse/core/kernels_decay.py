"""Kernel for the gradient of weight decay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import FLOAT32_IN, FLOAT32S, INT64, INT64_IN, kernel


@kernel(FLOAT32S, INT64, INT64_IN, FLOAT32_IN, INT64, FLOAT32_IN, FLOAT32S)
def add_decay(
    rows: NDArray[np.float32],
    row_stride: int,
    row_indices: NDArray[np.int64],
    grads: NDArray[np.float32],
    dim: int,
    coefficients: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Writes `g + (l1 sign(p) + l2 p)` to `out`, which has the length of `grads`. Arguments are as in `RuleKernel`.

    `coefficients` is `[l1, l2]`. If one of them is 0 the result is rounded as in dense Paddle.
    """
    l1, l2 = coefficients[0], coefficients[1]
    d, n, stride = np.uint64(dim), np.uint64(row_indices.shape[0]), np.uint64(row_stride)
    for i in range(n):
        row, grad = np.uint64(row_indices[i]) * stride, i * d
        for j in range(d):
            p = rows[row + j]
            out[grad + j] = grads[grad + j] + (l1 * np.sign(p) + l2 * p)
