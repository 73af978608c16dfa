from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.kernels_copies import (
    HELD,
    KNOWN,
    MADE,
    NUM_COUNTS,
    STATES_HELD,
    STATES_KNOWN,
    divide_by_states,
    enter_copies,
    find_holding,
    hold_updates,
    measure_amounts,
    note_answers,
    read_changes,
    settle_copies,
    subtract_bases,
)
from fleet_sparse.core.row_bound import ANY_AMOUNT, NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW

NUM_SLOTS, DIM, STATE_WIDTH = 5, 3, 2


class Copies:
    """Copies whose values and counts all differ."""

    def __init__(self) -> None:
        self.rows, self.bases = (np.arange(NUM_SLOTS * DIM, dtype=np.float32) + first for first in (100, 200))
        self.states, self.base_states = (
            np.arange(NUM_SLOTS * STATE_WIDTH, dtype=np.float32) + first for first in (300, 400)
        )
        self.counts = np.arange(NUM_SLOTS * NUM_COUNTS, dtype=np.uint32) + np.uint32(1)

    @property
    def by_slot(self) -> tuple[np.ndarray, ...]:
        """Rows, bases, states, their bases, and counts, by slot."""
        of_rows = (values.reshape(NUM_SLOTS, DIM) for values in (self.rows, self.bases))
        of_states = (values.reshape(NUM_SLOTS, STATE_WIDTH) for values in (self.states, self.base_states))
        return (*of_rows, *of_states, self.counts.reshape(NUM_SLOTS, NUM_COUNTS))

    def held_back(self, slots: list[int], *, may_hold: bool = True, most_held: int = ANY_AMOUNT) -> list[list[int]]:
        """Places of gradients, slots of changes, and slots of gradients that a job of one worker sends."""
        outputs, num_found = [np.empty(len(slots), np.int64) for _ in range(3)], np.zeros(3, np.int64)
        hold_updates(
            *(np.array(slots), may_hold, self.rows, self.bases, DIM, self.counts),
            *(1, 0, -1.0, 0.0, most_held, *outputs, num_found),
        )
        return [output[:n].tolist() for output, n in zip(outputs, num_found, strict=True)]

    def settle(self, slots: list[int], *, has_states: bool, width: int = DIM, state_width: int = STATE_WIDTH) -> None:
        settle_copies(
            *(np.array(slots), np.full(len(slots), 7, np.uint32), self.counts, has_states),
            *(self.rows, self.bases, width, self.states, self.base_states, state_width),
        )


def test_each_copy_of_a_batch_holds_one_more_update():
    copies = Copies()
    before = copies.by_slot[4].copy()
    assert copies.held_back([3, -1, 0]) == [[1], [], []]
    more = np.zeros_like(before)
    more[[3, 0]] = [0, 0, 1, 1, 1]
    np.testing.assert_array_equal(copies.by_slot[4], before + more)


def test_copies_that_may_not_hold_have_no_more_updates():
    copies = Copies()
    copies.counts[:] = 0
    assert copies.held_back([3, -1, 0], may_hold=False, most_held=-1) == [[0, 1, 2], [], [3, 0]]
    assert not copies.counts.any()


def test_what_is_held_beyond_the_most_is_due():
    copies = Copies()
    copies.by_slot[4][:, [HELD, STATES_HELD]] = [[0, 0], [1, 1], [2, 2], [0, 0], [0, 1]]
    assert copies.held_back([4, 3, 2, 1], most_held=0) == [[1], [4, 2, 1], [3]]
    assert copies.by_slot[4][:, HELD].tolist() == [0, 2, 3, 1, 1]


