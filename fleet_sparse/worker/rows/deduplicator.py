"""Deduplicator: the distinct ids of a batch, grouped by shard."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_batch import DedupScratch, dedup_scratch, dedup_split, find_among
from fleet_sparse.core.placement import Placement


class UniqueIds(NamedTuple):
    """Distinct ids of one table, in the order in which they are sent.

    Attributes:
        ids: int64 `(k,)`, those of shard 0 first; inside a shard in the order of their first appearance.
        num_per_shard: int64 `(num_shards,)`, number of ids of each shard.
    """

    ids: NDArray[np.int64]
    num_per_shard: NDArray[np.int64]

    def at(self, places: NDArray[np.int64]) -> UniqueIds:
        """Returns the ids at these ascending places `(n,)`, as fresh arrays."""
        num_before = np.searchsorted(places, np.cumsum(self.num_per_shard))
        return UniqueIds(self.ids[places], np.diff(num_before, prepend=0))


class Deduplicator:
    """Finds the distinct ids of batches. It keeps scratch memory for each calling thread."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._of_thread = threading.local()

    def unique(self, ids: Sequence[NDArray[np.int64]], salt: int) -> tuple[UniqueIds, list[NDArray[np.int64]]]:
        """The distinct ids of several arrays of one table.

        Args:
            ids: int64 arrays of any shape.
            salt: Salt of the table.

        Returns:
            The distinct ids of all arrays, and for each array the index of each of its ids among them, in its shape:
            `unique.ids[inverse] == ids`. All are fresh arrays.

        Raises:
            ValueError: An array is not int64.
        """
        for array in ids:
            if array.dtype != np.int64:
                raise ValueError(f"ids: {array.dtype}, should be int64")
        flat = [np.ascontiguousarray(array).reshape(-1) for array in ids]
        joined = flat[0] if len(flat) == 1 else np.concatenate([np.empty(0, np.int64), *flat])
        unique, inverse, num_per_shard = self._split(joined, salt)
        inverses, begin = [], 0
        for array in ids:
            inverses.append(inverse[begin : begin + array.size].reshape(array.shape))
            begin += array.size
        return UniqueIds(unique, num_per_shard), inverses

    def places(self, ids: NDArray[np.int64], others: NDArray[np.int64], salt: int) -> NDArray[np.int64]:
        """Returns the place of each of `ids` `(n,)` among the distinct `others`; -1 if it is not there.

        Args:
            ids: int64 ids of the table with that salt.
            others: int64 ids of the same table.
            salt: Salt of the table.
        """
        scratch = self._scratch(len(others)).of_kernel
        places = np.empty(len(ids), np.int64)
        find_among(ids, others, np.uint64(salt), scratch.table, scratch.cell_of, places)
        return places

    def _split(
        self, ids: NDArray[np.int64], salt: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        scratch = self._scratch(len(ids))
        inverse = np.empty(len(ids), np.int64)
        num_per_shard = np.empty(self._placement.num_shards, np.int64)
        num_unique = dedup_split(
            ids,
            np.uint64(salt),
            self._placement.shard_of_bucket,
            self._placement.num_shards,
            scratch.unique,
            inverse,
            num_per_shard,
            *scratch.of_kernel,
        )
        # A copy: the ids are sent from this memory while the next batch is prepared.
        return scratch.unique[:num_unique].copy(), inverse, num_per_shard

    def _scratch(self, num_ids: int) -> _Scratch:
        scratch: _Scratch | None = getattr(self._of_thread, "scratch", None)
        if scratch is None or len(scratch.unique) < num_ids:
            scratch = _Scratch(np.empty(num_ids, np.int64), dedup_scratch(num_ids))
            self._of_thread.scratch = scratch
        return scratch


class _Scratch(NamedTuple):
    unique: NDArray[np.int64]
    of_kernel: DedupScratch
