from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import constant, initial_scalars
from fleet_sparse.core.kernels_bitmap import plan_moves
from fleet_sparse.core.kernels_index import (
    CELL_BYTES,
    FIRST_CLASS,
    NUM_SEGMENTS,
    find,
    find_or_create,
    find_owned,
    hash_each,
    remove_cells,
    set_classes,
)
from fleet_sparse.core.placement import Placement

SALT = np.uint64(0x1234_5678_9ABC_DEF0)


class Index:
    """An index over cells that end after the segments of class `last_class`; rows are one float of the value 2."""

    def __init__(self, last_class):
        self.cells = np.zeros(CELL_BYTES // 8 * (2 * NUM_SEGMENTS << last_class), np.int64)
        self.classes = np.full(NUM_SEGMENTS, FIRST_CLASS, np.uint8)
        self.num_used = np.zeros(NUM_SEGMENTS, np.int64)
        self.growth = np.array([0, 0, FIRST_CLASS])
        self.rows = np.zeros(200_000, np.float32)

    def insert(self, ids):
        row_indices = np.empty(len(ids), np.int64)
        hash_each(ids, SALT, row_indices)
        done = find_or_create(
            *(self.cells, self.classes, self.num_used, self.growth, SALT, ids, row_indices, row_indices),
            *(self.rows, 1, self.rows, 1, 1, 1),
            *initial_scalars(constant(2), seed=0, salt=0),
            np.empty(0, np.float32),
        )
        return done, row_indices[:done]

    def remove(self, ids):
        rows = self.find(ids)
        bits = np.packbits(np.isin(np.arange(self.growth[0]), rows), bitorder="little")
        targets, removed_ids = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        plan_moves(bits, self.growth[0] - len(ids), targets)
        remove_cells(
            *(self.cells, self.classes, self.num_used, self.growth, SALT),
            *(bits, targets, removed_ids, np.empty(2 * self.num_used.max(), np.int64)),
        )
        return removed_ids

    def find(self, ids):
        row_indices = np.empty(len(ids), np.int64)
        find(self.cells, self.classes, SALT, ids, row_indices)
        return row_indices

    def find_owned(self, ids, placement, shard):
        row_indices = np.empty(len(ids), np.int64)
        owners = placement.shard_of_bucket
        num_misrouted = find_owned(self.cells, self.classes, SALT, owners, shard, ids, row_indices)
        return num_misrouted, row_indices


def ids_of_segment(segment, count):
    ids = np.arange(2000 * count)
    return ids[(hash_ids(ids, int(SALT)) >> np.uint64(40)) & np.uint64(NUM_SEGMENTS - 1) == segment][:count]


def test_owned_ids_are_found_and_misrouted_ones_counted():
    index, placement, ids = Index(12), Placement.even(3), np.arange(-50, 50)
    index.insert(np.arange(-50, 50, 2))
    num_misrouted, row_indices = index.find_owned(ids, placement, 1)
    assert num_misrouted == np.count_nonzero(placement.shard_of(ids, int(SALT)) != 1)
    assert row_indices.tolist() == index.find(ids).tolist()


def test_ids_get_row_indices_in_the_order_of_arrival():
    done, row_indices = Index(12).insert(np.array([5, -7, 5, 0, -7, 2**63 - 1]))
    assert (done, row_indices.tolist()) == (6, [0, 1, 0, 2, 1, 3])


def test_segments_grow_one_by_one_in_turn():
    index = Index(12)
    turns = []
    for begin in range(0, 60_000, 500):
        index.insert(np.arange(begin, begin + 500))
        turns.append(int(index.growth[2]) * NUM_SEGMENTS + int(index.growth[1]))
    assert turns == sorted(turns)
    grown = index.classes > index.growth[2]
    assert grown[: index.growth[1]].all()
    # Beyond its turn a segment has grown only if it was fuller than the others by far.
    assert grown[index.growth[1] :].mean() < 0.1


def test_load_stays_between_a_quarter_and_three_quarters():
    index = Index(12)
    for begin in range(0, 100_000, 1000):
        index.insert(np.arange(begin, begin + 1000))
        assert (index.num_used <= 0.75 * (1 << index.classes.astype(np.int64))).all()
        if begin >= 10_000:
            assert index.num_used.sum() >= 0.25 * (1 << index.classes.astype(np.int64)).sum()


@pytest.mark.parametrize("num_rows", [0, 1, 2_252, 2_253, 50_000, 1_000_000])
def test_reserved_segments_have_the_load_of_grown_ones(num_rows):
    index = Index(12)
    set_classes(index.classes, index.growth, num_rows)
    assert index.growth[0] == 0
    cells = (1 << index.classes.astype(np.int64)).sum()
    assert cells == NUM_SEGMENTS << FIRST_CLASS if num_rows < 2_252 else 0.34 <= num_rows / cells <= 0.56


def test_reserved_segments_grow_only_beyond_the_reserved_rows():
    index = Index(12)
    set_classes(index.classes, index.growth, 50_000)
    classes = index.classes.copy()
    index.insert(np.arange(50_000))
    assert (index.classes != classes).mean() < 0.1  # by chance fuller than the others by far
    assert index.find(np.arange(50_000)).tolist() == list(range(50_000))
    index.insert(np.arange(50_000, 100_000))
    assert index.find(np.arange(100_000)).tolist() == list(range(100_000))


def test_segment_that_fills_before_its_turn_grows_alone():
    index = Index(12)
    ids = ids_of_segment(1000, 200)
    assert index.insert(ids)[0] == 200
    assert (index.classes > FIRST_CLASS).nonzero()[0].tolist() == [1000]
    assert index.find(ids).tolist() == list(range(200))


# Removal.


@pytest.mark.parametrize("num_left", [0, 1, 5_000, 49_999])
def test_removed_ids_are_gone_and_the_others_have_the_first_rows(num_left):
    index, ids = Index(12), np.arange(50_000) * 31
    index.insert(ids)
    removed, left = ids[num_left:], ids[:num_left]
    assert sorted(index.remove(removed).tolist()) == removed.tolist()
    assert (index.find(removed) == -1).all()
    assert sorted(index.find(left).tolist()) == list(range(num_left))
    assert index.growth[0] == index.num_used.sum() == num_left


def test_rows_below_the_number_that_is_left_stay_where_they_are():
    index = Index(12)
    index.insert(np.arange(10))
    index.remove(np.array([2, 8]))
    assert index.find(np.arange(10)).tolist() == [0, 1, -1, 3, 4, 5, 6, 7, -1, 2]


def test_segments_shrink_to_the_size_of_few_ids():
    index, small, ids = Index(12), Index(12), np.arange(60_000)
    small.insert(ids[:9_000])
    index.insert(ids)
    index.remove(ids[9_000:])
    assert index.growth.tolist() == small.growth.tolist()
    assert (index.classes <= small.classes).all()
    assert (index.num_used <= 0.75 * (1 << index.classes.astype(np.int64))).all()


def test_ids_are_found_while_segments_grow_and_shrink():
    index, ids = Index(10), np.arange(40_000) * -977
    for low, high in [(0, 40_000), (0, 100), (50, 30_000), (29_000, 30_000), (10_000, 40_000), (39_999, 40_000)]:
        index.insert(ids[low:high])
        present = ids[index.find(ids) >= 0]
        index.remove(np.setdiff1d(present, ids[low:high]))
        assert (index.find(ids) >= 0).nonzero()[0].tolist() == list(range(low, high))
        assert sorted(index.find(ids[low:high]).tolist()) == list(range(high - low))


# No room.


@pytest.mark.parametrize("last_class", [6, 7])
def test_insertion_stops_where_the_memory_ends(last_class):
    index = Index(last_class)
    ids = np.arange(100_000)
    done, row_indices = index.insert(ids)
    assert 0.4 * (NUM_SEGMENTS << last_class) < done < 0.76 * (NUM_SEGMENTS << last_class)
    assert row_indices.tolist() == list(range(done))
    assert index.growth[0] == done
    assert index.find(ids[:done]).tolist() == list(range(done))
    assert (index.find(ids[done:]) == -1).all()
    assert (index.rows[:done] == 2).all()
    assert not index.rows[done:].any()
    assert index.insert(ids[done:])[0] == 0
    assert index.insert(ids[:done])[0] == done
