"""Kernels of copies of rows, and of their bases: the values that they had when they were last equal to what the
pservers have. Copy `slot` of an array is `values[slot * width : (slot + 1) * width]`.

Of each copy there are five counts, in one array so that a use of them touches one or two cache lines: the clock that
is known of its row and of its states, `NO_VERSION` for none, how many updates are held of both, and how many this
worker has made since the copy entered. Count `k` of a copy is `counts[NUM_COUNTS * slot + k]`.
"""

from __future__ import annotations

import math

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

NUM_COUNTS, KNOWN, STATES_KNOWN, HELD, STATES_HELD, MADE = 5, 0, 1, 2, 3, 4
_COUNTS, _KNOWN, _STATES_KNOWN = np.uint64(NUM_COUNTS), np.uint64(KNOWN), np.uint64(STATES_KNOWN)
_HELD, _STATES_HELD, _MADE = np.uint64(HELD), np.uint64(STATES_HELD), np.uint64(MADE)
_NO_VERSION, _ROW_FOLLOWS, _STATES_FOLLOW = int(NO_VERSION), ROW_FOLLOWS, STATES_FOLLOW
_LINE, _ZERO, _ONE = np.uint64(16), np.uint64(0), np.uint64(1)
# A kernel that reads one array looks further ahead: a core has only so many lines on their way from memory.
_AHEAD, _FAR_AHEAD = np.uint64(8), np.uint64(16)


@kernel(FLOAT32S, INT64_IN, INT64, FLOAT32S)
def gather_copies(copies: NDArray[np.float32], slots: NDArray[np.int64], width: int, out: NDArray[np.float32]) -> None:
    """Writes the copy of each slot to its place in `out`, `(n * width,)`; leaves it as it is where the slot is -1."""
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    for i in range(n):
        if i + _FAR_AHEAD < n and slots[i + _FAR_AHEAD] >= 0:
            for j in range(_ZERO, w, _LINE):
                prefetch_read(copies, np.uint64(slots[i + _FAR_AHEAD]) * w + j)
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


