from __future__ import annotations

import threading
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.placement import Placement
from fleet_sparse.worker.rows.deduplicator import Deduplicator, LookupGroup, TableLookups, UniqueIds

SALT = 0x1234_5678_9ABC_DEF0
IDS = st.integers(-(2**63), 2**63 - 1)


def int64(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


@given(st.lists(st.lists(st.one_of(st.integers(-5, 5), IDS)), max_size=4), st.sampled_from([1, 2, 3, 7]))
def test_inverse_leads_back_to_every_id(lists: list[list[int]], num_shards: int) -> None:
    arrays = [int64(*values) for values in lists]
    unique, inverses = Deduplicator(Placement.even(num_shards)).unique(arrays, SALT)
    for array, inverse in zip(arrays, inverses, strict=True):
        np.testing.assert_array_equal(unique.ids[inverse], array)


@given(st.lists(st.lists(st.one_of(st.integers(-5, 5), IDS)), min_size=6, max_size=6), st.sampled_from([1, 2, 3]))
def test_tables_placed_together_have_ids_as_placed_alone(lists: list[list[int]], num_shards: int) -> None:
    arrays = [int64(*values) for values in lists]
    paddings: list[tuple[int | None, ...]] = [(None, 3), (None,), (-1, None, 0)]
    tables = [TableLookups(f"t{number}", np.uint64(SALT + number), each) for number, each in enumerate(paddings)]
    positions = [np.empty_like(array) for array in arrays]
    placed = Deduplicator(Placement.even(num_shards)).place_tables(LookupGroup(tables), arrays, positions)
    begin = 0
    for lookups, unique in zip(tables, placed, strict=True):
        end = begin + len(lookups.paddings)
        alone = [np.empty_like(array) for array in arrays[begin:end]]
        of_table = Deduplicator(Placement.even(num_shards)).place(lookups, arrays[begin:end], alone)
        assert [each.tolist() for each in unique[:2]] == [each.tolist() for each in of_table[:2]]
        assert [each.tolist() for each in positions[begin:end]] == [each.tolist() for each in alone]
        begin = end


@given(st.lists(st.one_of(st.integers(-5, 5), IDS)), st.sampled_from([1, 2, 3, 7]))
def test_ids_are_distinct_and_grouped_by_shard(values: list[int], num_shards: int) -> None:
    placement = Placement.even(num_shards)
    unique, _ = Deduplicator(placement).unique([int64(*values)], SALT)
    assert sorted(unique.ids.tolist()) == sorted(set(values))
    shards = np.repeat(np.arange(num_shards), unique.num_per_shard)
    np.testing.assert_array_equal(placement.shard_of(unique.ids, SALT), shards)


def test_ids_of_a_shard_are_in_order_of_appearance() -> None:
    unique, _ = Deduplicator(Placement.even(1)).unique([int64(9, 3, 9), int64(4, 3, -1)], SALT)
    assert unique.ids.tolist() == [9, 3, 4, -1]


def test_inverse_has_the_shape_of_its_ids() -> None:
    _, (first, second) = Deduplicator(Placement.even(2)).unique([np.zeros((2, 3), np.int64), int64(5)], SALT)
    assert (first.shape, second.shape) == ((2, 3), (1,))


def test_ids_need_not_be_contiguous() -> None:
    ids = np.arange(12, dtype=np.int64).reshape(3, 4).T[::2]
    unique, (inverse,) = Deduplicator(Placement.even(2)).unique([ids], SALT)
    np.testing.assert_array_equal(unique.ids[inverse], ids)


def test_no_ids_at_all() -> None:
    unique, inverses = Deduplicator(Placement.even(2)).unique([], SALT)
    assert (unique.ids.size, unique.num_per_shard.tolist(), inverses) == (0, [0, 0], [])


def test_an_earlier_result_is_not_written_over() -> None:
    deduplicator = Deduplicator(Placement.even(2))
    unique, (inverse,) = deduplicator.unique([np.arange(1000, dtype=np.int64)], SALT)
    before = unique.ids.copy(), unique.num_per_shard.copy(), inverse.copy()
    deduplicator.unique([np.arange(5000, 6000, dtype=np.int64)], SALT)
    for kept, now in zip(before, (unique.ids, unique.num_per_shard, inverse), strict=True):
        np.testing.assert_array_equal(kept, now)


def test_threads_do_not_disturb_each_other() -> None:
    deduplicator = Deduplicator(Placement.even(2))
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            ids = rng.integers(0, 500, 2000)
            unique, (inverse,) = deduplicator.unique([ids], SALT)
            if not np.array_equal(unique.ids[inverse], ids):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_of_ids_is_used_again_once_nobody_has_a_view() -> None:
    deduplicator = Deduplicator(Placement.even(2))
    ids = np.arange(5000, dtype=np.int64)
    unique, _ = deduplicator.unique([ids], SALT)
    address, view = unique.ids.ctypes.data, memoryview(unique.ids).cast("B")[8:]
    del unique
    other, _ = deduplicator.unique([ids], SALT)
    del view
    third, _ = deduplicator.unique([ids], SALT)
    assert other.ids.ctypes.data != address
    assert third.ids.ctypes.data == address


def test_a_thread_that_ended_leaves_its_memory_to_the_next() -> None:
    deduplicator = Deduplicator(Placement.even(2))
    addresses = []

    def work() -> None:
        addresses.append(deduplicator.unique([np.arange(5000)], SALT)[0].ids.ctypes.data)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert addresses[0] == addresses[1]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="ids: int32, should be int64"):
        Deduplicator(Placement.even(1)).unique([np.zeros(3, np.int32)], SALT)  # type: ignore[list-item]


