from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet_sparse.core.ids import BUCKET_BITS, NUM_BUCKETS, bucket_of, hash_ids, table_id, table_salt

EXTREMES = np.array([-(2**63), -1, 0, 1, 2**63 - 1])
MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """As in Steele, Lea and Flood, with Python's integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def test_hash_is_the_published_splitmix64():
    # The first outputs of the generator seeded with 1234567, as other implementations print them.
    golden = 0x9E3779B97F4A7C15
    states = np.array([1234567 + k * golden & MASK for k in range(5)], np.uint64).view(np.int64)
    assert hash_ids(states, 0).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(hnp.arrays(np.int64, 20), st.integers(0, MASK))
def test_hash_is_splitmix64_of_id_xor_salt(ids, salt):
    assert hash_ids(ids, salt).tolist() == [splitmix64((int(i) & MASK) ^ salt) for i in ids]


def test_hash_keeps_the_shape():
    assert hash_ids(np.zeros((2, 3, 4), np.int64), 5).shape == (2, 3, 4)


# These numbers stand in snapshots and on the wire; they may never change.


@pytest.mark.parametrize(
    ("name", "salt", "number"),
    [("C1", 4286596853037386291, 778414391), ("emb/user@v2", 15662212379919542018, 2730198410)],
)
def test_salt_and_number_of_a_table_are_for_ever(name, salt, number):
    assert (table_salt(name), table_id(name)) == (salt, number)


def test_buckets_of_the_extreme_ids_are_for_ever():
    assert bucket_of(EXTREMES, table_salt("C1")).tolist() == [9811, 9816, 2389, 10321, 15404]


@given(hnp.arrays(np.int64, 20), st.integers(0, MASK))
def test_bucket_is_the_top_bits_of_the_hash(ids, salt):
    assert bucket_of(ids, salt).tolist() == [h >> (64 - BUCKET_BITS) for h in hash_ids(ids, salt).tolist()]


def test_small_ids_spread_evenly_over_the_buckets():
    counts = np.bincount(bucket_of(np.arange(100 * NUM_BUCKETS), table_salt("C1")), minlength=NUM_BUCKETS)
    # Chi-square over 16383 degrees of freedom: mean 16383, deviation 181.
    assert abs(((counts - 100) ** 2 / 100).sum() - (NUM_BUCKETS - 1)) < 5 * 181


def test_one_id_has_other_buckets_in_other_tables():
    assert len({int(bucket_of(np.array([7]), table_salt(f"C{i}"))[0]) for i in range(26)}) > 20
