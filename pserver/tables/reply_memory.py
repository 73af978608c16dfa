"""ReplyMemory: memory for the rows of replies, and KeptArray, memory for one array after another."""

from __future__ import annotations

from sys import getrefcount

import numpy as np
from numpy.typing import NDArray

# Two slabs, so that a client that reads slowly does not keep the others from theirs.
_NUM_SLABS = 2
_SLAB_VALUES = 2 << 20
_LINE_VALUES = 16
NUM_OWN_REFERENCES = 2
"""`getrefcount` of an array that only one list or attribute refers to: its reference and that of the call."""


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
            begin = 0 if getrefcount(slabs[index]) == NUM_OWN_REFERENCES else self._num_lent[index]
            end = begin + num_values
            if end <= _SLAB_VALUES:
                self._num_lent[index] = end + -end % _LINE_VALUES
                return slabs[index][begin:end]
        return np.empty(num_values, np.float32)


class KeptArray:
    """Memory of one array, which is lent again once no array or buffer refers to it. Threads: as `ReplyMemory`."""

    def __init__(self) -> None:
        self._array = np.empty(0, np.float32)

    def lend(self, num_values: int) -> NDArray[np.float32]:
        """Returns uninitialised memory `(num_values,)`: fresh memory if the kept one is in use or has another size."""
        if len(self._array) != num_values or getrefcount(self._array) > NUM_OWN_REFERENCES:
            self._array = np.empty(num_values, np.float32)
        return self._array[:]
