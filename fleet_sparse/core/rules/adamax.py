"""Adamax (Kingma and Ba, ICLR 2015, section 7.1), lazy, with the paper's t: the first push has t = 1; as dense Paddle.

m <- b1 m + (1 - b1) g,  u <- max(|g|, b2 u + epsilon),  p <- p - lr / (1 - b1^t) m / u.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..intrinsics import prefetch_write
from ..jit import kernel
from .rule import KERNEL_TYPES, UpdateRule

_AHEAD, _LINE, _TWO = np.uint64(16), np.uint64(16), np.uint64(2)


def _initial_state(hyperparameters: dict[str, float]) -> tuple[float, ...]:
    return (0.0, 0.0)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    # The beta1 that the kernel (and Paddle's) really multiplies with, as in `adam`.
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
        if i + _AHEAD < n:
            index = np.uint64(row_indices[i + _AHEAD])
            for j in range(np.uint64(0), d, _LINE):
                prefetch_write(rows, index * r_stride + j)
            for j in range(np.uint64(0), _TWO * d, _LINE):
                prefetch_write(states, index * s_stride + s_offset + j)
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
    "adamax", 2, (("beta1", 0.9), ("beta2", 0.999), ("epsilon", 1e-8)), _initial_state, _scalars, _apply
)
