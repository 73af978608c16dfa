from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.placement import Placement
from fleet_sparse.core.warm_up import warm_up
from fleet_sparse.pserver.merge import Merger
from fleet_sparse.pserver.ownership import count_foreign
from support.shards import floats, ids_of

SALT = 12345


@pytest.fixture(autouse=True)
def kernels() -> None:
    warm_up()


def test_distinct_ids_are_returned_as_they_are() -> None:
    ids, grads = ids_of(3, 1, 2), floats([1], [2], [3])
    merged = Merger(Placement.even(1), 0).merge(ids, grads, SALT)
    assert merged.ids is ids
    assert merged.grads is grads


def test_gradients_of_repeated_ids_are_summed() -> None:
    merged = Merger(Placement.even(1), 0).merge(ids_of(3, 1, 3), floats([1, 10], [2, 20], [4, 40]), SALT)
    assert merged.ids.tolist() == [3, 1]
    assert merged.grads.tolist() == [[5, 50], [2, 20]]


def test_no_ids_merge_to_none() -> None:
    merged = Merger(Placement.even(1), 0).merge(ids_of(), np.empty((0, 4), np.float32), SALT)
    assert (merged.ids.shape, merged.grads.shape, merged.num_foreign) == ((0,), (0, 4), 0)


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=50), max_size=4),
    st.integers(1, 4),
)
def test_merger_agrees_with_numpy_however_large_the_batch_before(batches: list[list[int]], num_shards: int) -> None:
    placement = Placement.even(num_shards)
    merger = Merger(placement, num_shards - 1)
    for batch in batches:
        ids = np.array(batch, np.int64)
        grads = np.arange(2 * len(ids), dtype=np.float32).reshape(-1, 2)
        distinct, inverse = np.unique(ids, return_inverse=True)
        sums = np.zeros((len(distinct), 2), np.float32)
        np.add.at(sums, inverse, grads)
        merged = merger.merge(ids, grads, SALT)
        order = np.argsort(merged.ids)
        assert np.array_equal(merged.ids[order], distinct)
        assert np.array_equal(merged.grads[order], sums)
        foreign = placement.shard_of(ids, SALT) != num_shards - 1
        assert merged.num_foreign == len(np.unique(ids[foreign]))
        assert count_foreign(ids, np.uint64(SALT), placement.shard_of_bucket, num_shards - 1) == foreign.sum()
