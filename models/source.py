"""What a model is fed: batches, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Batch(NamedTuple):
    """Examples that one step trains on."""

    ids: NDArray[np.int64]
    """`(n, num_fields)`: one id a field; all 2^64 values are ids."""
    dense: NDArray[np.float32]
    """`(n, num_dense)`, of the order of 1."""
    label: NDArray[np.float32]
    """`(n, 1)`: 0 or 1."""


class Source(NamedTuple):
    """A data set, as two functions that give batches."""

    num_fields: int
    num_dense: int
    num_batches: int | None
    """Batches an epoch of all workers together; None where only reading tells."""
    train: Callable[[int, int, int], Iterator[Batch]]
    """`train(epoch, worker_index, num_workers)`: the worker's share of an epoch. Batch `i` belongs to worker
    `i % num_workers`; the same arguments give the same batches."""
    test: Callable[[], Iterator[Batch]]
    """All batches that are held out."""
