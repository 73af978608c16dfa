"""RMSProp (Hinton, lecture 6 of his course, 2012; centered: Graves, arXiv 1308.0850), lazy; as dense Paddle.

s <- rho s + (1 - rho) g^2,  m <- momentum m + lr g / sqrt(s + epsilon),  p <- p - m;  with centered 1 instead of 0 also
a <- rho a + (1 - rho) g,  and the root is that of s - a^2 + epsilon. The states are s, a, m.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..intrinsics import prefetch_write
from ..jit import kernel
from .rule import KERNEL_TYPES, UpdateRule

_AHEAD, _LINE, _THREE = np.uint64(16), np.uint64(16), np.uint64(3)


def _initial_state(hyperparameters: dict[str, float]) -> tuple[float, ...]:
    return (0.0, 0.0, 0.0)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    # As Adam's betas: 1 - rho is that of the rho which the kernel multiplies with.
    rho = float(np.float32(hyperparameters["rho"]))
    names = ("epsilon", "momentum", "centered")
    return np.array([learning_rate, rho, 1.0 - rho, *(hyperparameters[name] for name in names)], np.float32)


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
    lr, rho, rest, epsilon = scalars[0], scalars[1], scalars[2], scalars[3]
    momentum, centered = scalars[4], scalars[5] != 0
    d, n = np.uint64(dim), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    for i in range(n):
        if i + _AHEAD < n:
            index = np.uint64(row_indices[i + _AHEAD])
            for j in range(np.uint64(0), d, _LINE):
                prefetch_write(rows, index * r_stride + j)
            for j in range(np.uint64(0), _THREE * d, _LINE):
                prefetch_write(states, index * s_stride + s_offset + j)
        index = np.uint64(row_indices[i])
        row = index * r_stride
        square = index * s_stride + s_offset
        mean = square + d
        moment = mean + d
        grad = i * d
        for j in range(d):
            g = grads[grad + j]
            s = rho * states[square + j] + rest * g * g
            states[square + j] = s
            if centered:
                a = rho * states[mean + j] + rest * g
                states[mean + j] = a
                s -= a * a
            m = momentum * states[moment + j] + lr * g / math.sqrt(s + epsilon)
            states[moment + j] = m
            rows[row + j] -= m


rmsprop = UpdateRule(
    "rmsprop",
    3,
    (("centered", 0.0), ("epsilon", 1e-6), ("momentum", 0.0), ("rho", 0.95)),
    _initial_state,
    _scalars,
    _apply,
)
