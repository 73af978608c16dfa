"""Adam (Kingma and Ba, ICLR 2015), lazy, with the paper's t: the first push has t = 1; as dense Paddle.

m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  p <- p - lr_t m / (sqrt(v) + epsilon_t)  with
lr_t = lr sqrt(1 - b2^t) / (1 - b1^t) and epsilon_t = epsilon sqrt(1 - b2^t).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import AHEAD, KERNEL_TYPES, UpdateRule, decays, prefetch_row, zeros

_NUM_STATES = np.uint64(2)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    # Both kernels, ours and Paddle's, multiply with float32 betas: 1 - 0.999 and 1 - float32(0.999) differ by 1e-5.
    beta1, beta2 = (float(np.float32(hyperparameters[name])) for name in ("beta1", "beta2"))
    correction = math.sqrt(1.0 - beta2**step)
    rate = learning_rate * correction / (1.0 - beta1**step)
    epsilon = hyperparameters["epsilon"] * correction
    return np.array([rate, epsilon, beta1, beta2, 1.0 - beta1, 1.0 - beta2], np.float32)


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
    rate, epsilon, beta1, beta2, rest1, rest2 = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], scalars[5]
    d, n = np.uint64(dim), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    for i in range(n):
        if i + AHEAD < n:
            ahead = np.uint64(row_indices[i + AHEAD])
            prefetch_row(rows, ahead * r_stride, states, ahead * s_stride + s_offset, d, _NUM_STATES)
        index = np.uint64(row_indices[i])
        row = index * r_stride
        first = index * s_stride + s_offset
        second = first + d
        grad = i * d
        for j in range(d):
            g = grads[grad + j]
            m = beta1 * states[first + j] + rest1 * g
            v = beta2 * states[second + j] + rest2 * g * g
            states[first + j] = m
            states[second + j] = v
            rows[row + j] -= rate * (m / (math.sqrt(v) + epsilon))


adam = UpdateRule(
    name="adam",
    num_states=2,
    defaults=(("beta1", 0.9), ("beta2", 0.999), ("epsilon", 1e-8)),
    initial_state=zeros(2),
    scalars=_scalars,
    kernel=_apply,
    merge=decays("beta1", "beta2"),
    squares=(1,),
)
