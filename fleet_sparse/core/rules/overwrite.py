"""No training: pushed values take the place of the old ones. For what a worker computes and pservers only keep."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import KERNEL_TYPES, UpdateRule


def _initial_state(hyperparameters: dict[str, float]) -> tuple[float, ...]:
    return ()


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    return np.empty(0, np.float32)


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
    d, stride, n = np.uint64(dim), np.uint64(row_stride), np.uint64(row_indices.shape[0])
    for i in range(n):
        row = np.uint64(row_indices[i]) * stride
        grad = i * d
        for j in range(d):
            rows[row + j] = grads[grad + j]


overwrite = UpdateRule("overwrite", 0, (), _initial_state, _scalars, _apply, trains=False)
