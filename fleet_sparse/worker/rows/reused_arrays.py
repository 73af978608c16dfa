"""ReusedArrays: memory of a step that the next steps use again."""

from __future__ import annotations

from collections import deque
from sys import getrefcount
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUM_KEPT = 16  # arrays of one size
_SMALLEST = 1 << 10  # values of the smallest array

_probe = [np.empty(0)]
_IDLE = getrefcount(_probe[0])
"""References of an array that only its container holds."""


class ReusedArrays:
    """Lends flat arrays, in powers of two: fresh memory costs a page fault for every 4 KB.

    An array is lent again when nothing else refers to it. So whatever sends values keeps them by a view, for as long as
    they may be sent again. Thread-safe; views may be dropped in any thread.

    Args:
        dtype: Dtype of the arrays.
    """

    def __init__(self, dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._lock = Lock()
        self._of_size: dict[int, deque[NDArray[Any]]] = {}

    def lend(self, num_values: int) -> NDArray[Any]:
        """Returns an uninitialised array with at least this many values."""
        size = max(_SMALLEST, 1 << (num_values - 1).bit_length())
        with self._lock:
            arrays = self._of_size.get(size)
            if arrays is None:
                arrays = self._of_size[size] = deque(maxlen=_NUM_KEPT)
            for _ in range(len(arrays)):
                arrays.rotate()
                if getrefcount(arrays[0]) == _IDLE:
                    return arrays[0]
            arrays.appendleft(np.empty(size, self._dtype))
            return arrays[0]
