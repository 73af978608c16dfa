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


class Listed(NamedTuple):
    """The ids of an ask whose rows follow, without states or with them, in their order; three columns `(n,)`."""

    ids: NDArray[np.int64]
    row_indices: NDArray[np.int64]
    clocks: NDArray[np.uint32]

    def first(self, n: int) -> Listed:
        """Returns the first n."""
        return Listed(self.ids[:n], self.row_indices[:n], self.clocks[:n])


class Decisions(NamedTuple):
    """The answer to each id of an ask, and the ids whose rows follow."""

    slack: NDArray[np.uint8]
    """`(n,)`: steps, `ROW_FOLLOWS` or `STATES_FOLLOW` for each id."""
    due: Listed
    """The ids with `ROW_FOLLOWS`."""
    full: Listed
    """The ids with `STATES_FOLLOW`."""


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
    slack, due, full = decide(
        *(ids, store.find(ids), versions, clocks, bound, num_workers),
        has_states=store.spec.update_rule.num_states > 0,
        gives_steps=counts_steps and bound.has_leases,
    )
    read = store.rows_at if read_rows is None else read_rows
    return RowAnswer(
        slack,
        read(due.row_indices, due.ids),
        due.clocks,
        read(full.row_indices, full.ids),
        full.clocks,
        store.states_at(full.row_indices),
        store.clock_epoch,
    )


def decide(
    ids: NDArray[np.int64],
    row_indices: NDArray[np.int64],
    versions: NDArray[np.uint32],
    clocks: NDArray[np.uint32],
    bound: RowBound,
    num_workers: int,
    *,
    has_states: bool,
    gives_steps: bool,
) -> Decisions:
    """Decides which copies may be used, and which rows follow. Arguments are those of `answer_asks`, and its bound."""
    slack, num_found = np.empty(len(ids), np.uint8), np.empty(2, np.int64)
    due, full = (
        Listed(np.empty(len(ids), np.int64), np.empty(len(ids), np.int64), np.empty(len(ids), np.uint32))
        for _ in range(2)
    )
    answer_asks(
        *(ids, row_indices, versions, clocks, bound.terms.lag, bound.terms.share, num_workers),
        *(has_states, gives_steps, slack),
        *due,
        *full,
        num_found,
    )
    num_due, num_full = num_found.tolist()
    return Decisions(slack, due.first(num_due), full.first(num_full))
