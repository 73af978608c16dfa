from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.ids import GOLDEN_GAMMA, hash_ids, table_salt
from fleet_sparse.core.initializer import (
    constant,
    initial_rows,
    normal,
    truncated_normal,
    uniform,
    xavier_normal,
    xavier_uniform,
)

SALT = table_salt("C1")
INITIALIZERS = [
    constant(0.5),
    uniform(-0.25, 0.75),
    normal(0.1, 2.0),
    truncated_normal(0.0, 1.0, -2.0, 2.0),
    truncated_normal(1.0, 0.5, 2.0, 3.0),
    truncated_normal(1.0, 0.5, -4.0, -1.0),
]
EVERY = pytest.mark.parametrize("initializer", INITIALIZERS, ids=str)
ids_strategy = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30, unique=True)


def rows_of(initializer, ids, *, dim=4, seed=7, salt=SALT):
    return initial_rows(initializer, np.array(ids, np.int64), dim=dim, seed=seed, salt=salt)


def uniforms(ids, dim, seed, salt):
    """The uniform numbers behind the rows, from the definition: one SplitMix64 generator a row."""
    stream = int(hash_ids(np.array([seed], np.uint64).view(np.int64), 0)[0]) ^ salt
    states = hash_ids(ids, stream)[:, None] + np.arange(dim, dtype=np.uint64) * GOLDEN_GAMMA
    return ((hash_ids(states.view(np.int64), 0) >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52


@EVERY
@settings(max_examples=25)
@given(ids=ids_strategy, data=st.data())
def test_row_depends_on_its_id_not_on_order_or_batch(initializer, ids, data):
    rows = dict(zip(ids, rows_of(initializer, ids).tolist(), strict=True))
    order = data.draw(st.permutations(ids))
    cut = data.draw(st.integers(0, len(ids)))
    for part in (order[:cut], order[cut:]):
        assert rows_of(initializer, part).tolist() == [rows[i] for i in part]


@EVERY
def test_first_columns_do_not_depend_on_the_dim(initializer):
    assert (rows_of(initializer, [3, -9], dim=70)[:, :5] == rows_of(initializer, [3, -9], dim=5)).all()


@pytest.mark.parametrize("initializer", INITIALIZERS[1:], ids=str)
def test_seed_salt_id_and_column_each_change_the_value(initializer):
    value = rows_of(initializer, [1])[0, 0]
    others = [
        rows_of(initializer, [1], seed=8)[0, 0],
        rows_of(initializer, [1], salt=SALT + 1)[0, 0],
        rows_of(initializer, [2])[0, 0],
        rows_of(initializer, [1])[0, 1],
    ]
    assert value not in others


def test_rows_are_for_ever():
    # A worker and a pserver of two versions, or a snapshot and its job, must agree on them bit by bit.
    assert rows_of(uniform(-1, 1), [-1], dim=2)[0].tolist() == [
        float.fromhex("-0x1.e7c6fp-1"),
        float.fromhex("0x1.c0dacp-4"),
    ]
    assert rows_of(normal(0, 1), [-1], dim=2)[0].tolist() == [
        float.fromhex("-0x1.fbc766p+0"),
        float.fromhex("0x1.1a2b02p-3"),
    ]


def test_seed_may_have_64_bits():
    assert not (rows_of(uniform(0, 1), [1], seed=2**64 - 1) == rows_of(uniform(0, 1), [1], seed=2**63 - 1)).any()


def test_uniform_is_its_definition():
    ids = np.arange(-500, 500)
    expected = -0.25 + 1.0 * uniforms(ids, 8, 7, SALT)
    assert (rows_of(uniform(-0.25, 0.75), ids, dim=8) == expected.astype(np.float32)).all()


def test_normal_is_the_quantile_of_the_uniform():
    ids = np.arange(5000)
    quantile = NormalDist(0.1, 2.0).inv_cdf
    expected = np.vectorize(quantile)(uniforms(ids, 8, 7, SALT)).astype(np.float32)
    np.testing.assert_array_max_ulp(rows_of(normal(0.1, 2.0), ids, dim=8), expected, maxulp=1)


def test_normal_reaches_into_the_far_tails():
    # Cutoffs 6 to 8 deviations out use the outermost branch of the quantile.
    ids = np.arange(2000)
    values = rows_of(truncated_normal(0, 1, 6, 8), ids, dim=1)[:, 0]
    least, most = (math.erfc(cutoff / math.sqrt(2)) / 2 for cutoff in (8, 6))
    p = least + (most - least) * uniforms(ids, 1, 7, SALT)[:, 0]
    np.testing.assert_allclose(values, -np.vectorize(NormalDist().inv_cdf)(p), rtol=1e-6)


def moments(initializer):
    _, a, b, low, high = initializer
    if initializer.kind == "uniform":
        return (a + b) / 2, (b - a) / math.sqrt(12), a, b
    if initializer.kind == "normal":
        return a, b, -math.inf, math.inf
    unit = NormalDist()
    lo, hi = (low - a) / b, (high - a) / b
    mass = unit.cdf(hi) - unit.cdf(lo)
    shift = (unit.pdf(lo) - unit.pdf(hi)) / mass
    spread = 1 + (lo * unit.pdf(lo) - hi * unit.pdf(hi)) / mass - shift**2
    return a + b * shift, b * math.sqrt(spread), low, high


@pytest.mark.parametrize("initializer", INITIALIZERS[1:], ids=str)
def test_mean_deviation_and_range_are_those_of_the_distribution(initializer):
    values = rows_of(initializer, np.arange(50_000), dim=16).astype(np.float64)
    mean, std, low, high = moments(initializer)
    error = std / math.sqrt(values.size)
    assert abs(values.mean() - mean) < 5 * error
    assert abs(values.std() - std) < 5 * error
    assert low <= values.min()
    assert values.max() <= high


def test_constant_fills_every_column():
    assert (rows_of(constant(-1.5), [1, 2, 3]) == np.float32(-1.5)).all()


def test_no_ids_and_read_only_ids_are_accepted():
    ids = np.array([5, 6])
    ids.flags.writeable = False
    assert rows_of(uniform(0, 1), []).shape == (0, 4)
    assert initial_rows(uniform(0, 1), ids, dim=1, seed=0, salt=0).shape == (2, 1)


def test_xavier_uniform_bound_and_xavier_normal_deviation():
    assert xavier_uniform(10, 14) == uniform(-0.5, 0.5)
    assert xavier_normal(10, 22) == normal(0.0, 0.25)


def test_initializer_is_printed_as_its_call():
    assert [str(one) for one in INITIALIZERS[:4]] == [
        "constant(0.5)",
        "uniform(-0.25, 0.75)",
        "normal(0.1, 2.0)",
        "truncated_normal(0.0, 1.0, -2.0, 2.0)",
    ]


# Refusals.


def test_uniform_with_bounds_in_the_wrong_order_is_refused():
    with pytest.raises(ValueError, match=r"uniform\(1\.0, 0\.0\)"):
        uniform(1, 0)


def test_negative_deviation_is_refused():
    with pytest.raises(ValueError, match="initializer: normal"):
        normal(0, -1)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e39])
def test_number_that_is_not_finite_in_float32_is_refused(value):
    with pytest.raises(ValueError, match="initializer: "):
        constant(value)


def test_truncation_to_nothing_is_refused():
    with pytest.raises(ValueError, match="initializer: truncated_normal"):
        truncated_normal(0, 1, 2, 2)
    with pytest.raises(ValueError, match="initializer: truncated_normal"):
        truncated_normal(0, 1, 50, 51)
