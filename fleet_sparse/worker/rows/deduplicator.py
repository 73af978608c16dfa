"""Deduplicator: the distinct ids of a batch, grouped by shard. BatchSequence: the same of successive batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_batch import (
    HIGHEST,
    IDS_AT,
    IS_PADDED,
    LOOKUP_COLUMNS,
    LOWEST,
    PADDING,
    POSITIONS_AT,
    SALT,
    TABLE,
    TABLE_COLUMNS,
    collect_distinct,
    dedup_scratch,
    find_among,
    order_by_shard,
    order_early_first,
    place_ids,
    place_tables,
    select_ids,
)
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.reused_memory import ReusedMemory

_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)
_ANY_ID = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
_NUM_IDS = 1 << 10  # ids of a batch for which there is scratch memory at first


class UniqueIds(NamedTuple):
    """Distinct ids of one table, grouped by shard, or some of them.

    Attributes:
        ids: int64 `(k,)`, those of shard 0 first; inside a shard in the order of their first appearance.
        num_per_shard: int64 `(num_shards,)`, number of ids of each shard.
        begins: int64 `(num_shards,)`, index in `ids` of the first id of each shard; None if they are all of `ids`.
    """

    ids: NDArray[np.int64]
    num_per_shard: NDArray[np.int64]
    begins: NDArray[np.int64] | None = None

    @property
    def places(self) -> NDArray[np.int64]:
        """Their places among `ids`, ascending."""
        if self.begins is None:
            return np.arange(len(self.ids))
        parts = [np.arange(begin, begin + n) for begin, n in zip(self.begins, self.num_per_shard, strict=True)]
        return np.concatenate(parts)

    def at(self, places: NDArray[np.int64]) -> UniqueIds:
        """Returns the ids at these ascending places `(n,)` of all, as fresh arrays."""
        ids, num_per_shard = np.empty(len(places), np.int64), np.empty(len(self.num_per_shard), np.int64)
        select_ids(self.ids, self.num_per_shard, places, ids, num_per_shard)
        return UniqueIds(ids, num_per_shard)


class SuccessiveIds(NamedTuple):
    """Distinct ids of a batch; within a shard those come first that are not in the batch before.

    Attributes:
        unique: All of them.
        early: Those that are not in the batch before.
        late: Those that are.
        before: Distinct ids of the batch before; None if it is not known, and all ids are early then.
    """

    unique: UniqueIds
    early: UniqueIds
    late: UniqueIds
    before: UniqueIds | None


class TableLookups(NamedTuple):
    """The lookups of a program on one table: all that is known of their ids before a batch."""

    name: str
    salt: np.uint64
    """Salt of the table."""
    paddings: tuple[int | None, ...] = (None,)
    """Padding id of each lookup."""
    size: int | None = None
    """Ids must lie in `[0, size)`; None for any ids."""


class LookupGroup:
    """The lookups of a program on some tables, as the kernel takes them.

    Args:
        tables: The lookups on each table.

    Attributes:
        tables: As given.
        described: `(num_tables, TABLE_COLUMNS)`, never written to.
        num_lookups: Number of lookups.
    """

    def __init__(self, tables: Sequence[TableLookups]) -> None:
        self.tables = tables
        self.described = np.zeros((len(tables), TABLE_COLUMNS), np.int64)
        self.num_lookups = sum(len(lookups.paddings) for lookups in tables)
        self._template = np.zeros((self.num_lookups, LOOKUP_COLUMNS), np.int64)
        row = 0
        for number, lookups in enumerate(tables):
            low, high = _ANY_ID if lookups.size is None else (0, lookups.size - 1)
            self.described[number, SALT] = np.uint64(lookups.salt).astype(np.int64)
            self.described[number, LOWEST], self.described[number, HIGHEST] = low, high
            for padding in lookups.paddings:
                self._template[row, TABLE] = number
                self._template[row, PADDING], self._template[row, IS_PADDED] = padding or 0, padding is not None
                row += 1

    def at(self, addresses: Sequence[int]) -> NDArray[np.int64]:
        """Returns the lookups for the kernel: of each the address of its ids, their number, address of positions."""
        lookups = self._template.copy()
        lookups[:, IDS_AT : POSITIONS_AT + 1] = np.array(addresses, np.int64).reshape(-1, 3)
        return lookups


class Deduplicator:
    """Finds the distinct ids of batches. Several threads may call it at once; each call takes scratch memory."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        # It does not belong to a thread: one of Paddle's executor is a new one for Python at each call.
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
        """Does what `place_tables` does, for one table."""
        return self.place_tables(LookupGroup((lookups,)), ids, positions)[0]

    def place_tables(
        self, group: LookupGroup, ids: Sequence[NDArray[np.int64]], positions: Sequence[NDArray[np.int64]]
    ) -> list[UniqueIds]:
        """The distinct ids of a batch in each table; writes the index of each id among those of its table.

        The memory of the result is reused once neither the arrays nor views of them are left.

        Args:
            group: The lookups on the tables.
            ids: For each lookup its ids, int64 or int32 of any shape; those of the first table first.
            positions: For each lookup contiguous int64 memory of the same shape: the index of each id among the
                distinct ones, and their number for the padding id.

        Raises:
            ValueError: Ids are not integers, or one is outside of a bounded table. `positions` are undefined then.
        """
        arrays: list[NDArray[np.int64]] = []  # they are kept until the kernel has returned
        addresses: list[int] = []
        num_ids = 0
        for array, of_lookup in zip(ids, positions, strict=True):
            given, size = array, array.size
            if given.dtype != _INT64:
                given = _as_int64(group.tables, given, len(arrays))
            if not given.flags.c_contiguous:
                given = np.ascontiguousarray(given)
            num_ids += size
            arrays.append(given)
            addresses += [
                given.__array_interface__["data"][0],
                size,
                of_lookup.__array_interface__["data"][0],
            ]
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = _Scratch()
        if num_ids > scratch.num_ids:
            scratch.grow(num_ids)
        num_shards, num_tables = self._placement.num_shards, len(group.tables)
        num_counts = (num_shards + 1) * num_tables
        memory = self._memory.lend(num_counts + num_ids)
        num_distinct, unique = memory[:num_tables], memory[num_counts : num_counts + num_ids]
        num_per_shard = memory[num_tables:num_counts].reshape(num_tables, num_shards)
        num_placed = place_tables(
            group.at(addresses),
            group.described,
            self._placement.shard_of_bucket,
            num_shards,
            unique,
            num_per_shard,
            num_distinct,
            *scratch.of_kernel,
        )
        self._idle.append(scratch)  # not after Ctrl-C: its hash table may not be empty then
        placed, begin = [], 0
        for number, count in enumerate(num_distinct.tolist()):
            end = begin + count
            if number == num_placed:
                raise _outside(group.tables[number], unique[begin:end])
            placed.append(UniqueIds(unique[begin:end], num_per_shard[number]))
            begin = end
        return placed

    def grouped(self, ids: NDArray[np.int64], salt: int) -> tuple[UniqueIds, NDArray[np.int64] | None]:
        """Groups distinct ids of a table by shard; those of a shard keep their order.

        Args:
            ids: `(n,)`, distinct.
            salt: Salt of the table.

        Returns:
            The grouped ids, and the index of each among `ids`: `unique.ids == ids[order]`. None if they are in this
            order: then they are `ids`, no copy.
        """
        num_per_shard, order = np.empty(self._placement.num_shards, np.int64), np.empty(len(ids), np.int64)
        if order_by_shard(ids, np.uint64(salt), self._placement.shard_of_bucket, num_per_shard, order):
            return UniqueIds(ids, num_per_shard), None
        return UniqueIds(ids[order], num_per_shard), order

    def sequence(self, lookups: TableLookups) -> BatchSequence:
        """A new sequence of batches of one table."""
        return BatchSequence(self._placement, self._memory, lookups)

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


