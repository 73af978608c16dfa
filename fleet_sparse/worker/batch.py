"""The ids of one batch: which ones are there, and which shard each of them lives on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_batch import dedup_scratch, dedup_split
from fleet_sparse.core.placement import Placement


class UniqueIds(NamedTuple):
    """Distinct ids of one table in the order in which they travel.

    Attributes:
        ids: int64 `(k,)`, those of shard 0 first; inside a shard in the order of their first appearance.
        num_per_shard: int64 `(num_shards,)`, how many of them each shard owns.
    """

    ids: NDArray[np.int64]
    num_per_shard: NDArray[np.int64]

    def where(self, is_wanted: NDArray[np.bool_]) -> UniqueIds:
        """Those of the ids that are wanted, `(k,)`, as fresh arrays."""
        shards = np.repeat(np.arange(len(self.num_per_shard), dtype=np.uint16), self.num_per_shard)
        return UniqueIds(self.ids[is_wanted], np.bincount(shards[is_wanted], minlength=len(self.num_per_shard)))


class Deduplicator:
    """Finds the distinct ids of batches. Keeps its scratch memory, one for each thread that calls it."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._of_thread = threading.local()

    def unique(self, ids: Sequence[NDArray[np.int64]], salt: int) -> tuple[UniqueIds, list[NDArray[np.int64]]]:
        """The distinct ids of several arrays of one table.

        Args:
            ids: int64 arrays of any shape.
            salt: The table's.

        Returns:
            The distinct ids of all of them, and for each array one of its shape with the index of each of its ids
            among them: `unique.ids[inverse] == ids`. All are fresh arrays.

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

    def among(self, ids: NDArray[np.int64], others: NDArray[np.int64], salt: int) -> NDArray[np.bool_]:
        """Which of `ids` `(n,)` are among `others`; both distinct ids of the table with that salt."""
        unique, (of_others, of_ids) = self.unique([others, ids], salt)
        is_there = np.zeros(len(unique.ids), np.bool_)
        is_there[of_others] = True
        found: NDArray[np.bool_] = is_there[of_ids]
        return found

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
        # A copy: the ids are sent from this memory while the next batch is on its way.
        return scratch.unique[:num_unique].copy(), inverse, num_per_shard

    def _scratch(self, num_ids: int) -> _Scratch:
        scratch: _Scratch | None = getattr(self._of_thread, "scratch", None)
        if scratch is None or len(scratch.unique) < num_ids:
            scratch = _Scratch(np.empty(num_ids, np.int64), dedup_scratch(num_ids))
            self._of_thread.scratch = scratch
        return scratch


class _Scratch(NamedTuple):
    unique: NDArray[np.int64]
    of_kernel: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]
