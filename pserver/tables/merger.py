"""Merger: hashes and checks the ids of pushes, and sums the gradients of ids that occur more than once."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_batch import DedupScratch, dedup_scratch, dedup_split, find_among, segment_sum
from fleet_sparse.core.kernels_ownership import hash_and_check
from fleet_sparse.core.placement import Placement


class Merged(NamedTuple):
    """Distinct ids and the sum of the gradients of each."""

    ids: NDArray[np.int64]
    """`(k,)`, in the order of their first appearance."""
    grads: NDArray[np.float32]
    """`(k, dim)`."""


class CheckedPush(msgspec.Struct, frozen=True, eq=False):
    """Result of one pass over the ids and gradients of a push.

    Attributes:
        hashes: Hashes of the ids, `(n,)`.
        num_misrouted: Number of ids that another shard owns.
        may_repeat: True if an id is repeated; very rarely, also if none is.
        is_finite: True if all gradients are finite.
    """

    hashes: NDArray[np.int64]
    num_misrouted: int
    may_repeat: bool
    is_finite: bool


class Merger:
    """Works on the ids of one shard of a placement. Belongs to one thread."""

    def __init__(self, placement: Placement, shard: int) -> None:
        self._placement = placement
        self._shard = shard
        self._counts = np.empty(3, np.int64)
        self._num_per_shard = np.empty(placement.num_shards, np.int64)
        # The key is the size of batches: a small one uses a small hash table, which stays in the CPU cache.
        self._scratch: dict[int, DedupScratch] = {}
        self._fingerprints: dict[int, NDArray[np.uint32]] = {}

    def check(self, ids: NDArray[np.int64], grads: NDArray[np.float32], salt: np.uint64) -> CheckedPush:
        """Hashes `ids` `(n,)` of the table with that salt, each once, and checks them and `grads` `(n, dim)`."""
        bits, hashes = len(ids).bit_length(), np.empty(len(ids), np.int64)
        fingerprints = self._fingerprints.get(bits)
        if fingerprints is None:
            fingerprints = self._fingerprints[bits] = np.empty(4 << bits, np.uint32)
        shard_of_bucket, counts = self._placement.shard_of_bucket, self._counts
        hash_and_check(ids, grads.reshape(-1), salt, shard_of_bucket, self._shard, hashes, fingerprints, counts)
        num_misrouted, num_repeated, has_not_finite = counts.tolist()
        return CheckedPush(hashes, num_misrouted, num_repeated > 0, not has_not_finite)

    def merge(self, ids: NDArray[np.int64], grads: NDArray[np.float32], salt: np.uint64) -> Merged:
        """Sums `grads` `(n, dim)` of equal `ids` `(n,)`, all of this shard, in their order. Both arrays are returned as
        they are, not copied, when the ids are distinct.
        """
        unique, inverse = self._distinct(ids, salt)
        if len(unique) == len(ids):
            return Merged(ids, grads)
        sums = np.empty((len(unique), grads.shape[1]), np.float32)
        segment_sum(grads.reshape(-1), inverse, grads.shape[1], sums.reshape(-1))
        return Merged(unique, sums)

    def among(self, ids: NDArray[np.int64], others: NDArray[np.int64], salt: np.uint64) -> NDArray[np.bool_]:
        """Returns which of `ids` `(n,)` are among `others`, which are distinct; all of them are of this shard."""
        scratch = self._scratch_for(len(others))
        places = np.empty(len(ids), np.int64)
        find_among(ids, others, salt, scratch.table, scratch.cell_of, places)
        return places >= 0

    def _distinct(self, ids: NDArray[np.int64], salt: np.uint64) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the distinct ids, and the index of each id among them."""
        n = len(ids)
        unique, inverse = np.empty(n, np.int64), np.empty(n, np.int64)
        num_unique = dedup_split(
            ids,
            salt,
            self._placement.shard_of_bucket,
            self._placement.num_shards,
            unique,
            inverse,
            self._num_per_shard,
            *self._scratch_for(n),
        )
        return unique[:num_unique], inverse

    def _scratch_for(self, num_ids: int) -> DedupScratch:
        bits = num_ids.bit_length()
        if bits not in self._scratch:
            self._scratch[bits] = dedup_scratch(1 << bits)
        return self._scratch[bits]
