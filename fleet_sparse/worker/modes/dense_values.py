"""DenseValues: the values of a dense array that a worker trains itself, with the pservers' rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec


class DenseValues(Protocol):
    """Values of a dense array, or of a range of it, and their optimizer state. One thread at a time uses it."""

    @property
    def values(self) -> NDArray[np.float32]:
        """`(n,)`, changed in place."""
        ...

    def push(self, grads: NDArray[np.float32], learning_rate: float, step: int) -> object:
        """Applies gradients `(n,)` with the array's rule."""
        ...


LocalDense = Callable[[DenseSpec, int], Sequence[DenseValues]]
"""Makes the ranges of a dense array for a number of shards, with any values; raises `PlanError` for lack of memory."""


def write_values(values: NDArray[np.float32], begin: int, outs: Sequence[NDArray[np.float32]]) -> None:
    """Writes values `[begin, begin + n)` of an array to their places in `outs`, which hold the array in order."""
    offset = 0
    for out in outs:
        first, last = max(begin, offset), min(begin + len(values), offset + out.size)
        if first < last:
            out.reshape(-1)[first - offset : last - offset] = values[first - begin : last - begin]
        offset += out.size
