"""ReusedMemory: arrays that are lent again once nothing refers to them, by their reference count."""

from __future__ import annotations

import sysconfig
from sys import getrefcount
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray


def find_by_references(arrays: list[NDArray[Any]], num_references: int, begin: int, end: int) -> int:
    """Returns the first index in `[begin, end)` of an array with this number of references; -1 if there is none.

    With `UNUSED` nothing but the list refers to the array: no variable, no view, no buffer of it. It must own its
    memory: NumPy lets a view of a view refer to the owner. It stays unused until somebody reads it from the list. The
    caller must be the only one that does; any thread may drop references.
    """
    for index in range(begin, end):
        if getrefcount(arrays[index]) == num_references:
            return index
    return -1


def _num_of_unused() -> int:
    """References of an array that only its list holds, found by the code that asks; -1 if counts mean nothing.

    Without the GIL references of other threads may not be counted yet, so such a build of Python never reuses memory.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return -1
    probe = [np.empty(1, np.uint8)]
    for num_references in range(1, 10):
        if find_by_references(probe, num_references, 0, 1) == 0:
            view = probe[0][:]
            is_counted = find_by_references(probe, num_references, 0, 1) < 0 and view.base is probe[0]
            return num_references if is_counted else -1
    return -1


UNUSED = _num_of_unused()
"""Number of references of an array that only its list holds; -1, which no array has, if it is unknown."""


class ReusedMemory:
    """Lends flat arrays, in powers of two: fresh memory costs a page fault for every 4 KB.

    An array is lent again when nothing else refers to it. So whatever sends values keeps them by a view, for as long as
    they may be sent again. Thread-safe; views may be dropped in any thread.

    Args:
        dtype: Dtype of the arrays.
        num_kept: Largest number of arrays of one size to keep.
        smallest: Number of values of the smallest array.
        largest: Number of values from which on memory is fresh; None to reuse arrays of any size.
    """

    def __init__(self, dtype: Any, *, num_kept: int = 16, smallest: int = 1 << 10, largest: int | None = None) -> None:
        self._dtype = np.dtype(dtype)
        self._num_kept = num_kept
        self._smallest = smallest
        self._largest = largest
        self._lock = Lock()
        self._of_size: dict[int, list[NDArray[Any]]] = {}
        self._num_replaced = 0

    def lend(self, num_values: int) -> NDArray[Any]:
        """Returns an uninitialised array with at least this many values."""
        if self._largest is not None and num_values > self._largest:
            return np.empty(num_values, self._dtype)
        size = max(self._smallest, 1 << (num_values - 1).bit_length())
        with self._lock:
            arrays = self._of_size.get(size)
            if arrays is None:
                arrays = self._of_size[size] = []
            index = find_by_references(arrays, UNUSED, 0, len(arrays))
            if index >= 0:
                return arrays[index]
            array = np.empty(size, self._dtype)
            if len(arrays) < self._num_kept:
                arrays.append(array)
            else:  # those that are held longest are not waited for
                self._num_replaced += 1
                arrays[self._num_replaced % self._num_kept] = array
            return array
