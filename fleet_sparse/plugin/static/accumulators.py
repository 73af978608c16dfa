"""Accumulators: the variables in which Paddle's optimizer ops keep the states that an update rule of ours has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray


class Accumulators(NamedTuple):
    """Names of the variables of one parameter."""

    states: tuple[str, ...]
    """One for each state of the rule, in its order; of the parameter's shape."""
    powers: tuple[tuple[str, float], ...]
    """Variables of one value, each with its beta. After t updates the value is beta to the power of t + 1."""


class _Layout(NamedTuple):
    """Paddle's names of the accumulators of an optimizer."""

    states: tuple[str, ...] = ()
    powers: tuple[tuple[str, str], ...] = ()
    """Each with the attribute of the optimizer that holds its beta."""


_BETA1, _BETA2 = ("beta1_pow_acc", "_beta1"), ("beta2_pow_acc", "_beta2")
_MOMENTS = _Layout(("moment1", "moment2"), (_BETA1, _BETA2))
_LAYOUTS: dict[type, _Layout] = {
    paddle.optimizer.SGD: _Layout(),
    paddle.optimizer.Adagrad: _Layout(("moment",)),
    paddle.optimizer.Adam: _MOMENTS,
    paddle.optimizer.AdamW: _MOMENTS,
    paddle.optimizer.Adamax: _Layout(("moment", "inf_norm"), (_BETA1,)),
    paddle.optimizer.Momentum: _Layout(("velocity",)),
    paddle.optimizer.RMSProp: _Layout(("mean_square", "mean_grad", "momentum")),
    paddle.optimizer.Lamb: _MOMENTS,
}

_CHUNK = 1 << 16


def has_accumulators(optimizer: Any) -> bool:
    """Returns whether Paddle has ops for the rule of the optimizer, with the states that our rule has."""
    return type(optimizer) in _LAYOUTS


def accumulators_of(optimizer: Any, parameter: str) -> Accumulators:
    """Returns the accumulators of a parameter to which the optimizer was applied."""
    layout = _LAYOUTS[type(optimizer)]
    prefix = "" if optimizer._name is None else f"{optimizer._name}_"

    def name_of(accumulator: str) -> str:
        return str(optimizer._accumulators[prefix + accumulator][parameter].name)

    return Accumulators(
        tuple(name_of(accumulator) for accumulator in layout.states),
        tuple((name_of(accumulator), float(getattr(optimizer, beta))) for accumulator, beta in layout.powers),
    )


def power_after(beta: float, num_updates: int) -> np.float32:
    """Returns the value of Paddle's power of `beta` after `num_updates` updates: a product in float32, bit by bit."""
    power = np.float32(beta)
    for begin, powers in _powers(beta):
        power = powers[min(num_updates - begin, len(powers) - 1)]
        if num_updates < begin + len(powers):
            break
    return power


def updates_until(beta: float, power: np.float32, otherwise: int) -> int:
    """Returns the number of updates after which Paddle's power of `beta` is `power`.

    `otherwise` is returned if that is not known: a power that no longer changes, or that has another beginning.
    """
    for begin, powers in _powers(beta):
        index = int(np.searchsorted(-powers, -power))
        if index < len(powers):
            is_known = powers[index] == power and (index + 1 == len(powers) or powers[index + 1] != power)
            return begin + index if is_known else otherwise
    return otherwise


def _powers(beta: float) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yields the powers after 0, 1, 2, ... updates, in parts, until they no longer change: index of the first, part."""
    begin, first = 0, np.float32(beta)
    while True:
        factors = np.full(_CHUNK, beta, np.float32)
        factors[0] = first
        powers = np.multiply.accumulate(factors)
        yield begin, powers
        first = powers[-1] * np.float32(beta)
        if first == powers[-1]:
            return
        begin += _CHUNK
