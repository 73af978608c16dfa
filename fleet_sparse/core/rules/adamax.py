"""Adamax (Kingma and Ba, ICLR 2015, section 7.1), lazy, with the paper's t: the first push has t = 1; as dense Paddle.

m <- b1 m + (1 - b1) g,  u <- max(|g|, b2 u + epsilon),  p <- p - lr / (1 - b1^t) m / u.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import AHEAD, KERNEL_TYPES, UpdateRule, prefetch_row, zeros

_NUM_STATES = np.uint64(2)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    # The float32 beta1 that the kernel multiplies with, as in `adam`.
    beta1 = float(np.float32(hyperparameters["beta1"]))
    rate = learning_rate / (1.0 - beta1**step)
    return np.array([rate, hyperparameters["epsilon"], beta1, 1.0 - beta1, hyperparameters["beta2"]], np.float32)


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
    rate, epsilon, beta1, rest1, beta2 = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    d, n = np.uint64(dim), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    for i in range(n):
        if i + AHEAD < n:
            ahead = np.uint64(row_indices[i + AHEAD])
            prefetch_row(rows, ahead * r_stride, states, ahead * s_stride + s_offset, d, _NUM_STATES)
        index = np.uint64(row_indices[i])
        row = index * r_stride
        first = index * s_stride + s_offset
        norm = first + d
        grad = i * d
        for j in range(d):
            g = grads[grad + j]
            m = beta1 * states[first + j] + rest1 * g
            u = max(abs(g), beta2 * states[norm + j] + epsilon)
            states[first + j] = m
            states[norm + j] = u
            rows[row + j] -= rate * (m / u)


adamax = UpdateRule(
    name="adamax",
    num_states=2,
    defaults=(("beta1", 0.9), ("beta2", 0.999), ("epsilon", 1e-8)),
    initial_state=zeros(2),
    scalars=_scalars,
    kernel=_apply,
)
