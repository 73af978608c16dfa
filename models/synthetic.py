"""Draws examples of Criteo's shape from a known model.

An example has 13 dense values and 26 categorical fields of 10 to 10 million values each, or of other sizes, drawn by
Zipf's law. From a chosen draw on, other values are the frequent ones. The label is drawn from a planted factorisation
machine over the ids (Rendle, 2010, equation 1):

    logit = b + sum_i w_i + sum_{i < j} <v_i, v_j> + <u, dense>

Its weights are computed from the seed and the id, so that they need no table and fields can have any size. Of Criteo's
data, there is the number of values of each field here, `CRITEO_SIZES`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .drawn import TEST_STREAM, TRAIN_STREAM, Truth, chance_of
from .source import Batch

NUM_DENSE = 13
NUM_FIELDS = 26
FIELD_SIZES = np.geomspace(10, 10_000_000, NUM_FIELDS).round()
"""Number of distinct values of each field."""
CRITEO_SIZES = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""Number of distinct values of each categorical field of Criteo's Kaggle log."""
_LARGE = 100_000  # smaller fields keep their size when all are scaled
EXPONENT = 1.1
"""Exponent of Zipf's law: value `r` of a field occurs `r**-EXPONENT` times as often as value 1."""

TRUTH_DIM = 4
BIAS = -1.0
WEIGHT_SCALE = 0.17
"""Standard deviation of w, v and u."""

_CLICK, _CONVERSION = 0, 1  # the tasks


def criteo_sizes(num_ids: int) -> NDArray[np.int64]:
    """Returns Criteo's field sizes, the large ones scaled so that all of them are about `num_ids`."""
    sizes = np.array(CRITEO_SIZES, np.float64)
    is_large = sizes > _LARGE
    sizes[is_large] *= max(num_ids - sizes[~is_large].sum(), NUM_FIELDS) / sizes[is_large].sum()
    return np.maximum(np.floor(sizes), 1).astype(np.int64)


def moved(ranks: NDArray[np.int64], field_sizes: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Returns values `(..., fields)` of which others are the frequent ones: each field is rotated by its own number.

    Args:
        ranks: Values of each field, the frequent ones first.
        field_sizes: `(fields,)`, numbers of distinct values.
        seed: Seed of the rotation.
    """
    shifts = np.random.default_rng([seed, NUM_FIELDS]).integers(0, field_sizes)
    found: NDArray[np.int64] = (ranks + shifts) % field_sizes
    return found


def draw(
    size: int,
    *,
    seed: int,
    stream: int = TEST_STREAM,
    index: int = 0,
    field_sizes: Sequence[int] | NDArray[np.integer | np.floating] = FIELD_SIZES,
    drift_at: int | None = None,
) -> Truth:
    """Draws impressions, labelled with clicks; as `Draw`.

    Args:
        size: As of `Draw`.
        seed: As of `Draw`.
        stream: As of `Draw`.
        index: As of `Draw`.
        field_sizes: Number of distinct values of each field.
        drift_at: Number of the training draw from which on other values are the frequent ones, as they then are for
            testing; None for no such draw.
    """
    rng = np.random.default_rng([seed, stream, index])
    has_moved = drift_at is not None and (stream != TRAIN_STREAM or index >= drift_at)
    ids, dense = _features(rng, size, seed, np.asarray(field_sizes, np.float64), has_moved=has_moved)
    logit = _logit(ids, dense, seed, _CLICK)
    label = rng.random((size, 1)) < chance_of(logit)
    return Truth(Batch(ids, dense.astype(np.float32), label.astype(np.float32)), logit)


def draw_conversions(size: int, *, seed: int, stream: int = TEST_STREAM, index: int = 0) -> Truth:
    """Draws impressions, labelled with a click, and with a click that is followed by a conversion; as `Draw`.

    The conversion has weights of its own: `p(click and conversion) = p(click) p(conversion | click)`.
    """
    rng = np.random.default_rng([seed, stream, index])
    ids, dense = _features(rng, size, seed, FIELD_SIZES, has_moved=False)
    chance = chance_of(np.concatenate([_logit(ids, dense, seed, task) for task in (_CLICK, _CONVERSION)], axis=1))
    label = np.logical_and.accumulate(rng.random((size, 2)) < chance, axis=1)
    of_both = np.multiply.accumulate(chance, axis=1)
    truth = np.log(of_both) - np.log1p(-of_both)
    return Truth(Batch(ids, dense.astype(np.float32), label.astype(np.float32)), truth)


def _features(
    rng: np.random.Generator, size: int, seed: int, field_sizes: NDArray[np.float64], *, has_moved: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    rank = _zipf(rng.random((size, NUM_FIELDS)), field_sizes)
    if has_moved:
        rank = moved(rank, field_sizes.astype(np.int64), seed)
    return _ids(rank, seed), rng.standard_normal((size, NUM_DENSE))


def _zipf(chance: NDArray[np.float64], field_sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Ranks from 0: the inverse distribution function of the bounded Pareto law, rounded down."""
    power = 1 - EXPONENT
    above = (field_sizes + 1) ** power
    rank = (1 + chance * (above - 1)) ** (1 / power)
    return np.minimum(rank, field_sizes).astype(np.int64) - 1


def _ids(rank: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Field and rank, mixed bijectively into 64 bits."""
    field = np.arange(NUM_FIELDS, dtype=np.uint64) << np.uint64(48)
    salt = _mixed(np.array([seed + 1], np.uint64))  # so that another seed gives other ids
    return _mixed((rank.astype(np.uint64) | field) ^ salt).view(np.int64)


def _logit(ids: NDArray[np.int64], dense: NDArray[np.float64], seed: int, task: int) -> NDArray[np.float64]:
    first = task * (1 + TRUTH_DIM)
    w, *v = (_weights(ids, column) for column in range(first, first + 1 + TRUTH_DIM))
    u = WEIGHT_SCALE * np.random.default_rng([seed, task] if task else [seed]).standard_normal(NUM_DENSE)
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
