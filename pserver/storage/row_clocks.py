"""RowClocks: for each row of a store how much it changed since the clocks were made."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import Column
from fleet_sparse.core.kernels_clocks import advance_clocks

from .column_array import ColumnArray
from .virtual_memory import ReservedMemory

_CLOCK = Column("clock", np.dtype("<u4"))  # in memory only: snapshots have no clocks


class RowClocks:
    """Clocks of 32 bits, which begin at 0 and wrap.

    The clock of a row that was removed and inserted again begins at 0, too. It does not tell how old a copy of the
    removed row is.

    Only the thread that owns the store uses them.

    Args:
        num_rows: Number of rows that there are.
        max_rows: Largest number of rows.
        huge_pages: Ask the system for 2 MB pages once there are many.

    Attributes:
        max_rows: Number of rows that fit.
    """

    def __init__(self, num_rows: int, max_rows: int, *, huge_pages: bool) -> None:
        self._column = ColumnArray(_CLOCK, max_rows, huge_pages=huge_pages)
        self._column.use(num_rows)
        self.max_rows = self._column.max_rows

    @property
    def memory(self) -> ReservedMemory:
        """Where they are."""
        return self._column.memory

    @property
    def of_rows(self) -> NDArray[np.uint32]:
        """`(max_rows,)`, the clock of each row at its row index; to be read."""
        return self._column.elements

    def advance(self, row_indices: NDArray[np.int64], amounts: NDArray[np.uint32]) -> None:
        """Adds an amount to the clock of each row; both are `(n,)`."""
        advance_clocks(self._column.elements, row_indices, amounts)

    def grow(self, num_before: int, num_rows: int) -> None:
        """Adds rows `[num_before, num_rows)`."""
        self._column.fill(num_before, num_rows)

    def remove(self, num_left: int, targets: NDArray[np.int64]) -> None:
        """Moves clocks with their rows, as `kernels_bitmap.plan_moves` planned."""
        self._column.remove(num_left, targets)

    def close(self) -> None:
        """Frees the memory."""
        self._column.close()