class BatchSequence:
    """Finds the distinct ids of successive batches of one table. One thread at a time uses it.

    The hash table of a batch is kept until the next one, whose ids are looked up in it.

    Args:
        placement: Placement of the ids.
        memory: Memory for ids.
        lookups: The lookups on the table.
    """

    def __init__(self, placement: Placement, memory: ReusedMemory, lookups: TableLookups) -> None:
        self._placement = placement
        self._memory = memory
        self._lookups = lookups
        self._next_of_part = np.empty(2 * placement.num_shards + 1, np.int64)
        self._filled, self._empty = _Scratch(), _Scratch()  # of the batch before, and of the next one
        self._before: UniqueIds | None = None

    def place(self, ids: Sequence[NDArray[np.int64]], positions: Sequence[NDArray[np.int64]]) -> SuccessiveIds:
        """The distinct ids of the next batch; writes the index of each id among them.

        Args:
            ids: As in `Deduplicator.place`.
            positions: As in `Deduplicator.place`.

        Raises:
            ValueError: As `Deduplicator.place`. The next batch is the first one then.
        """
        before, self._before = self._before, None
        try:
            unique, early, late = self._place(ids, positions)
        except BaseException:
            self._filled, self._empty = _Scratch(), _Scratch()  # the hash tables are in no known state
            raise
        self._before = unique
        return SuccessiveIds(unique, early, late, before)

    def _place(
        self, ids: Sequence[NDArray[np.int64]], positions: Sequence[NDArray[np.int64]]
    ) -> tuple[UniqueIds, UniqueIds, UniqueIds]:
        lookups, num_shards, scratch = self._lookups, self._placement.num_shards, self._empty
        num_distinct = scratch.collect(self._placement.shard_of_bucket, lookups, ids, positions)
        memory = self._memory.lend(5 * num_shards + num_distinct)
        parts, unique = memory[: 5 * num_shards], memory[5 * num_shards : 5 * num_shards + num_distinct]
        is_allowed = order_early_first(
            num_distinct,
            num_shards,
            *(_ANY_ID if lookups.size is None else (0, lookups.size - 1)),
            lookups.salt,
            unique,
            parts,
            scratch.of_kernel.arrived,
            scratch.of_kernel.arrival_of,
            scratch.of_kernel.cell_of,
            self._next_of_part,
            self._filled.of_kernel.table,
            self._filled.of_kernel.arrived,
        )
        if not is_allowed:
            raise _outside(lookups, unique)
        for of_lookup in positions:
            place_ids(of_lookup.reshape(-1), scratch.of_kernel.cell_of, num_distinct)
        self._empty, self._filled = self._filled, scratch
        of_all, num_early, begin_early, num_late, begin_late = parts.reshape(5, num_shards)
        early, late = UniqueIds(unique, num_early, begin_early), UniqueIds(unique, num_late, begin_late)
        return UniqueIds(unique, of_all), early, late


