"""Simulates caches of rows on a trace. It shares no code with the cache of the workers, whose figures it judges.

A cache is read with the distinct ids of one batch after the other. A row that is not cached is a miss. Each function
writes how many ids of each batch missed and how many entered.

- `run_lru`: the row whose last read is oldest makes room.
- `run_lfu`: the row with the fewest reads since it entered makes room, the one read longest ago of several.
- `run_aged_lfu`: the cache as it was specified. Counters of 8 bits are halved once in 20 capacities of reads; the
  lowest of 8 rows after a hand makes room, if a sketch of misses, of at least 4 counters a row, says more of the new
  row. The workers' cache halves its counters once in 16 capacities: after 20 it forgets a hot set that has moved too
  late, as `fleet_sparse.core.cache_policies` says with figures. Its sketch has 8 counters a row, as pservers have for
  each id.
- `run_optimal`: Belady's. The row whose next read is farthest away makes room; a missed row that is read later than all
  others stays outside.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.jit import INT32_IN, INT64, INT64_IN, INT64S, inlined, kernel

_TYPES = (INT32_IN, INT64_IN, INT64, INT64, INT64S, INT64S)
_FREQUENCIES = 4096
CANDIDATES, ROUND, COUNTERS_PER_ROW, MOST = 8, 20, 4, 255
"""`run_aged_lfu` chooses among 8 rows which one makes room, halves its counters once in 20 capacities of reads, has 4
counters of misses a row, and counts to 255."""


@inlined
def _unlink(before: Any, after: Any, row: Any) -> None:
    b, a = before[row], after[row]
    after[b], before[a] = a, b


@inlined
def _link_first(before: Any, after: Any, head: Any, row: Any) -> None:
    first = after[head]
    after[head], before[row], after[row], before[first] = row, head, first, row


@kernel(*_TYPES)
def run_lru(
    ids: NDArray[np.int32],
    begins: NDArray[np.int64],
    num_ids: int,
    capacity: int,
    missed: NDArray[np.int64],
    entered: NDArray[np.int64],
) -> None:
    """Runs a cache in which every missed row enters; see the module."""
    before, after = np.empty(num_ids + 2, np.int32), np.empty(num_ids + 2, np.int32)
    is_in = np.zeros(num_ids, np.uint8)
    head, tail, num_rows = num_ids, num_ids + 1, 0
    after[head], before[tail] = tail, head
    for step in range(begins.shape[0] - 1):
        missed[step] = 0
        for at in range(begins[step], begins[step + 1]):
            id_ = ids[at]
            if is_in[id_]:
                _unlink(before, after, id_)
            else:
                missed[step] += 1
                is_in[id_] = 1
                if num_rows == capacity:
                    victim = before[tail]
                    _unlink(before, after, victim)
                    is_in[victim] = 0
                else:
                    num_rows += 1
            _link_first(before, after, head, id_)
        entered[step] = missed[step]


@kernel(*_TYPES)
def run_lfu(
    ids: NDArray[np.int32],
    begins: NDArray[np.int64],
    num_ids: int,
    capacity: int,
    missed: NDArray[np.int64],
    entered: NDArray[np.int64],
) -> None:
    """Runs a cache in which every missed row enters; see the module."""
    size = num_ids + 2 * _FREQUENCIES
    before, after = np.empty(size, np.int32), np.empty(size, np.int32)
    frequency = np.zeros(num_ids, np.int32)
    for f in range(_FREQUENCIES):  # a list of the rows of each frequency, from `num_ids + 2 f` to the next
        after[num_ids + 2 * f], before[num_ids + 2 * f + 1] = num_ids + 2 * f + 1, num_ids + 2 * f
    num_rows, lowest = 0, 1
    for step in range(begins.shape[0] - 1):
        missed[step] = 0
        for at in range(begins[step], begins[step + 1]):
            id_ = ids[at]
            if frequency[id_] > 0:
                _unlink(before, after, id_)
                frequency[id_] = min(frequency[id_] + 1, _FREQUENCIES - 1)
            else:
                missed[step] += 1
                if num_rows == capacity:
                    while after[num_ids + 2 * lowest] == num_ids + 2 * lowest + 1:
                        lowest += 1
                    victim = before[num_ids + 2 * lowest + 1]
                    _unlink(before, after, victim)
                    frequency[victim] = 0
                else:
                    num_rows += 1
                frequency[id_], lowest = 1, 1
            _link_first(before, after, num_ids + 2 * frequency[id_], id_)
        entered[step] = missed[step]


@inlined
def place(id_: Any, number: Any, mask: Any) -> Any:
    """The counter of an id, one of two."""
    mixed = (np.uint64(id_) + np.uint64(number)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((mixed ^ (mixed >> np.uint64(29))) & np.uint64(mask))


@kernel(*_TYPES)
def run_aged_lfu(
    ids: NDArray[np.int32],
    begins: NDArray[np.int64],
    num_ids: int,
    capacity: int,
    missed: NDArray[np.int64],
    entered: NDArray[np.int64],
) -> None:
    """Runs a cache in which a missed row enters if it is estimated to be used more than its victim; see the module."""
    num_counters = 1
    while num_counters < COUNTERS_PER_ROW * capacity:
        num_counters *= 2
    sketch, mask = np.zeros(num_counters, np.int64), num_counters - 1
    slot_of, id_of = np.full(num_ids, -1, np.int32), np.full(capacity, -1, np.int32)
    uses, num_rows, hand = np.zeros(capacity, np.int64), 0, 0
    next_use, next_counter, aged_uses, aged_counters = 0, 0, 0.0, 0.0
    for step in range(begins.shape[0] - 1):
        missed[step] = entered[step] = 0
        num_reads = begins[step + 1] - begins[step]
        aged_uses += num_reads / ROUND
        aged_counters += num_reads / ROUND * (num_counters / capacity)
        while aged_uses >= 1:
            aged_uses -= 1
            uses[next_use] >>= 1
            next_use = (next_use + 1) % capacity
        while aged_counters >= 1:
            aged_counters -= 1
            sketch[next_counter] >>= 1
            next_counter = (next_counter + 1) & mask
        for at in range(begins[step], begins[step + 1]):
            id_ = ids[at]
            if slot_of[id_] >= 0:
                uses[slot_of[id_]] = min(uses[slot_of[id_]] + 1, MOST)
                continue
            missed[step] += 1
            first, second = place(id_, 0, mask), place(id_, 1, mask)
            estimate = min(min(sketch[first], sketch[second]) + 1, MOST)
            sketch[first], sketch[second] = max(sketch[first], estimate), max(sketch[second], estimate)
            if num_rows < capacity:
                slot = num_rows
                num_rows += 1
            else:
                slot = hand
                for _ in range(CANDIDATES):
                    if uses[hand] < uses[slot]:
                        slot = hand
                    hand = (hand + 1) % capacity
                    if uses[slot] == 0:
                        break
                if estimate <= uses[slot]:
                    continue
                slot_of[id_of[slot]] = -1
            entered[step] += 1
            id_of[slot], slot_of[id_], uses[slot] = id_, slot, estimate


@kernel(*_TYPES)
def run_optimal(
    ids: NDArray[np.int32],
    begins: NDArray[np.int64],
    num_ids: int,
    capacity: int,
    missed: NDArray[np.int64],
    entered: NDArray[np.int64],
) -> None:
    """Runs the cache that knows all later reads; see the module."""
    num_steps = begins.shape[0] - 1
    next_read, next_of = np.empty(ids.shape[0], np.int32), np.full(num_ids, num_steps, np.int32)
    for back in range(num_steps):
        step = num_steps - 1 - back
        for at in range(begins[step], begins[step + 1]):
            next_read[at], next_of[ids[at]] = next_of[ids[at]], step
    size = num_ids + 2 * (num_steps + 1)  # a list of the rows that are read next in each step
    before, after = np.empty(size, np.int32), np.empty(size, np.int32)
    for step in range(num_steps + 1):
        after[num_ids + 2 * step], before[num_ids + 2 * step + 1] = num_ids + 2 * step + 1, num_ids + 2 * step
    is_in, num_rows, farthest = np.zeros(num_ids, np.uint8), 0, 0
    for step in range(num_steps):
        missed[step] = entered[step] = 0
        for at in range(begins[step], begins[step + 1]):
            id_, was_in = ids[at], is_in[ids[at]]
            if was_in:
                _unlink(before, after, id_)
                is_in[id_] = 0
                num_rows -= 1
            else:
                missed[step] += 1
            following = next_read[at]
            if following == num_steps:
                continue
            if num_rows == capacity:
                while after[num_ids + 2 * farthest] == num_ids + 2 * farthest + 1:
                    farthest -= 1
                if following >= farthest:
                    continue
                victim = after[num_ids + 2 * farthest]
                _unlink(before, after, victim)
                is_in[victim] = 0
                num_rows -= 1
            _link_first(before, after, num_ids + 2 * following, id_)
            is_in[id_] = 1
            num_rows += 1
            farthest = max(farthest, following)
            entered[step] += 1 - was_in
