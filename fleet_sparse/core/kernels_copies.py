"""Kernels of copies of rows, and of their bases: the values that they had when they were last equal to what the
pservers have. Copy `slot` of an array is `values[slot * width : (slot + 1) * width]`.

Of each copy there are four counts, in one array so that a use of them touches one cache line: the clock that is known
of its row and of its states, `NO_VERSION` for none, and how many updates are held of both. Count `k` of a copy is
`counts[NUM_COUNTS * slot + k]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intrinsics import copy, prefetch_read, prefetch_write
from .jit import (
    BOOL,
    FLOAT32_IN,
    FLOAT32S,
    FLOAT64,
    FLOAT64_IN,
    INT64,
    INT64_IN,
    INT64S,
    UINT8_IN,
    UINT32_IN,
    UINT32S,
    inlined,
    kernel,
)
from .kernels_changes import power
from .kernels_row_bound import are_states_old, lease_steps, max_held, units
from .row_bound import NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW

NUM_COUNTS, KNOWN, STATES_KNOWN, HELD, STATES_HELD = 4, 0, 1, 2, 3
_COUNTS, _KNOWN, _STATES_KNOWN = np.uint64(NUM_COUNTS), np.uint64(KNOWN), np.uint64(STATES_KNOWN)
_HELD, _STATES_HELD = np.uint64(HELD), np.uint64(STATES_HELD)
_NO_VERSION, _ROW_FOLLOWS, _STATES_FOLLOW = int(NO_VERSION), ROW_FOLLOWS, STATES_FOLLOW
_AHEAD, _LINE, _ZERO, _ONE = np.uint64(8), np.uint64(16), np.uint64(0), np.uint64(1)


@kernel(FLOAT32S, INT64_IN, INT64, FLOAT32S)
def gather_copies(copies: NDArray[np.float32], slots: NDArray[np.int64], width: int, out: NDArray[np.float32]) -> None:
    """Writes the copy of each slot to its place in `out`, `(n * width,)`; leaves it as it is where the slot is -1."""
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            for j in range(_ZERO, w, _LINE):
                prefetch_read(copies, np.uint64(slots[i + _AHEAD]) * w + j)
        if slots[i] >= 0:
            copy(out, i * w, copies, np.uint64(slots[i]) * w, w)


@kernel(FLOAT32S, INT64_IN, FLOAT32_IN, INT64)
def scatter_copies(
    copies: NDArray[np.float32], slots: NDArray[np.int64], fresh: NDArray[np.float32], width: int
) -> None:
    """Writes fresh values `(n * width,)` over the copies in these slots; those whose slot is -1 are passed over."""
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            for j in range(_ZERO, w, _LINE):
                prefetch_write(copies, np.uint64(slots[i + _AHEAD]) * w + j)
        if slots[i] >= 0:
            copy(copies, np.uint64(slots[i]) * w, fresh, i * w, w)


@kernel(FLOAT32S, FLOAT32S, INT64_IN, FLOAT32_IN, INT64)
def refresh_copies(
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    slots: NDArray[np.int64],
    fresh: NDArray[np.float32],
    width: int,
) -> None:
    """Makes fresh values `(n * width,)` the bases, and adds to the copies what they differed from the bases before.

    Fresh values whose slot is -1 are passed over.
    """
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            for j in range(_ZERO, w, _LINE):
                prefetch_write(copies, np.uint64(slots[i + _AHEAD]) * w + j)
                prefetch_write(bases, np.uint64(slots[i + _AHEAD]) * w + j)
        if slots[i] < 0:
            continue
        at = np.uint64(slots[i]) * w
        for j in range(w):
            value = fresh[i * w + j]
            copies[at + j] = value + (copies[at + j] - bases[at + j])
            bases[at + j] = value


@kernel(FLOAT32S, FLOAT32S, INT64_IN, FLOAT32_IN, UINT32S, INT64, FLOAT64_IN, FLOAT64_IN)
def refresh_states(
    states: NDArray[np.float32],
    base_states: NDArray[np.float32],
    slots: NDArray[np.int64],
    fresh: NDArray[np.float32],
    counts: NDArray[np.uint32],
    dim: int,
    decays: NDArray[np.float64],
    least: NDArray[np.float64],
) -> None:
    """Makes fresh states the bases, and merges into them what the copies' updates since their bases made.

    Args:
        states: `(num_slots * num_states * dim,)`.
        base_states: The same.
        slots: `(n,)`; states whose slot is -1 are passed over.
        fresh: `(n * num_states * dim,)`.
        counts: Of the copies.
        dim: Floats of a row.
        decays: `(num_states,)`, as in `kernels_changes`.
        least: `(num_states,)`, as of `subtract_base_states`.
    """
    d, num_states = np.uint64(dim), np.uint64(decays.shape[0])
    width = d * num_states
    for i in range(np.uint64(slots.shape[0])):
        if slots[i] < 0:
            continue
        at = np.uint64(slots[i]) * width
        num_updates = np.uint64(counts[_COUNTS * np.uint64(slots[i]) + _STATES_HELD])
        for k in range(num_states):
            decay = power(decays[k], num_updates)
            for j in range(k * d, (k + _ONE) * d):
                value = fresh[i * width + j]
                own = max(np.float64(states[at + j]) - decay * np.float64(base_states[at + j]), least[k])
                states[at + j] = np.float32(decay * np.float64(value) + own) if num_updates > _ZERO else value
                base_states[at + j] = value


@kernel(FLOAT32S, FLOAT32S, INT64_IN, INT64, FLOAT32S)
def subtract_bases(
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    slots: NDArray[np.int64],
    width: int,
    out: NDArray[np.float32],
) -> None:
    """Writes by what copies differ from their bases, `(n * width,)`."""
    w = np.uint64(width)
    for i in range(np.uint64(slots.shape[0])):
        at = np.uint64(slots[i]) * w
        for j in range(w):
            out[i * w + j] = copies[at + j] - bases[at + j]


@kernel(FLOAT32S, FLOAT32S, INT64_IN, INT64)
def settle_bases(copies: NDArray[np.float32], bases: NDArray[np.float32], slots: NDArray[np.int64], width: int) -> None:
    """Makes copies their own bases; slots of -1 are passed over."""
    w = np.uint64(width)
    for i in range(np.uint64(slots.shape[0])):
        if slots[i] >= 0:
            copy(bases, np.uint64(slots[i]) * w, copies, np.uint64(slots[i]) * w, w)


@inlined
def _displacement(
    copies: NDArray[np.float32], bases: NDArray[np.float32], begin: np.uint64, width: np.uint64
) -> np.float32:
    """Returns the largest difference of a value from its base."""
    most = np.float32(0)
    for j in range(begin, begin + width):
        most = max(most, abs(copies[j] - bases[j]))
    return most


@kernel(FLOAT32S, FLOAT32S, INT64_IN, INT64, FLOAT32S)
def measure_displacements(
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    slots: NDArray[np.int64],
    width: int,
    out: NDArray[np.float32],
) -> None:
    """Writes the largest difference of a value of each copy from its base, `(n,)`."""
    w = np.uint64(width)
    for i in range(np.uint64(slots.shape[0])):
        out[i] = _displacement(copies, bases, np.uint64(slots[i]) * w, w)


@kernel(INT64_IN, INT64_IN, INT64_IN, INT64_IN, UINT32S, BOOL, INT64S, UINT32S, INT64S)
def plan_reads(
    slots: NDArray[np.int64],
    unleased: NDArray[np.int64],
    missing: NDArray[np.int64],
    chosen: NDArray[np.int64],
    counts: NDArray[np.uint32],
    has_states: bool,
    asked: NDArray[np.int64],
    versions: NDArray[np.uint32],
    plain: NDArray[np.int64],
) -> None:
    """Divides what is not read from a copy alone: into the ids that are asked about and those that are pulled.

    Args:
        slots: `(n,)`, of the ids.
        unleased: Places of the ids whose copy has no lease, ascending.
        missing: Places of the ids without a copy, ascending.
        chosen: Indices of `missing` of those that enter, ascending.
        counts: Of the copies.
        has_states: True if the rule has states.
        asked: Output, as long as `unleased` and `chosen` together: their places, ascending.
        versions: Output, of the same length: the versions of the copies; `NO_VERSION` of ids that enter, and where the
            states are old.
        plain: Output, at least as long as `missing`: places of those that do not enter, ascending.
    """
    num_asked, num_plain, u, c = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    num_unleased, num_chosen = np.uint64(unleased.shape[0]), np.uint64(chosen.shape[0])
    for m in range(np.uint64(missing.shape[0]) + _ONE):
        is_end = m == np.uint64(missing.shape[0])
        end = slots.shape[0] if is_end else missing[m]
        while u < num_unleased and unleased[u] < end:
            if u + _AHEAD < num_unleased:
                prefetch_read(counts, _COUNTS * np.uint64(slots[np.uint64(unleased[u + _AHEAD])]))
            at = _COUNTS * np.uint64(slots[np.uint64(unleased[u])])
            version = counts[at + _KNOWN]
            age = np.uint32(version - counts[at + _STATES_KNOWN])
            is_old = has_states and age > 0 and are_states_old(int(version), int(age))
            asked[num_asked], versions[num_asked] = unleased[u], np.uint32(_NO_VERSION) if is_old else version
            num_asked += _ONE
            u += _ONE
        if is_end:
            break
        if c < num_chosen and np.uint64(chosen[c]) == m:
            asked[num_asked], versions[num_asked] = end, np.uint32(_NO_VERSION)
            num_asked += _ONE
            c += _ONE
        else:
            plain[num_plain] = end
            num_plain += _ONE


@kernel(UINT8_IN, INT64, FLOAT32_IN, UINT32_IN, INT64, FLOAT32S, UINT32S, result=INT64)
def place_answers(
    slack: NDArray[np.uint8],
    code: int,
    rows: NDArray[np.float32],
    versions: NDArray[np.uint32],
    dim: int,
    out_rows: NDArray[np.float32],
    out_versions: NDArray[np.uint32],
) -> int:
    """Writes the rows that an answer has for one code to their places among those that it has for both.

    Args:
        slack: Answers of one part of a pserver's.
        code: `ROW_FOLLOWS` or `STATES_FOLLOW`.
        rows: `(n * dim,)`, those with that code, in order.
        versions: `(n,)`, their clocks.
        dim: Floats of a row.
        out_rows: Output, `(m * dim,)`, of all rows that follow from this part on.
        out_versions: Output, `(m,)`.

    Returns:
        The number of answers with that code. If it is not n, not all was written.
    """
    d, row, num_placed = np.uint64(dim), _ZERO, _ZERO
    for i in range(np.uint64(slack.shape[0])):
        if slack[i] == code:
            if num_placed < np.uint64(versions.shape[0]) and row < np.uint64(out_versions.shape[0]):
                copy(out_rows, row * d, rows, num_placed * d, d)
                out_versions[row] = versions[num_placed]
            num_placed += _ONE
        row += _ONE if slack[i] >= _ROW_FOLLOWS else _ZERO
    return int(num_placed)


@inlined
def lag_class(lag: int) -> int:
    """Returns the class of a lag: 0 of 0, and k of those from `2^(k-1)` to below `2^k`."""
    of_lag, rest = 0, np.uint32(lag)
    while rest > 0:
        rest >>= np.uint32(1)
        of_lag += 1
    return of_lag


@kernel(INT64_IN, INT64_IN, UINT8_IN, UINT32_IN, UINT32S, INT64_IN, INT64, INT64S)
def count_lags(
    slots: NDArray[np.int64],
    asked: NDArray[np.int64],
    slack: NDArray[np.uint8],
    versions: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    num_per_shard: NDArray[np.int64],
    num_classes: int,
    histogram: NDArray[np.int64],
) -> None:
    """Counts how far the copies are behind that an answer refreshes, of those whose clock is known.

    Args:
        slots: Of the ids of a batch; -1 for those without a copy.
        asked: `(n,)`, places of the ids that were asked about, ascending.
        slack: `(n,)`, the answers.
        versions: Clocks of the rows that follow, in their order.
        counts: Of the copies.
        num_per_shard: `(num_shards,)`, number of ids of the batch of each shard.
        num_classes: Number of classes of lags.
        histogram: `(num_shards * num_classes,)`: number of copies by shard and `lag_class`; changed.
    """
    row, shard, end = _ZERO, _ZERO, num_per_shard[0]
    for i in range(np.uint64(asked.shape[0])):
        if slack[i] < _ROW_FOLLOWS:
            continue
        while asked[i] >= end:
            shard += _ONE
            end += num_per_shard[shard]
        slot = slots[np.uint64(asked[i])]
        if slot >= 0:
            known = counts[_COUNTS * np.uint64(slot) + _KNOWN]
            if known != _NO_VERSION:
                lag = np.uint32(versions[row] - known)
                histogram[shard * np.uint64(num_classes) + np.uint64(lag_class(int(lag)))] += 1
        row += _ONE


@kernel(INT64_IN, INT64_IN, UINT8_IN, UINT32_IN, UINT32S, INT64S, INT64S)
def note_answers(
    slots: NDArray[np.int64],
    asked: NDArray[np.int64],
    slack: NDArray[np.uint8],
    versions: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    row_slots: NDArray[np.int64],
    state_slots: NDArray[np.int64],
) -> None:
    """Takes note of the clocks in an answer.

    Args:
        slots: With the next three arguments, as in `count_lags`.
        counts: Of the copies; changed.
        row_slots: Output: for each row that follows its slot, -1 if the row enters.
        state_slots: Output: the same for each row whose states follow.
    """
    row, state = _ZERO, _ZERO
    for i in range(np.uint64(asked.shape[0])):
        if slack[i] < _ROW_FOLLOWS:
            continue
        slot = slots[np.uint64(asked[i])]
        row_slots[row] = slot
        has_states = slack[i] == _STATES_FOLLOW
        if has_states:
            state_slots[state] = slot
            state += _ONE
        if slot >= 0:
            counts[_COUNTS * np.uint64(slot) + _KNOWN] = versions[row]
            if has_states:
                counts[_COUNTS * np.uint64(slot) + _STATES_KNOWN] = versions[row]
        row += _ONE


@kernel(INT64_IN, INT64_IN, UINT8_IN, UINT32_IN, INT64, FLOAT64, INT64, BOOL, INT64, INT64, INT64S, INT64S)
def find_leases(
    slots: NDArray[np.int64],
    asked: NDArray[np.int64],
    slack: NDArray[np.uint8],
    versions: NDArray[np.uint32],
    lag: int,
    share: float,
    num_workers: int,
    has_leases: bool,
    steps_off: int,
    most_steps: int,
    asked_slots: NDArray[np.int64],
    steps: NDArray[np.int64],
) -> None:
    """Writes for how many further steps the copies are leased that were asked about.

    Args:
        slots: With the next three arguments, as in `count_lags`.
        lag: With `share`, the bound, as in `kernels_row_bound`.
        share: As above.
        num_workers: Number of workers of the job, at least 2.
        has_leases: As of `RowBound`.
        steps_off: By how many steps leases are shorter.
        most_steps: Longest lease.
        asked_slots: Output, `(n,)`: the slot of each; -1 for ids that enter.
        steps: Output, `(n,)`; -1 if a copy is not leased any more once others have gone on in this step.
    """
    row = _ZERO
    for i in range(np.uint64(asked.shape[0])):
        asked_slots[i] = slots[np.uint64(asked[i])]
        left = int(slack[i])
        if left >= _ROW_FOLLOWS:
            left = lease_steps(int(versions[row]), lag, share, num_workers) if has_leases else 0
            row += _ONE
        steps[i] = min(max(left - steps_off, -1), most_steps)


@kernel(INT64_IN, UINT32_IN, UINT32S)
def begin_counts(slots: NDArray[np.int64], versions: NDArray[np.uint32], counts: NDArray[np.uint32]) -> None:
    """Writes the counts of new copies with these slots and clocks, both `(n,)`, which hold nothing."""
    for i in range(np.uint64(slots.shape[0])):
        at = _COUNTS * np.uint64(slots[i])
        counts[at + _KNOWN], counts[at + _STATES_KNOWN] = versions[i], versions[i]
        counts[at + _HELD], counts[at + _STATES_HELD] = np.uint32(0), np.uint32(0)


@kernel(INT64_IN, UINT32S)
def count_updates(slots: NDArray[np.int64], counts: NDArray[np.uint32]) -> None:
    """Adds one held update to each copy; places without one, whose slot is -1, are passed over."""
    n = np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            prefetch_write(counts, _COUNTS * np.uint64(slots[i + _AHEAD]))
        if slots[i] >= 0:
            at = _COUNTS * np.uint64(slots[i])
            counts[at + _HELD] += np.uint32(1)
            counts[at + _STATES_HELD] += np.uint32(1)


@kernel(
    *(INT64_IN, FLOAT32S, FLOAT32S, INT64, UINT32S, INT64, INT64, FLOAT64, FLOAT64, INT64),
    *(INT64S, INT64S, INT64S, INT64S),
)
def find_due(
    slots: NDArray[np.int64],
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    width: int,
    counts: NDArray[np.uint32],
    num_workers: int,
    lag: int,
    share: float,
    units_per_distance: float,
    most_held: int,
    as_gradients: NDArray[np.int64],
    due: NDArray[np.int64],
    single_updates: NDArray[np.int64],
    num_found: NDArray[np.int64],
) -> None:
    """Finds out what is sent of a batch that was trained and counted.

    Args:
        slots: `(n,)`, -1 for ids without a copy.
        copies: The copies.
        bases: Their bases; not read without `units_per_distance`.
        width: Floats of a copy.
        counts: Of the copies.
        num_workers: Number of workers that the bound is divided by; 1 if `most_held` alone says what may be held.
        lag: With `share`, the bound, as in `kernels_row_bound`.
        share: As above.
        units_per_distance: Units of a distance of 1 in a bound in distance; 0 with one in updates.
        most_held: Largest amount that may be held of a copy.
        as_gradients: Output, at least `(n,)`: places whose gradients go as they are, ascending.
        due: Output, at least `(n,)`: slots of the copies whose changes go.
        single_updates: Output, at least `(n,)`: slots of the copies whose gradients go as they are.
        num_found: Output, `(3,)`: the lengths of these three.
    """
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    num_gradients, num_due, num_single = np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            prefetch_read(counts, _COUNTS * np.uint64(slots[i + _AHEAD]))
            if units_per_distance > 0.0:
                for j in range(_ZERO, w, _LINE):
                    prefetch_read(copies, np.uint64(slots[i + _AHEAD]) * w + j)
                    prefetch_read(bases, np.uint64(slots[i + _AHEAD]) * w + j)
        if slots[i] < 0:
            as_gradients[num_gradients] = np.int64(i)
            num_gradients += _ONE
            continue
        slot = np.uint64(slots[i])
        held = int(counts[_COUNTS * slot + _HELD])
        amount, most = held, most_held
        if num_workers > 1:
            known = counts[_COUNTS * slot + _KNOWN]
            clock = 0 if known == _NO_VERSION else int(known)
            most = min(most, max_held(clock, lag, share, num_workers))
            if units_per_distance > 0.0:
                moved = _displacement(copies, bases, slot * w, w)
                amount = max(units(float(moved), units_per_distance), int(held > 0))
        if amount <= most:
            continue
        if held <= 1 and counts[_COUNTS * slot + _STATES_HELD] <= 1:
            as_gradients[num_gradients], single_updates[num_single] = np.int64(i), slots[i]
            num_gradients += _ONE
            num_single += _ONE
        else:
            due[num_due] = slots[i]
            num_due += _ONE
    num_found[0], num_found[1], num_found[2] = num_gradients, num_due, num_single


@kernel(INT64_IN, FLOAT32S, FLOAT32S, INT64, UINT32S, FLOAT64, FLOAT32S, UINT32S, UINT32S)
def read_changes(
    slots: NDArray[np.int64],
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    width: int,
    counts: NDArray[np.uint32],
    units_per_distance: float,
    changes: NDArray[np.float32],
    amounts: NDArray[np.uint32],
    num_updates: NDArray[np.uint32],
) -> None:
    """Writes what copies hold.

    Args:
        slots: `(n,)`, none negative.
        copies: The copies.
        bases: Their bases.
        width: Floats of a copy.
        counts: Of the copies.
        units_per_distance: As in `find_due`.
        changes: Output, `(n * width,)`: by what the copies differ from their bases.
        amounts: Output, `(n,)`: updates or, with `units_per_distance`, units of distance that are held.
        num_updates: Output, `(n,)`: updates of the states that are held.
    """
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            for j in range(_ZERO, w, _LINE):
                prefetch_read(copies, np.uint64(slots[i + _AHEAD]) * w + j)
                prefetch_read(bases, np.uint64(slots[i + _AHEAD]) * w + j)
            prefetch_read(counts, _COUNTS * np.uint64(slots[i + _AHEAD]))
        slot = np.uint64(slots[i])
        for j in range(w):
            changes[i * w + j] = copies[slot * w + j] - bases[slot * w + j]
        held = counts[_COUNTS * slot + _HELD]
        amounts[i], num_updates[i] = held, counts[_COUNTS * slot + _STATES_HELD]
        if units_per_distance > 0.0:
            moved = float(_displacement(copies, bases, slot * w, w))
            amounts[i] = max(units(moved, units_per_distance), int(held > 0))


@kernel(INT64_IN, UINT32_IN, UINT32S)
def advance_versions(slots: NDArray[np.int64], amounts: NDArray[np.uint32], counts: NDArray[np.uint32]) -> None:
    """Adds amounts to the known clocks of copies, which wrap; both are `(n,)`. Slots of -1 are passed over."""
    for i in range(np.uint64(slots.shape[0])):
        if slots[i] >= 0:
            at = _COUNTS * np.uint64(slots[i])
            if counts[at + _KNOWN] != _NO_VERSION:
                counts[at + _KNOWN] += amounts[i]
                counts[at + _STATES_KNOWN] += amounts[i]


@kernel(INT64_IN, UINT32_IN, BOOL, UINT32S)
def settle_counts(
    slots: NDArray[np.int64], amounts: NDArray[np.uint32], has_states: bool, counts: NDArray[np.uint32]
) -> None:
    """Takes note that what copies held was sent: it is not held any more, and made their known clocks newer.

    Args:
        slots: `(n,)`; those of -1 are passed over.
        amounts: `(n,)`: by how much the clocks advanced.
        has_states: True if the states were sent as well.
        counts: Of the copies; changed.
    """
    for i in range(np.uint64(slots.shape[0])):
        if slots[i] < 0:
            continue
        at = _COUNTS * np.uint64(slots[i])
        if counts[at + _KNOWN] != _NO_VERSION:
            counts[at + _KNOWN] += amounts[i]
            counts[at + _STATES_KNOWN] += amounts[i]
        counts[at + _HELD] = np.uint32(0)
        if has_states:
            counts[at + _STATES_HELD] = np.uint32(0)
