"""Replica: a dense array as its pservers have it, computed once more by a worker that nobody else trains with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.table import DenseSpec

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
        """Takes values `(n,)` and states `(num_states, n)` over."""
        ...


LocalDense = Callable[[DenseSpec, int], Sequence[DenseValues]]
"""Makes a dense array by the ranges of so many shards, whatever its values at first; raises `PlanError` for memory."""


class Replica:
    """All shards' ranges of a dense array. It and they stay equal, bit by bit, while both apply the same pushes.

    Args:
        spec: Of the array.
        ranges: As the shards have them, so that a rule over whole rows, as Lamb, sees the same parts.
    """

    def __init__(self, spec: DenseSpec, ranges: Sequence[DenseValues]) -> None:
        self._spec = spec
        self._ranges = [(*spec.range_of(shard, len(ranges)), local) for shard, local in enumerate(ranges)]

    def read(self, client: Client, *, step: int) -> None:
        """Takes over what the pservers have; `step` as of the client's `pull_dense`.

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
        """What the shards do with this push."""
        for begin, end, local in self._ranges:
            local.push(push.grads[begin:end], push.learning_rate, push.optimizer_step)

    def write(self, outs: Sequence[NDArray[np.float32]]) -> None:
        """Writes the values to contiguous arrays of any shape, one after the other."""
        for begin, _, local in self._ranges:
            write_values(local.values, begin, outs)


def write_values(values: NDArray[np.float32], begin: int, outs: Sequence[NDArray[np.float32]]) -> None:
    """Writes values, the first of which is value `begin` of an array, to where the array goes: `outs`, in order."""
    offset = 0
    for out in outs:
        first, last = max(begin, offset), min(begin + len(values), offset + out.size)
        if first < last:
            out.reshape(-1)[first - offset : last - offset] = values[first - begin : last - begin]
        offset += out.size
