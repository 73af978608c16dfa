"""Momentum (Polyak, 1964) and Nesterov's (Sutskever et al., ICML 2013), lazy; as dense Paddle.

v <- mu v + g,  p <- p - lr v;  with use_nesterov 1 instead of 0  p <- p - lr (g + mu v).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import AHEAD, KERNEL_TYPES, UpdateRule, decays, prefetch_row, zeros

_NUM_STATES = np.uint64(1)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    names = ("mu", "use_nesterov")
    return np.array([learning_rate, *(hyperparameters[name] for name in names)], np.float32)


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
    lr, mu, use_nesterov = scalars[0], scalars[1], scalars[2] != 0
    d, n = np.uint64(dim), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    for i in range(n):
        if i + AHEAD < n:
            ahead = np.uint64(row_indices[i + AHEAD])
            prefetch_row(rows, ahead * r_stride, states, ahead * s_stride + s_offset, d, _NUM_STATES)
        index = np.uint64(row_indices[i])
        row = index * r_stride
        velocity = index * s_stride + s_offset
        grad = i * d
        for j in range(d):
            g = grads[grad + j]
            v = states[velocity + j] * mu + g
            states[velocity + j] = v
            rows[row + j] -= (g + v * mu) * lr if use_nesterov else lr * v


momentum = UpdateRule(
    name="momentum",
    num_states=1,
    defaults=(("mu", 0.9), ("use_nesterov", 0.0)),
    initial_state=zeros(1),
    scalars=_scalars,
    kernel=_apply,
    merge=decays("mu"),
    is_linear=True,
)
