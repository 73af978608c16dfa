from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.kernels_bitmap import (
    clear_bits,
    count_and_set_bits,
    move_bits,
    plan_moves,
    set_bits,
    write_days,
)
from fleet_sparse.core.kernels_columns import move_elements

NUM_ROWS = 83


def bitmap(rows, num_rows=NUM_ROWS):
    return np.packbits(np.isin(np.arange(num_rows), sorted(rows)), bitorder="little")


def planned(removed, num_rows=NUM_ROWS):
    targets = np.empty(len(removed), np.int64)
    plan_moves(bitmap(removed, num_rows), num_rows - len(removed), targets)
    return targets


some_rows = st.sets(st.integers(0, NUM_ROWS - 1))


@given(some_rows, some_rows)
@settings(deadline=None)
def test_bits_of_rows_are_set_and_no_others(before, rows):
    bits = bitmap(before)
    set_bits(bits, np.array([*rows, *rows], np.int64))
    assert (bits == bitmap(before | rows)).all()


@given(some_rows, some_rows)
@settings(deadline=None)
def test_bits_of_rows_are_cleared_and_no_others(before, rows):
    bits = bitmap(before)
    clear_bits(bits, np.array([*rows, *rows], np.int64))
    assert (bits == bitmap(before - rows)).all()


def test_new_bits_count_once_and_negative_rows_not_at_all():
    bits = bitmap({3, 9})
    assert count_and_set_bits(bits, np.array([-1, 9, 10, 10, 82])) == 2
    assert (bits == bitmap({3, 9, 10, 82})).all()


def test_days_are_written_for_the_bits_which_are_then_cleared():
    bits, days = bitmap({0, 7, 8, 82}), np.full(88, 5, np.uint16)
    write_days(bits, days, 65535)
    assert np.flatnonzero(days == 65535).tolist() == [0, 7, 8, 82]
    assert (days == 5).sum() == 84
    assert not bits.any()


@given(some_rows)
@settings(deadline=None)
def test_rows_that_stay_fill_the_beginning(removed):
    first = NUM_ROWS - len(removed)
    targets = planned(removed)
    after = list(range(first))
    for j, target in enumerate(targets.tolist()):
        assert (target == -1) == (first + j in removed)
        if target >= 0:
            assert target in removed
            after[target] = first + j
    assert sorted(after) == sorted(set(range(NUM_ROWS)) - removed)


@given(some_rows, some_rows)
@settings(deadline=None)
def test_bits_and_elements_move_with_their_rows(removed, changed):
    first, targets = NUM_ROWS - len(removed), planned(removed)
    moved = dict(zip(range(first, NUM_ROWS), targets.tolist(), strict=True))
    left = {row: moved.get(row, row) for row in set(range(NUM_ROWS)) - removed}
    bits, elements = bitmap(changed), np.arange(1, NUM_ROWS + 1, dtype=np.uint16)
    move_bits(bits, first, targets)
    move_elements(elements.view(np.uint8), 2, first, targets)
    assert (bits == bitmap({left[row] for row in changed - removed})).all()
    assert {target: int(elements[target]) for target in left.values()} == {left[row]: row + 1 for row in left}


@pytest.mark.parametrize("hole", [0, 63, 64, 4095])
def test_single_hole_is_found_wherever_it_is(hole):
    assert planned({hole}, num_rows=4097).tolist() == [hole]
