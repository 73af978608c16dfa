"""Kernels of changes: what updates elsewhere made of a row and its states, and its merge into the row.

A change of n updates with weight w adds `copy - base` to the row and makes each state, which decays by b in an
update, `(1 - w) s + w (b^n s + s_copy - b^n s_base)`. Rows and states are laid out as for rules (`rules.rule`).

Copies moved by w times what each update makes of a row, but their states are those of whole updates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intrinsics import prefetch_read, prefetch_write
from .jit import FLOAT32_IN, FLOAT32S, FLOAT64, FLOAT64_IN, INT64, INT64_IN, UINT32_IN, inlined, kernel

_AHEAD, _LINE, _ZERO = np.uint64(16), np.uint64(16), np.uint64(0)


@inlined
def power(base: np.float64, exponent: np.uint64) -> np.float64:
    """Returns a power of a decay."""
    # Exact for a factor of 1, and the same bits on both sides, which a library's pow need not give.
    result = np.float64(1.0)
    square = base
    while exponent != _ZERO:
        if exponent & np.uint64(1):
            result *= square
        square *= square
        exponent >>= np.uint64(1)
    return result


@kernel(FLOAT32S, FLOAT32S, INT64_IN, UINT32_IN, INT64, FLOAT64_IN, FLOAT64_IN, FLOAT32S)
def subtract_base_states(
    states: NDArray[np.float32],
    base_states: NDArray[np.float32],
    slots: NDArray[np.int64],
    num_updates: NDArray[np.uint32],
    dim: int,
    decays: NDArray[np.float64],
    least: NDArray[np.float64],
    out: NDArray[np.float32],
) -> None:
    """Writes the change of the states of some copies.

    Args:
        states: `(num_slots * num_states * dim,)`, after the updates.
        base_states: The same, before them.
        slots: `(n,)`.
        num_updates: `(n,)`.
        dim: Floats of a row.
        decays: `(num_states,)`.
        least: `(num_states,)`, of `rules.rule.least_addends`: rounding shall not make a sum of squares negative.
        out: Output, `(n * num_states * dim,)`.
    """
    d, num_states, n = np.uint64(dim), np.uint64(decays.shape[0]), np.uint64(slots.shape[0])
    width = d * num_states
    for i in range(n):
        if i + _AHEAD < n:
            for j in range(_ZERO, width, _LINE):
                prefetch_read(states, np.uint64(slots[i + _AHEAD]) * width + j)
                prefetch_read(base_states, np.uint64(slots[i + _AHEAD]) * width + j)
        begin = np.uint64(slots[i]) * width
        for k in range(num_states):
            decay, least_change = power(decays[k], np.uint64(num_updates[i])), least[k]
            for j in range(k * d, (k + np.uint64(1)) * d):
                before = decay * np.float64(base_states[begin + j])
                out[i * width + j] = np.float32(max(np.float64(states[begin + j]) - before, least_change))


@kernel(
    *(FLOAT32S, INT64, FLOAT32S, INT64, INT64, INT64_IN),
    *(FLOAT32_IN, FLOAT32_IN, UINT32_IN, INT64, FLOAT64_IN, FLOAT64),
)
def merge_changes(
    rows: NDArray[np.float32],
    row_stride: int,
    states: NDArray[np.float32],
    state_stride: int,
    state_offset: int,
    row_indices: NDArray[np.int64],
    row_changes: NDArray[np.float32],
    state_changes: NDArray[np.float32],
    num_updates: NDArray[np.uint32],
    dim: int,
    decays: NDArray[np.float64],
    weight: float,
) -> None:
    """Merges changes into rows and states; a row that is named twice is changed twice, in order.

    Args:
        rows: With the next four arguments, as for rules.
        row_indices: `(n,)`, none negative.
        row_changes: `(n * dim,)`.
        state_changes: `(n * num_states * dim,)`, as `subtract_base_states` writes them.
        num_updates: `(n,)`: number of updates of each change of states.
        dim: Floats of a row.
        decays: `(num_states,)`; `(0,)` leaves the states as they are.
        weight: Weight of the changes of states.
    """
    d, num_states, n = np.uint64(dim), np.uint64(decays.shape[0]), np.uint64(row_indices.shape[0])
    r_stride, s_stride, s_offset = np.uint64(row_stride), np.uint64(state_stride), np.uint64(state_offset)
    width = d * num_states
    for i in range(n):
        if i + _AHEAD < n:
            ahead = np.uint64(row_indices[i + _AHEAD])
            for j in range(_ZERO, d, _LINE):
                prefetch_write(rows, ahead * r_stride + j)
            for j in range(_ZERO, width, _LINE):
                prefetch_write(states, ahead * s_stride + s_offset + j)
        row = np.uint64(row_indices[i]) * r_stride
        state = np.uint64(row_indices[i]) * s_stride + s_offset
        for j in range(d):
            rows[row + j] = np.float32(np.float64(rows[row + j]) + np.float64(row_changes[i * d + j]))
        for k in range(num_states):
            decay = power(decays[k], np.uint64(num_updates[i]))
            for j in range(k * d, (k + np.uint64(1)) * d):
                s = np.float64(states[state + j])
                merged = decay * s + np.float64(state_changes[i * width + j])
                states[state + j] = np.float32((1.0 - weight) * s + weight * merged)