def _outside(lookups: TableLookups, unique: NDArray[np.int64]) -> ValueError:
    low, high = int(unique.min()), int(unique.max())
    return ValueError(
        f"table {lookups.name!r}: id {low if low < 0 else high} is outside [0, {lookups.size}). "
        "Give the embedding a larger size, or is_distributed=True for ids without bounds"
    )


def _as_int64(tables: Sequence[TableLookups], ids: NDArray[np.int64], lookup: int) -> NDArray[np.int64]:
    """Converts the ids of a lookup. Raises `ValueError` if they are not integers."""
    if ids.dtype != _INT32:
        names = [lookups.name for lookups in tables for _ in lookups.paddings]
        raise ValueError(
            f"table {names[lookup]!r}: ids are {ids.dtype}, should be int64 or int32. Write .astype('int64')"
        )
    return ids.astype(np.int64)


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

    def collect(
        self,
        shard_of_bucket: NDArray[np.int32],
        lookups: TableLookups,
        ids: Sequence[NDArray[np.int64]],
        positions: Sequence[NDArray[np.int64]],
    ) -> int:
        """Enters the ids of a batch into the hash table, which is empty; returns the number of distinct ones.

        Raises:
            ValueError: Ids are not integers.
        """
        num_ids = 0
        for given in ids:
            num_ids += given.size
        if num_ids > self.num_ids:
            self.grow(num_ids)
        table, arrived, shard_of, cell_of, _ = self.of_kernel
        num_distinct = 0
        for number, (given, of_lookup, padding) in enumerate(zip(ids, positions, lookups.paddings, strict=True)):
            array = given if given.dtype == _INT64 else _as_int64((lookups,), given, number)
            num_distinct = collect_distinct(
                array.ravel(),
                lookups.salt,
                padding or 0,
                padding is not None,
                shard_of_bucket,
                num_distinct,
                of_lookup.reshape(-1),
                table,
                arrived,
                shard_of,
                cell_of,
            )
        return num_distinct
