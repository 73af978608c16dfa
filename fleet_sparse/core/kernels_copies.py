"""Kernels of copies of rows, and of their bases: the values that they had when they were last equal to what the
pservers have. Copy `slot` of an array is `values[slot * width : (slot + 1) * width]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intrinsics import copy, prefetch_read, prefetch_write
from .jit import FLOAT32_IN, FLOAT32S, FLOAT64_IN, INT64, INT64_IN, UINT32_IN, UINT32S, kernel
from .kernels_changes import power

_AHEAD, _LINE, _ZERO, _ONE = np.uint64(8), np.uint64(16), np.uint64(0), np.uint64(1)


@kernel(FLOAT32S, INT64_IN, INT64, FLOAT32S)
def gather_copies(copies: NDArray[np.float32], slots: NDArray[np.int64], width: int, out: NDArray[np.float32]) -> None:
    """Writes the copy of each slot to its place in `out`, `(n * width,)`; leaves it as it is where the slot is -1."""
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            for j in range(_ZERO, w, _LINE):
                prefetch_read(copies, np.uint64(slots[i + _AHEAD]) * w + j)
        if slots[i] >= 0:
            copy(out, i * w, copies, np.uint64(slots[i]) * w, w)


@kernel(FLOAT32S, FLOAT32S, INT64_IN, FLOAT32_IN, INT64)
def refresh_copies(
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    slots: NDArray[np.int64],
    fresh: NDArray[np.float32],
    width: int,
) -> None:
    """Makes fresh values `(n * width,)` the bases, and adds to the copies what they differed from the bases before."""
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            for j in range(_ZERO, w, _LINE):
                prefetch_write(copies, np.uint64(slots[i + _AHEAD]) * w + j)
                prefetch_write(bases, np.uint64(slots[i + _AHEAD]) * w + j)
        at = np.uint64(slots[i]) * w
        for j in range(w):
            value = fresh[i * w + j]
            copies[at + j] = value + (copies[at + j] - bases[at + j])
            bases[at + j] = value


@kernel(FLOAT32S, FLOAT32S, INT64_IN, FLOAT32_IN, UINT32_IN, INT64, FLOAT64_IN)
def refresh_states(
    states: NDArray[np.float32],
    base_states: NDArray[np.float32],
    slots: NDArray[np.int64],
    fresh: NDArray[np.float32],
    num_updates: NDArray[np.uint32],
    dim: int,
    decays: NDArray[np.float64],
) -> None:
    """Makes fresh states the bases, and merges into them what the copies' updates since their bases made.

    Args:
        states: `(num_slots * num_states * dim,)`.
        base_states: The same.
        slots: `(n,)`.
        fresh: `(n * num_states * dim,)`.
        num_updates: `(n,)`, number of updates since the bases.
        dim: Floats of a row.
        decays: `(num_states,)`, as in `kernels_changes`.
    """
    d, num_states = np.uint64(dim), np.uint64(decays.shape[0])
    width = d * num_states
    for i in range(np.uint64(slots.shape[0])):
        at = np.uint64(slots[i]) * width
        for k in range(num_states):
            decay = power(decays[k], np.uint64(num_updates[i]))
            for j in range(k * d, (k + _ONE) * d):
                value = fresh[i * width + j]
                own = np.float64(states[at + j]) - decay * np.float64(base_states[at + j])
                states[at + j] = np.float32(decay * np.float64(value) + own) if num_updates[i] > 0 else value
                base_states[at + j] = value


@kernel(FLOAT32S, FLOAT32S, INT64_IN, INT64, FLOAT32S)
def subtract_bases(
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    slots: NDArray[np.int64],
    width: int,
    out: NDArray[np.float32],
) -> None:
    """Writes by what copies differ from their bases, `(n * width,)`."""
    w = np.uint64(width)
    for i in range(np.uint64(slots.shape[0])):
        at = np.uint64(slots[i]) * w
        for j in range(w):
            out[i * w + j] = copies[at + j] - bases[at + j]


@kernel(FLOAT32S, FLOAT32S, INT64_IN, INT64)
def settle_bases(copies: NDArray[np.float32], bases: NDArray[np.float32], slots: NDArray[np.int64], width: int) -> None:
    """Makes copies their own bases."""
    w = np.uint64(width)
    for i in range(np.uint64(slots.shape[0])):
        at = np.uint64(slots[i]) * w
        copy(bases, at, copies, at, w)


@kernel(FLOAT32S, FLOAT32S, INT64_IN, INT64, FLOAT32S)
def measure_displacements(
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    slots: NDArray[np.int64],
    width: int,
    out: NDArray[np.float32],
) -> None:
    """Writes the largest difference of a value of each copy from its base, `(n,)`."""
    w = np.uint64(width)
    for i in range(np.uint64(slots.shape[0])):
        at, most = np.uint64(slots[i]) * w, np.float32(0)
        for j in range(w):
            most = max(most, abs(copies[at + j] - bases[at + j]))
        out[i] = most


@kernel(UINT32S, UINT32S, INT64_IN)
def count_updates(held: NDArray[np.uint32], states_held: NDArray[np.uint32], slots: NDArray[np.int64]) -> None:
    """Adds 1 to both counts of each slot."""
    n = np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(held, np.uint64(slots[i + _AHEAD]))
            prefetch_write(states_held, np.uint64(slots[i + _AHEAD]))
        held[slots[i]] += np.uint32(1)
        states_held[slots[i]] += np.uint32(1)
