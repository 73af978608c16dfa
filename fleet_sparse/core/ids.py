"""Ids: all 2^64 values of int64, and the hash that spreads them over buckets.

The hash decides which pserver owns an id and where a snapshot stores it. It is part of the snapshot format and of the
wire protocol: the results of these functions must never change.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

BUCKET_BITS = 14
NUM_BUCKETS = 1 << BUCKET_BITS

# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014, https://doi.org/10.1145/2660193.2660195).
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def table_salt(name: str) -> int:
    """Returns the 64 bits that a table's ids are combined with before they are hashed: xxh3-64 of its UTF-8 name.

    The salt puts equal ids of different tables into different buckets.
    """
    return xxhash.xxh3_64_intdigest(name.encode())


def table_id(name: str) -> int:
    """Returns the 32 bits that name a table in a frame."""
    return xxhash.xxh3_64_intdigest(b"fleet_sparse/table/" + name.encode()) & 0xFFFF_FFFF


def hash_ids(ids: NDArray[np.int64], salt: int) -> NDArray[np.uint64]:
    """Returns `splitmix64(id ^ salt)` of each id: the output of a SplitMix64 generator with the state `id ^ salt`.

    It maps the 2^64 ids one to one. `ids` may have any shape; the result has the same shape.
    """
    z = (ids.view(np.uint64) ^ np.uint64(salt)) + GOLDEN_GAMMA
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))


def bucket_of(ids: NDArray[np.int64], salt: int) -> NDArray[np.int64]:
    """Returns the bucket of each id, in `[0, NUM_BUCKETS)`: the top 14 bits of its hash."""
    return (hash_ids(ids, salt) >> np.uint64(64 - BUCKET_BITS)).view(np.int64)
