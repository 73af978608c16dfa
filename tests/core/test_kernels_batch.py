from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet_sparse.core.kernels_batch import all_finite, dedup_scratch, dedup_split, find_among, segment_sum
from fleet_sparse.core.placement import Placement

SCRATCH = dedup_scratch(60_000)

some_ids = st.one_of(
    hnp.arrays(np.int64, st.integers(0, 200)),
    hnp.arrays(np.int64, st.integers(0, 200), elements=st.integers(-3, 3)),
    hnp.arrays(np.int64, st.integers(0, 200), elements=st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1])),
)
salts = st.integers(0, 2**64 - 1)


def dedup(ids, salt, num_shards, scratch=SCRATCH):
    n = len(ids)
    unique, inverse = np.empty(n, np.int64), np.empty(n, np.int64)
    num_per_shard = np.full(num_shards, -1)
    shards = Placement.even(num_shards).shard_of_bucket
    k = dedup_split(ids, np.uint64(salt), shards, num_shards, unique, inverse, num_per_shard, *scratch)
    return unique[:k], inverse, num_per_shard


@given(some_ids, salts, st.integers(1, 9))
def test_inverse_leads_from_every_id_to_itself(ids, salt, num_shards):
    unique, inverse, _ = dedup(ids, salt, num_shards)
    assert (unique[inverse] == ids).all()


@given(some_ids, salts, st.integers(1, 9))
def test_ids_are_grouped_by_shard_in_order_of_appearance(ids, salt, num_shards):
    unique, _, num_per_shard = dedup(ids, salt, num_shards)
    seen = np.array(list(dict.fromkeys(ids.tolist())), np.int64)
    shards = Placement.even(num_shards).shard_of(seen, salt)
    expected = [seen[shards == shard] for shard in range(num_shards)]
    assert num_per_shard.tolist() == [len(part) for part in expected]
    assert unique.tolist() == np.concatenate(expected).tolist()


def test_most_shards_that_a_placement_has():
    ids = np.arange(50_000)
    unique, inverse, num_per_shard = dedup(ids, 3, 16384)
    assert (np.diff(Placement.even(16384).shard_of(unique, 3)) >= 0).all()
    assert num_per_shard.sum() == 50_000
    assert (unique[inverse] == ids).all()


def test_scratch_is_empty_again_after_use():
    dedup(np.arange(1000) % 77, 5, 3)
    assert (SCRATCH[0] == -1).all()


@pytest.mark.parametrize("num_ids", [0, 1, 8, 9, 1000])
def test_scratch_of_exactly_the_size_is_enough(num_ids):
    ids = np.arange(num_ids)
    unique, _, _ = dedup(ids, 5, 2, dedup_scratch(num_ids))
    assert len(unique) == num_ids


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32), st.data())
def test_segment_sum_adds_in_the_order_of_arrival(k, dim, seed, data):
    inverse = np.array(data.draw(st.lists(st.integers(0, k - 1), max_size=100)), np.int64)
    grads = np.random.default_rng(seed).standard_normal((len(inverse), dim)).astype(np.float32)
    out = np.full((k, dim), np.nan, np.float32)
    segment_sum(grads.reshape(-1), inverse, dim, out.reshape(-1))
    expected = np.zeros((k, dim), np.float32)
    np.add.at(expected, inverse, grads)
    assert (out == expected).all()


@pytest.mark.parametrize("size", [0, 1, 7, 64, 1000])
def test_finite_values_are_finite(size):
    largest = np.finfo(np.float32).max
    values = np.resize(np.array([0, -0.0, largest, -largest, 1e-45], np.float32), size)
    assert all_finite(values) is True


@given(st.integers(1, 300), st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]), st.data())
def test_one_value_that_is_not_finite_is_found(size, value, data):
    values = np.ones(size, np.float32)
    values[data.draw(st.integers(0, size - 1))] = value
    assert all_finite(values) is False


@given(some_ids, some_ids, salts)
def test_places_among_others_are_those_of_a_dict(ids, others, salt):
    others = np.unique(others)
    places = np.empty(len(ids), np.int64)
    find_among(ids, others, np.uint64(salt), SCRATCH.table, SCRATCH.cell_of, places)
    place_of = {number: place for place, number in enumerate(others.tolist())}
    assert places.tolist() == [place_of.get(number, -1) for number in ids.tolist()]
    assert (SCRATCH.table == -1).all()
