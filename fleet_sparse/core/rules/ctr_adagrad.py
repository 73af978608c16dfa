"""Adagrad of Paddle's CTR accessors: p <- p - lr g sqrt(G0 / (G0 + G)), then G <- G + g^2; p stays within bounds.

With `is_shared` the first value of a row has a G of its own and the others have one together, to which the mean of
their g^2 is added (`SparseAdaGradSGDRule`); otherwise each value has its own (`StdAdaGradSGDRule`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import AHEAD, KERNEL_TYPES, UpdateRule, prefetch_row, zeros

_NUM_STATES, _ONE = np.uint64(1), np.uint64(1)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    names = ("initial_g2sum", "weight_min", "weight_max", "is_shared", "first")
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
    lr, initial, low, high = scalars[0], scalars[1], scalars[2], scalars[3]
    is_shared, first = scalars[4] != 0, np.uint64(np.int64(scalars[5]))
    d, n = np.uint64(dim), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    for i in range(n):
        if i + AHEAD < n:
            ahead = np.uint64(row_indices[i + AHEAD])
            prefetch_row(rows, ahead * r_stride, states, ahead * s_stride + s_offset, d, _NUM_STATES)
        index = np.uint64(row_indices[i])
        row = index * r_stride
        g2sum = index * s_stride + s_offset
        grad = i * d
        for j in range(d):
            g = grads[grad + j]
            value = rows[row + j] - lr * g * math.sqrt(initial / (initial + states[g2sum + j]))
            rows[row + j] = min(max(value, low), high)
        if is_shared:
            begin = first + _ONE
            total = np.float64(0.0)
            for j in range(begin, d):
                total += np.float64(grads[grad + j]) * np.float64(grads[grad + j])
            if begin < d:
                total /= np.float64(d - begin)
            for j in range(begin, d):
                states[g2sum + j] += np.float32(total)
        end = min(first + _ONE, d) if is_shared else d
        for j in range(end):
            states[g2sum + j] += grads[grad + j] * grads[grad + j]


ctr_adagrad = UpdateRule(
    name="ctr_adagrad",
    num_states=1,
    defaults=(("first", 0.0), ("initial_g2sum", 3.0), ("is_shared", 1.0), ("weight_max", 10.0), ("weight_min", -10.0)),
    initial_state=zeros(1),
    scalars=_scalars,
    kernel=_apply,
    needs_whole_row=True,
)
