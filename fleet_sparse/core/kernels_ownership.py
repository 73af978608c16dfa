"""Kernels that check pushes and pulls: which shard owns the ids, whether they are distinct, and gradients finite."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ids import BUCKET_BITS
from .jit import FLOAT32_IN, INT32_IN, INT64, INT64_IN, INT64S, UINT32S, UINT64, kernel
from .kernels_batch import are_finite
from .kernels_hash import splitmix64

_BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
_UPPER_SHIFT, _ONE = np.uint64(32), np.uint64(1)
_EMPTY, _FULL = np.uint32(0), np.uint32(1)


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


@kernel(INT64_IN, FLOAT32_IN, UINT64, INT32_IN, INT64, INT64S, UINT32S, INT64S)
def hash_and_check(
    ids: NDArray[np.int64],
    grads: NDArray[np.float32],
    salt: np.uint64,
    shard_of_bucket: NDArray[np.int32],
    shard: int,
    hashes: NDArray[np.int64],
    fingerprints: NDArray[np.uint32],
    counts: NDArray[np.int64],
) -> None:
    """Hashes ids, once each, counts those that another shard owns, and looks for repeated ids and gradients not finite.

    Ids are compared by their cell and 31 bits of their hash. So a repeated id is always found, and very rarely two
    distinct ids are taken for one.

    Args:
        ids: `(n,)`.
        grads: Gradients, `(n * dim,)`.
        salt: Salt of the table.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        shard: The shard that should own them.
        hashes: Output, `(n,)`.
        fingerprints: Scratch, a power of 2 above n; the sparser it is, the faster.
        counts: Output, `(3,)`: misrouted ids; ids that seem equal to an earlier one; 1 if a gradient is not finite.
    """
    n = np.uint64(ids.shape[0])
    mask = np.uint64(fingerprints.shape[0]) - _ONE
    for i in range(n):
        hashes[i] = splitmix64(np.uint64(ids[i]) ^ salt)
    num_misrouted = num_repeated = 0
    for i in range(n):
        num_misrouted += shard_of_bucket[np.uint64(hashes[i]) >> _BUCKET_SHIFT] != shard
    fingerprints[:] = _EMPTY
    for i in range(n):
        h = np.uint64(hashes[i])
        cell, fingerprint = h & mask, np.uint32(h >> _UPPER_SHIFT) | _FULL
        while fingerprints[cell] != _EMPTY and fingerprints[cell] != fingerprint:
            cell = (cell + _ONE) & mask
        num_repeated += fingerprints[cell] == fingerprint
        fingerprints[cell] = fingerprint
    counts[0] = num_misrouted
    counts[1] = num_repeated
    counts[2] = not are_finite(grads)
