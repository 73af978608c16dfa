"""ReplyMemory: memory for the rows of replies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.reused_memory import UNUSED, find_by_references

# Two slabs, so that a client that reads slowly does not keep the others from theirs.
_NUM_SLABS = 2
_SLAB_VALUES = 2 << 20
_LINE_VALUES = 16


class ReplyMemory:
    """Memory that is lent for the rows of a reply, and lent again once no array or buffer refers to it.

    A reply that waits to be sent refers to its rows, so they do not change before. Fresh memory would cost a page fault
    for every 4 KB, which takes longer than to write it. Used by one thread; references may be dropped in any thread.
    """

    def __init__(self) -> None:
        self._slabs = [np.empty(_SLAB_VALUES, np.float32) for _ in range(_NUM_SLABS)]
        self._num_lent = [0] * _NUM_SLABS  # values from the beginning of each slab

    def lend(self, num_values: int) -> NDArray[np.float32]:
        """Returns uninitialised memory `(num_values,)`: of a slab, or of its own if the slabs are in use."""
        slabs = self._slabs
        for index in range(_NUM_SLABS):
            is_unused = find_by_references(slabs, UNUSED, index, index + 1) == index
            begin = 0 if is_unused else self._num_lent[index]
            end = begin + num_values
            if end <= _SLAB_VALUES:
                self._num_lent[index] = end + -end % _LINE_VALUES
                return slabs[index][begin:end]
        return np.empty(num_values, np.float32)
