"""AdamW (Loshchilov and Hutter, ICLR 2019), lazy: p <- p - lr coeff p, then a step of Adam; as dense Paddle.

Adam's step is that of `adam`, but for the decay, which is no part of the gradient. t is that of the table: a row is
decayed when it is pushed.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..intrinsics import prefetch_write
from ..jit import kernel
from .rule import KERNEL_TYPES, UpdateRule

_AHEAD, _LINE, _TWO = np.uint64(16), np.uint64(16), np.uint64(2)


def _initial_state(hyperparameters: dict[str, float]) -> tuple[float, ...]:
    return (0.0, 0.0)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    # The betas that the kernel (and Paddle's) really multiplies with, as in `adam`.
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
        if i + _AHEAD < n:
            index = np.uint64(row_indices[i + _AHEAD])
            for j in range(np.uint64(0), d, _LINE):
                prefetch_write(rows, index * r_stride + j)
            for j in range(np.uint64(0), _TWO * d, _LINE):
                prefetch_write(states, index * s_stride + s_offset + j)
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
    "adamw",
    2,
    (("beta1", 0.9), ("beta2", 0.999), ("coeff", 0.01), ("epsilon", 1e-8)),
    _initial_state,
    _scalars,
    _apply,
)
