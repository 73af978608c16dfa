"""The index of a store: which cells of which memory find a row by its id."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_index import CELL_BYTES, FIRST_CLASS, NUM_SEGMENTS, remove_cells

from .virtual_memory import ReservedMemory


class IdIndex:
    """Cells, and the class of each segment; `core.kernels_index` says how they are laid out and changes them.

    Segments grow in the order of their addresses, so what is in use is a window that slides up the reserved memory.

    Attributes:
        cells: All cells, two int64 each, flat.
        classes: `(1024,)`, of each segment.
        num_used: `(1024,)`, cells in use of each segment.
        growth: Rows, next segment to grow in turn, its class.
        salt: The table's.
        memory: Where the cells are.
    """

    def __init__(self, salt: int, *, huge_pages: bool) -> None:
        self.salt = np.uint64(salt)
        self.memory = ReservedMemory(huge_pages=huge_pages)
        self.cells: NDArray[np.int64] = self.memory.array(np.int64)
        self.classes = np.full(NUM_SEGMENTS, FIRST_CLASS, np.uint8)
        self.num_used = np.zeros(NUM_SEGMENTS, np.int64)
        self.growth = np.array([0, 0, FIRST_CLASS], np.int64)
        self.settle()

    @property
    def num_rows(self) -> int:
        """Ids that have a row."""
        return int(self.growth[0])

    def settle(self) -> None:
        """After an insertion: moves the window of the memory in use, and gives back what lies below."""
        _, segment, size_class = self.growth.tolist()
        self.memory.release_before(_begin_of(segment, size_class))
        self.memory.in_use = _begin_of(segment, size_class + 1)

    def remove(self, removed: NDArray[np.uint8], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Removes rows, renumbers those that move, and gives memory back.

        Args:
            removed: A bit for each row.
            targets: As `core.kernels_notes.plan_moves` makes it.

        Returns:
            The ids of the removed rows, as long as `targets`.
        """
        removed_ids, scratch = np.empty(len(targets), np.int64), np.empty(2 * int(self.num_used.max()), np.int64)
        remove_cells(
            *(self.cells, self.classes, self.num_used, self.growth, self.salt),
            *(removed, targets, removed_ids, scratch),
        )
        _, segment, size_class = self.growth.tolist()
        self.memory.use_again_from(_begin_of(segment, size_class))
        self.settle()
        ends = (NUM_SEGMENTS + 1 + np.arange(NUM_SEGMENTS)) << self.classes.astype(np.int64)
        self.memory.release_from(max(CELL_BYTES * int(ends.max()), self.memory.in_use))
        return removed_ids

    def close(self) -> None:
        """Gives the memory back."""
        del self.cells
        self.memory.close()


def _begin_of(segment: int, size_class: int) -> int:
    return CELL_BYTES * ((NUM_SEGMENTS + segment) << size_class)
