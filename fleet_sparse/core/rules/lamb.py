"""LAMB (You et al., ICLR 2020, algorithm 2), lazy, with a trust ratio for each row; as dense Paddle for one parameter.

m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon) + decay p,
p <- p - lr r u  with  r = |p| / |u|, and 1 if either norm is 0, or if decay is 0 and always_adapt is not 1.

The norms are of one row of a table, or of one whole dense parameter.
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
    decay = hyperparameters["decay"]
    adapts = decay > 0 or hyperparameters["always_adapt"] != 0
    rest1, rest2, bias1, bias2 = 1.0 - beta1, 1.0 - beta2, 1.0 - beta1**step, 1.0 - beta2**step
    epsilon = hyperparameters["epsilon"]
    return np.array([learning_rate, beta1, beta2, rest1, rest2, bias1, bias2, epsilon, decay, adapts], np.float32)


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
    lr, beta1, beta2, rest1, rest2 = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    bias1, bias2, epsilon, decay, adapts = scalars[5], scalars[6], scalars[7], scalars[8], scalars[9] != 0
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
        row_square, step_square = 0.0, 0.0  # float64: a dense parameter may have millions of values
        for j in range(d):
            g = grads[grad + j]
            p = rows[row + j]
            m = beta1 * states[first + j] + rest1 * g
            v = beta2 * states[second + j] + rest2 * g * g
            states[first + j] = m
            states[second + j] = v
            u = m / bias1 / (math.sqrt(v / bias2) + epsilon) + decay * p
            row_square += np.float64(p) * np.float64(p)
            step_square += np.float64(u) * np.float64(u)
        rate = lr
        if adapts and row_square > 0 and step_square > 0:
            rate *= np.float32(math.sqrt(row_square)) / np.float32(math.sqrt(step_square))
        for j in range(d):
            p = rows[row + j]
            m, v = states[first + j], states[second + j]
            rows[row + j] = p - rate * (m / bias1 / (math.sqrt(v / bias2) + epsilon) + decay * p)


lamb = UpdateRule(
    name="lamb",
    num_states=2,
    defaults=(("always_adapt", 0.0), ("beta1", 0.9), ("beta2", 0.999), ("decay", 0.01), ("epsilon", 1e-6)),
    initial_state=zeros(2),
    scalars=_scalars,
    kernel=_apply,
    needs_whole_row=True,
    merge=decays("beta1", "beta2"),
    squares=(1,),
)
