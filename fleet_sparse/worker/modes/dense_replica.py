"""Replica: the copy of a dense array that the only worker of a job computes itself, as its pservers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec

from ..net.client import Client
from ..net.requests import DenseUpdate


class DenseValues(Protocol):
    """Values of a dense array, or of a range of it, and their optimizer state. One thread at a time uses it."""

    @property
    def values(self) -> NDArray[np.float32]:
        """`(n,)`, changed in place."""
        ...

    def push(self, grads: NDArray[np.float32], learning_rate: float, step: int) -> object:
        """Applies gradients `(n,)` with the array's rule."""
        ...

    def load(self, values: NDArray[np.float32], states: NDArray[np.float32]) -> None:
        """Replaces values `(n,)` and states `(num_states, n)`."""
        ...


LocalDense = Callable[[DenseSpec, int], Sequence[DenseValues]]
"""Makes the ranges of a dense array for a number of shards, with any values; raises `PlanError` for lack of memory."""


class Replica:
    """All ranges of a dense array. They are bit-equal to those of the shards while both apply the same pushes.

    Args:
        spec: Spec of the array.
        ranges: The same ranges as on the shards: a rule over whole rows, such as Lamb, depends on them.
    """

    def __init__(self, spec: DenseSpec, ranges: Sequence[DenseValues]) -> None:
        self._spec = spec
        self._ranges = [(*spec.range_of(shard, len(ranges)), local) for shard, local in enumerate(ranges)]

    def read(self, client: Client, *, step: int) -> None:
        """Reads values and states from the pservers; `step` as of the client's `pull_dense`.

        Raises:
            FleetSparseError: As the client's `pull_dense`.
        """
        num_values = self._spec.num_values
        values = np.empty(num_values, np.float32)
        states = np.empty((self._spec.update_rule.num_states, num_values), np.float32)
        client.pull_dense(self._spec, values, states=list(states), step=step)
        for begin, end, local in self._ranges:
            local.load(values[begin:end], states[:, begin:end])

    def apply(self, push: DenseUpdate) -> None:
        """Applies a push as the shards do."""
        for begin, end, local in self._ranges:
            local.push(push.grads[begin:end], push.learning_rate, push.optimizer_step)

    def write(self, outs: Sequence[NDArray[np.float32]]) -> None:
        """Writes the values to contiguous arrays of any shape, one after the other."""
        for begin, _, local in self._ranges:
            write_values(local.values, begin, outs)


def write_values(values: NDArray[np.float32], begin: int, outs: Sequence[NDArray[np.float32]]) -> None:
    """Writes values `[begin, begin + n)` of an array to their places in `outs`, which hold the array in order."""
    offset = 0
    for out in outs:
        first, last = max(begin, offset), min(begin + len(values), offset + out.size)
        if first < last:
            out.reshape(-1)[first - offset : last - offset] = values[first - begin : last - begin]
        offset += out.size
