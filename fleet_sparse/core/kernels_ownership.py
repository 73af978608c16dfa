"""Kernels that check ids: which shard owns them, and whether they are distinct."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ids import BUCKET_BITS
from .intrinsics import prefetch_write
from .jit import INT32_IN, INT32S, INT64, INT64_IN, INT64S, UINT64, kernel
from .kernels_hash import splitmix64

_BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
_AHEAD, _ONE = np.uint64(8), np.uint64(1)


@kernel(INT64_IN, UINT64, INT32_IN, INT64, result=INT64)
def count_misrouted(ids: NDArray[np.int64], salt: np.uint64, shard_of_bucket: NDArray[np.int32], shard: int) -> int:
    """Counts the ids that another shard owns.

    A kernel because it runs before pulls: `Placement.shard_of` takes a fifth of the time of the pull itself.

    Args:
        ids: `(n,)`.
        salt: Salt of the table.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        shard: The shard that should own them.
    """
    num_misrouted = 0
    for i in range(np.uint64(ids.shape[0])):
        num_misrouted += shard_of_bucket[splitmix64(np.uint64(ids[i]) ^ salt) >> _BUCKET_SHIFT] != shard
    return num_misrouted


@kernel(INT64_IN, UINT64, INT32_IN, INT64, INT64S, INT32S, INT32S, INT64S)
def hash_and_check(
    ids: NDArray[np.int64],
    salt: np.uint64,
    shard_of_bucket: NDArray[np.int32],
    shard: int,
    hashes: NDArray[np.int64],
    table: NDArray[np.int32],
    cell_of: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """Hashes ids, once each, and counts those that another shard owns and those that are equal to an earlier one.

    Args:
        ids: `(n,)`, n below 2^31.
        salt: Salt of the table.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        shard: The shard that should own them.
        hashes: Output, `(n,)`.
        table: A hash table, empty (-1) before and after; as `dedup_scratch` makes it for n ids.
        cell_of: Scratch, at least `(n,)`.
        counts: Output, `(2,)`: misrouted ids, repeated ids.
    """
    n = np.uint64(ids.shape[0])
    mask = np.uint64(table.shape[0]) - _ONE
    num_misrouted = 0
    for i in range(n):
        hashes[i] = splitmix64(np.uint64(ids[i]) ^ salt)
    for i in range(n):
        num_misrouted += shard_of_bucket[np.uint64(hashes[i]) >> _BUCKET_SHIFT] != shard
    num_distinct = np.uint64(0)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(table, np.uint64(hashes[i + _AHEAD]) & mask)
        cell = np.uint64(hashes[i]) & mask
        while table[cell] >= 0 and ids[np.uint64(table[cell])] != ids[i]:
            cell = (cell + _ONE) & mask
        if table[cell] < 0:
            table[cell] = i
            cell_of[num_distinct] = cell
            num_distinct += _ONE
    for u in range(num_distinct):
        table[np.uint64(cell_of[u])] = -1
    counts[0] = num_misrouted
    counts[1] = np.int64(n - num_distinct)
