"""Draws pairs of texts from a known model of topics: is the second one about the topic of the first?

A text has a topic. Each of its words is of that topic with probability `SHARE_OF_TOPIC`, else of any, and within a
topic words are drawn by Zipf's law. The second text has the topic of the first in every second pair, labelled 1, and an
independently drawn topic in the others. The logit is Bayes' rule over the topics t of both texts:

    logit = log mean_t p(first | t) p(second | t) - log mean_t p(first | t) - log mean_t p(second | t)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .drawn import TEST_STREAM, Truth
from .dssm import PADDING_ID
from .source import Batch

NUM_TOPICS = 30
WORDS_PER_TOPIC = 200
SHARE_OF_TOPIC = 0.8
MAX_LENGTH = 8
"""Most words of a text; the fewest are 2."""


def draw(size: int, *, seed: int, stream: int = TEST_STREAM, index: int = 0) -> Truth:
    """Draws texts of 2 to `MAX_LENGTH` words, as `Draw`; `ids` has both texts, each padded with `PADDING_ID`."""
    return _draw(size, MAX_LENGTH, np.random.default_rng([seed, stream, index]))


def draw_words(size: int, *, seed: int, stream: int = TEST_STREAM, index: int = 0) -> Truth:
    """Draws pairs of words, as `Draw`."""
    return _draw(size, 1, np.random.default_rng([seed, stream, index]))


def _draw(size: int, max_length: int, rng: np.random.Generator) -> Truth:
    label = rng.integers(0, 2, (size, 1))
    first, other = rng.integers(0, NUM_TOPICS, (2, size, 1))
    of_text = np.stack([first, np.where(label, first, other)], axis=1)  # (size, 2, 1)
    of_any = rng.integers(0, NUM_TOPICS, (size, 2, max_length))
    topic = np.where(rng.random(of_any.shape) < SHARE_OF_TOPIC, of_text, of_any)
    rank = (WORDS_PER_TOPIC ** rng.random(topic.shape)).astype(np.int64) - 1  # Zipf's law with exponent 1
    length = rng.integers(min(2, max_length), max_length + 1, (size, 2, 1))
    is_padding = np.arange(max_length) >= length
    ids = np.where(is_padding, PADDING_ID, 1 + topic * WORDS_PER_TOPIC + rank)
    batch = Batch(ids.reshape(size, -1), np.empty((size, 0), np.float32), label.astype(np.float32))
    return Truth(batch, _logit(topic, is_padding))


def _logit(topic: NDArray[np.int64], is_padding: NDArray[np.bool_]) -> NDArray[np.float64]:
    of_any = (1 - SHARE_OF_TOPIC) / NUM_TOPICS
    # (size, 2, words, topics): log p(a word's topic | topic of the text)
    is_of_topic = topic[..., np.newaxis] == np.arange(NUM_TOPICS)
    log_p = np.where(is_padding[..., np.newaxis], 0.0, np.log(of_any + SHARE_OF_TOPIC * is_of_topic)).sum(axis=2)
    both = np.logaddexp.reduce(log_p.sum(axis=1), axis=1) - np.log(NUM_TOPICS)
    each = np.logaddexp.reduce(log_p, axis=2) - np.log(NUM_TOPICS)
    logit: NDArray[np.float64] = both - each.sum(axis=1)
    return logit[:, np.newaxis]
