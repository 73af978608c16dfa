"""FTRL-Proximal (McMahan et al., KDD 2013, algorithm 1), where alpha is the learning rate. It is lazy by definition.

s <- (sqrt(n + g^2) - sqrt(n)) / alpha,  z <- z + g - s p,  n <- n + g^2,
p <- 0 if |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / alpha + l2).  The states are z, n.

p follows from z and n alone, so the first push discards the initial value of a row: tables should begin with zeros. The
paper's alpha is constant. A push with learning rate 0 changes nothing.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import AHEAD, KERNEL_TYPES, UpdateRule, prefetch_row, zeros

_NUM_STATES = np.uint64(2)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    return np.array([learning_rate, *(hyperparameters[name] for name in ("beta", "l1", "l2"))], np.float32)


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
    alpha, beta, l1, l2 = scalars[0], scalars[1], scalars[2], scalars[3]
    if alpha == 0:
        return
    d, n = np.uint64(dim), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    for i in range(n):
        if i + AHEAD < n:
            ahead = np.uint64(row_indices[i + AHEAD])
            prefetch_row(rows, ahead * r_stride, states, ahead * s_stride + s_offset, d, _NUM_STATES)
        index = np.uint64(row_indices[i])
        row = index * r_stride
        linear = index * s_stride + s_offset
        square = linear + d
        grad = i * d
        for j in range(d):
            g = grads[grad + j]
            root_before = math.sqrt(states[square + j])
            squares = states[square + j] + g * g
            root = math.sqrt(squares)
            z = states[linear + j] + g - (root - root_before) / alpha * rows[row + j]
            states[linear + j] = z
            states[square + j] = squares
            if abs(z) <= l1:
                rows[row + j] = 0
            else:
                rows[row + j] = ((l1 if z > 0 else -l1) - z) / ((beta + root) / alpha + l2)


ftrl = UpdateRule(
    name="ftrl",
    num_states=2,
    defaults=(("beta", 1.0), ("l1", 0.0), ("l2", 0.0)),
    initial_state=zeros(2),
    scalars=_scalars,
    kernel=_apply,
    follows_state=True,
)
