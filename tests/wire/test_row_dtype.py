from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.settings import ROWS_DTYPES
from fleet_sparse.wire.row_dtype import RowDtype, copy_from_frame, for_frame, from_frame

# Values that both 16-bit formats have.
EXACT = np.array([[0.5, -0.25, 0.0], [1.0, -2.0, 65280.0]], np.float32)


def there_and_back(rows: NDArray[np.float32], dtype: RowDtype) -> NDArray[np.float32]:
    return from_frame(for_frame(rows, dtype), dtype)


@pytest.mark.parametrize("dtype", RowDtype)
def test_itemsize_in_frames_is_that_of_the_page(dtype: RowDtype) -> None:
    rows = for_frame(EXACT, dtype)
    assert rows.dtype == dtype.in_frames
    assert (rows.shape, rows.nbytes) == (EXACT.shape, EXACT.size * (4 if dtype is RowDtype.FLOAT32 else 2))


@pytest.mark.parametrize("dtype", RowDtype)
def test_values_of_every_dtype_survive_the_round_trip(dtype: RowDtype) -> None:
    np.testing.assert_array_equal(there_and_back(EXACT, dtype), EXACT)


def test_float32_is_not_copied() -> None:
    assert for_frame(EXACT, RowDtype.FLOAT32) is EXACT
    assert from_frame(EXACT, RowDtype.FLOAT32) is EXACT


@pytest.mark.parametrize("dtype", RowDtype)
def test_rows_that_are_not_contiguous_are_encoded(dtype: RowDtype) -> None:
    rows = np.asfortranarray(EXACT)
    in_frame = for_frame(rows, dtype)
    assert in_frame.flags.c_contiguous
    np.testing.assert_array_equal(from_frame(in_frame, dtype), EXACT)


@pytest.mark.parametrize("dtype", RowDtype)
def test_rows_are_written_to_out_alone(dtype: RowDtype) -> None:
    whole = np.full((4, 3), 9, np.float32)
    copy_from_frame(for_frame(EXACT, dtype), dtype, whole[1:3])
    np.testing.assert_array_equal(whole[1:3], EXACT)
    assert whole[[0, 3]].tolist() == [[9] * 3] * 2


@pytest.mark.parametrize("dtype", RowDtype)
def test_rows_are_written_to_an_array_that_is_not_contiguous(dtype: RowDtype) -> None:
    whole = np.full((2, 5), 9, np.float32)
    copy_from_frame(for_frame(EXACT, dtype), dtype, whole[:, 1:4])
    np.testing.assert_array_equal(whole[:, 1:4], EXACT)
    assert whole[:, [0, 4]].tolist() == [[9, 9]] * 2


@pytest.mark.parametrize("dtype", RowDtype)
def test_zero_rows_are_encoded_and_decoded(dtype: RowDtype) -> None:
    assert there_and_back(np.empty((0, 3), np.float32), dtype).shape == (0, 3)


def test_the_setting_knows_every_dtype() -> None:
    assert [name.upper() for name in ROWS_DTYPES] == [dtype.name for dtype in RowDtype]
