"""Stochastic gradient descent: p <- p - lr g."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import AHEAD, KERNEL_TYPES, UpdateRule, decays, learning_rate_alone, prefetch_row, zeros

_NONE = np.uint64(0)


@kernel(*KERNEL_TYPES)
def _apply(
    rows: NDArray[np.float32],
    row_stride: int,
    states: NDArray[np.float32],
    state_stride: int,
    state_offset: int,
    row_indices: NDArray[np.int64],
    grads: NDArray[np.float32],
    dim: int,
    scalars: NDArray[np.float32],
) -> None:
    lr = scalars[0]
    d, stride, n = np.uint64(dim), np.uint64(row_stride), np.uint64(row_indices.shape[0])
    for i in range(n):
        if i + AHEAD < n:
            prefetch_row(rows, np.uint64(row_indices[i + AHEAD]) * stride, states, _NONE, d, _NONE)
        row = np.uint64(row_indices[i]) * stride
        grad = i * d
        for j in range(d):
            rows[row + j] -= lr * grads[grad + j]


sgd = UpdateRule(
    name="sgd",
    num_states=0,
    defaults=(),
    initial_state=zeros(0),
    scalars=learning_rate_alone,
    kernel=_apply,
    merge=decays(),
    is_linear=True,
)
