from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fleet_sparse.core.kernels_half import from_bfloat16, from_float16, to_bfloat16, to_float16

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)
BITS = hnp.arrays(np.uint32, st.integers(0, 40), elements=st.integers(0, 2**32 - 1))
MIDDLES_OF_FLOAT16 = (ALL_HALVES[:0x7C00].view(np.float16).astype(np.float32) + np.float32(2.0**-25)).view(np.uint32)
MIDDLES_OF_BFLOAT16 = (ALL_HALVES.astype(np.uint32) << 16) | np.uint32(0x8000)
NAN = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF], np.uint32)


def applied(kernel: Callable[..., None], bits: NDArray[Any], dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    out = np.empty(bits.shape, dtype)
    kernel(bits, out)
    return out


float16_of = partial(applied, to_float16, dtype=np.uint16)
bfloat16_of = partial(applied, to_bfloat16, dtype=np.uint16)
of_float16 = partial(applied, from_float16, dtype=np.uint32)
of_bfloat16 = partial(applied, from_bfloat16, dtype=np.uint32)


def numpys_float16(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    with np.errstate(over="ignore", under="ignore"):
        return bits.view(np.float32).astype(np.float16).view(np.uint16)


def rounded_in_float64(value: float) -> float:
    """To 8 significant bits, or to a multiple of 2^-133, ties to even; infinite from 2^128 on."""
    if value == 0 or not np.isfinite(value):
        return value
    unit = 2.0 ** max(int(np.floor(np.log2(abs(value)))) - 7, -133)
    rounded = float(np.rint(value / unit)) * unit
    return rounded if abs(rounded) < 2.0**128 else float(np.copysign(np.inf, value))


def neighbours(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.concatenate([bits - np.uint32(1), bits, bits + np.uint32(1)])


def test_every_float16_becomes_the_equal_float32() -> None:
    values, numpys = of_float16(ALL_HALVES).view(np.float32), ALL_HALVES.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(values, numpys)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(numpys))


def test_every_bfloat16_becomes_the_equal_float32() -> None:
    np.testing.assert_array_equal(of_bfloat16(ALL_HALVES), ALL_HALVES.astype(np.uint32) << 16)


def test_every_float16_survives_the_round_trip() -> None:
    is_number = ~np.isnan(ALL_HALVES.view(np.float16))
    np.testing.assert_array_equal(float16_of(of_float16(ALL_HALVES))[is_number], ALL_HALVES[is_number])


def test_every_bfloat16_survives_the_round_trip() -> None:
    is_number = ~np.isnan(of_bfloat16(ALL_HALVES).view(np.float32))
    np.testing.assert_array_equal(bfloat16_of(of_bfloat16(ALL_HALVES))[is_number], ALL_HALVES[is_number])


@given(BITS)
def test_float32s_round_to_numpys_float16s(bits: NDArray[np.uint32]) -> None:
    bits = bits[~np.isnan(bits.view(np.float32))]
    np.testing.assert_array_equal(float16_of(bits), numpys_float16(bits))


def test_float32s_around_each_float16_round_as_numpys() -> None:
    bits = np.concatenate([neighbours(of_float16(ALL_HALVES[:0x7C01])), neighbours(MIDDLES_OF_FLOAT16)])
    both = np.concatenate([bits, bits ^ np.uint32(0x80000000)])
    both = both[~np.isnan(both.view(np.float32))]
    np.testing.assert_array_equal(float16_of(both), numpys_float16(both))


@given(BITS)
def test_float32s_round_to_bfloat16s_as_in_float64(bits: NDArray[np.uint32]) -> None:
    values = bits.view(np.float32).astype(np.float64)
    expected = [rounded_in_float64(value) for value in values.tolist()]
    np.testing.assert_array_equal(of_bfloat16(bfloat16_of(bits)).view(np.float32), expected)


def test_float32s_around_ties_of_bfloat16_round_as_in_float64() -> None:
    bits = neighbours(MIDDLES_OF_BFLOAT16[::37])
    bits = bits[~np.isnan(bits.view(np.float32))]
    expected = [rounded_in_float64(value) for value in bits.view(np.float32).astype(np.float64).tolist()]
    np.testing.assert_array_equal(of_bfloat16(bfloat16_of(bits)).view(np.float32), expected)


@pytest.mark.parametrize(
    ("shorten", "lengthen"), [(float16_of, of_float16), (bfloat16_of, of_bfloat16)], ids=["float16", "bfloat16"]
)
def test_nan_stays_nan(shorten: Callable[..., Any], lengthen: Callable[..., Any]) -> None:
    assert np.isnan(lengthen(shorten(NAN)).view(np.float32)).all()


def test_values_past_bfloat16_become_infinite_with_their_sign() -> None:
    largest = np.finfo(np.float32).max
    values = np.array([3.3895e38, largest, -largest, np.inf], np.float32)
    halves = of_bfloat16(bfloat16_of(values.view(np.uint32))).view(np.float32)
    assert np.isfinite(halves[0])
    assert halves[1:].tolist() == [np.inf, -np.inf, np.inf]
