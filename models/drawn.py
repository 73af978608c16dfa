"""A data source of examples that are drawn from a known model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .source import Batch, DataSource

DRAW = 512
"""Number of examples that are drawn at once, so that they do not depend on the batch size."""
TRAIN_STREAM, TEST_STREAM = 0, 1
"""The streams of random numbers."""


class Truth(NamedTuple):
    """Examples and the logits that their labels were drawn from."""

    batch: Batch
    logit: NDArray[np.float64]
    """Shaped like the labels: a label is 1 with probability `sigmoid(logit)`."""


class Draw(Protocol):
    """Draws examples of a known model."""

    def __call__(self, size: int, *, seed: int, stream: int = TEST_STREAM, index: int = 0) -> Truth:
        """Draws `size` examples, the same for the same arguments.

        Args:
            size: Number of examples.
            seed: Seed of the known model and of its examples.
            stream: `TRAIN_STREAM` or `TEST_STREAM`; they have other examples of the same model.
            index: Number of the draw in its stream.
        """


def source(draw: Draw, num_examples: int, *, batch_size: int, seed: int) -> DataSource:
    """`num_examples` training examples, and a tenth of that, rounded up, for testing. Each epoch has the same."""
    num_tested = -(-num_examples // 10)
    shape = draw(1, seed=seed).batch

    def batches(stream: int, num_drawn: int) -> Iterator[Batch]:
        draws = (draw(DRAW, seed=seed, stream=stream, index=index).batch for index in itertools.count())
        return _rebatched(draws, num_drawn, batch_size)

    def train(epoch: int, worker_index: int, num_workers: int) -> Iterator[Batch]:
        return itertools.islice(batches(TRAIN_STREAM, num_examples), worker_index, None, num_workers)

    return DataSource(
        num_fields=shape.ids.shape[1],
        num_dense=shape.dense.shape[1],
        num_batches=-(-num_examples // batch_size),
        train=train,
        test=lambda: batches(TEST_STREAM, num_tested),
        num_labels=shape.label.shape[1],
    )


def chance_of(logit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes `sigmoid(logit)`."""
    chance: NDArray[np.float64] = 1 / (1 + np.exp(-logit))
    return chance


def _rebatched(batches: Iterator[Batch], num_examples: int, size: int) -> Iterator[Batch]:
    """The first `num_examples` examples in batches of `size`; the last batch has the remaining ones."""
    held = next(batches)
    for begin in range(0, num_examples, size):
        wanted = min(size, num_examples - begin)
        while len(held.label) < wanted:
            held = _joined(held, next(batches))
        yield _part(held, slice(wanted))
        held = _part(held, slice(wanted, None))


def _joined(first: Batch, second: Batch) -> Batch:
    return Batch(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.dense, second.dense]),
        np.concatenate([first.label, second.label]),
    )


def _part(batch: Batch, examples: slice) -> Batch:
    return Batch(batch.ids[examples], batch.dense[examples], batch.label[examples])
