"""Draws users' histories and candidate items from a known model of interests.

An item belongs to one of `NUM_TOPICS` topics, and within it items are drawn by Zipf's law. A user is interested in a
few topics; most items of the history are of these, and so is every second candidate. The logit of a click grows with
the number n of items in the history that share the candidate's topic, and has a weight for each candidate:

    logit = BIAS + GAIN log(1 + n) + w_candidate
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .din import PADDING_ID
from .drawn import TEST_STREAM, Truth, chance_of
from .source import Batch

NUM_TOPICS = 10
ITEMS_PER_TOPIC = 200
NUM_INTERESTS = 2
MAX_LENGTH = 20
"""Places of a history."""
SHARE_OF_INTERESTS = 0.8
"""Share of the items in a history that are of the user's topics; the others are of any."""

BIAS = -2.0
GAIN = 1.5
WEIGHT_SCALE = 0.3
"""Standard deviation of w."""


def draw(size: int, *, seed: int, stream: int = TEST_STREAM, index: int = 0) -> Truth:
    """Draws examples, as `Draw`: `ids` has the candidate, then the history, padded with `PADDING_ID`."""
    rng = np.random.default_rng([seed, stream, index])
    interests = rng.integers(0, NUM_TOPICS, (size, NUM_INTERESTS))
    of_interest = np.take_along_axis(interests, rng.integers(0, NUM_INTERESTS, (size, MAX_LENGTH + 1)), axis=1)
    of_any = rng.integers(0, NUM_TOPICS, of_interest.shape)
    share = np.full(MAX_LENGTH + 1, SHARE_OF_INTERESTS)
    share[0] = 0.5
    topic = np.where(rng.random(of_interest.shape) < share, of_interest, of_any)
    rank = (ITEMS_PER_TOPIC ** rng.random(topic.shape)).astype(np.int64) - 1  # Zipf's law with exponent 1
    ids = 1 + topic * ITEMS_PER_TOPIC + rank
    length = rng.integers(1, MAX_LENGTH + 1, (size, 1))
    is_padding = np.arange(MAX_LENGTH + 1) > length
    ids[is_padding] = PADDING_ID
    num_shared = ((topic[:, 1:] == topic[:, :1]) & ~is_padding[:, 1:]).sum(axis=1, keepdims=True)

    logit = BIAS + GAIN * np.log1p(num_shared) + _weights(seed)[ids[:, :1]]
    label = rng.random((size, 1)) < chance_of(logit)
    return Truth(Batch(ids, np.empty((size, 0), np.float32), label.astype(np.float32)), logit)


def _weights(seed: int) -> NDArray[np.float64]:
    return WEIGHT_SCALE * np.random.default_rng([seed]).standard_normal(1 + NUM_TOPICS * ITEMS_PER_TOPIC)
