"""Checks of numbers that every kind of table makes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_batch import all_finite
from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.row_dtype import RowDtype

from ..refusal import Refusal
from .mutations import scaled

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_FLOAT16_ADVICE = (
    " as float16, which ends at 65504. Write FLEET_SPARSE_ROWS_DTYPE=bfloat16, which has the range of float32"
)


def check_learning_rate(where: str, learning_rate: float) -> None:
    """Refuses a learning rate that is not finite as float32."""
    if not abs(learning_rate) <= _MAX_FLOAT32:
        raise Refusal(ErrorCode.NOT_FINITE, f"{where}: learning rate is {learning_rate}, it should be finite")


def check_finite(where: str, what: str, values: NDArray[np.float32], dtype: RowDtype = RowDtype.FLOAT32) -> None:
    """Refuses `values` `(n, ...)` with NaN or infinite ones; `dtype` is how they travelled."""
    if not all_finite(values.reshape(-1)):
        number = values.size - int(np.count_nonzero(np.isfinite(values)))
        message = f"{where}: {number} of {values.size} {what} are NaN or infinite"
        raise Refusal(ErrorCode.NOT_FINITE, message + (_FLOAT16_ADVICE if dtype is RowDtype.FLOAT16 else ""))


def scaled_gradients(grads: NDArray[np.float32], factor: float, *, is_staged: bool) -> NDArray[np.float32]:
    """Returns gradients as they are applied; those of a staged push are scaled when its step is merged."""
    if not is_staged:
        return scaled(grads, factor)
    if not (math.isfinite(factor) and factor >= 0):
        raise Refusal(
            ErrorCode.NOT_FINITE, f"header: the weight of a contribution is {factor}, should be finite and >= 0"
        )
    return grads
