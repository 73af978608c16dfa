"""Merger: the gradients of one push, one row an id, and how many of its ids belong elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_batch import DedupScratch, dedup_scratch, dedup_split, find_among, segment_sum
from fleet_sparse.core.placement import Placement


class Merged(NamedTuple):
    """Distinct ids and the sum of the gradients of each."""

    ids: NDArray[np.int64]
    """`(k,)`, in the order of their first appearance if all are of this shard."""
    grads: NDArray[np.float32]
    """`(k, dim)`."""
    num_foreign: int
    """How many of the ids another shard owns."""


class Merger:
    """Sums the gradients of ids that occur more than once, for one shard of a placement. Belongs to one thread."""

    def __init__(self, placement: Placement, shard: int) -> None:
        self._placement = placement
        self._shard = shard
        self._num_per_shard = np.empty(placement.num_shards, np.int64)
        # By the size of batches: a small one stays in a small hash table, which the cache holds.
        self._scratch: dict[int, DedupScratch] = {}

    def merge(self, ids: NDArray[np.int64], grads: NDArray[np.float32], salt: int) -> Merged:
        """Merges `ids` `(n,)` and `grads` `(n, dim)` of the table with that salt; both are returned as they are, not
        copied, when the ids are distinct. Repeated ids are summed in the order in which they came.
        """
        unique, inverse = self._distinct(ids, salt)
        num_foreign = len(unique) - int(self._num_per_shard[self._shard])
        if len(unique) == len(ids):
            return Merged(ids, grads, num_foreign)
        sums = np.empty((len(unique), grads.shape[1]), np.float32)
        segment_sum(grads.reshape(-1), inverse, grads.shape[1], sums.reshape(-1))
        return Merged(unique, sums, num_foreign)

    def among(self, ids: NDArray[np.int64], others: NDArray[np.int64], salt: int) -> NDArray[np.bool_]:
        """Which of `ids` `(n,)` are among `others`, which are distinct; all of them are of this shard."""
        scratch = self._scratch_for(len(others))
        places = np.empty(len(ids), np.int64)
        find_among(ids, others, np.uint64(salt), scratch.table, scratch.cell_of, places)
        return places >= 0

    def _distinct(self, ids: NDArray[np.int64], salt: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The distinct ids, and the place of each id among them."""
        n = len(ids)
        unique, inverse = np.empty(n, np.int64), np.empty(n, np.int64)
        num_unique = dedup_split(
            ids,
            np.uint64(salt),
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