@pytest.mark.parametrize(("units_per_distance", "expected"), [(0.0, [3, 0, 2, 5, 0]), (8.0, [2, 0, 1, 5, 4])])
def test_amounts_are_updates_or_units_of_distance_that_are_held(units_per_distance: float, expected: list[int]):
    copies = Copies()
    copies.by_slot[4][:, HELD] = [3, 0, 2, 5, 0]
    rows, bases, *_ = copies.by_slot
    bases[:] = rows
    rows[0, 2] += 0.13  # rounded up
    rows[3] -= [0.6, 0.1, 0.3]
    rows[4, 1] += 0.5  # of no update that is held: a single gradient that was sent
    slots, changes = np.arange(NUM_SLOTS), np.empty((NUM_SLOTS, DIM), np.float32)
    amounts, of_changes, num_updates = (np.empty(NUM_SLOTS, np.uint32) for _ in range(3))
    of_copies = copies.rows, copies.bases, DIM
    measure_amounts(slots, copies.counts, *of_copies, units_per_distance, amounts)
    read_changes(slots, *of_copies, copies.counts, units_per_distance, changes.reshape(-1), of_changes, num_updates)
    assert amounts.tolist() == of_changes.tolist() == expected
    np.testing.assert_array_equal(changes, rows - bases)
    subtract_bases(copies.rows, copies.bases, slots, DIM, changes.reshape(-1))
    np.testing.assert_array_equal(changes, rows - bases)


@pytest.mark.parametrize("most", [1, 2])
def test_what_is_sent_is_what_the_amount_exceeds(most: int):
    copies = Copies()
    copies.by_slot[4][:, [HELD, STATES_HELD]] = [[3, 3], [0, 0], [2, 2], [5, 5], [1, 1]]
    copies.bases[:] = copies.rows
    copies.rows[: 2 * DIM] += 0.13
    slots, amounts = np.arange(NUM_SLOTS), np.empty(NUM_SLOTS, np.uint32)
    outputs, num_found = [np.empty(NUM_SLOTS, np.int64) for _ in range(3)], np.zeros(3, np.int64)
    hold_updates(
        *(slots, True, copies.rows, copies.bases, DIM, copies.counts),
        *(2, 4096, -1.0, 8.0, most, *outputs, num_found),
    )
    measure_amounts(slots, copies.counts, copies.rows, copies.bases, DIM, 8.0, amounts)
    sent = sorted([*outputs[1][: num_found[1]], *outputs[2][: num_found[2]]])
    assert sent == np.flatnonzero(amounts > most).tolist() == {1: [0, 1], 2: []}[most]


def test_copies_that_hold_updates_of_row_or_states_are_found():
    counts = np.zeros((NUM_SLOTS, NUM_COUNTS), np.uint32)
    counts[1, HELD] = counts[3, STATES_HELD] = 2
    counts[:, [KNOWN, STATES_KNOWN]] = 9
    found = np.empty(NUM_SLOTS, np.int64)
    num_found = find_holding(np.array([4, 3, 2, 1, 0]), counts.reshape(-1), found)
    assert found[:num_found].tolist() == [3, 1]


def test_copies_are_sent_with_states_that_are_an_eighth_behind():
    counts = np.zeros((NUM_SLOTS, NUM_COUNTS), np.uint32)
    counts[:, KNOWN], counts[:, HELD], counts[:, STATES_HELD] = [31, 32, 64, NO_VERSION, 30], 1, [2, 2, 3, 1, 3]
    assert divided(counts, clocks_count_updates=True) == ([2, 1], [4, 3, 0])


def test_clocks_of_distance_do_not_tell_how_old_states_are():
    counts = np.zeros((NUM_SLOTS, NUM_COUNTS), np.uint32)
    counts[:, KNOWN], counts[:, STATES_HELD], counts[:, MADE] = 1 << 20, [2, 2, 3, 1, 3], [16, 17, 24, 1, 25]
    assert divided(counts, clocks_count_updates=False) == ([4, 1], [3, 2, 0])


def divided(counts: np.ndarray, *, clocks_count_updates: bool) -> tuple[list[int], list[int]]:
    """Slots of copies, from the last to the first, that two workers send without their states, and with them."""
    without_states, with_states = np.empty(NUM_SLOTS, np.int64), np.empty(NUM_SLOTS, np.int64)
    slots = np.arange(NUM_SLOTS)[::-1].copy()
    n = divide_by_states(slots, counts.reshape(-1), 2, clocks_count_updates, without_states, with_states)
    return without_states[:n].tolist(), with_states[: NUM_SLOTS - n].tolist()


