"""`fleet.metrics` of values of a program, which Paddle 3.3 finds in a scope for its old IR alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from paddle.base.libpaddle import pir

METRICS = ("sum", "max", "min", "auc", "mae", "rmse", "mse", "acc")
"""Names of the functions in `fleet.metrics`."""


def wrap_metric(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of `fleet.metrics`; a value of a program stands for the value of its name in the scope."""

    @wraps(stock)
    def metric(*args: Any, **kwargs: Any) -> Any:
        return stock(*map(_named, args), **{name: _named(value) for name, value in kwargs.items()})

    return metric


def _named(argument: Any) -> Any:
    return argument.name if isinstance(argument, pir.Value) else argument
