"""AdamW (Loshchilov and Hutter, ICLR 2019), lazy: p <- p - lr coeff p, then a step of Adam; as dense Paddle.

The step is that of `adam`; the decay is not part of the gradient. Rows decay only when they are pushed.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import AHEAD, KERNEL_TYPES, UpdateRule, decays, prefetch_row, zeros

_NUM_STATES = np.uint64(2)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    # The float32 betas that the kernel multiplies with, as in `adam`.
    beta1, beta2 = (float(np.float32(hyperparameters[name])) for name in ("beta1", "beta2"))
    correction = math.sqrt(1.0 - beta2**step)
    rate = learning_rate * correction / (1.0 - beta1**step)
    epsilon = hyperparameters["epsilon"] * correction
    decay = learning_rate * hyperparameters["coeff"]
    return np.array([rate, epsilon, beta1, beta2, 1.0 - beta1, 1.0 - beta2, decay], np.float32)


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
    decay = scalars[6]
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
            p = rows[row + j]
            m = beta1 * states[first + j] + rest1 * g
            v = beta2 * states[second + j] + rest2 * g * g
            states[first + j] = m
            states[second + j] = v
            rows[row + j] = p - decay * p - rate * (m / (math.sqrt(v) + epsilon))


adamw = UpdateRule(
    name="adamw",
    num_states=2,
    defaults=(("beta1", 0.9), ("beta2", 0.999), ("coeff", 0.01), ("epsilon", 1e-8)),
    initial_state=zeros(2),
    scalars=_scalars,
    kernel=_apply,
    merge=decays("beta1", "beta2"),
    squares=(1,),
)
