"""Deduplicator: the distinct ids of a batch, grouped by shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_batch import (
    collect_distinct,
    dedup_scratch,
    find_among,
    order_by_shard,
    place_ids,
    split_by_presence,
)
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.reused_memory import ReusedMemory

_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)
_LOWEST, _HIGHEST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
_NUM_IDS = 1 << 10  # ids of a batch for which there is scratch memory at first


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


class PartOfIds(NamedTuple):
    """Some of the distinct ids of a batch, in their order."""

    unique: UniqueIds
    places: NDArray[np.int64]
    """Place of each in the whole, ascending."""


class TableLookups(NamedTuple):
    """The lookups of a program on one table: all that is known of their ids before a batch."""

    name: str
    salt: np.uint64
    """Salt of the table."""
    paddings: tuple[int | None, ...] = (None,)
    """Padding id of each lookup."""
    size: int | None = None
    """Ids must lie in `[0, size)`; None for any ids."""


class Deduplicator:
    """Finds the distinct ids of batches. Several threads may call it at once; each call takes scratch memory."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        # Not of threads: a thread of Paddle's executor is a new one for Python at each call.
        self._idle: list[_Scratch] = []
        self._memory = ReusedMemory(np.int64)

    def unique(self, ids: Sequence[NDArray[np.int64]], salt: int) -> tuple[UniqueIds, list[NDArray[np.int64]]]:
        """The distinct ids of several arrays of one table.

        Args:
            ids: int64 arrays of any shape.
            salt: Salt of the table.

        Returns:
            The distinct ids of all arrays, and for each array the index of each of its ids among them, in its shape:
            `unique.ids[inverse] == ids`.

        Raises:
            ValueError: An array is not int64.
        """
        for array in ids:
            if array.dtype != _INT64:
                raise ValueError(f"ids: {array.dtype}, should be int64")
        inverses = [np.empty(array.shape, np.int64) for array in ids]
        lookups = TableLookups("", np.uint64(salt), (None,) * len(ids))
        return self.place(lookups, ids, inverses), inverses

    def place(
        self, lookups: TableLookups, ids: Sequence[NDArray[np.int64]], positions: Sequence[NDArray[np.int64]]
    ) -> UniqueIds:
        """The distinct ids of a batch; writes the index of each id among them.

        The memory of the result is reused once neither the arrays nor views of them are left.

        Args:
            lookups: The lookups on the table.
            ids: For each lookup its ids, int64 or int32 of any shape.
            positions: For each lookup contiguous int64 memory of the same shape: the index of each id among the
                distinct ones, and their number for the padding id.

        Raises:
            ValueError: Ids are not integers, or one is outside of a bounded table. `positions` are undefined then.
        """
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = _Scratch()
        num_ids = 0
        for given in ids:
            num_ids += given.size
        if num_ids > scratch.num_ids:
            scratch.grow(num_ids)
        table, arrived, shard_of, cell_of, next_of_shard = scratch.of_kernel
        shard_of_bucket, num_shards = self._placement.shard_of_bucket, self._placement.num_shards
        flat_positions = []
        num_distinct = 0
        for given, of_lookup, padding in zip(ids, positions, lookups.paddings, strict=True):
            array = given
            if array.dtype != _INT64:
                if array.dtype != _INT32:
                    raise ValueError(
                        f"table {lookups.name!r}: ids are {array.dtype}, should be int64 or int32. "
                        "Write .astype('int64')"
                    )
                array = given.astype(np.int64)
            flat_positions.append(of_lookup.reshape(-1))
            num_distinct = collect_distinct(
                array.ravel(),
                lookups.salt,
                padding or 0,
                padding is not None,
                shard_of_bucket,
                num_distinct,
                flat_positions[-1],
                table,
                arrived,
                shard_of,
                cell_of,
            )
        memory = self._memory.lend(num_shards + num_distinct)
        unique = UniqueIds(memory[num_shards : num_shards + num_distinct], memory[:num_shards])
        lowest, highest = (_LOWEST, _HIGHEST) if lookups.size is None else (0, lookups.size - 1)
        is_allowed = order_by_shard(
            num_distinct,
            num_shards,
            lowest,
            highest,
            unique.ids,
            unique.num_per_shard,
            table,
            arrived,
            shard_of,
            cell_of,
            next_of_shard,
        )
        if not is_allowed:
            low, high = int(unique.ids.min()), int(unique.ids.max())
            raise ValueError(
                f"table {lookups.name!r}: id {low if low < 0 else high} is outside [0, {lookups.size}). "
                "Give the embedding a larger size, or is_distributed=True for ids without bounds"
            )
        for of_lookup in flat_positions:
            place_ids(of_lookup, cell_of, num_distinct)
        self._idle.append(scratch)  # not after an error or Ctrl-C: its hash table may not be empty then
        return unique

    def split(self, unique: UniqueIds, others: NDArray[np.int64], salt: int) -> tuple[PartOfIds, PartOfIds]:
        """The distinct ids of a batch that are not among others, and those that are.

        Args:
            unique: Ids of the table with that salt.
            others: Distinct ids of the same table.
            salt: Salt of the table.
        """
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = _Scratch()
        if len(others) > scratch.num_ids:
            scratch.grow(len(others))
        num_ids, num_shards = len(unique.ids), self._placement.num_shards
        memory = self._memory.lend(2 * num_ids + 2 * num_shards)
        counts = memory[: 2 * num_shards]
        ids, places = memory[2 * num_shards :][:num_ids], memory[2 * num_shards + num_ids :][:num_ids]
        table, _, _, cell_of, _ = scratch.of_kernel
        split_by_presence(
            unique.ids, unique.num_per_shard, others, np.uint64(salt), table, cell_of, ids, places, counts
        )
        self._idle.append(scratch)
        num_absent = int(counts[:num_shards].sum())
        return (
            PartOfIds(UniqueIds(ids[:num_absent], counts[:num_shards]), places[:num_absent]),
            PartOfIds(UniqueIds(ids[num_absent:], counts[num_shards:]), places[num_absent:]),
        )

    def places(self, ids: NDArray[np.int64], others: NDArray[np.int64], salt: int) -> NDArray[np.int64]:
        """Returns the place of each of `ids` `(n,)` among the distinct `others`; -1 if it is not there.

        Args:
            ids: int64 ids of the table with that salt.
            others: int64 ids of the same table.
            salt: Salt of the table.
        """
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = _Scratch()
        if len(others) > scratch.num_ids:
            scratch.grow(len(others))
        places = np.empty(len(ids), np.int64)
        find_among(ids, others, np.uint64(salt), scratch.of_kernel.table, scratch.of_kernel.cell_of, places)
        self._idle.append(scratch)
        return places


class _Scratch:
    """Memory of one call.

    Attributes:
        num_ids: Number of ids of a batch that it has room for.
        of_kernel: Scratch arguments of the kernels.
    """

    def __init__(self) -> None:
        self.grow(_NUM_IDS)

    def grow(self, num_ids: int) -> None:
        """Makes room for a batch of this many ids."""
        self.num_ids = num_ids
        self.of_kernel = dedup_scratch(num_ids)
