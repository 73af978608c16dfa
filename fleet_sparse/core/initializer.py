"""Initializers: the first value of a row, from seed, table and id alone.

The values of a row are the outputs of one SplitMix64 generator, seeded with the id, the table's salt and the seed. They
do not depend on the shard or on the order of requests, so a pull of an id without a row returns what the row will have.
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

_SMALLEST_PROBABILITY = 1e-290  # 2^-53 of it is still a normal float64


class Initializer(NamedTuple):
    """A distribution of first values; the functions of this module make one.

    Attributes:
        kind: One of `KINDS`.
        a: Value (constant), lower bound (uniform) or mean.
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
    """An initializer in the form that kernels take.

    Attributes:
        kind: `CONSTANT`, `UNIFORM` or `NORMAL`; the latter is truncated, at infinity if there are no cutoffs.
        values: `(6,)`, as `kernels_initial` says.
        stream: 64 bits that an id is combined with to seed the generator of its row; from seed and salt.
    """

    kind: int
    values: NDArray[np.float64]
    stream: np.uint64


def constant(value: float) -> Initializer:
    """All values of a row are `value`."""
    return checked(Initializer("constant", value, 0.0, 0.0, 0.0))


def uniform(low: float, high: float) -> Initializer:
    """The uniform distribution between `low` and `high`."""
    return checked(Initializer("uniform", low, high, 0.0, 0.0))


def normal(mean: float, std: float) -> Initializer:
    """The normal distribution."""
    return checked(Initializer("normal", mean, std, 0.0, 0.0))


def truncated_normal(mean: float, std: float, low: float, high: float) -> Initializer:
    """The normal distribution cut off at `low` and `high`, which are values and not multiples of `std`."""
    return checked(Initializer("truncated_normal", mean, std, low, high))


def xavier_uniform(fan_in: float, fan_out: float) -> Initializer:
    """Uniform within `sqrt(6 / (fan_in + fan_out))` of 0 (Glorot and Bengio, AISTATS 2010)."""
    limit = math.sqrt(6.0 / (fan_in + fan_out))
    return uniform(-limit, limit)


def xavier_normal(fan_in: float, fan_out: float) -> Initializer:
    """Normal with mean 0 and variance `2 / (fan_in + fan_out)` (Glorot and Bengio, AISTATS 2010)."""
    return normal(0.0, math.sqrt(2.0 / (fan_in + fan_out)))


def checked(initializer: Initializer) -> Initializer:
    """Returns the same initializer with its numbers as floats.

    Raises:
        ValueError: The kind is unknown, a number is not finite in float32, bounds are in the wrong order, the standard
            deviation is negative, or the probability between the cutoffs is 0.
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
    """Returns the initializer in the form that kernels take, for a table with this salt."""
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
    """Returns the first value of the row of each id.

    Args:
        ids: `(n,)`; ids may repeat.
        dim: Number of values of a row.
        seed: Seed of the initializer, in `[0, 2^64)`.
        salt: Salt of the table, as `table_salt` returns it.

    Returns:
        `(n, dim)`.
    """
    out = np.empty((len(ids), dim), np.float32)
    scalars = initial_scalars(initializer, seed=seed, salt=salt)
    write_initial_rows(np.ascontiguousarray(ids, np.int64), dim, *scalars, out.reshape(-1))
    return out


def _truncation(initializer: Initializer) -> tuple[float, float, float, float]:
    """Returns mean, signed standard deviation, and the probabilities below the two cutoffs.

    Cutoffs above the mean are mirrored, by a negative deviation: the distribution function is precise only below 1/2.
    """
    _, mean, std, low, high = initializer
    if low > mean:
        return mean, -std, _below((mean - high) / std), _below((mean - low) / std)
    return mean, std, _below((low - mean) / std), _below((high - mean) / std)


def _below(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def mean_of(initializer: Initializer) -> float:
    """Returns the mean of the distribution."""
    kind, a, b, low, high = initializer
    if kind == "uniform":
        return (a + b) / 2
    if kind == "truncated_normal":
        below, above = (low - a) / b, (high - a) / b
        _, std, low_probability, high_probability = _truncation(initializer)
        density = (math.exp(-0.5 * below * below) - math.exp(-0.5 * above * above)) / math.sqrt(2 * math.pi)
        return a + abs(std) * density / (high_probability - low_probability)
    return a