def test_copies_that_were_sent_are_their_own_bases():
    copies = Copies()
    copies.settle([4, -1, 1], has_states=True)
    rows, bases, states, base_states, _ = copies.by_slot
    assert (bases == rows).all(axis=1).tolist() == [False, True, False, False, True]
    assert (base_states == states).all(axis=1).tolist() == [False, True, False, False, True]


def test_copies_that_were_sent_hold_nothing_and_are_newer():
    copies = Copies()
    copies.settle([4, -1, 1], has_states=True)
    counts = copies.by_slot[4]
    assert counts[[4, 1]].tolist() == [[21 + 7, 22 + 7, 0, 0, 25], [6 + 7, 7 + 7, 0, 0, 10]]
    assert counts[0].tolist() == [1, 2, 3, 4, 5]


def test_states_that_were_not_sent_are_still_held():
    copies = Copies()
    before = copies.base_states.copy()
    copies.settle([1], has_states=False)
    assert copies.by_slot[4][1].tolist() == [6 + 7, 7 + 7, 0, 9, 10]
    np.testing.assert_array_equal(copies.base_states, before)


def test_an_unknown_clock_stays_unknown_when_a_copy_is_sent():
    copies = Copies()
    copies.by_slot[4][1, KNOWN] = NO_VERSION
    copies.settle([1], has_states=True)
    assert copies.by_slot[4][1].tolist() == [NO_VERSION, 7, 0, 0, 10]


def test_a_new_copy_is_its_own_base_and_holds_nothing():
    copies = Copies()
    others = [values[[0, 2, 3]].copy() for values in copies.by_slot]
    rows, row_states = np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([[7, 8], [9, 10]], np.float32)
    enter_copies(
        *(np.array([4, 1]), rows.reshape(-1), row_states.reshape(-1), np.array([50, 60], np.uint32)),
        *(copies.rows, copies.bases, DIM, copies.states, copies.base_states, STATE_WIDTH, copies.counts),
    )
    for values, entered in zip(copies.by_slot, (rows, rows, row_states, row_states), strict=False):
        np.testing.assert_array_equal(values[[4, 1]], entered)
    assert copies.by_slot[4][[4, 1]].tolist() == [[50, 50, 0, 0, 0], [60, 60, 0, 0, 0]]
    for values, before in zip(copies.by_slot, others, strict=True):
        np.testing.assert_array_equal(values[[0, 2, 3]], before)


def test_an_answer_is_divided_into_copies_and_rows_that_enter():
    copies = Copies()
    slots, asked = np.array([2, -1, 0, -1, 4]), np.array([0, 1, 2, 3, 4])
    slack = np.array([ROW_FOLLOWS, STATES_FOLLOW, 9, STATES_FOLLOW, STATES_FOLLOW], np.uint8)
    versions, rows = np.array([70, 71, 72, 73], np.uint32), np.arange(4 * DIM, dtype=np.float32)
    states = np.arange(3 * STATE_WIDTH, dtype=np.float32)
    row_slots, state_slots = np.empty(4, np.int64), np.empty(3, np.int64)
    entering = np.empty((2, DIM), np.float32), np.empty((2, STATE_WIDTH), np.float32), np.empty(2, np.uint32)
    note_answers(
        *(slots, asked, slack, versions, rows, DIM, states, STATE_WIDTH, copies.counts, row_slots, state_slots),
        *(entering[0].reshape(-1), entering[1].reshape(-1), entering[2]),
    )
    assert (row_slots.tolist(), state_slots.tolist()) == ([2, -1, -1, 4], [-1, -1, 4])
    assert [each.tolist() for each in entering] == [[[3, 4, 5], [6, 7, 8]], [[0, 1], [2, 3]], [71, 72]]
    assert copies.by_slot[4][:, [KNOWN, STATES_KNOWN]].tolist() == [[1, 2], [6, 7], [70, 12], [16, 17], [73, 73]]
