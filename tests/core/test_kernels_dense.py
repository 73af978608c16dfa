from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.kernels_dense import add_one_more, add_two

FLOATS = st.lists(st.floats(width=32), min_size=1, max_size=70)
FACTORS = st.sampled_from([1.0, 0.5, 1 / 3, 0.0])


@given(FLOATS, FACTORS, FACTORS, st.sampled_from([1.0, 2.0, 7 / 3]))
def test_sums_have_the_bits_of_numpy(drawn: list[float], first_factor: float, factor: float, divisor: float) -> None:
    first, f, g, d = np.array(drawn, np.float32), np.float32(first_factor), np.float32(factor), np.float32(divisor)
    second, out = first[::-1].copy(), np.empty_like(first)
    with np.errstate(all="ignore"):
        expected = (first * f + second * g) / d
        assert add_two(first, f, second, g, d, out) == bool(np.isfinite(expected).all())
        np.testing.assert_array_equal(out, expected)
        expected = (out + first * f) / d
        assert add_one_more(out, first, f, d) == bool(np.isfinite(expected).all())
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 37, 99])
def test_one_value_that_is_not_finite_is_found(fault: float, index: int) -> None:
    one, grads, faulty = np.float32(1), np.ones(100, np.float32), np.ones(100, np.float32)
    faulty[index] = fault
    assert add_two(grads, one, grads, one, one, np.empty(100, np.float32))
    assert not add_two(grads, one, faulty, one, one, np.empty(100, np.float32))
    assert add_one_more(grads.copy(), grads, one, one)
    assert not add_one_more(grads.copy(), faulty, one, one)
