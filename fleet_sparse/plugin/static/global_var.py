"""Variables that keep their values between runs, as `paddle.static.create_global_var` made them in Paddle 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import paddle
from paddle.base import unique_name
from paddle.base.libpaddle import pir


def global_var(name: str, shape: Sequence[int], dtype: Any, value: float) -> pir.Value:
    """A parameter without gradient in the default programs; the startup program sets all of it to `value`."""
    first = paddle.nn.initializer.Constant(value)
    attr = paddle.ParamAttr(name=name, initializer=first, trainable=False)
    variable = paddle.static.create_parameter(list(shape), dtype, attr=attr)
    variable.stop_gradient = True
    return variable


def overwrite(variable: pir.Value, value: pir.Value) -> pir.Value:
    """Gives a variable the value of each run; returns the variable."""
    value.stop_gradient = True
    paddle.assign(value, variable)
    variable.stop_gradient = True
    return variable


def wrap_create_global_var(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `paddle.static.create_global_var`, which Paddle 3.3 cannot do in its new IR. Arguments are Paddle's."""

    @wraps(stock)
    def create_global_var(
        shape: Sequence[int],
        value: float,
        dtype: Any,
        persistable: bool = False,
        force_cpu: bool = False,
        name: str | None = None,
    ) -> Any:
        if not paddle.framework.in_pir_mode():
            return stock(shape, value, dtype, persistable, force_cpu, name)
        return global_var(name or unique_name.generate("global_var"), shape, dtype, float(value))

    return create_global_var
