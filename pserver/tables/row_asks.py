"""What a pserver answers to a worker that asks about its copies of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.row_bound import ROW_FOLLOWS, STATES_FOLLOW, RowBound, answers

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


ReadRows = Callable[[NDArray[np.int64]], NDArray[np.float32]]
"""Returns the rows `(n, dim)` of ids `(n,)`."""


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
        versions: `(n,)`, of the copies.
        read_rows: Reads rows of the table; None if they read as the store has them.
        counts_steps: As of `CacheTerms`.
    """
    if num_workers == 1:
        clocks = np.zeros(len(ids), np.uint32)
    else:
        store.make_clocks(bound)
        clocks = store.clocks(ids)
    has_states = store.spec.update_rule.num_states > 0
    slack = answers(bound, clocks, versions, num_workers, has_states=has_states)
    if not counts_steps:
        slack[slack < ROW_FOLLOWS] = 0
    is_due, is_full = slack == ROW_FOLLOWS, slack == STATES_FOLLOW
    due, full = ids[is_due], ids[is_full]
    read = store.rows if read_rows is None else read_rows
    return RowAnswer(
        slack, read(due), clocks[is_due], read(full), clocks[is_full], store.states(full), store.clock_epoch
    )
