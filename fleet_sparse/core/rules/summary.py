"""Decaying sum: p <- decay p + d. A push carries what the batch of one worker adds, as the sums of `data_norm`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .rule import KERNEL_TYPES, UpdateRule, zeros


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    return np.array([hyperparameters["decay"]], np.float32)


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
    decay = scalars[0]
    d, stride, n = np.uint64(dim), np.uint64(row_stride), np.uint64(row_indices.shape[0])
    for i in range(n):
        row = np.uint64(row_indices[i]) * stride
        added = i * d
        for j in range(d):
            rows[row + j] = decay * rows[row + j] + grads[added + j]


summary = UpdateRule(
    name="summary",
    num_states=0,
    defaults=(("decay", 0.9999999),),
    initial_state=zeros(0),
    scalars=_scalars,
    kernel=_apply,
    trains=False,
    is_summed=True,
)
