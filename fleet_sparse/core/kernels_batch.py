"""Kernels on the ids and gradients of one batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .ids import BUCKET_BITS
from .intrinsics import array_at, prefetch_write
from .jit import (
    BOOL,
    FLOAT32_IN,
    FLOAT32S,
    INT32_IN,
    INT32S,
    INT64,
    INT64_IN,
    INT64S,
    INT64S_2D,
    UINT64,
    inlined,
    kernel,
)
from .kernels_hash import splitmix64

_BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
_AHEAD, _ONE, _TWO = np.uint64(8), np.uint64(1), np.uint64(2)
_int64s_at = array_at(INT64S)
_WITHOUT_SIGN, _INFINITY = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)


@inlined
def _shard_of(id_: Any, salt: Any, shard_of_bucket: Any) -> Any:
    return shard_of_bucket[splitmix64(np.uint64(id_) ^ salt) >> _BUCKET_SHIFT]


class DedupScratch(NamedTuple):
    """Scratch arguments of `dedup_split`, which describes them."""

    table: NDArray[np.int32]
    arrived: NDArray[np.int64]
    arrival_of: NDArray[np.int32]
    cell_of: NDArray[np.int32]
    next_of_shard: NDArray[np.int64]


def dedup_scratch(num_ids: int) -> DedupScratch:
    """Makes scratch memory for up to `num_ids` ids and 16384 shards, to be reused."""
    capacity = 1 << max(4, (2 * num_ids - 1).bit_length())
    return DedupScratch(
        np.full(capacity, -1, np.int32),
        np.empty(num_ids, np.int64),
        np.empty(num_ids, np.int32),
        np.empty(num_ids, np.int32),
        np.empty((1 << BUCKET_BITS) + 1, np.int64),
    )


@kernel(
    *(INT64_IN, UINT64, INT32_IN, INT64, INT64S, INT64S, INT64S, INT32S, INT64S, INT32S, INT32S, INT64S),
    result=INT64,
)
def dedup_split(
    ids: NDArray[np.int64],
    salt: np.uint64,
    shard_of_bucket: NDArray[np.int32],
    num_shards: int,
    unique: NDArray[np.int64],
    inverse: NDArray[np.int64],
    num_per_shard: NDArray[np.int64],
    table: NDArray[np.int32],
    arrived: NDArray[np.int64],
    arrival_of: NDArray[np.int32],
    cell_of: NDArray[np.int32],
    next_of_shard: NDArray[np.int64],
) -> int:
    """Writes the distinct ids, grouped by shard, shard 0 first; within a shard in the order of first appearance.

    Args:
        ids: `(n,)`, n below 2^31.
        salt: The table's.
        shard_of_bucket: `(NUM_BUCKETS,)`, each in `[0, num_shards)`.
        num_shards: Number of shards of the placement.
        unique: Output, at least `(n,)`.
        inverse: Output, at least `(n,)`: `unique[inverse[i]] == ids[i]`.
        num_per_shard: Output, `(num_shards,)`.
        table: A hash table, empty (-1) before and after; `dedup_scratch` makes it and what follows.
        arrived: The distinct ids in the order of their first appearance.
        arrival_of: Index of each id in `arrived`.
        cell_of: Cell of each distinct id in `table`, later its index in `unique`.
        next_of_shard: Where the next id of each shard goes.

    Returns:
        The number of distinct ids.
    """
    n = np.uint64(ids.shape[0])
    shards = np.uint64(num_shards)
    mask = np.uint64(table.shape[0]) - _ONE
    num_unique = np.uint64(0)
    for i in range(n):
        arrival_of[i] = splitmix64(np.uint64(ids[i]) ^ salt) & mask
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(table, np.uint64(arrival_of[i + _AHEAD]))
        cell = np.uint64(arrival_of[i])
        while table[cell] >= 0 and arrived[np.uint64(table[cell])] != ids[i]:
            cell = (cell + _ONE) & mask
        if table[cell] < 0:
            table[cell] = num_unique
            arrived[num_unique] = ids[i]
            cell_of[num_unique] = cell
            num_unique += _ONE
        arrival_of[i] = table[cell]
    next_of_shard[: shards + _ONE] = 0
    for u in range(num_unique):
        table[np.uint64(cell_of[u])] = -1
        shard = _shard_of(arrived[u], salt, shard_of_bucket)
        cell_of[u] = shard
        next_of_shard[np.uint64(shard) + _ONE] += 1
    for s in range(shards):
        num_per_shard[s] = next_of_shard[s + _ONE]
        next_of_shard[s + _ONE] += next_of_shard[s]
    for u in range(num_unique):
        shard = np.uint64(cell_of[u])
        place = next_of_shard[shard]
        next_of_shard[shard] += 1
        cell_of[u] = place
        unique[np.uint64(place)] = arrived[u]
    for i in range(n):
        inverse[i] = cell_of[np.uint64(arrival_of[i])]
    return int(num_unique)


@kernel(INT64_IN, UINT64, INT32_IN, INT64S, INT64S, result=BOOL)
def order_by_shard(
    ids: NDArray[np.int64],
    salt: np.uint64,
    shard_of_bucket: NDArray[np.int32],
    num_per_shard: NDArray[np.int64],
    order: NDArray[np.int64],
) -> bool:
    """Writes the order of distinct ids by shard, in which those of a shard keep theirs.

    Args:
        ids: `(n,)`.
        salt: The table's.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        num_per_shard: Output, `(num_shards,)`.
        order: Output, `(n,)`: their indices.

    Returns:
        True if the ids are in this order.
    """
    n, num_shards = np.uint64(ids.shape[0]), np.uint64(num_per_shard.shape[0])
    num_per_shard[:] = 0
    for i in range(n):
        num_per_shard[np.uint64(_shard_of(ids[i], salt, shard_of_bucket))] += 1
    end = 0
    for s in range(num_shards):
        end += num_per_shard[s]
        num_per_shard[s] = end
    is_ordered = True
    for i in range(n):  # from the last id on, so that in the end there is where each shard begins
        last = n - _ONE - i
        shard = np.uint64(_shard_of(ids[last], salt, shard_of_bucket))
        num_per_shard[shard] -= 1
        order[np.uint64(num_per_shard[shard])] = last
        is_ordered &= np.uint64(num_per_shard[shard]) == last
    for s in range(num_shards):
        next_begins = num_per_shard[s + _ONE] if s + _ONE < num_shards else np.int64(n)
        num_per_shard[s] = next_begins - num_per_shard[s]
    return is_ordered


@kernel(INT64_IN, INT64_IN, INT64_IN, INT64S, INT64S)
def select_ids(
    ids: NDArray[np.int64],
    num_per_shard: NDArray[np.int64],
    places: NDArray[np.int64],
    selected: NDArray[np.int64],
    num_selected: NDArray[np.int64],
) -> None:
    """Selects some of the ids that are grouped by shard.

    Args:
        ids: All of them.
        num_per_shard: `(num_shards,)`, number of ids of each shard.
        places: `(n,)`, ascending indices of `ids`.
        selected: Output, `(n,)`.
        num_selected: Output, `(num_shards,)`, number of the selected ids of each shard.
    """
    n, first, end = np.uint64(places.shape[0]), np.uint64(0), np.int64(0)
    for s in range(np.uint64(num_per_shard.shape[0])):
        end += num_per_shard[s]
        i = first
        while i < n and places[i] < end:
            selected[i] = ids[np.uint64(places[i])]
            i += _ONE
        num_selected[s] = i - first
        first = i


@inlined
def _collect(
    ids: Any,
    salt: Any,
    padding: Any,
    is_padded: Any,
    shard_of_bucket: Any,
    num_distinct: Any,
    positions: Any,
    mask: Any,
    table: Any,
    arrived: Any,
    shard_of: Any,
    cell_of: Any,
) -> Any:
    """Does what `collect_distinct` does, with the first `mask + 1` cells of `table` as the hash table."""
    n = np.uint64(ids.shape[0])
    k = np.uint64(num_distinct)
    for i in range(n):
        positions[i] = np.int64(splitmix64(np.uint64(ids[i]) ^ salt))
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(table, np.uint64(positions[i + _AHEAD]) & mask)
        if is_padded and ids[i] == padding:
            positions[i] = -1
            continue
        hashed = np.uint64(positions[i])
        cell = hashed & mask
        while table[cell] >= 0 and arrived[np.uint64(table[cell])] != ids[i]:
            cell = (cell + _ONE) & mask
        if table[cell] < 0:
            table[cell] = k
            arrived[k] = ids[i]
            cell_of[k] = cell
            shard_of[k] = shard_of_bucket[hashed >> _BUCKET_SHIFT]
            k += _ONE
        positions[i] = table[cell]
    return k


@kernel(
    *(INT64_IN, UINT64, INT64, BOOL, INT32_IN, INT64, INT64S, INT32S, INT64S, INT32S, INT32S),
    result=INT64,
)
def collect_distinct(
    ids: NDArray[np.int64],
    salt: np.uint64,
    padding: int,
    is_padded: bool,
    shard_of_bucket: NDArray[np.int32],
    num_distinct: int,
    positions: NDArray[np.int64],
    table: NDArray[np.int32],
    arrived: NDArray[np.int64],
    shard_of: NDArray[np.int32],
    cell_of: NDArray[np.int32],
) -> int:
    """Adds the ids of one lookup to the distinct ids of a batch; `order_early_first` ends the batch.

    Args:
        ids: `(n,)`; fewer than 2^31 in a batch.
        salt: Salt of the table.
        padding: Id that is no row.
        is_padded: False if there is no such id.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        num_distinct: Number of distinct ids of the batch so far.
        positions: Output, `(n,)`: index of each id among `arrived`, -1 for padding.
        table: A hash table, empty (-1) before the first lookup; `dedup_scratch` makes it and what follows.
        arrived: The distinct ids in the order of their first appearance.
        shard_of: Shard of each distinct id.
        cell_of: Cell of each distinct id in `table`.

    Returns:
        The number of distinct ids now.
    """
    mask = np.uint64(table.shape[0]) - _ONE
    return int(
        _collect(
            ids,
            salt,
            padding,
            is_padded,
            shard_of_bucket,
            num_distinct,
            positions,
            mask,
            table,
            arrived,
            shard_of,
            cell_of,
        )
    )


@inlined
def _place(positions: Any, index_of: Any, padding_index: Any) -> None:
    """Does what `place_ids` does, inside of a kernel."""
    for i in range(np.uint64(positions.shape[0])):
        arrival = positions[i]
        positions[i] = np.int64(padding_index) if arrival < 0 else np.int64(index_of[np.uint64(arrival)])


# Columns of the lookups of `place_tables`.
TABLE, PADDING, IS_PADDED, IDS_AT, NUM_IDS, POSITIONS_AT = 0, 1, 2, 3, 4, 5
LOOKUP_COLUMNS = 6
# Columns of its tables.
SALT, LOWEST, HIGHEST = 0, 1, 2
TABLE_COLUMNS = 3


@kernel(
    *(INT64S_2D, INT64S_2D, INT32_IN, INT64, INT64S, INT64S_2D, INT64S, INT32S, INT64S, INT32S, INT32S, INT64S),
    result=INT64,
)
def place_tables(
    lookups: NDArray[np.int64],
    tables: NDArray[np.int64],
    shard_of_bucket: NDArray[np.int32],
    num_shards: int,
    unique: NDArray[np.int64],
    num_per_shard: NDArray[np.int64],
    num_distinct: NDArray[np.int64],
    table: NDArray[np.int32],
    arrived: NDArray[np.int64],
    shard_of: NDArray[np.int32],
    cell_of: NDArray[np.int32],
    next_of_shard: NDArray[np.int64],
) -> int:
    """Finds the distinct ids of a batch in each of several tables, and the index of each id among them.

    Args:
        lookups: `(num_lookups, LOOKUP_COLUMNS)`, by table: index of the table; id that is no row, and 1 if there is
            one; address and number of the ids, int64; address of the memory for their positions, int64. The position
            of padding is the number of distinct ids.
        tables: `(num_tables, TABLE_COLUMNS)`: salt, smallest and largest id that are allowed.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        num_shards: Number of shards.
        unique: Output, at least as many as all ids: those of table 0 first; of a table those of shard 0 first; within a
            shard in the order of first appearance.
        num_per_shard: Output, `(num_tables, num_shards)`.
        num_distinct: Output, `(num_tables,)`.
        table: A hash table, empty (-1) before and after; `dedup_scratch` makes it, for the ids of the largest table,
            and what follows.
        arrived: Scratch.
        shard_of: Scratch.
        cell_of: Scratch.
        next_of_shard: Scratch, at least `(num_shards + 1,)`.

    Returns:
        The number of tables; or index of the first table with an id that is not allowed, up to which all is written.
    """
    shards, end = np.uint64(num_shards), np.uint64(lookups.shape[0])
    first, first_id = np.uint64(0), np.uint64(0)
    for number in range(tables.shape[0]):
        salt = np.uint64(tables[number, SALT])
        lowest, highest = tables[number, LOWEST], tables[number, HIGHEST]
        last, num_ids = first, np.int64(0)
        while last < end and lookups[last, TABLE] == number:
            num_ids += lookups[last, NUM_IDS]
            last += _ONE
        capacity = np.uint64(16)
        while capacity < _TWO * np.uint64(num_ids):
            capacity *= _TWO
        k = np.uint64(0)
        for lookup in range(first, last):
            of_lookup = lookups[lookup, NUM_IDS]
            k = _collect(
                _int64s_at(lookups[lookup, IDS_AT], of_lookup),
                salt,
                lookups[lookup, PADDING],
                lookups[lookup, IS_PADDED] != 0,
                shard_of_bucket,
                k,
                _int64s_at(lookups[lookup, POSITIONS_AT], of_lookup),
                capacity - _ONE,
                table,
                arrived,
                shard_of,
                cell_of,
            )
        next_of_shard[: shards + _ONE] = 0
        num_outside = np.int64(0)
        for u in range(k):
            table[np.uint64(cell_of[u])] = -1
            next_of_shard[np.uint64(shard_of[u]) + _ONE] += 1
            num_outside += (arrived[u] < lowest) | (arrived[u] > highest)
        for s in range(shards):
            num_per_shard[number, s] = next_of_shard[s + _ONE]
            next_of_shard[s + _ONE] += next_of_shard[s]
        for u in range(k):
            shard = np.uint64(shard_of[u])
            index = next_of_shard[shard]
            next_of_shard[shard] += 1
            cell_of[u] = index
            unique[first_id + np.uint64(index)] = arrived[u]
        num_distinct[number] = k
        if num_outside:
            return int(number)
        for lookup in range(first, last):
            _place(_int64s_at(lookups[lookup, POSITIONS_AT], lookups[lookup, NUM_IDS]), cell_of, k)
        first = last
        first_id += k
    return int(tables.shape[0])


@kernel(
    *(INT64, INT64, INT64, INT64, UINT64, INT64S, INT64S, INT64S, INT32S, INT32S, INT64S, INT32S, INT64S),
    result=BOOL,
)
def order_early_first(
    num_distinct: int,
    num_shards: int,
    lowest: int,
    highest: int,
    salt: np.uint64,
    unique: NDArray[np.int64],
    parts: NDArray[np.int64],
    arrived: NDArray[np.int64],
    shard_of: NDArray[np.int32],
    cell_of: NDArray[np.int32],
    next_of_part: NDArray[np.int64],
    table_before: NDArray[np.int32],
    arrived_before: NDArray[np.int64],
) -> bool:
    """Writes the distinct ids of a batch, shard 0 first; within a shard first those that are not in the batch before.

    In both parts of a shard they are in the order of first appearance.

    The hash table of the batch is left as it is, for the batch after it; that of the batch before is emptied.

    Args:
        num_distinct: Number of ids that `collect_distinct` found.
        num_shards: Number of shards, s.
        lowest: Smallest id that is allowed.
        highest: Largest id that is allowed.
        salt: Salt of the table.
        unique: Output, at least `(num_distinct,)`.
        parts: Output, `(5 * s,)`: for each shard the number of its ids; then the number of those that are not in the
            batch before, and the index in `unique` of the first of them; then the same of those that are.
        arrived: The distinct ids, as `collect_distinct` left them.
        shard_of: Shard of each.
        cell_of: Output: index of each in `unique`, for `place_ids`.
        next_of_part: Scratch, at least `(2 * s + 1,)`.
        table_before: Hash table of the batch before, as `collect_distinct` left it; empty (-1) afterwards.
        arrived_before: Distinct ids of that batch, as `collect_distinct` left them.

    Returns:
        True if all ids are allowed.
    """
    k, shards = np.uint64(num_distinct), np.uint64(num_shards)
    mask = np.uint64(table_before.shape[0]) - _ONE
    next_of_part[: _TWO * shards + _ONE] = 0
    num_outside = np.int64(0)
    for u in range(k):
        cell_of[u] = splitmix64(np.uint64(arrived[u]) ^ salt) & mask
    for u in range(k):
        if u + _AHEAD < k:
            prefetch_write(table_before, np.uint64(cell_of[u + _AHEAD]))
        id, cell = arrived[u], np.uint64(cell_of[u])
        while table_before[cell] >= 0 and arrived_before[np.uint64(table_before[cell])] != id:
            cell = (cell + _ONE) & mask
        part = _TWO * np.uint64(shard_of[u]) + np.uint64(table_before[cell] >= 0)
        cell_of[u] = part
        next_of_part[part + _ONE] += 1
        num_outside += (id < lowest) | (id > highest)
    for s in range(shards):
        early, late = _TWO * s, _TWO * s + _ONE
        parts[shards + s], parts[np.uint64(3) * shards + s] = next_of_part[late], next_of_part[late + _ONE]
        parts[s] = next_of_part[late] + next_of_part[late + _ONE]
        next_of_part[late] += next_of_part[early]
        next_of_part[late + _ONE] += next_of_part[late]
        parts[_TWO * shards + s], parts[np.uint64(4) * shards + s] = next_of_part[early], next_of_part[late]
    for u in range(k):
        part = np.uint64(cell_of[u])
        index = next_of_part[part]
        next_of_part[part] += 1
        cell_of[u] = index
        unique[np.uint64(index)] = arrived[u]
    table_before[:] = np.int32(-1)
    return bool(num_outside == 0)


@kernel(INT64S, INT32S, INT64)
def place_ids(positions: NDArray[np.int64], index_of: NDArray[np.int32], padding_index: int) -> None:
    """Replaces what `collect_distinct` wrote to `positions` by indices into the ordered ids.

    Args:
        positions: Changed in place.
        index_of: Index of each distinct id among the ordered ones, as `order_early_first` left it in `cell_of`.
        padding_index: Index of padding.
    """
    _place(positions, index_of, padding_index)


@inlined
def _enter(others: NDArray[np.int64], salt: np.uint64, table: NDArray[np.int32], cell_of: NDArray[np.int32]) -> None:
    """Writes the index of each of the distinct `others` to an empty hash table, and its cell to `cell_of`."""
    m = np.uint64(others.shape[0])
    mask = np.uint64(table.shape[0]) - _ONE
    for o in range(m):
        cell_of[o] = splitmix64(np.uint64(others[o]) ^ salt) & mask
    for o in range(m):
        if o + _AHEAD < m:
            prefetch_write(table, np.uint64(cell_of[o + _AHEAD]))
        cell = np.uint64(cell_of[o])
        while table[cell] >= 0:
            cell = (cell + _ONE) & mask
        table[cell] = o
        cell_of[o] = cell


@inlined
def _cell_of(id: int, others: NDArray[np.int64], salt: np.uint64, table: NDArray[np.int32]) -> np.uint64:
    """Cell of an id in a table of others: that of its index if it is among them, else an empty one."""
    mask = np.uint64(table.shape[0]) - _ONE
    cell = splitmix64(np.uint64(id) ^ salt) & mask
    while table[cell] >= 0 and others[np.uint64(table[cell])] != id:
        cell = (cell + _ONE) & mask
    return cell


@inlined
def _clear(num_cells: np.uint64, table: NDArray[np.int32], cell_of: NDArray[np.int32]) -> None:
    """Empties the cells of a hash table."""
    for o in range(num_cells):
        table[np.uint64(cell_of[o])] = -1


@kernel(INT64_IN, INT64_IN, UINT64, INT32S, INT32S, INT64S)
def find_among(
    ids: NDArray[np.int64],
    others: NDArray[np.int64],
    salt: np.uint64,
    table: NDArray[np.int32],
    cell_of: NDArray[np.int32],
    places: NDArray[np.int64],
) -> None:
    """Writes the index of each id among others: `others[places[i]] == ids[i]`, -1 for an id that is not there.

    Args:
        ids: `(n,)`.
        others: `(m,)`, distinct, m below 2^31.
        salt: The table's.
        table: A hash table, empty (-1) before and after; as `dedup_scratch` makes it for m ids.
        cell_of: At least `(m,)`.
        places: Output, `(n,)`.
    """
    n = np.uint64(ids.shape[0])
    _enter(others, salt, table, cell_of)
    for i in range(n):
        cell = _cell_of(ids[i], others, salt, table)
        places[i] = table[cell]
    _clear(np.uint64(others.shape[0]), table, cell_of)


@kernel(FLOAT32_IN, INT64_IN, INT64, FLOAT32S)
def segment_sum(grads: NDArray[np.float32], inverse: NDArray[np.int64], dim: int, out: NDArray[np.float32]) -> None:
    """Sums gradients of one row: `out[inverse[i]] += grads[i]` from zero, in the order of `grads`.

    Args:
        grads: `(n * dim,)`.
        inverse: `(n,)`, each in `[0, k)`.
        dim: Columns of a gradient.
        out: Output, `(k * dim,)`.
    """
    d, n = np.uint64(dim), np.uint64(inverse.shape[0])
    out[:] = np.float32(0)
    for i in range(n):
        to = np.uint64(inverse[i]) * d
        grad = i * d
        for j in range(d):
            out[to + j] += grads[grad + j]


@inlined
def are_finite(values: NDArray[np.float32]) -> bool:
    """Does what `all_finite` does, inside of a kernel."""
    # It compares bits: a maximum of integers is vectorised, a test of floats that stops early is not.
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for i in range(np.uint64(bits.shape[0])):
        largest = max(largest, bits[i] & _WITHOUT_SIGN)
    return bool(largest < _INFINITY)


@kernel(FLOAT32_IN, result=BOOL)
def all_finite(values: NDArray[np.float32]) -> bool:
    """Returns whether no value is NaN or infinite."""
    return are_finite(values)
