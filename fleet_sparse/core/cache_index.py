"""CacheIndex: which rows a cache has, which of them are leased, and which make room."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .cache_policies import Admission, CachePolicy
from .kernels_cache import (
    MAX_SLOTS,
    STEP_BITS,
    age_cells,
    choose_slots,
    find_slots,
    halve_counters,
    ids_of_slots,
    replace_slots,
    set_leases,
    use_slots,
)
from .kernels_sketch import LINE_BYTES

MAX_LEASE_STEPS = 1 << (STEP_BITS - 2)
"""Largest number of steps of a lease."""

_LEAST_CELLS, _COUNTERS_PER_ROW, _TIMES_PER_CAPACITY = 16, 8, 16
_CELL_BYTES = 16
_SLOT_BYTES = 4  # besides its cells
INDEX_BYTES_PER_ROW = 3 * _CELL_BYTES + _SLOT_BYTES + _COUNTERS_PER_ROW
"""Bytes of a slot of a large index, at most: up to three cells, and counters of the sketch."""
_LINE_WORDS = LINE_BYTES // 8
_MAX_ROUND_STEPS = 1 << (STEP_BITS - 2)
"""A lease must not be seen 2^23 steps after its end: in so many steps all of them are renewed or ended."""


class Uses(NamedTuple):
    """What a cache has of the ids of a batch."""

    slots: NDArray[np.int64]
    """`(n,)`: the slot of each id, -1 for those without one."""
    unleased: NDArray[np.int64]
    """Indices of the ids whose copy has no lease, ascending."""
    missing: NDArray[np.int64]
    """Indices of the ids without a slot, ascending."""


class Entries(NamedTuple):
    """Ids that take slots."""

    indices: NDArray[np.int64]
    """`(n,)`: their indices among the missing ids, ascending."""
    slots: NDArray[np.int64]
    """`(n,)`: the slot of each, which another id may have until `replace`."""
    counters: NDArray[np.int64]
    """`(n,)`: counters to begin with."""


class CacheIndex:
    """The index of a row cache of a fixed number of slots. One thread at a time uses it.

    Args:
        capacity: Number of slots.
        salt: The table's.
        policy: Which row makes room.
        admission: Which row enters.

    Attributes:
        capacity: As given.
        num_used: Number of slots in use; these are the first ones.

    Raises:
        ValueError: The capacity is not in 1 to 2^28 - 1.
    """

    def __init__(self, capacity: int, salt: int, policy: CachePolicy, admission: Admission) -> None:
        if not 1 <= capacity <= MAX_SLOTS:
            raise ValueError(f"capacity is {capacity} rows, should be 1 to {MAX_SLOTS}")
        self.capacity, self.num_used = capacity, 0
        self._policy, self._admission, self._salt = policy, admission, np.uint64(salt)
        num_cells = max(_LEAST_CELLS, 1 << (3 * capacity // 2).bit_length())
        self._cells = _aligned(2 * num_cells)
        self._cell_of = np.zeros(capacity, np.uint32)
        num_lines = -(-_COUNTERS_PER_ROW * capacity // LINE_BYTES)
        self._sketch = _aligned(num_lines * _LINE_WORDS).view(np.uint8)
        self._hands = np.zeros((3, 1), np.int64)
        self._num_found = np.zeros(2, np.int64)
        self._num_reads = self._num_aged = self._batch = 0
        self._aged_step: int | None = None  # of the last call of `age`
        self._time = 0  # of the batch, in sixteenths of a capacity of reads
        self._round_reads = policy.round_capacities * capacity

    @property
    def num_bytes(self) -> int:
        """Memory of index and sketch."""
        return self._cells.nbytes + self._cell_of.nbytes + self._sketch.nbytes

    @property
    def keeps_most_outside(self) -> bool:
        """True if most of the missing ids of a batch do not enter: there is no room, and they have to earn it."""
        return self._admission.beats_victim and self.num_used == self.capacity

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the slot of each id, -1 for those without one; both are `(n,)`. Notes no use."""
        slots = np.empty(len(ids), np.int64)
        find_slots(self._cells, self._salt, ids, slots)
        return slots

    def use(self, ids: NDArray[np.int64], step: int) -> Uses:
        """Begins a batch: finds its ids and notes their use. Until the next batch their slots make no room.

        Args:
            ids: `(n,)`, distinct.
            step: Step of the batch.
        """
        n = len(ids)
        if self._aged_step is not None and step - self._aged_step > _MAX_ROUND_STEPS:  # leases may seem to lie ahead
            self.lease(np.arange(self.num_used), np.full(self.num_used, step - 1, np.int64))
            self._aged_step = step
        self._batch += 1
        self._time = self._num_reads * _TIMES_PER_CAPACITY // self.capacity
        slots, unleased, missing = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
        use_slots(
            *(self._cells, self._salt, ids, step, self._batch, self._policy.counts_uses, self._time),
            *(slots, unleased, missing, self._num_found),
        )
        self._num_reads += n
        num_unleased, num_missing = self._num_found.tolist()
        return Uses(slots, unleased[:num_unleased], missing[:num_missing])

    def choose(self, ids: NDArray[np.int64]) -> Entries:
        """Counts the missing ids of the batch, `(n,)`, as missed, and chooses those that enter. Changes no slot."""
        n, policy, admission = len(ids), self._policy, self._admission
        entering, slots, counters = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
        num_entering = choose_slots(
            *(self._cells, self._salt, self._sketch, self._hands[0], ids, self._batch, policy.counts_uses),
            *(self._time, admission.least_misses, admission.beats_victim, self.num_used, self.capacity),
            *(entering, slots, counters),
        )
        counters = counters[:num_entering]
        if not policy.counts_uses:
            counters.fill(self._time & 255)
        elif not policy.is_halved:
            counters.fill(1)
        return Entries(entering[:num_entering], slots[:num_entering], counters)

    def ids_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the id of each slot; both are `(n,)`. The slots are in use."""
        ids = np.empty(len(slots), np.int64)
        ids_of_slots(self._cells, self._cell_of, slots, ids)
        return ids

    def replace(self, ids: NDArray[np.int64], entries: Entries, step: int) -> None:
        """Gives the chosen slots to ids, in place of those that have them.

        Args:
            ids: `(n,)`, one for each entry.
            entries: What `choose` returned in this batch; entries may be left out whose slot is in use.
            step: End of their leases.
        """
        self.num_used = replace_slots(
            *(self._cells, self._salt, self._cell_of, self.num_used, ids, entries.slots, entries.counters),
            *(step, self._batch),
        )

    def lease(self, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> None:
        """Leases slots until the given steps, both `(n,)`: at most `MAX_LEASE_STEPS` after the present one."""
        set_leases(self._cells, self._cell_of, slots, steps)

    def age(self, num_reads: int, step: int) -> NDArray[np.int64]:
        """Ages rows and misses by a number of reads.

        Args:
            num_reads: Number of ids that were read since the last call.
            step: Present step.

        Returns:
            Slots that were not used for a round, of those that were aged.
        """
        before, self._num_aged = self._num_aged, self._num_aged + num_reads
        round_reads, num_cells, num_counters = self._round_reads, len(self._cells) // 2, len(self._sketch)
        num_due = self._num_aged * num_cells // round_reads - before * num_cells // round_reads
        num_steps = 1 if self._aged_step is None else max(step - self._aged_step, 1)
        self._aged_step = step
        num_due = min(max(num_due, -(-num_cells * num_steps // _MAX_ROUND_STEPS)), num_cells)
        idle = np.empty(num_due, np.int64)
        num_idle = age_cells(
            *(self._cells, self._hands[1], num_due, step, self._policy.counts_uses, self._policy.is_halved),
            *(self._time, idle),
        )
        num_due = self._num_aged * num_counters // round_reads - before * num_counters // round_reads
        halve_counters(self._sketch, self._hands[2], min(num_due, num_counters))
        return idle[:num_idle]

    def clear(self) -> None:
        """Empties all slots; misses are still known."""
        self._cells.fill(0)
        self.num_used = 0


def _aligned(num_words: int) -> NDArray[np.uint64]:
    """Returns zeros that begin at a cache line."""
    words = np.zeros(num_words + _LINE_WORDS, np.uint64)
    begin = -words.ctypes.data // 8 % _LINE_WORDS
    return words[begin : begin + num_words]
