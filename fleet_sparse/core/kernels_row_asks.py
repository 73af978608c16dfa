"""Kernel that answers asks about copies of rows, by the bounds of `kernels_row_bound`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intrinsics import prefetch_read
from .jit import BOOL, FLOAT64, INT64, INT64_IN, INT64S, UINT8S, UINT32_IN, UINT32S, kernel
from .kernels_row_bound import are_states_old, max_behind
from .row_bound import ANY_AMOUNT, NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW

_NO_VERSION, _ROW_FOLLOWS, _STATES_FOLLOW = int(NO_VERSION), ROW_FOLLOWS, STATES_FOLLOW
_MOST_STEPS = ROW_FOLLOWS - 1
_AHEAD, _ZERO, _ONE = np.uint64(16), np.uint64(0), np.uint64(1)


@kernel(
    *(INT64_IN, INT64_IN, UINT32_IN, UINT32S, INT64, FLOAT64, INT64, BOOL, BOOL),
    *(UINT8S, INT64S, INT64S, UINT32S, INT64S, INT64S, UINT32S, INT64S),
)
def answer_asks(
    ids: NDArray[np.int64],
    row_indices: NDArray[np.int64],
    versions: NDArray[np.uint32],
    clocks: NDArray[np.uint32],
    lag: int,
    share: float,
    num_workers: int,
    has_states: bool,
    gives_steps: bool,
    slack: NDArray[np.uint8],
    due: NDArray[np.int64],
    due_row_indices: NDArray[np.int64],
    due_clocks: NDArray[np.uint32],
    full: NDArray[np.int64],
    full_row_indices: NDArray[np.int64],
    full_clocks: NDArray[np.uint32],
    num_found: NDArray[np.int64],
) -> None:
    """Writes a pserver's answer to each ask, and lists what follows.

    Args:
        ids: `(n,)`.
        row_indices: `(n,)`, -1 for an id without a row, whose clock is 0.
        versions: `(n,)`, of the copies.
        clocks: The clock of each row; not read with one worker, whose rows have the clock 0.
        lag: With `share`, the bound, as in `kernels_row_bound`.
        share: As above.
        num_workers: Number of workers of the job.
        has_states: True if the table's rule has states.
        gives_steps: True if copies are leased for a number of steps; else slack is 0 for all that are within the bound.
        slack: Output, `(n,)`.
        due: Output, at least `(n,)`: the ids with `ROW_FOLLOWS`, in their order.
        due_row_indices: Output, the same of their row indices.
        due_clocks: Output, the same of their clocks.
        full: Output, at least `(n,)`: the ids with `STATES_FOLLOW`, in their order.
        full_row_indices: Output, the same of their row indices.
        full_clocks: Output, the same of their clocks.
        num_found: Output, `(2,)`: the number of ids with `ROW_FOLLOWS`, and of those with `STATES_FOLLOW`.
    """
    n, num_due, num_full = np.uint64(ids.shape[0]), np.uint64(0), np.uint64(0)
    is_clocked, others = num_workers > 1, max(num_workers - 1, 1)
    most = max_behind(0, lag, share, num_workers) if is_clocked else ANY_AMOUNT
    for i in range(n):
        clock, version = np.uint32(0), versions[i]
        if is_clocked:
            if i + _AHEAD < n and row_indices[i + _AHEAD] >= 0:
                prefetch_read(clocks, np.uint64(row_indices[i + _AHEAD]))
            if row_indices[i] >= 0:
                clock = clocks[np.uint64(row_indices[i])]
            if share >= 0.0:  # else the same for all rows; divisions take most of the time
                most = max_behind(int(clock), lag, share, num_workers)
        behind = int(np.uint32(clock - version))
        is_new = version == _NO_VERSION
        if not is_new and behind <= most:
            slack[i] = min((most - behind) // others, _MOST_STEPS) if gives_steps else 0
        elif has_states and (is_new or are_states_old(int(clock), behind)):
            slack[i] = _STATES_FOLLOW
            full[num_full], full_row_indices[num_full], full_clocks[num_full] = ids[i], row_indices[i], clock
            num_full += _ONE
        else:
            slack[i] = _ROW_FOLLOWS
            due[num_due], due_row_indices[num_due], due_clocks[num_due] = ids[i], row_indices[i], clock
            num_due += _ONE
    num_found[0], num_found[1] = num_due, num_full
