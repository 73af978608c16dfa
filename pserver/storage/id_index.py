"""IdIndex: finds the row of an id in a store."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_index import CELL_BYTES, FIRST_CLASS, NUM_SEGMENTS, remove_cells, set_classes

from .virtual_memory import ReservedMemory


class IdIndex:
    """An open-addressing index of 1024 segments; `core.kernels_index` defines its layout and changes it.

    Segments grow in the order of their addresses, so the memory in use is a window that slides up the reserved memory.

    Attributes:
        cells: All cells, two int64 each, flat.
        classes: `(1024,)`, the size class of each segment.
        num_used: `(1024,)`, the number of cells in use of each segment.
        growth: Number of rows, next segment to grow in turn, its class.
        salt: The salt of the table.
        memory: Where the cells are.
    """

    def __init__(self, salt: int, *, huge_pages: bool) -> None:
        self.salt = np.uint64(salt)
        self.memory = ReservedMemory(huge_pages=huge_pages)
        self.cells: NDArray[np.int64] = self.memory.array(np.int64)
        self.classes = np.full(NUM_SEGMENTS, FIRST_CLASS, np.uint8)
        self.num_used = np.zeros(NUM_SEGMENTS, np.int64)
        self.growth = np.array([0, 0, FIRST_CLASS], np.int64)
        self.slide()

    @property
    def num_rows(self) -> int:
        """Number of ids that have a row."""
        return int(self.growth[0])

    def slide(self) -> None:
        """Moves the window of memory in use after an insertion, and frees the memory below it."""
        _, segment, size_class = self.growth.tolist()
        begin = _begin_of(segment, size_class)
        self.memory.release_before(begin)
        self.memory.in_use = 2 * begin  # where the segment begins in the next class

    def reserve(self, num_rows: int) -> None:
        """Prepares an index without rows for this number, so that it does not grow on the way, if there is room."""
        classes, growth = self.classes.copy(), self.growth.copy()
        set_classes(classes, growth, num_rows)
        if CELL_BYTES * _ends_of(classes).max() <= self.memory.num_bytes:
            self.classes[:], self.growth[:] = classes, growth
            self._use_again()
            self.slide()

    def remove(self, removed: NDArray[np.uint8], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Removes rows, renumbers the rows that move, and frees memory.

        Args:
            removed: Bitmap with one bit for each row.
            targets: As `core.kernels_bitmap.plan_moves` planned.

        Returns:
            The ids of the removed rows, as long as `targets`.
        """
        used_to = self._end()
        removed_ids, scratch = np.empty(len(targets), np.int64), np.empty(2 * int(self.num_used.max()), np.int64)
        remove_cells(
            *(self.cells, self.classes, self.num_used, self.growth, self.salt),
            *(removed, targets, removed_ids, scratch),
        )
        self._use_again()
        self.slide()
        self.memory.release_from(self._end(), used_to)
        return removed_ids

    def close(self) -> None:
        """Frees the memory."""
        del self.cells
        self.memory.close()

    def _use_again(self) -> None:
        """Counts memory as in use that was below the window before."""
        _, segment, size_class = self.growth.tolist()
        self.memory.use_again_from(_begin_of(segment, size_class))

    def _end(self) -> int:
        """Returns the byte after the last cell of all segments, and after the window in use."""
        return max(CELL_BYTES * int(_ends_of(self.classes).max()), self.memory.in_use)


def _ends_of(classes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns the cell after the last one of each segment."""
    return (NUM_SEGMENTS + 1 + np.arange(NUM_SEGMENTS)) << classes.astype(np.int64)


def _begin_of(segment: int, size_class: int) -> int:
    return CELL_BYTES * ((NUM_SEGMENTS + segment) << size_class)