@kernel(FLOAT32S, FLOAT32S, INT64_IN, FLOAT32_IN, INT64, UINT32S)
def refresh_copies(
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    slots: NDArray[np.int64],
    fresh: NDArray[np.float32],
    width: int,
    counts: NDArray[np.uint32],
) -> None:
    """Makes fresh values `(n * width,)` the bases, and adds to the copies what they differed from the bases before.

    Fresh values whose slot is -1 are passed over. A copy that is infinite or NaN and holds no update becomes the fresh
    row: its difference from its base would be NaN for ever.
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
        is_held = counts[_COUNTS * np.uint64(slots[i]) + _HELD] > 0
        for j in range(w):
            value, own = fresh[i * w + j], copies[at + j] - bases[at + j]
            copies[at + j] = value + own if is_held or abs(own) < np.inf else value
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
    d, num_states, n = np.uint64(dim), np.uint64(decays.shape[0]), np.uint64(slots.shape[0])
    width = d * num_states
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            for j in range(_ZERO, width, _LINE):
                prefetch_write(states, np.uint64(slots[i + _AHEAD]) * width + j)
                prefetch_write(base_states, np.uint64(slots[i + _AHEAD]) * width + j)
        if slots[i] < 0:
            continue
        at = np.uint64(slots[i]) * width
        num_updates = np.uint64(counts[_COUNTS * np.uint64(slots[i]) + _STATES_HELD])
        for k in range(num_states):
            decay, least_own = power(decays[k], num_updates), least[k]
            for j in range(k * d, (k + _ONE) * d):
                value = fresh[i * width + j]
                own = max(np.float64(states[at + j]) - decay * np.float64(base_states[at + j]), least_own)
                states[at + j] = np.float32(decay * np.float64(value) + own) if num_updates > _ZERO else value
                base_states[at + j] = value


@inlined
def _subtract_base(
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    begin: np.uint64,
    width: np.uint64,
    out: NDArray[np.float32],
    out_begin: np.uint64,
) -> None:
    """Writes by what a copy differs from its base."""
    for j in range(width):
        out[out_begin + j] = copies[begin + j] - bases[begin + j]


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
        _subtract_base(copies, bases, np.uint64(slots[i]) * w, w, out, i * w)


@inlined
def _displacement(
    copies: NDArray[np.float32], bases: NDArray[np.float32], begin: np.uint64, width: np.uint64
) -> np.float32:
    """Returns the largest difference of a value from its base."""
    most = np.float32(0)
    for j in range(begin, begin + width):
        most = max(most, abs(copies[j] - bases[j]))
    return most


@inlined
def _amount_of(
    counts: NDArray[np.uint32],
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    slot: np.uint64,
    width: np.uint64,
    units_per_distance: float,
) -> int:
    """Returns how much a copy holds: updates or, with `units_per_distance`, units of distance.

    An update that is held is at least one unit: others may have moved the copy back to its base.
    """
    amount = int(counts[_COUNTS * slot + _HELD])
    if units_per_distance > 0.0:
        moved = float(_displacement(copies, bases, slot * width, width))
        amount = max(units(moved, units_per_distance), int(amount > 0))
    return amount


@kernel(INT64_IN, UINT32S, FLOAT32S, FLOAT32S, INT64, FLOAT64, UINT32S)
def measure_amounts(
    slots: NDArray[np.int64],
    counts: NDArray[np.uint32],
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    width: int,
    units_per_distance: float,
    amounts: NDArray[np.uint32],
) -> None:
    """Writes how much copies hold.

    Args:
        slots: `(n,)`, none negative.
        counts: Of the copies.
        copies: The copies.
        bases: Their bases; not read without `units_per_distance`.
        width: Floats of a copy.
        units_per_distance: Units of a distance of 1 in a bound in distance; 0 where updates are counted.
        amounts: Output, `(n,)`: updates, or units of distance.
    """
    w = np.uint64(width)
    for i in range(np.uint64(slots.shape[0])):
        amounts[i] = _amount_of(counts, copies, bases, np.uint64(slots[i]), w, units_per_distance)


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
    """Divides the ids that cannot be read from a copy alone into those that are asked about and those that are pulled.

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
            if u + _FAR_AHEAD < num_unleased:
                prefetch_read(counts, _COUNTS * np.uint64(slots[np.uint64(unleased[u + _FAR_AHEAD])]))
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
    return math.frexp(np.float64(lag))[1]


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
    row, shard, end, n = _ZERO, _ZERO, num_per_shard[0], np.uint64(asked.shape[0])
    for i in range(n):
        if i + _FAR_AHEAD < n and slots[np.uint64(asked[i + _FAR_AHEAD])] >= 0:
            prefetch_write(counts, _COUNTS * np.uint64(slots[np.uint64(asked[i + _FAR_AHEAD])]))
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


@kernel(
    *(INT64_IN, INT64_IN, UINT8_IN, UINT32_IN, FLOAT32_IN, INT64, FLOAT32_IN, INT64, UINT32S),
    *(INT64S, INT64S, FLOAT32S, FLOAT32S, UINT32S),
)
def note_answers(
    slots: NDArray[np.int64],
    asked: NDArray[np.int64],
    slack: NDArray[np.uint8],
    versions: NDArray[np.uint32],
    rows: NDArray[np.float32],
    width: int,
    states: NDArray[np.float32],
    state_width: int,
    counts: NDArray[np.uint32],
    row_slots: NDArray[np.int64],
    state_slots: NDArray[np.int64],
    entering_rows: NDArray[np.float32],
    entering_states: NDArray[np.float32],
    entering_versions: NDArray[np.uint32],
) -> None:
    """Takes note of the clocks in an answer, and writes the rows that enter.

    Args:
        slots: With the next three arguments, as in `count_lags`.
        rows: `(m * width,)`, the rows that follow.
        width: Floats of a row.
        states: `(l * state_width,)`, the states that follow.
        state_width: Floats of the states of a row.
        counts: Of the copies; changed.
        row_slots: Output, `(m,)`: for each row that follows its slot, -1 if the row enters.
        state_slots: Output, `(l,)`: the same for each row whose states follow.
        entering_rows: Output, `(e * width,)`, for the `e` places of `asked` without a slot: their rows, which follow.
        entering_states: Output, `(e * state_width,)`: their states, which follow if the rule has some.
        entering_versions: Output, `(e,)`: their clocks.
    """
    w, of_states = np.uint64(width), np.uint64(state_width)
    row, state, num_entering = _ZERO, _ZERO, _ZERO
    for i in range(np.uint64(asked.shape[0])):
        if slack[i] < _ROW_FOLLOWS:
            continue
        slot = slots[np.uint64(asked[i])]
        row_slots[row] = slot
        has_states = slack[i] == _STATES_FOLLOW
        if has_states:
            state_slots[state] = slot
        if slot >= 0:
            counts[_COUNTS * np.uint64(slot) + _KNOWN] = versions[row]
            if has_states:
                counts[_COUNTS * np.uint64(slot) + _STATES_KNOWN] = versions[row]
        else:
            copy(entering_rows, num_entering * w, rows, row * w, w)
            if has_states:
                copy(entering_states, num_entering * of_states, states, state * of_states, of_states)
            entering_versions[num_entering] = versions[row]
            num_entering += _ONE
        row += _ONE
        state += _ONE if has_states else _ZERO


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


