"""Ids of categorical values."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest


def feature_ids(field: str, values: Iterable[str]) -> NDArray[np.int64]:
    """Hashes values to ids, `(n,)` int64: xxh3-64 of `field=value` in UTF-8, the same everywhere and always.

    The field is part of the text, so that all fields can share one table. With a million distinct values the chance
    that any two collide is 3e-8.
    """
    digests = [xxh3_64_intdigest(f"{field}={value}".encode()) for value in values]
    return np.array(digests, np.uint64).view(np.int64)