# Lookups of a table


def place(lookups: TableLookups, *ids: NDArray[Any], num_shards: int = 2) -> tuple[UniqueIds, list[NDArray[np.int64]]]:
    positions = [np.full(each.shape, -9, np.int64) for each in ids]
    return Deduplicator(Placement.even(num_shards)).place(lookups, ids, positions), positions


@given(st.lists(st.lists(st.integers(-3, 3)), min_size=2, max_size=2), st.sampled_from([1, 2, 7]))
def test_padding_of_each_lookup_has_the_index_after_the_last(lists: list[list[int]], num_shards: int) -> None:
    arrays = [int64(*values) for values in lists]
    lookups = TableLookups("t", np.uint64(SALT), (0, None))
    unique, positions = place(lookups, *arrays, num_shards=num_shards)
    padding = -77
    rows = np.append(unique.ids, padding)
    expected = [np.where(arrays[0] == 0, padding, arrays[0]), arrays[1]]
    assert [rows[each].tolist() for each in positions] == [each.tolist() for each in expected]
    assert sorted(unique.ids) == sorted(set(arrays[0][arrays[0] != 0]) | set(arrays[1]))


def test_ids_of_32_bits_are_those_of_64() -> None:
    unique, (positions,) = place(TableLookups("t", np.uint64(SALT)), np.array([[5, -1], [5, 7]], np.int32))
    assert unique.ids[positions].tolist() == [[5, -1], [5, 7]]


@pytest.mark.parametrize("wrong", [-1, 10, 2**63 - 1, -(2**63)])
def test_an_id_outside_of_a_bounded_table_is_named(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"table 't': id {wrong} is outside \[0, 10\)"):
        place(TableLookups("t", np.uint64(SALT), (None,), 10), int64(3, wrong, 9))


def test_a_batch_after_one_that_failed_is_right() -> None:
    deduplicator = Deduplicator(Placement.even(2))
    bounded, positions = TableLookups("t", np.uint64(SALT), (None,), 10), [np.empty(2, np.int64)]
    with pytest.raises(ValueError, match="11"):
        deduplicator.place(bounded, [int64(3, 11)], positions)
    unique = deduplicator.place(bounded, [int64(3, 9)], positions)
    assert unique.ids[positions[0]].tolist() == [3, 9]


def test_ids_that_are_not_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="table 't': ids are float32"):
        place(TableLookups("t", np.uint64(SALT)), np.zeros(3, np.float32))


# Some of the ids

SOME_IDS = st.sets(st.one_of(st.integers(-9, 9), IDS))


@given(SOME_IDS, st.randoms(), st.sampled_from([1, 2, 3, 7]))
def test_ids_at_some_places_are_grouped_by_shard(values: set[int], random: Random, num_shards: int) -> None:
    unique, _ = Deduplicator(Placement.even(num_shards)).unique([int64(*values)], SALT)
    is_wanted = np.array([random.random() < 0.5 for _ in values], np.bool_)
    wanted = unique.at(np.flatnonzero(is_wanted))
    assert (wanted.ids.dtype, wanted.num_per_shard.dtype) == (np.int64, np.int64)
    np.testing.assert_array_equal(wanted.ids, unique.ids[is_wanted])
    shards = np.repeat(np.arange(num_shards), wanted.num_per_shard)
    np.testing.assert_array_equal(Placement.even(num_shards).shard_of(wanted.ids, SALT), shards)


