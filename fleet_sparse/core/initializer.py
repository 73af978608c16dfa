"""Initializers: the first value of a row, from seed, table and id alone.

The columns of a row are the outputs of one SplitMix64 generator, seeded with the id, the table's salt and the seed. So
a row begins with the same values on any shard, in any order of arrival, in any batch, and a pull can answer for an id
that has no row yet.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .ids import hash_ids
from .kernels_initial import CONSTANT, NORMAL, UNIFORM, write_initial_rows

FLOAT32_MAX = float(np.finfo(np.float32).max)
KINDS = ("constant", "uniform", "normal", "truncated_normal")

_SMALLEST_PROBABILITY = 1e-290  # leaves room for a part of 2^-53 of it above the smallest float64


class Initializer(NamedTuple):
    """A distribution. Made by the functions of this module.

    Attributes:
        kind: One of `KINDS`.
        a: The value (constant), lower bound (uniform) or mean.
        b: Upper bound (uniform) or standard deviation; 0 for constant.
        low: Lower cutoff (truncated_normal), else 0.
        high: Upper cutoff (truncated_normal), else 0.
    """

    kind: str
    a: float
    b: float
    low: float
    high: float

    def __str__(self) -> str:
        used = {"constant": 1, "uniform": 2, "normal": 2}.get(self.kind, 4)
        return f"{self.kind}({', '.join(repr(value) for value in self[1 : 1 + used])})"


class InitialScalars(NamedTuple):
    """An initializer as the kernels take it.

    Attributes:
        kind: `CONSTANT`, `UNIFORM` or `NORMAL`, which is the truncated one with the cutoffs at infinity.
        values: `(6,)`, see `kernels_initial`.
        stream: What ids are combined with to seed their row's generator: from the seed and the table's salt.
    """

    kind: int
    values: NDArray[np.float64]
    stream: np.uint64


def constant(value: float) -> Initializer:
    """Every column is `value`."""
    return checked(Initializer("constant", value, 0.0, 0.0, 0.0))


def uniform(low: float, high: float) -> Initializer:
    """Evenly between `low` and `high`."""
    return checked(Initializer("uniform", low, high, 0.0, 0.0))


def normal(mean: float, std: float) -> Initializer:
    """The normal distribution."""
    return checked(Initializer("normal", mean, std, 0.0, 0.0))


def truncated_normal(mean: float, std: float, low: float, high: float) -> Initializer:
    """The normal distribution on the condition that a value lies between `low` and `high` (absolute, not in `std`)."""
    return checked(Initializer("truncated_normal", mean, std, low, high))


def xavier_uniform(fan_in: float, fan_out: float) -> Initializer:
    """Uniform within `sqrt(6 / (fan_in + fan_out))` of 0 (Glorot and Bengio, AISTATS 2010)."""
    limit = math.sqrt(6.0 / (fan_in + fan_out))
    return uniform(-limit, limit)


def xavier_normal(fan_in: float, fan_out: float) -> Initializer:
    """Normal with mean 0 and variance `2 / (fan_in + fan_out)` (Glorot and Bengio, AISTATS 2010)."""
    return normal(0.0, math.sqrt(2.0 / (fan_in + fan_out)))


def checked(initializer: Initializer) -> Initializer:
    """The same initializer with its numbers as floats.

    Raises:
        ValueError: An unknown kind, a number that is not finite in float32, bounds in the wrong order, a negative
            standard deviation, or cutoffs so far from the mean that no value lies between them.
    """
    kind, *numbers = initializer
    if kind not in KINDS:
        raise ValueError(f"initializer: kind is {kind!r}, should be one of {', '.join(KINDS)}")
    a, b, low, high = (float(number) for number in numbers)
    result = Initializer(kind, a, b, low, high)
    if not all(abs(number) <= FLOAT32_MAX for number in result[1:]):
        raise ValueError(f"initializer: {result} has a number that is not finite in float32")
    if kind == "uniform" and not a <= b:
        raise ValueError(f"initializer: {result} has its lower bound above the upper one")
    if kind in ("normal", "truncated_normal") and not b >= 0:
        raise ValueError(f"initializer: {result} has a negative standard deviation")
    if kind == "truncated_normal":
        if not (low < high and b > 0):
            raise ValueError(f"initializer: {result} should have low < high and a standard deviation above 0")
        *_, below, above = _truncation(result)
        if not above - below > _SMALLEST_PROBABILITY:
            raise ValueError(f"initializer: {result} has no probability between its cutoffs")
    return result


def initial_scalars(initializer: Initializer, *, seed: int, salt: int) -> InitialScalars:
    """What the kernels need to know of an initializer, for a table with that salt."""
    stream = hash_ids(np.array([seed], np.uint64).view(np.int64), 0)[0] ^ np.uint64(salt)
    kind, a, b, low, high = initializer
    if kind == "constant":
        return InitialScalars(CONSTANT, np.array([a, 0, 0, 0, 0, 0], np.float64), stream)
    if kind == "uniform":
        return InitialScalars(UNIFORM, np.array([a, b - a, 0, 0, 0, 0], np.float64), stream)
    if kind == "normal":
        return InitialScalars(NORMAL, np.array([a, b, 0.0, 1.0, -math.inf, math.inf], np.float64), stream)
    return InitialScalars(NORMAL, np.array([*_truncation(initializer), low, high], np.float64), stream)


def initial_rows(
    initializer: Initializer, ids: NDArray[np.int64], *, dim: int, seed: int, salt: int
) -> NDArray[np.float32]:
    """The value that the row of each id begins with.

    Args:
        ids: `(n,)`, repeats allowed.
        dim: Columns of a row.
        seed: In `[0, 2^64)`.
        salt: The table's, see `table_salt`.

    Returns:
        `(n, dim)`.
    """
    out = np.empty((len(ids), dim), np.float32)
    scalars = initial_scalars(initializer, seed=seed, salt=salt)
    write_initial_rows(np.ascontiguousarray(ids, np.int64), dim, *scalars, out.reshape(-1))
    return out


def _truncation(initializer: Initializer) -> tuple[float, float, float, float]:
    """Mean, signed standard deviation, and the probabilities below the two cutoffs.

    Cutoffs above the mean are mirrored (negative deviation): the distribution function is exact to the last digits only
    below 1/2.
    """
    _, mean, std, low, high = initializer
    if low > mean:
        return mean, -std, _below((mean - high) / std), _below((mean - low) / std)
    return mean, std, _below((low - mean) / std), _below((high - mean) / std)


def _below(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))
