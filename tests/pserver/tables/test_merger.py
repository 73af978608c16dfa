from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.kernels_ownership import count_misrouted
from fleet_sparse.core.placement import Placement
from fleet_sparse.pserver.tables.merger import Merger
from fleet_sparse.warm_up import warm_up
from support.shards import floats, ids_of

SALT = np.uint64(12345)


@pytest.fixture(autouse=True)
def kernels() -> None:
    warm_up()


def test_distinct_ids_are_returned_as_they_are() -> None:
    ids, grads = ids_of(3, 1, 2), floats([1], [2], [3])
    merged = Merger(Placement.even(1), 0).merge(ids, grads, SALT)
    assert merged.ids is ids
    assert merged.grads is grads


def test_no_ids_merge_to_none() -> None:
    merged = Merger(Placement.even(1), 0).merge(ids_of(), np.empty((0, 4), np.float32), SALT)
    assert (merged.ids.shape, merged.grads.shape) == ((0,), (0, 4))


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=50), max_size=4),
    st.integers(1, 4),
)
def test_merger_agrees_with_numpy_on_batches_of_any_size(batches: list[list[int]], num_shards: int) -> None:
    placement = Placement.even(num_shards)
    merger = Merger(placement, num_shards - 1)
    for batch in batches:
        ids = np.array(batch, np.int64)
        grads = np.arange(2 * len(ids), dtype=np.float32).reshape(-1, 2)
        distinct, inverse = np.unique(ids, return_inverse=True)
        sums = np.zeros((len(distinct), 2), np.float32)
        np.add.at(sums, inverse, grads)
        checked = merger.check(ids, grads, SALT)
        assert np.array_equal(checked.hashes.view(np.uint64), hash_ids(ids, int(SALT)))
        misrouted = placement.shard_of(ids, int(SALT)) != num_shards - 1
        assert (checked.num_misrouted, checked.may_repeat) == (misrouted.sum(), len(ids) > len(distinct))
        assert count_misrouted(ids, SALT, placement.shard_of_bucket, num_shards - 1) == misrouted.sum()
        merged = merger.merge(ids, grads, SALT)
        order = np.argsort(merged.ids)
        assert np.array_equal(merged.ids[order], distinct)
        assert np.array_equal(merged.grads[order], sums)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max, 0.0])
def test_check_finds_one_gradient_that_is_not_finite(value: float) -> None:
    ids, merger = np.arange(1000, dtype=np.int64), Merger(Placement.even(1), 0)
    for place in (0, 777, 2999):
        grads = np.full((1000, 3), -1.5, np.float32)
        grads.reshape(-1)[place] = value
        assert merger.check(ids, grads, SALT).is_finite == np.isfinite(value)


# Which of some ids are among others


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), max_size=50),
    st.sets(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), max_size=50),
    st.integers(1, 3),
)
def test_among_agrees_with_sets_on_every_shard(drawn: list[int], others: set[int], num_shards: int) -> None:
    placement = Placement.even(num_shards)
    ids, wanted = np.array(drawn, np.int64), np.array(sorted(others), np.int64)
    for shard in range(num_shards):
        mine, its = (array[placement.shard_of(array, int(SALT)) == shard] for array in (ids, wanted))
        found = Merger(placement, shard).among(mine, its, SALT)
        assert found.tolist() == [id_ in others for id_ in mine.tolist()]


def test_gradients_of_an_id_are_summed_in_their_order() -> None:
    merged = Merger(Placement.even(1), 0).merge(ids_of(5, 5, 5), floats([1e8], [1.0], [-1e8]), SALT)
    assert merged.grads.tolist() == [[0.0]]
    merged = Merger(Placement.even(1), 0).merge(ids_of(5, 5, 5), floats([1e8], [-1e8], [1.0]), SALT)
    assert merged.grads.tolist() == [[1.0]]
