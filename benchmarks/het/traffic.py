"""Simulates the rows that travel in a job whose workers cache rows. Like `simulator`, it shares no code with the
cache.

Workers are in step: all read, one after the other, then all update. A row that is not cached travels as without a
cache, or enters with its states. A cached one is asked about, unless it is leased, and travels if it is further behind
than allowed. Updates are held until they are more than allowed, or until the row leaves; states travel when a row
became an eighth older since they last did. Policies are those of `simulator.run_aged_lfu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.het.simulator import CANDIDATES, COUNTERS_PER_ROW, MOST, ROUND, place
from benchmarks.het.trace import Trace
from fleet_sparse.core.jit import BOOL, FLOAT64, INT32_IN, INT64, INT64_IN, INT64S, inlined, kernel

_MOST_READS = 1 << 17  # of a batch
READ, PLAIN, ENTERED, ASKED, REFRESHED, REFRESHED_WITH_STATES, GRADIENT, CHANGED, CHANGED_WITH_STATES = range(9)


class Traffic(NamedTuple):
    """Numbers of rows that travelled, of all workers."""

    read: int
    """Distinct ids of all batches."""
    plain: int
    entered: int
    asked: int
    """Copies that were asked about."""
    refreshed: int
    """Without states; so is `changed`."""
    refreshed_with_states: int
    gradient: int
    changed: int
    changed_with_states: int

    def num_bytes(self, dim: int, num_states: int, *, num_workers: int) -> int:
        """Returns the bytes of ids, versions, rows and states (docs/protocol.md, Row caches), without heads."""
        row, with_states = 4 * dim, 4 * dim * (1 + num_states)
        asks = self.asked + self.entered
        sent = 8 * self.plain + 12 * asks + (8 + row) * self.gradient
        if num_workers == 1:
            sent += (8 + with_states) * (self.changed + self.changed_with_states)
        else:
            sent += (12 + row) * self.changed
            sent += ((16 + with_states) if num_states else (12 + row)) * self.changed_with_states
        received = row * self.plain + asks + (4 + row) * self.refreshed
        return sent + received + (4 + with_states) * (self.refreshed_with_states + self.entered)

    def saved(self, dim: int, num_states: int, *, num_workers: int) -> float:
        """Returns the share of the bytes that a job without caches sends and receives."""
        return 1 - self.num_bytes(dim, num_states, num_workers=num_workers) / (self.read * (16 + 8 * dim))

    @property
    def rows_saved(self) -> float:
        """The share of the rows and gradients that did not travel."""
        travelled = self.plain + self.entered + self.refreshed + self.refreshed_with_states
        return 1 - (travelled + self.gradient + self.changed + self.changed_with_states) / (2 * self.read)


def simulated(
    traces: Sequence[Trace],
    *,
    capacity: int,
    lag: int,
    share: float | None,
    has_leases: bool,
    first_counted: int,
) -> Traffic:
    """Runs a job.

    Args:
        traces: Of each worker, with as many steps.
        capacity: Copies of a worker.
        lag: As `max_row_lag`.
        share: As `max_row_lag_share`.
        has_leases: True where steps are counted.
        first_counted: Step from which on rows are counted.
    """
    steps = range(traces[0].num_steps)
    batches = [trace.batch(step) for step in steps for trace in traces]
    begins = np.concatenate([[0], np.cumsum([len(batch) for batch in batches])])
    numbers = np.zeros(len(Traffic._fields), np.int64)
    at_most = 0.0 if share is None else share
    run_job(
        *(np.concatenate(batches), begins, len(traces), traces[0].num_ids, capacity),
        *(lag, at_most, has_leases, first_counted, numbers),
    )
    return Traffic(*numbers.tolist())


@inlined
def _held_at_most(lag: Any, share: Any, clock: Any, num_workers: Any) -> Any:
    """Returns the lag of a row, and how many updates a worker may hold of it."""
    of_row = lag if share == 0.0 else min(lag, np.int64(share * clock))
    return of_row, max(np.int64(0), (of_row + num_workers) // (2 * (num_workers - 1)) - 1)


@kernel(INT32_IN, INT64_IN, INT64, INT64, INT64, INT64, FLOAT64, BOOL, INT64, INT64S)
def run_job(
    ids: NDArray[np.int32],
    begins: NDArray[np.int64],
    num_workers: int,
    num_ids: int,
    capacity: int,
    lag: int,
    share: float,
    has_leases: bool,
    first_counted: int,
    numbers: NDArray[np.int64],
) -> None:
    """Adds up `numbers`, the fields of `Traffic`; see the module. `share` 0 is none."""
    num_counters = 1
    while num_counters < COUNTERS_PER_ROW * capacity:
        num_counters *= 2
    mask, shape = num_counters - 1, (num_workers, capacity)
    sketch: Any = np.zeros((num_workers, num_counters), np.uint8)
    uses: Any = np.zeros(shape, np.uint8)
    slot_of = np.full((num_workers, num_ids), -1, np.int32)
    id_of, is_taken = np.full(shape, -1, np.int32), np.zeros(shape, np.uint8)
    known, states_known, until = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    held, states_held, clocks = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(num_ids, np.int64)
    num_rows, hand = np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64)
    next_use, next_counter = np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64)
    aged_uses, aged_counters = np.zeros(num_workers, np.float64), np.zeros(num_workers, np.float64)
    estimates: Any = np.zeros((num_workers, _MOST_READS), np.uint8)
    taken = np.full((num_workers, _MOST_READS), -1, np.int64)
    for step in range((begins.shape[0] - 1) // num_workers):
        one = 1 if step >= first_counted else 0
        for w in range(num_workers):
            begin, end = begins[step * num_workers + w], begins[step * num_workers + w + 1]
            aged_uses[w] += (end - begin) / ROUND
            aged_counters[w] += (end - begin) / ROUND * (num_counters / capacity)
            while aged_uses[w] >= 1:
                aged_uses[w] -= 1
                uses[w, next_use[w]] >>= 1
                next_use[w] = (next_use[w] + 1) % capacity
            while aged_counters[w] >= 1:
                aged_counters[w] -= 1
                sketch[w, next_counter[w]] >>= 1
                next_counter[w] = (next_counter[w] + 1) & mask
            numbers[READ] += one * (end - begin)
            for at in range(begin, end):
                id_ = ids[at]
                slot = slot_of[w, id_]
                taken[w, at - begin] = -1
                if slot >= 0:
                    uses[w, slot] = min(np.int64(uses[w, slot]) + 1, MOST)
                    if num_workers == 1 or (has_leases and step <= until[w, slot]):
                        continue
                    numbers[ASKED] += one
                    of_row, most = _held_at_most(lag, share, clocks[id_], num_workers)
                    behind, allowed = clocks[id_] - known[w, slot], of_row - (num_workers - 1) * most
                    if behind > allowed:
                        behind, known[w, slot] = 0, clocks[id_]
                        if 8 * (clocks[id_] - states_known[w, slot]) >= clocks[id_]:
                            numbers[REFRESHED_WITH_STATES] += one
                            states_known[w, slot] = clocks[id_]
                        else:
                            numbers[REFRESHED] += one
                    until[w, slot] = step + (allowed - behind) // (num_workers - 1)
                    continue
                first, second = place(id_, 0, mask), place(id_, 1, mask)
                estimate = min(min(np.int64(sketch[w, first]), np.int64(sketch[w, second])) + 1, MOST)
                sketch[w, first] = max(np.int64(sketch[w, first]), estimate)
                sketch[w, second] = max(np.int64(sketch[w, second]), estimate)
                victim = -1
                if num_rows[w] < capacity:
                    victim = num_rows[w]
                    num_rows[w] += 1
                else:
                    fewest: Any = MOST + 1
                    for _ in range(CANDIDATES):
                        candidate = hand[w]
                        if is_taken[w, candidate] == 0 and np.int64(uses[w, candidate]) < fewest:
                            fewest, victim = np.int64(uses[w, candidate]), candidate
                        hand[w] = (candidate + 1) % capacity
                        if fewest == 0:
                            break
                    if estimate <= fewest:
                        victim = -1
                estimates[w, at - begin], taken[w, at - begin] = estimate, victim
                if victim >= 0:
                    is_taken[w, victim] = 1
                numbers[ENTERED if victim >= 0 else PLAIN] += one
        for w in range(num_workers):
            begin, end = begins[step * num_workers + w], begins[step * num_workers + w + 1]
            for at in range(begin, end):
                id_, slot = ids[at], taken[w, at - begin]
                if slot >= 0:
                    left = id_of[w, slot]
                    if left >= 0:
                        slot_of[w, left] = -1
                        if held[w, slot] > 0 or states_held[w, slot] > 0:
                            numbers[CHANGED_WITH_STATES] += one
                            clocks[left] += held[w, slot]
                            held[w, slot] = states_held[w, slot] = 0
                    id_of[w, slot], slot_of[w, id_], uses[w, slot] = id_, slot, estimates[w, at - begin]
                    is_taken[w, slot] = 0
                    known[w, slot] = states_known[w, slot] = clocks[id_]
                    until[w, slot] = step
                slot = slot_of[w, id_]
                if slot < 0:
                    numbers[GRADIENT] += one
                    clocks[id_] += 1
                    continue
                held[w, slot] += 1
                states_held[w, slot] += 1
                if num_workers == 1:
                    continue
                of_copy = known[w, slot] + held[w, slot]
                _, most = _held_at_most(lag, share, of_copy, num_workers)
                if held[w, slot] <= most:
                    continue
                if held[w, slot] == 1 and states_held[w, slot] == 1:
                    numbers[GRADIENT] += one
                    states_held[w, slot] = 0
                elif 8 * states_held[w, slot] * num_workers >= of_copy:
                    numbers[CHANGED_WITH_STATES] += one
                    states_held[w, slot] = 0
                else:
                    numbers[CHANGED] += one
                clocks[id_] += held[w, slot]
                known[w, slot] += held[w, slot]
                states_known[w, slot] += held[w, slot]
                held[w, slot] = 0
