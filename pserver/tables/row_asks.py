"""What a pserver answers to a worker that asks about its copies of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_row_asks import answer_asks
from fleet_sparse.core.row_bound import RowBound

from ..storage.table_store import TableStore


class CacheTerms(NamedTuple):
    """What the workers of a job with row caches agreed on."""

    bound: RowBound
    num_workers: int
    counts_steps: bool
    """True if shards know the step of each worker, so that copies may be leased for steps."""


class RowAnswer(NamedTuple):
    """The answer to an ask.

    Attributes:
        slack: `(n,)`: steps, `ROW_FOLLOWS` or `STATES_FOLLOW` for each id.
        rows: `(k, dim)`: rows of the ids with `ROW_FOLLOWS`, in their order.
        versions: `(k,)`: their clocks.
        full_rows: `(m, dim)`: rows of the ids with `STATES_FOLLOW`, in their order.
        full_versions: `(m,)`: their clocks.
        states: `(m, num_states, dim)`.
        clock_epoch: As of `TableStore`.
    """

    slack: NDArray[np.uint8]
    rows: NDArray[np.float32]
    versions: NDArray[np.uint32]
    full_rows: NDArray[np.float32]
    full_versions: NDArray[np.uint32]
    states: NDArray[np.float32]
    clock_epoch: int


ReadRows = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""Returns rows `(n, dim)`, as `TableStore.rows_at`."""

_NO_CLOCKS = np.empty(0, np.uint32)


def answer(
    store: TableStore,
    bound: RowBound,
    num_workers: int,
    ids: NDArray[np.int64],
    versions: NDArray[np.uint32],
    read_rows: ReadRows | None = None,
    *,
    counts_steps: bool = True,
) -> RowAnswer:
    """Answers an ask about copies. The first ask of a table makes its clocks if the job has several workers.

    Copies of the only worker are behind only if rows were removed. Its rows have no clocks, and all versions are 0.

    Args:
        store: The rows.
        bound: Of the job.
        num_workers: Number of workers of the job.
        ids: `(n,)`.
        versions: `(n,)`, of the copies; as long as `ids`, which is not checked.
        read_rows: Reads rows of the table; None if they read as the store has them.
        counts_steps: As of `CacheTerms`.
    """
    clocks = _NO_CLOCKS
    if num_workers > 1:
        store.make_clocks(bound)
        clocks = store.clocks
    row_indices, slack, num_found = store.find(ids), np.empty(len(ids), np.uint8), np.empty(2, np.int64)
    due, due_row_indices, full, full_row_indices = (np.empty(len(ids), np.int64) for _ in range(4))
    due_clocks, full_clocks = (np.empty(len(ids), np.uint32) for _ in range(2))
    lag, share, _ = bound.terms
    has_states, gives_steps = store.spec.update_rule.num_states > 0, counts_steps and bound.has_leases
    answer_asks(
        *(ids, row_indices, versions, clocks, lag, share, num_workers),
        *(has_states, gives_steps, slack),
        *(due, due_row_indices, due_clocks),
        *(full, full_row_indices, full_clocks),
        num_found,
    )
    num_due, num_full = num_found.tolist()
    full_row_indices = full_row_indices[:num_full]
    read = store.rows_at if read_rows is None else read_rows
    return RowAnswer(
        slack,
        read(due_row_indices[:num_due], due[:num_due]),
        due_clocks[:num_due],
        read(full_row_indices, full[:num_full]),
        full_clocks[:num_full],
        store.states_at(full_row_indices),
        store.clock_epoch,
    )
