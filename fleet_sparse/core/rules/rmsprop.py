"""RMSProp (Hinton, lecture 6 of his course, 2012; centered: Graves, arXiv 1308.0850), lazy; as dense Paddle.

s <- rho s + (1 - rho) g^2,  m <- momentum m + lr g / sqrt(s + epsilon),  p <- p - m;  with centered 1 instead of 0 also
a <- rho a + (1 - rho) g,  and the root is that of s - a^2 + epsilon. The states are s, a, m.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import AHEAD, KERNEL_TYPES, UpdateRule, decays, prefetch_row, zeros

_NUM_STATES = np.uint64(3)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    # The float32 rho that the kernel multiplies with, as the betas in `adam`.
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
        if i + AHEAD < n:
            ahead = np.uint64(row_indices[i + AHEAD])
            prefetch_row(rows, ahead * r_stride, states, ahead * s_stride + s_offset, d, _NUM_STATES)
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
    name="rmsprop",
    num_states=3,
    defaults=(("centered", 0.0), ("epsilon", 1e-6), ("momentum", 0.0), ("rho", 0.95)),
    initial_state=zeros(3),
    scalars=_scalars,
    kernel=_apply,
    merge=decays("rho", "rho", "momentum"),
    squares=(0,),
)
