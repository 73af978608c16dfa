"""Batches of examples, and the data sets that yield them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Batch(NamedTuple):
    """Examples of one step."""

    ids: NDArray[np.int64]
    """`(n, num_fields)`: one id per field; all 2^64 values are valid ids."""
    dense: NDArray[np.float32]
    """`(n, num_dense)`, scaled to the order of 1."""
    label: NDArray[np.float32]
    """`(n, num_labels)`: 0 or 1."""


class DataSource(NamedTuple):
    """A data set as two functions that return batches."""

    num_fields: int
    num_dense: int
    num_batches: int | None
    """Batches per epoch over all workers; None if unknown before the data is read."""
    train: Callable[[int, int, int], Iterator[Batch]]
    """`train(epoch, worker_index, num_workers)`: the batches of a worker in an epoch. Batch `i` belongs to worker
    `i % num_workers`; the same arguments return the same batches."""
    test: Callable[[], Iterator[Batch]]
    """The held-out batches."""
    num_labels: int = 1
    """Labels of an example, one for each task."""
