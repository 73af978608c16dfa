"""Adagrad: m <- m + g^2, p <- p - lr g / (sqrt(m) + epsilon) (Duchi et al., JMLR 12, 2011; as dense Paddle)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import AHEAD, KERNEL_TYPES, UpdateRule, decays, prefetch_row

_NUM_STATES = np.uint64(1)


def _initial_state(hyperparameters: dict[str, float]) -> tuple[float, ...]:
    return (hyperparameters["initial_accumulator_value"],)


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    return np.array([learning_rate, hyperparameters["epsilon"]], np.float32)


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
    lr, epsilon = scalars[0], scalars[1]
    d, n = np.uint64(dim), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    for i in range(n):
        if i + AHEAD < n:
            ahead = np.uint64(row_indices[i + AHEAD])
            prefetch_row(rows, ahead * r_stride, states, ahead * s_stride + s_offset, d, _NUM_STATES)
        index = np.uint64(row_indices[i])
        row = index * r_stride
        moment = index * s_stride + s_offset
        grad = i * d
        for j in range(d):
            g = grads[grad + j]
            m = states[moment + j] + g * g
            states[moment + j] = m
            rows[row + j] -= lr * g / (math.sqrt(m) + epsilon)


adagrad = UpdateRule(
    name="adagrad",
    num_states=1,
    defaults=(("epsilon", 1e-6), ("initial_accumulator_value", 0.0)),
    initial_state=_initial_state,
    scalars=_scalars,
    kernel=_apply,
    merge=decays(1.0),
    squares=(0,),
)
