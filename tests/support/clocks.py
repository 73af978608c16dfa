"""Clocks of rows by id."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.pserver.storage.table_store import TableStore


def clocks_of(store: TableStore, ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Returns the clock of the row of each id, 0 for one without a row; both are `(n,)`."""
    row_indices = store.find(ids)
    return np.where(row_indices < 0, np.uint32(0), store.clocks[row_indices])
