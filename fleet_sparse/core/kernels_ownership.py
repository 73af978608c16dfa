"""Ownership: whether the ids of a request are this shard's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ids import BUCKET_BITS
from .jit import INT32_IN, INT64, INT64_IN, UINT64, kernel
from .kernels_hash import splitmix64

_BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)


@kernel(INT64_IN, UINT64, INT32_IN, INT64, result=INT64)
def count_foreign(ids: NDArray[np.int64], salt: np.uint64, shard_of_bucket: NDArray[np.int32], shard: int) -> int:
    """How many of the ids another shard owns.

    A kernel because it stands before every pull: `Placement.shard_of` takes a fifth of the time of the pull itself.

    Args:
        ids: `(n,)`.
        salt: The table's.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        shard: The one that should own them.
    """
    num_foreign = 0
    for i in range(np.uint64(ids.shape[0])):
        num_foreign += shard_of_bucket[splitmix64(np.uint64(ids[i]) ^ salt) >> _BUCKET_SHIFT] != shard
    return num_foreign
