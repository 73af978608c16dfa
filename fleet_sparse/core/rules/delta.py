"""No training: p <- p + lr d. A push carries the change d that training on a worker made to a row, as in geo training.

The learning rate is the weight of the change: 1 / M where those of M workers are averaged, 1 where they are summed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..intrinsics import prefetch_write
from ..jit import kernel
from .rule import KERNEL_TYPES, UpdateRule

_AHEAD, _LINE = np.uint64(16), np.uint64(16)


def _initial_state(hyperparameters: dict[str, float]) -> tuple[float, ...]:
    return ()


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    return np.array([learning_rate], np.float32)


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
    weight = scalars[0]
    d, stride, n = np.uint64(dim), np.uint64(row_stride), np.uint64(row_indices.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            ahead = np.uint64(row_indices[i + _AHEAD]) * stride
            for j in range(np.uint64(0), d, _LINE):
                prefetch_write(rows, ahead + j)
        row = np.uint64(row_indices[i]) * stride
        change = i * d
        for j in range(d):
            rows[row + j] += weight * grads[change + j]


delta = UpdateRule("delta", 0, (), _initial_state, _scalars, _apply, trains=False)
