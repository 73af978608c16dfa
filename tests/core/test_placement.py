from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.ids import NUM_BUCKETS, bucket_of
from fleet_sparse.core.placement import Placement, is_known, num_row_shards_of, version_of


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 16384])
def test_even_placement_has_contiguous_ranges_of_equal_size(num_shards):
    shards = Placement.even(num_shards).shard_of_bucket
    assert (np.diff(shards) >= 0).all()
    counts = np.bincount(shards, minlength=num_shards)
    assert counts.max() - counts.min() <= 1


def test_even_placement_is_bucket_times_shards_over_buckets():
    assert Placement.even(3).shard_of_bucket[[0, 5461, 5462, 10922, 10923, 16383]].tolist() == [0, 0, 1, 1, 2, 2]


def test_the_first_shards_may_have_all_rows():
    placement = Placement.even(5, version_of(5, 2))
    assert (placement.shard_of_bucket == Placement.even(2).shard_of_bucket).all()
    assert placement.num_shards == 5
    assert is_known(placement.version)


def test_versions_say_how_many_shards_have_rows():
    assert [version_of(5, num_row_shards) for num_row_shards in (0, 1, 4, 5)] == [1, 0x10001, 0x40001, 1]
    assert [num_row_shards_of(version) for version in (1, 0x10001, 0x40001)] == [0, 1, 4]
    assert not is_known(2)
    with pytest.raises(ValueError, match="6"):
        version_of(5, 6)


def test_shard_of_an_id_is_that_of_its_bucket():
    ids = np.arange(-1000, 1000).reshape(2, 1000)
    placement = Placement.even(5)
    assert (placement.shard_of(ids, 99) == bucket_of(ids, 99) * 5 // NUM_BUCKETS).all()
    assert placement.shard_of(ids, 99).dtype == np.int32


def test_placement_keeps_its_own_copy_of_the_array():
    shards = np.zeros(NUM_BUCKETS, np.int32)
    placement = Placement(4, 2, shards)
    shards[:] = 1
    assert not placement.shard_of_bucket.any()
    with pytest.raises(ValueError):  # noqa: PT011
        placement.shard_of_bucket[0] = 1


# Refusals.


def test_array_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"placement 3: .*\(5,\).*\(16384,\)"):
        Placement(3, 1, np.zeros(5, np.int32))


@pytest.mark.parametrize("num_shards", [0, -1, 16385])
def test_number_of_shards_out_of_range_is_refused(num_shards):
    with pytest.raises(ValueError, match=r"placement 1: num_shards.* 1 to 16384"):
        Placement.even(num_shards)


@pytest.mark.parametrize("shard", [-1, 2])
def test_bucket_of_a_missing_shard_is_refused(shard):
    with pytest.raises(ValueError, match=r"placement 1: .* 0 to 1$"):
        Placement(1, 2, np.full(NUM_BUCKETS, shard, np.int32))
