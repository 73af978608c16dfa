"""Kernels of the index of a row cache: id -> slot, by open addressing, with all that a hit reads in one cell.

A cell is two u64: the id and a word. The word has, from its lowest bit, slot + 1 in 28 bits, the number of the batch
that used the row last modulo 16, a counter of 8 bits (`cache_policies`), and the step until which the row is leased
modulo 2^24. A cell whose word is 0 is empty. There is a power of two of cells, and always an empty one. `cell_of` has
the cell of each slot.

Steps are compared as if less than 2^23 apart: `age_cells` renews the steps of old leases in time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intrinsics import prefetch_read, prefetch_write
from .jit import BOOL, INT64, INT64_IN, INT64S, UINT8S, UINT32S, UINT64, UINT64S, inlined, kernel
from .kernels_hash import splitmix64
from .kernels_sketch import LINE_BYTES, count_one

MAX_SLOTS = (1 << 28) - 1
STEP_BITS = 24

_ZERO, _ONE, _TWO, _AHEAD = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(16)
_SLOT_MASK, _BATCH_SHIFT, _BATCH_MASK = np.uint64(MAX_SLOTS), np.uint64(28), np.uint64(15)
_COUNTER_SHIFT, _COUNTER_MASK, _COUNTER_ONE = np.uint64(32), np.uint64(255), np.uint64(1 << 32)
_STEP_SHIFT, _STEP_MASK, _HALF_STEPS = np.uint64(40), np.uint64((1 << STEP_BITS) - 1), np.uint64(1 << (STEP_BITS - 1))
_NO_BATCH, _NO_COUNTER = ~np.uint64(15 << 28), ~np.uint64(255 << 32)
_NO_STEP = np.uint64((1 << 40) - 1)
_MAX_SCANNED, _NO_PRIORITY = 64, np.uint64(256)
_MOST_CANDIDATES = 8  # rows of which one makes room
_OLD, _LOWER, _HALF_SHIFT = np.uint64(128), np.uint64(0xFFFF_FFFF), np.uint64(32)


@inlined
def _search(cells: NDArray[np.uint64], mask: np.uint64, home: np.uint64, id_: np.uint64) -> np.uint64:
    """The cell that holds the id, or the empty one where it would be."""
    cell = home
    while cells[_TWO * cell + _ONE] != _ZERO and cells[_TWO * cell] != id_:
        cell = (cell + _ONE) & mask
    return cell


@inlined
def _mask_of(cells: NDArray[np.uint64]) -> np.uint64:
    return (np.uint64(cells.shape[0]) >> _ONE) - _ONE


@kernel(UINT64S, UINT64, INT64_IN, INT64S)
def find_slots(cells: NDArray[np.uint64], salt: np.uint64, ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
    """Writes the slot of each id, -1 for those without one, `(n,)`."""
    mask, n = _mask_of(cells), np.uint64(ids.shape[0])
    for i in range(n):
        slots[i] = np.int64(splitmix64(np.uint64(ids[i]) ^ salt) & mask)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(cells, _TWO * np.uint64(slots[i + _AHEAD]))
        cell = _search(cells, mask, np.uint64(slots[i]), np.uint64(ids[i]))
        slots[i] = np.int64(cells[_TWO * cell + _ONE] & _SLOT_MASK) - 1


@kernel(UINT64S, UINT64, INT64_IN, INT64, INT64, BOOL, INT64, INT64S, INT64S, INT64S, INT64S)
def use_slots(
    cells: NDArray[np.uint64],
    salt: np.uint64,
    ids: NDArray[np.int64],
    step: int,
    batch: int,
    counts_uses: bool,
    time: int,
    slots: NDArray[np.int64],
    unleased: NDArray[np.int64],
    missing: NDArray[np.int64],
    num_found: NDArray[np.int64],
) -> None:
    """Writes the slot of each id and notes its use.

    Args:
        cells: The index.
        salt: The table's.
        ids: `(n,)`, distinct.
        step: Step of this use; one at the end of a lease is leased.
        batch: Number of this batch.
        counts_uses: As in `CachePolicy`.
        time: Time of this use, for a policy that counts none.
        slots: Output, `(n,)`: slots, -1 for ids without one.
        unleased: Output, `(n,)`: indices of ids whose lease is over, ascending.
        missing: Output, `(n,)`: indices of ids without a slot, ascending.
        num_found: Output, `(2,)`: the lengths of `unleased` and `missing`.
    """
    mask, n, now = _mask_of(cells), np.uint64(ids.shape[0]), np.uint64(step) & _STEP_MASK
    of_batch = (np.uint64(batch) & _BATCH_MASK) << _BATCH_SHIFT
    stamp = (np.uint64(time) & _COUNTER_MASK) << _COUNTER_SHIFT
    num_unleased, num_missing = np.uint64(0), np.uint64(0)
    for i in range(n):
        slots[i] = np.int64(splitmix64(np.uint64(ids[i]) ^ salt) & mask)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(cells, _TWO * np.uint64(slots[i + _AHEAD]))
        cell, id_ = np.uint64(slots[i]), np.uint64(ids[i])
        word = cells[_TWO * cell + _ONE]
        while word != _ZERO and cells[_TWO * cell] != id_:
            cell = (cell + _ONE) & mask
            word = cells[_TWO * cell + _ONE]
        slots[i] = np.int64(word & _SLOT_MASK) - 1
        if word == _ZERO:
            missing[num_missing] = np.int64(i)
            num_missing += _ONE
            continue
        is_over = (((word >> _STEP_SHIFT) - now) & _STEP_MASK) >= _HALF_STEPS
        unleased[num_unleased] = np.int64(i)
        num_unleased += _ONE if is_over else _ZERO
        if counts_uses:  # without a branch: hot rows, whose counters are full, are mixed with others
            word += _COUNTER_ONE if ((word >> _COUNTER_SHIFT) & _COUNTER_MASK) < _COUNTER_MASK else _ZERO
        else:
            word = (word & _NO_COUNTER) | stamp
        cells[_TWO * cell + _ONE] = (word & _NO_BATCH) | of_batch
    num_found[0], num_found[1] = num_unleased, num_missing


@kernel(
    *(UINT64S, UINT64, UINT8S, INT64S, INT64_IN, INT64, BOOL, INT64, INT64, BOOL, INT64, INT64),
    *(INT64S, INT64S, INT64S),
    result=INT64,
)
def choose_slots(
    cells: NDArray[np.uint64],
    salt: np.uint64,
    sketch: NDArray[np.uint8],
    hand: NDArray[np.int64],
    ids: NDArray[np.int64],
    batch: int,
    counts_uses: bool,
    time: int,
    least_misses: int,
    beats_victim: bool,
    num_used: int,
    capacity: int,
    entering: NDArray[np.int64],
    slots: NDArray[np.int64],
    estimates: NDArray[np.int64],
) -> int:
    """Counts misses and chooses which ids enter, and where. The index stays as it is until `replace_slots`.

    A slot that this batch used, or that was chosen for it, makes no room.

    Args:
        cells: The index.
        salt: The table's.
        sketch: Counters of misses, in lines of 64 bytes.
        hand: `(1,)`, cell from which on rows make room; changed.
        ids: `(n,)`, distinct, without a slot.
        batch: Number of this batch.
        counts_uses: As in `CachePolicy`.
        time: Time of this use.
        least_misses: As in `Admission`.
        beats_victim: As in `Admission`.
        num_used: Number of slots in use, the first ones.
        capacity: Number of slots.
        entering: Output, at least `(n,)`: indices of the ids that enter, ascending.
        slots: Output, at least `(n,)`: the slot of each of them.
        estimates: Output, at least `(n,)`: number of misses of each of them.

    Returns:
        The number of ids that enter.
    """
    mask, n = _mask_of(cells), np.uint64(ids.shape[0])
    num_lines, line_bytes = np.uint64(sketch.shape[0]) // np.uint64(LINE_BYTES), np.uint64(LINE_BYTES)
    this_batch, now = np.uint64(batch) & _BATCH_MASK, np.uint64(time)
    place, num_entering, num_free = np.uint64(hand[0]), np.uint64(0), capacity - num_used
    for i in range(n):
        estimates[i] = np.int64(splitmix64(np.uint64(ids[i]) ^ salt))
    for i in range(n):
        if i + _AHEAD < n:
            ahead = ((np.uint64(estimates[i + _AHEAD]) & _LOWER) * num_lines) >> _HALF_SHIFT
            prefetch_write(sketch, ahead * line_bytes)
        h = np.uint64(estimates[i])
        line = ((h & _LOWER) * num_lines) >> _HALF_SHIFT
        estimate = np.int64(count_one(sketch, line * line_bytes, h))
        if estimate < least_misses:
            continue
        if num_free > 0:
            slots[num_entering] = capacity - num_free
            num_free -= 1
        else:
            victim, lowest, num_candidates = _ZERO, _NO_PRIORITY, 0
            for _ in range(_MAX_SCANNED):
                word = cells[_TWO * place + _ONE]
                if word != _ZERO and ((word >> _BATCH_SHIFT) & _BATCH_MASK) != this_batch:
                    counter = (word >> _COUNTER_SHIFT) & _COUNTER_MASK
                    priority = counter if counts_uses else _COUNTER_MASK - ((now - counter) & _COUNTER_MASK)
                    if priority < lowest:
                        victim, lowest = place, priority
                    num_candidates += 1
                place = (place + _ONE) & mask
                if num_candidates == _MOST_CANDIDATES or lowest == _ZERO:
                    break
            if lowest == _NO_PRIORITY or (beats_victim and estimate <= np.int64(lowest)):
                continue
            word = cells[_TWO * victim + _ONE]
            slots[num_entering] = np.int64(word & _SLOT_MASK) - 1
            cells[_TWO * victim + _ONE] = (word & _NO_BATCH) | (this_batch << _BATCH_SHIFT)
        entering[num_entering], estimates[num_entering] = np.int64(i), estimate
        num_entering += _ONE
    hand[0] = place
    return int(num_entering)


@inlined
def _empty(
    cells: NDArray[np.uint64], mask: np.uint64, salt: np.uint64, cell_of: NDArray[np.uint32], cell: np.uint64
) -> None:
    """Empties a cell, and moves those after it that are not where their search would find them any more."""
    hole = cell
    after = (hole + _ONE) & mask
    while cells[_TWO * after + _ONE] != _ZERO:
        home = splitmix64(cells[_TWO * after] ^ salt) & mask
        if ((after - home) & mask) >= ((after - hole) & mask):
            word = cells[_TWO * after + _ONE]
            cells[_TWO * hole], cells[_TWO * hole + _ONE] = cells[_TWO * after], word
            cell_of[(word & _SLOT_MASK) - _ONE] = np.uint32(hole)
            hole = after
        after = (after + _ONE) & mask
    cells[_TWO * hole + _ONE] = _ZERO


@kernel(UINT64S, UINT64, UINT32S, INT64, INT64_IN, INT64_IN, INT64_IN, INT64, INT64, result=INT64)
def replace_slots(
    cells: NDArray[np.uint64],
    salt: np.uint64,
    cell_of: NDArray[np.uint32],
    num_used: int,
    ids: NDArray[np.int64],
    slots: NDArray[np.int64],
    counters: NDArray[np.int64],
    step: int,
    batch: int,
) -> int:
    """Gives slots to ids, in place of the ids that have them.

    Args:
        cells: The index.
        salt: The table's.
        cell_of: `(num_slots,)`.
        num_used: Number of slots in use before, the first ones.
        ids: `(n,)`, without a slot.
        slots: `(n,)`, distinct.
        counters: `(n,)`, 0 to 255.
        step: End of their leases.
        batch: Number of their batch.

    Returns:
        Number of slots in use afterwards; the new ones follow the used ones without a gap.
    """
    mask = _mask_of(cells)
    of_all = ((np.uint64(step) & _STEP_MASK) << _STEP_SHIFT) | ((np.uint64(batch) & _BATCH_MASK) << _BATCH_SHIFT)
    n, num_used_after = np.uint64(ids.shape[0]), num_used
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(cells, _TWO * (splitmix64(np.uint64(ids[i + _AHEAD]) ^ salt) & mask))
        slot, id_ = np.uint64(slots[i]), np.uint64(ids[i])
        if slots[i] < num_used:
            _empty(cells, mask, salt, cell_of, np.uint64(cell_of[slot]))
        cell = _search(cells, mask, splitmix64(id_ ^ salt) & mask, id_)
        cells[_TWO * cell] = id_
        cells[_TWO * cell + _ONE] = of_all | (np.uint64(counters[i]) << _COUNTER_SHIFT) | (slot + _ONE)
        cell_of[slot] = np.uint32(cell)
        num_used_after = max(num_used_after, slots[i] + 1)
    return num_used_after


@kernel(UINT64S, UINT32S, INT64_IN, INT64_IN)
def set_leases(
    cells: NDArray[np.uint64], cell_of: NDArray[np.uint32], slots: NDArray[np.int64], steps: NDArray[np.int64]
) -> None:
    """Sets the step until which each slot is leased; both are `(n,)`. Slots of -1 are passed over."""
    n = np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            prefetch_write(cells, _TWO * np.uint64(cell_of[np.uint64(slots[i + _AHEAD])]))
        if slots[i] < 0:
            continue
        at = _TWO * np.uint64(cell_of[np.uint64(slots[i])]) + _ONE
        cells[at] = (cells[at] & _NO_STEP) | ((np.uint64(steps[i]) & _STEP_MASK) << _STEP_SHIFT)


@kernel(UINT64S, UINT32S, INT64_IN, INT64S)
def ids_of_slots(
    cells: NDArray[np.uint64], cell_of: NDArray[np.uint32], slots: NDArray[np.int64], ids: NDArray[np.int64]
) -> None:
    """Writes the id of each slot in use, `(n,)`."""
    n = np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_read(cells, _TWO * np.uint64(cell_of[np.uint64(slots[i + _AHEAD])]))
        ids[i] = np.int64(cells[_TWO * np.uint64(cell_of[np.uint64(slots[i])])])


@kernel(UINT64S, INT64S, INT64, INT64, BOOL, BOOL, INT64, INT64S, result=INT64)
def age_cells(
    cells: NDArray[np.uint64],
    hand: NDArray[np.int64],
    num_cells: int,
    step: int,
    counts_uses: bool,
    is_halved: bool,
    time: int,
    idle: NDArray[np.int64],
) -> int:
    """Ages the rows of the next cells.

    Args:
        cells: The index.
        hand: `(1,)`, the next cell to age; changed.
        num_cells: Number of cells to age, at most all.
        step: Present step. A lease that is over ends at the step before it, so that it does not seem to begin again.
        counts_uses: As in `CachePolicy`.
        is_halved: As in `CachePolicy`.
        time: Present time.
        idle: Output, at least `(num_cells,)`: slots that were not used for about a round; every slot if the policy
            does not say.

    Returns:
        The number of idle slots.
    """
    mask, now, present = _mask_of(cells), np.uint64(step) & _STEP_MASK, np.uint64(time)
    num_idle, cell = np.uint64(0), np.uint64(hand[0])
    over = ((now - _ONE) & _STEP_MASK) << _STEP_SHIFT
    for _ in range(num_cells):
        word = cells[_TWO * cell + _ONE]
        if word != _ZERO:
            counter = (word >> _COUNTER_SHIFT) & _COUNTER_MASK
            age = (present - counter) & _COUNTER_MASK
            is_idle = True
            if not counts_uses:
                is_idle = age >= _OLD
                counter = (present - _OLD) & _COUNTER_MASK if is_idle else counter
            elif is_halved:
                is_idle = counter == _ZERO
                counter >>= _ONE
            idle[num_idle] = np.int64(word & _SLOT_MASK) - 1
            num_idle += _ONE if is_idle else _ZERO
            if (((word >> _STEP_SHIFT) - now) & _STEP_MASK) >= _HALF_STEPS:
                word = (word & _NO_STEP) | over
            cells[_TWO * cell + _ONE] = (word & _NO_COUNTER) | (counter << _COUNTER_SHIFT)
        cell = (cell + _ONE) & mask
    hand[0] = cell
    return int(num_idle)


@kernel(UINT8S, INT64S, INT64)
def halve_counters(counters: NDArray[np.uint8], hand: NDArray[np.int64], num_counters: int) -> None:
    """Halves the next counters of a sketch, from `hand` `(1,)` on, which is changed; at most all."""
    size, at = np.uint64(counters.shape[0]), np.uint64(hand[0])
    for _ in range(num_counters):
        counters[at] >>= np.uint8(1)
        at += _ONE
        if at == size:
            at = _ZERO
    hand[0] = at
