from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.kernels_cow_view import (
    NUM_DIGITS,
    NUM_PARTITIONS,
    copy_rows_at_cut,
    keep_pre_images,
    partition_by_hash,
    sort_partitions,
    unhash,
)

DIM, STATE_WIDTH = 2, 3
ALL_ROWS = np.empty(0, np.uint8)


class Cut:
    """Five rows with a state, in one block each, and room for some images."""

    def __init__(self, capacity):
        self.values = np.arange(25, dtype=np.float32)
        self.positions = np.zeros(4, np.int32)
        self.images = np.full(capacity * 5, np.nan, np.float32)
        self.arrays = (self.values, 5, self.values, 5, DIM, DIM, STATE_WIDTH)
        self.num_images = 0

    def keep(self, *rows, members=ALL_ROWS):
        self.num_images = keep_pre_images(
            np.array(rows, np.int64), self.positions, members, *self.arrays, self.images, self.num_images
        )
        return self.num_images

    def copy(self, *rows):
        out_rows, out_states = np.empty((len(rows), 2), np.float32), np.empty((len(rows), 3), np.float32)
        again = copy_rows_at_cut(
            *(np.array(rows, np.int64), self.positions, *self.arrays, self.images),
            *(out_rows.reshape(-1), out_states.reshape(-1)),
        )
        return np.hstack([out_rows, out_states]).tolist(), again


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(0, 2**64 - 1))
def test_ids_come_back_from_their_hashes(ids, salt):
    hashes = hash_ids(np.array(ids, np.int64), salt).view(np.int64)
    unhash(hashes, np.uint64(salt))
    assert hashes.tolist() == ids


def sorted_hashes(hashes):
    hashes, rows = hashes.copy(), np.arange(len(hashes), dtype=np.int32)
    out, begins = hashes.copy(), np.empty(NUM_PARTITIONS + 1, np.int64)
    partition_by_hash(out, rows, begins, np.empty(NUM_PARTITIONS, np.int64))
    largest = np.diff(begins).max()
    spare = np.empty(largest, np.int64), np.empty(largest, np.int32)
    sort_partitions(out, rows, begins, *spare, np.empty(NUM_DIGITS, np.int64))
    assert np.array_equal(out, hashes[rows])
    return out.view(np.uint64)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1)))
def test_hashes_are_sorted_as_unsigned_numbers(values):
    assert sorted_hashes(np.array(values, np.uint64).view(np.int64)).tolist() == sorted(values)


@pytest.mark.parametrize("count", [1000, 100_000])
def test_hashes_of_many_ids_are_sorted(count):
    hashes = hash_ids(np.arange(count), 5)
    assert np.array_equal(sorted_hashes(hashes.view(np.int64)), np.sort(hashes))


def test_hashes_with_equal_highest_bits_are_sorted():
    assert np.array_equal(sorted_hashes(np.arange(10_000)[::-1].copy()), np.arange(10_000, dtype=np.uint64))


def test_row_that_changed_after_it_was_kept_is_copied_as_it_was():
    cut = Cut(2)
    assert cut.keep(3, 1) == 2
    cut.values[:] = -1
    assert cut.copy(1, 3) == ([[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]], 0)


def test_row_is_kept_once():
    cut = Cut(1)
    assert [cut.keep(2, 2), cut.keep(2)] == [1, 1]


def test_copied_row_is_not_kept():
    cut = Cut(1)
    cut.copy(0)
    assert cut.keep(0) == 0


def test_row_that_is_newer_than_the_cut_is_not_kept():
    assert Cut(1).keep(4) == 0


def test_row_that_is_no_member_is_not_kept():
    cut = Cut(1)
    assert cut.keep(0, 1, 3, members=np.array([0b0010], np.uint8)) == 1
    assert cut.positions.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("capacity", [0, 2])
def test_image_without_room_is_told(capacity):
    cut = Cut(capacity)
    assert cut.keep(*range(capacity)) == capacity
    assert cut.keep(3) == -1


def test_rows_that_were_copied_before_are_counted():
    cut = Cut(1)
    assert cut.copy(0, 1)[1] == 0
    assert cut.copy(1, 2, 0)[1] == 2
