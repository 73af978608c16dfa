"""The id of a categorical value."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest


def feature_ids(field: str, values: Iterable[str]) -> NDArray[np.int64]:
    """`(n,)` int64: the 64 bits of xxh3-64 of `field=value` in UTF-8, the same on every machine and in every release.

    The field is part of the text, so that one table serves all fields. Two of a million distinct values collide with
    a chance of 3e-8.
    """
    digests = [xxh3_64_intdigest(f"{field}={value}".encode()) for value in values]
    return np.array(digests, np.uint64).view(np.int64)
