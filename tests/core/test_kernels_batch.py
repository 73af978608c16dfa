from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.kernels_batch import all_finite, dedup_scratch, dedup_split
from fleet_sparse.core.placement import Placement

SCRATCH = dedup_scratch(60_000)


def dedup(ids, salt, num_shards, scratch=SCRATCH):
    n = len(ids)
    unique, inverse = np.empty(n, np.int64), np.empty(n, np.int64)
    num_per_shard = np.full(num_shards, -1)
    shards = Placement.even(num_shards).shard_of_bucket
    k = dedup_split(ids, np.uint64(salt), shards, num_shards, unique, inverse, num_per_shard, *scratch)
    return unique[:k], inverse, num_per_shard


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
