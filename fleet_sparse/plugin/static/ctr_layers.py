"""Layers of Paddle 2 for click models that read what its pservers kept in rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import paddle

from fleet_sparse.errors import PlanError

_NUM_COLUMNS = 2
"""Columns of a row that `continuous_value_model` takes for shows and clicks."""


def wrap_continuous_value_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `static.nn.continuous_value_model`, which Paddle 3.3 cannot do in its new IR. Arguments are Paddle's.

    Without `use_cvm` it drops the two columns. With it they would have to be shows and clicks, which rows here do not
    begin with.
    """

    @wraps(stock)
    def continuous_value_model(input: Any, cvm: Any, use_cvm: bool = True) -> Any:  # Paddle's name
        if not paddle.framework.in_pir_mode():
            return stock(input, cvm, use_cvm)
        if use_cvm:
            raise PlanError(
                "continuous_value_model: use_cvm is True, but rows of tables here do not begin with their shows and "
                "clicks. Write use_cvm=False, and entry=ShowClickEntry(show, click) in the lookup to count them"
            )
        return input[:, _NUM_COLUMNS:]

    return continuous_value_model


def data_norm(*_: Any, **__: Any) -> Any:
    """Refuses `paddle.static.nn.data_norm`, which Paddle 3 does not have.

    Raises:
        PlanError: Always.
    """
    raise PlanError(
        "data_norm: Paddle 3 has no such layer, and pservers here do not add up its summaries. Write "
        "paddle.static.nn.batch_norm(input), or normalize the values in the reader"
    )
