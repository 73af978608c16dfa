"""Number of distinct ids of draws from a Zipf distribution."""

from __future__ import annotations

import math


def distinct_of_zipf(draws: float, ranks: float, exponent: float) -> float:
    """Returns the expected number of distinct ids if the id of rank i is drawn with a probability like i ** -exponent.

    Sums over the first 1000 ranks one by one, then over intervals of ranks that grow by 2 %.
    """
    num_single = int(min(ranks, 1000))
    weights = [(float(rank), 1.0) for rank in range(1, num_single + 1)]
    low = num_single + 0.5
    while low < ranks:
        high = min(low * 1.02, ranks + 0.5)
        weights.append((math.sqrt(low * high), high - low))
        low = high
    mass = sum(width * rank**-exponent for rank, width in weights)
    return sum(width * -math.expm1(-draws * rank**-exponent / mass) for rank, width in weights)