@kernel(
    *(INT64_IN, FLOAT32_IN, FLOAT32_IN, UINT32_IN, FLOAT32S, FLOAT32S, INT64),
    *(FLOAT32S, FLOAT32S, INT64, UINT32S),
)
def enter_copies(
    slots: NDArray[np.int64],
    rows: NDArray[np.float32],
    row_states: NDArray[np.float32],
    versions: NDArray[np.uint32],
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    width: int,
    states: NDArray[np.float32],
    base_states: NDArray[np.float32],
    state_width: int,
    counts: NDArray[np.uint32],
) -> None:
    """Writes new copies, which hold nothing, over those that had their slots.

    Args:
        slots: `(n,)`, none negative.
        rows: `(n * width,)`.
        row_states: `(n * state_width,)`.
        versions: `(n,)`, their clocks.
        copies: The copies; changed, as all that follow.
        bases: Their bases, or the copies again if there are none.
        width: Floats of a copy.
        states: States of the copies.
        base_states: Their bases, or the states again if there are none.
        state_width: Floats of the states of a copy.
        counts: Of the copies.
    """
    w, of_states, n = np.uint64(width), np.uint64(state_width), np.uint64(slots.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            ahead = np.uint64(slots[i + _AHEAD])
            prefetch_write(counts, _COUNTS * ahead)
            for j in range(_ZERO, w, _LINE):
                prefetch_write(copies, ahead * w + j)
                prefetch_write(bases, ahead * w + j)
            for j in range(_ZERO, of_states, _LINE):
                prefetch_write(states, ahead * of_states + j)
                prefetch_write(base_states, ahead * of_states + j)
        slot = np.uint64(slots[i])
        copy(copies, slot * w, rows, i * w, w)
        copy(bases, slot * w, rows, i * w, w)
        copy(states, slot * of_states, row_states, i * of_states, of_states)
        copy(base_states, slot * of_states, row_states, i * of_states, of_states)
        at = _COUNTS * slot
        counts[at + _KNOWN], counts[at + _STATES_KNOWN] = versions[i], versions[i]
        counts[at + _HELD], counts[at + _STATES_HELD], counts[at + _MADE] = np.uint32(0), np.uint32(0), np.uint32(0)


@kernel(INT64_IN, UINT32S, INT64S, result=INT64)
def find_holding(slots: NDArray[np.int64], counts: NDArray[np.uint32], found: NDArray[np.int64]) -> int:
    """Finds the copies that hold updates, of the row or only of its states.

    Args:
        slots: `(n,)`, none negative.
        counts: Of the copies.
        found: Output, at least `(n,)`: the slots of those that do, in the same order.

    Returns:
        Their number.
    """
    num_found, n = _ZERO, np.uint64(slots.shape[0])
    for i in range(n):
        if i + _FAR_AHEAD < n:
            prefetch_read(counts, _COUNTS * np.uint64(slots[i + _FAR_AHEAD]))
        at = _COUNTS * np.uint64(slots[i])
        found[num_found] = slots[i]
        num_found += _ONE if counts[at + _HELD] > 0 or counts[at + _STATES_HELD] > 0 else _ZERO
    return int(num_found)


@inlined
def _known_clock(counts: NDArray[np.uint32], slot: np.uint64) -> np.uint32:
    """Returns the clock that is known of the row of a copy; 0 for none, with which rows begin."""
    known = counts[_COUNTS * slot + _KNOWN]
    return np.uint32(0) if known == _NO_VERSION else np.uint32(known)


@kernel(
    *(INT64_IN, BOOL, FLOAT32S, FLOAT32S, INT64, UINT32S, INT64, INT64, FLOAT64, FLOAT64, INT64),
    *(INT64S, INT64S, INT64S, INT64S),
)
def hold_updates(
    slots: NDArray[np.int64],
    may_hold: bool,
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
    """Adds an update to what each copy of a batch holds, once it was trained, and finds out what of them is sent.

    Args:
        slots: `(n,)`, -1 for ids without a copy.
        may_hold: False if no updates are held: none is added.
        copies: The copies.
        bases: Their bases; not read without `units_per_distance`.
        width: Floats of a copy.
        counts: Of the copies; changed.
        num_workers: Number of workers that the bound is divided by; 1 if `most_held` alone says what may be held.
        lag: With `share`, the bound, as in `kernels_row_bound`.
        share: As above.
        units_per_distance: As in `measure_amounts`.
        most_held: Largest amount that may be held of a copy.
        as_gradients: Output, at least `(n,)`: places whose gradients go as they are, ascending.
        due: Output, at least `(n,)`: slots of the copies whose changes go.
        single_updates: Output, at least `(n,)`: slots of the copies whose gradients go as they are.
        num_found: Output, `(3,)`: the lengths of these three.
    """
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    num_gradients, num_due, num_single, more = _ZERO, _ZERO, _ZERO, np.uint32(1 if may_hold else 0)
    if num_workers > 1 and share < 0.0:  # the same for all clocks
        most_held = min(most_held, max_held(0, lag, share, num_workers))
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            prefetch_write(counts, _COUNTS * np.uint64(slots[i + _AHEAD]))
            if units_per_distance > 0.0:
                for j in range(_ZERO, w, _LINE):
                    prefetch_read(copies, np.uint64(slots[i + _AHEAD]) * w + j)
                    prefetch_read(bases, np.uint64(slots[i + _AHEAD]) * w + j)
        if slots[i] < 0:
            as_gradients[num_gradients] = np.int64(i)
            num_gradients += _ONE
            continue
        slot = np.uint64(slots[i])
        counts[_COUNTS * slot + _HELD] += more
        counts[_COUNTS * slot + _STATES_HELD] += more
        counts[_COUNTS * slot + _MADE] += more
        most = most_held
        if num_workers > 1 and share >= 0.0:
            most = min(most, max_held(int(_known_clock(counts, slot)), lag, share, num_workers))
        if _amount_of(counts, copies, bases, slot, w, units_per_distance) <= most:
            continue
        if counts[_COUNTS * slot + _HELD] <= 1 and counts[_COUNTS * slot + _STATES_HELD] <= 1:
            as_gradients[num_gradients], single_updates[num_single] = np.int64(i), slots[i]
            num_gradients += _ONE
            num_single += _ONE
        else:
            due[num_due] = slots[i]
            num_due += _ONE
    num_found[0], num_found[1], num_found[2] = num_gradients, num_due, num_single


@kernel(INT64_IN, UINT32S, INT64, BOOL, INT64S, INT64S, result=INT64)
def divide_by_states(
    slots: NDArray[np.int64],
    counts: NDArray[np.uint32],
    num_workers: int,
    clocks_count_updates: bool,
    without_states: NDArray[np.int64],
    with_states: NDArray[np.int64],
) -> int:
    """Divides copies that are due into those that are sent without their states, and those with old ones.

    At most an eighth of all updates, over all workers, are missing from the states on the pserver. Where clocks tell
    how many there were, each worker may keep its share of that eighth, and else an eighth of those that it has made
    since the copy entered.

    Args:
        slots: `(n,)`, none negative.
        counts: Of the copies.
        num_workers: Number of workers of the job.
        clocks_count_updates: False with a bound in distance.
        without_states: Output, at least `(n,)`: slots of the former, in the same order.
        with_states: Output, at least `(n,)`: slots of the latter, in the same order.

    Returns:
        The number of the former; all others are the latter.
    """
    num_without, num_with = _ZERO, _ZERO
    for i in range(np.uint64(slots.shape[0])):
        at = _COUNTS * np.uint64(slots[i])
        lacking = int(counts[at + _STATES_HELD])
        if clocks_count_updates:
            clock = np.uint32(_known_clock(counts, np.uint64(slots[i])) + counts[at + _HELD])
            is_old = are_states_old(int(clock), lacking * num_workers)
        else:
            is_old = are_states_old(int(counts[at + _MADE]), lacking)
        without_states[num_without] = with_states[num_with] = slots[i]
        num_without += _ZERO if is_old else _ONE
        num_with += _ONE if is_old else _ZERO
    return int(num_without)


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
        units_per_distance: As in `measure_amounts`.
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
        _subtract_base(copies, bases, slot * w, w, changes, i * w)
        amounts[i] = _amount_of(counts, copies, bases, slot, w, units_per_distance)
        num_updates[i] = counts[_COUNTS * slot + _STATES_HELD]


@kernel(INT64_IN, UINT32_IN, UINT32S)
def advance_versions(slots: NDArray[np.int64], amounts: NDArray[np.uint32], counts: NDArray[np.uint32]) -> None:
    """Adds amounts to the known clocks of copies, which wrap; both are `(n,)`. Slots of -1 are passed over."""
    for i in range(np.uint64(slots.shape[0])):
        if slots[i] >= 0:
            at = _COUNTS * np.uint64(slots[i])
            if counts[at + _KNOWN] != _NO_VERSION:
                counts[at + _KNOWN] += amounts[i]
                counts[at + _STATES_KNOWN] += amounts[i]


@kernel(INT64_IN, UINT32_IN, UINT32S, BOOL, FLOAT32S, FLOAT32S, INT64, FLOAT32S, FLOAT32S, INT64)
def settle_copies(
    slots: NDArray[np.int64],
    amounts: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    has_states: bool,
    copies: NDArray[np.float32],
    bases: NDArray[np.float32],
    width: int,
    states: NDArray[np.float32],
    base_states: NDArray[np.float32],
    state_width: int,
) -> None:
    """Takes note that what copies held was sent: their known clocks are newer, and they are their own bases.

    Args:
        slots: `(n,)`; those of -1 are passed over.
        amounts: `(n,)`: by how much the clocks advanced.
        counts: Of the copies; changed.
        has_states: True if the states were sent as well.
        copies: The copies.
        bases: Their bases; changed.
        width: Floats of a base; 0 if there are none.
        states: States of the copies.
        base_states: Their bases; changed if the states were sent.
        state_width: Floats of the bases of the states of a copy; 0 if there are none.
    """
    w, n = np.uint64(width), np.uint64(slots.shape[0])
    of_states = np.uint64(state_width) if has_states else _ZERO
    for i in range(n):
        if i + _AHEAD < n and slots[i + _AHEAD] >= 0:
            ahead = np.uint64(slots[i + _AHEAD])
            prefetch_write(counts, _COUNTS * ahead)
            for j in range(_ZERO, w, _LINE):
                prefetch_read(copies, ahead * w + j)
                prefetch_write(bases, ahead * w + j)
            for j in range(_ZERO, of_states, _LINE):
                prefetch_read(states, ahead * of_states + j)
                prefetch_write(base_states, ahead * of_states + j)
        if slots[i] < 0:
            continue
        slot = np.uint64(slots[i])
        at = _COUNTS * slot
        if counts[at + _KNOWN] != _NO_VERSION:
            counts[at + _KNOWN] += amounts[i]
            counts[at + _STATES_KNOWN] += amounts[i]
        counts[at + _HELD] = np.uint32(0)
        if has_states:
            counts[at + _STATES_HELD] = np.uint32(0)
        copy(bases, slot * w, copies, slot * w, w)
        copy(base_states, slot * of_states, states, slot * of_states, of_states)
