"""Draws examples of Criteo's shape from a known model.

An example has 13 dense values and 26 categorical fields of 10 to 10 million values each, drawn by Zipf's law. Its label
is drawn from a planted factorisation machine over the ids (Rendle, 2010, equation 1):

    logit = b + sum_i w_i + sum_{i < j} <v_i, v_j> + <u, dense>

Its weights are computed from the seed and the id, so that they need no table and fields can have any size. Nothing here
comes from Criteo's data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .source import Batch, DataSource

NUM_DENSE = 13
NUM_FIELDS = 26
FIELD_SIZES = np.geomspace(10, 10_000_000, NUM_FIELDS).round()
"""Number of distinct values of each field."""
EXPONENT = 1.1
"""Exponent of Zipf's law: value `r` of a field occurs `r**-EXPONENT` times as often as value 1."""

TRUTH_DIM = 4
BIAS = -1.0
WEIGHT_SCALE = 0.17
"""Standard deviation of w, v and u."""

_TRAIN, _TEST = 0, 1  # the streams of random numbers


class Truth(NamedTuple):
    """Examples and the logits that their labels were drawn from."""

    batch: Batch
    logit: NDArray[np.float64]
    """`(n, 1)`: the label is 1 with probability `sigmoid(logit)`."""


def source(*, batch_size: int, num_batches: int, num_test_batches: int, seed: int) -> DataSource:
    """Batches that are drawn lazily. Each epoch has the same examples."""

    def train(epoch: int, worker_index: int, num_workers: int) -> Iterator[Batch]:
        for index in range(worker_index, num_batches, num_workers):
            yield draw(batch_size, seed=seed, stream=_TRAIN, index=index).batch

    def test() -> Iterator[Batch]:
        for index in range(num_test_batches):
            yield draw(batch_size, seed=seed, stream=_TEST, index=index).batch

    return DataSource(num_fields=NUM_FIELDS, num_dense=NUM_DENSE, num_batches=num_batches, train=train, test=test)


def draw(size: int, *, seed: int, stream: int = _TEST, index: int = 0) -> Truth:
    """Draws `size` examples, the same for the same arguments."""
    rng = np.random.default_rng([seed, stream, index])
    ids = _ids(_zipf(rng.random((size, NUM_FIELDS))), seed)
    dense = rng.standard_normal((size, NUM_DENSE))
    logit = _logit(ids, dense, seed)
    label = rng.random((size, 1)) < 1 / (1 + np.exp(-logit))
    return Truth(Batch(ids, dense.astype(np.float32), label.astype(np.float32)), logit)


def _zipf(chance: NDArray[np.float64]) -> NDArray[np.int64]:
    """Ranks from 0: the inverse distribution function of the bounded Pareto law, rounded down."""
    power = 1 - EXPONENT
    above = (FIELD_SIZES + 1) ** power
    rank = (1 + chance * (above - 1)) ** (1 / power)
    return np.minimum(rank, FIELD_SIZES).astype(np.int64) - 1


def _ids(rank: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Field and rank, mixed bijectively into 64 bits."""
    field = np.arange(NUM_FIELDS, dtype=np.uint64) << np.uint64(48)
    salt = _mixed(np.array([seed + 1], np.uint64))  # so that another seed gives other ids
    return _mixed((rank.astype(np.uint64) | field) ^ salt).view(np.int64)


def _logit(ids: NDArray[np.int64], dense: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    w, *v = (_weights(ids, column) for column in range(1 + TRUTH_DIM))
    u = WEIGHT_SCALE * np.random.default_rng([seed]).standard_normal(NUM_DENSE)
    pairs = sum((v_k.sum(1) ** 2 - (v_k**2).sum(1)) / 2 for v_k in v)
    logit: NDArray[np.float64] = BIAS + w.sum(1) + pairs + dense @ u
    return logit[:, np.newaxis]


def _weights(ids: NDArray[np.int64], column: int) -> NDArray[np.float64]:
    """A uniformly distributed number with mean 0 and deviation `WEIGHT_SCALE` for each id."""
    bits = _mixed(ids.view(np.uint64) ^ _mixed(np.array([column + 1], np.uint64)))
    return WEIGHT_SCALE * 12**0.5 * (bits / 2.0**64 - 0.5)


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), a bijection."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