@given(SOME_IDS, SOME_IDS)
def test_ids_are_found_among_others(ids: set[int], others: set[int]) -> None:
    places = Deduplicator(Placement.even(2)).places(int64(*ids), int64(*others), SALT)
    place_of = {id: place for place, id in enumerate(others)}
    assert places.tolist() == [place_of.get(id, -1) for id in ids]


# Successive batches

LOOKUPS = TableLookups("t", np.uint64(SALT), (None, 0), 10)
Batches = list[list[list[int]]]  # of each batch, of each of two lookups: ids


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.lists(st.integers(-1, 9), max_size=12), min_size=2, max_size=2), max_size=6),
    st.sampled_from([1, 2, 3, 7]),
    st.integers(0, 3000),
)
def test_successive_batches_are_ordered_early_first(batches: Batches, num_shards: int, num_more: int) -> None:
    """The model: distinct ids in order of appearance, by shard and by presence in the batch before."""
    placement = Placement.even(num_shards)
    sequence, before = Deduplicator(placement).sequence(LOOKUPS), None
    for number, batch in enumerate(batches):
        first, second = (int64(*values) for values in batch)
        if number == 1:
            first = np.concatenate([first, np.arange(num_more) % 7])  # more than there was scratch memory for
        positions = [np.full(len(first), -9, np.int64), np.full(len(second), -9, np.int64)]
        if -1 in first or -1 in second:
            with pytest.raises(ValueError, match="id -1"):
                sequence.place([first, second], positions)
            before = None
            continue
        ids = sequence.place([first, second], positions)
        wanted = [*first.tolist(), *(id for id in second.tolist() if id)]
        distinct, seen = [*dict.fromkeys(wanted)], [] if before is None else before.ids.tolist()
        expected: list[int] = []
        for shard in range(num_shards):
            of_shard = [id for id in distinct if placement.shard_of(int64(id), SALT)[0] == shard]
            for part, is_there in ((ids.early, False), (ids.late, True)):
                assert part.begins is not None
                assert part.begins[shard] == len(expected)
                expected += [id for id in of_shard if (id in seen) is is_there]
                assert part.begins[shard] + part.num_per_shard[shard] == len(expected)
            assert ids.unique.num_per_shard[shard] == len(of_shard)
        assert ids.unique.ids.tolist() == expected
        rows = np.append(ids.unique.ids, 0)  # padding is id 0 of the second lookup
        assert [rows[each].tolist() for each in positions] == [first.tolist(), second.tolist()]
        assert np.all(positions[1][second == 0] == len(expected))
        assert ids.before is before
        before = ids.unique


def test_ids_of_a_batch_are_kept_while_the_next_is_placed() -> None:
    sequence, made = Deduplicator(Placement.even(2)).sequence(TableLookups("t", np.uint64(SALT))), []
    for first in (0, 500, 1000):
        made.append(sequence.place([np.arange(first, first + 1000)], [np.empty(1000, np.int64)]))
    assert [sorted(ids.unique.ids.tolist()) for ids in made] == [[*range(n, n + 1000)] for n in (0, 500, 1000)]
    assert [int(ids.early.num_per_shard.sum()) for ids in made] == [1000, 500, 500]


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_distinct_ids_are_grouped_as_a_batch_of_them(num_shards: int) -> None:
    deduplicator = Deduplicator(Placement.even(num_shards))
    for num_ids in (0, 1, 100):
        ids = np.random.default_rng(num_ids).permutation(10_000)[:num_ids]
        unique, order = deduplicator.grouped(ids, 3)
        expected, _ = deduplicator.unique([ids], 3)
        np.testing.assert_array_equal(ids if order is None else ids[order], expected.ids)
        assert deduplicator.grouped(expected.ids, 3)[1] is None
        np.testing.assert_array_equal(unique.ids, expected.ids)
        np.testing.assert_array_equal(unique.num_per_shard, expected.num_per_shard)
