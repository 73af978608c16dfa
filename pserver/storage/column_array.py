"""ColumnArray: one column of a store, with one element for each row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import Column
from fleet_sparse.core.kernels_columns import move_elements, scatter_elements

from .virtual_memory import ReservedMemory


class ColumnArray:
    """A column in reserved memory, so that it never moves while it grows.

    Args:
        column: What it holds.
        max_rows: Largest number of rows; fewer where the address space is short.
        huge_pages: Ask the system for 2 MB pages once the column is large.

    Attributes:
        column: What it holds.
        memory: Where it is.
        elements: `(max_rows, *shape)`.
        bytes: The same memory as flat bytes, for the kernels.
        max_rows: Number of elements that fit.
    """

    def __init__(self, column: Column, max_rows: int, *, huge_pages: bool) -> None:
        self.column = column
        self.memory = ReservedMemory(huge_pages=huge_pages, max_bytes=max_rows * column.element_bytes)
        self.bytes: NDArray[np.uint8] = self.memory.array(np.uint8)
        self.max_rows = self.memory.num_bytes // column.element_bytes
        used = self.bytes[: self.max_rows * column.element_bytes]
        self.elements: NDArray[Any] = used.view(column.dtype).reshape(self.max_rows, *column.shape)

    def fill(self, begin: int, end: int) -> None:
        """Gives the rows `[begin, end)` the column's initial value."""
        self.elements[begin:end] = self.column.initial
        self.use(end)

    def use(self, num_rows: int) -> None:
        """Reports how many rows there are to the memory."""
        self.memory.in_use = num_rows * self.column.element_bytes

    def set(self, row_indices: NDArray[np.int64], elements: NDArray[Any]) -> None:
        """Sets the elements `(n, *shape)` of some rows; for an index that occurs twice, the last element counts."""
        source = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        scatter_elements(self.bytes, self.column.element_bytes, row_indices, source)

    def remove(self, num_left: int, targets: NDArray[np.int64]) -> None:
        """Moves elements with their rows, as `kernels_bitmap.plan_moves` planned, and frees the rest of the memory."""
        used_to = self.memory.in_use
        move_elements(self.bytes, self.column.element_bytes, num_left, targets)
        self.use(num_left)
        self.memory.release_from(self.memory.in_use, used_to)

    def check(self, where: str, elements: NDArray[Any], num_rows: int) -> None:
        """Checks that an array can be passed to `set`.

        Raises:
            ValueError: It has another dtype or shape.
        """
        expected = (num_rows, *self.column.shape)
        if elements.dtype != self.column.dtype or elements.shape != expected:
            raise ValueError(
                f"{where}: column {self.column.name!r} is {elements.dtype} {elements.shape}, should be "
                f"{self.column.dtype} {expected}"
            )

    def close(self) -> None:
        """Frees the memory."""
        del self.bytes, self.elements
        self.memory.close()
