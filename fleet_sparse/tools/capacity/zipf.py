"""Number of distinct ids of draws from a Zipf distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator


def distinct_of_zipf(draws: float, ranks: float, exponent: float) -> float:
    """Returns the expected number of distinct ids if that of rank i is drawn with a probability like i ** -exponent."""
    return sum(width * -math.expm1(-draws * p) for _, width, p in ranks_of_zipf(ranks, exponent))


def ranks_of_zipf(ranks: float, exponent: float) -> Iterator[tuple[float, float, float]]:
    """Yields intervals of ranks: the last rank, the number of ranks, and the probability of one of them.

    The first 1000 ranks come one by one, then intervals that grow by 2 %.
    """
    num_single = int(min(ranks, 1000))
    weights = [(float(rank), 1.0) for rank in range(1, num_single + 1)]
    low = num_single + 0.5
    while low < ranks:
        high = min(low * 1.02, ranks + 0.5)
        weights.append((math.sqrt(low * high), high - low))
        low = high
    mass, last = sum(width * rank**-exponent for rank, width in weights), 0.0
    for rank, width in weights:
        last += width
        yield last, width, rank**-exponent / mass
