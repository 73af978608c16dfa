"""Kernels for the first value of a row.

The numbers of an initializer, at most six, are (value) for `CONSTANT`; (low, high - low) for `UNIFORM`; (mean, standard
deviation, probability below the lower cutoff, probability below the upper cutoff, lower cutoff, upper cutoff) for
`NORMAL`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .ids import GOLDEN_GAMMA
from .jit import FLOAT32S, FLOAT64_IN, INT64, INT64_IN, UINT64, inlined, kernel
from .kernels_hash import splitmix64

CONSTANT, UNIFORM, NORMAL = 0, 1, 2

_TWO_POW_MINUS_52 = 2.0**-52
_BELOW_1 = 1.0 - 2.0**-53
_S12 = np.uint64(12)


@inlined
def _uniform_01(bits: np.uint64) -> float:
    # The middle of one of 2^52 equal intervals: exact, and never 0 or 1.
    return (np.float64(bits >> _S12) + 0.5) * _TWO_POW_MINUS_52


@inlined
def normal_quantile(p: float) -> float:
    """Returns the z below which a standard normal value lies with probability p, 0 < p < 1, to 1 part in 10^16.

    Algorithm AS 241, PPND16 (Wichura, Applied Statistics 37, 1988).
    """
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        numerator = (
            ((((((2509.0809287301226727 * r + 33430.575583588128105) * r + 67265.770927008700853) * r
            + 45921.953931549871457) * r + 13731.693765509461125) * r + 1971.5909503065514427) * r
            + 133.14166789178437745) * r + 3.387132872796366608
        )  # fmt: skip
        denominator = (
            ((((((5226.495278852854561 * r + 28729.085735721942674) * r + 39307.89580009271061) * r
            + 21213.794301586595867) * r + 5394.1960214247511077) * r + 687.1870074920579083) * r
            + 42.313330701600911252) * r + 1.0
        )  # fmt: skip
        return q * numerator / denominator
    r = math.sqrt(-math.log(p if q < 0.0 else 1.0 - p))
    if r <= 5.0:
        r -= 1.6
        numerator = (
            ((((((7.7454501427834140764e-4 * r + 0.0227238449892691845833) * r + 0.24178072517745061177) * r
            + 1.27045825245236838258) * r + 3.64784832476320460504) * r + 5.7694972214606914055) * r
            + 4.6303378461565452959) * r + 1.42343711074968357734
        )  # fmt: skip
        denominator = (
            ((((((1.05075007164441684324e-9 * r + 5.475938084995344946e-4) * r + 0.0151986665636164571966) * r
            + 0.14810397642748007459) * r + 0.68976733498510000455) * r + 1.6763848301838038494) * r
            + 2.05319162663775882187) * r + 1.0
        )  # fmt: skip
    else:
        r -= 5.0
        numerator = (
            ((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r + 0.0012426609473880784386) * r
            + 0.026532189526576123093) * r + 0.29656057182850489123) * r + 1.7848265399172913358) * r
            + 5.4637849111641143699) * r + 6.6579046435011037772
        )  # fmt: skip
        denominator = (
            ((((((2.04426310338993978564e-15 * r + 1.4215117583164458887e-7) * r + 1.8463183175100546818e-5) * r
            + 7.868691311456132591e-4) * r + 0.0148753612908506148525) * r + 0.13692988092273580531) * r
            + 0.59983220655588793769) * r + 1.0
        )  # fmt: skip
    return -numerator / denominator if q < 0.0 else numerator / denominator


@inlined
def write_initial(
    id_: np.int64,
    dim: np.uint64,
    kind: int,
    values: NDArray[np.float64],
    stream: np.uint64,
    out: NDArray[np.float32],
    begin: np.uint64,
) -> None:
    """Writes the first value of the row of one id to `out[begin : begin + dim]`."""
    if kind == CONSTANT:
        value = np.float32(values[0])
        for j in range(dim):
            out[begin + j] = value
        return
    state = splitmix64(np.uint64(id_) ^ stream)
    if kind == UNIFORM:
        low = values[0]
        width = values[1]
        for j in range(dim):
            out[begin + j] = np.float32(low + width * _uniform_01(splitmix64(state + j * GOLDEN_GAMMA)))
        return
    mean = values[0]
    std = values[1]
    below = values[2]
    between = values[3] - values[2]
    for j in range(dim):
        p = min(below + between * _uniform_01(splitmix64(state + j * GOLDEN_GAMMA)), _BELOW_1)
        out[begin + j] = np.float32(min(max(mean + std * normal_quantile(p), values[4]), values[5]))


@kernel(INT64_IN, INT64, INT64, FLOAT64_IN, UINT64, FLOAT32S)
def write_initial_rows(
    ids: NDArray[np.int64],
    dim: int,
    kind: int,
    values: NDArray[np.float64],
    stream: np.uint64,
    out: NDArray[np.float32],
) -> None:
    """Writes the first values of the rows of ids to `out`, `dim` floats each, one after the other."""
    d = np.uint64(dim)
    for i in range(np.uint64(ids.shape[0])):
        write_initial(ids[i], d, kind, values, stream, out, i * d)
