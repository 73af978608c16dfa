"""`paddle.static.ctr_metric_bundle` with statistics that last from run to run, as in Paddle 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import paddle
from paddle.base import unique_name

from .global_var import global_var, overwrite


def wrap_ctr_metric_bundle(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `paddle.static.ctr_metric_bundle`, which Paddle 3.3 cannot do in its new IR. Arguments are Paddle's.

    The results are sums over all examples so far, float32 `(1,)` each: of squared errors, absolute errors, predictions,
    sigmoids of predictions, labels, and the number of examples. With `ins_tag_weight` the last but two and the last
    are multiplied by its first value.
    """

    @wraps(stock)
    def ctr_metric_bundle(input: Any, label: Any, ins_tag_weight: Any = None) -> Any:
        if not paddle.framework.in_pir_mode():
            return stock(input, label, ins_tag_weight)
        prediction, truth = _constant(input), _constant(label)
        error = prediction - truth
        of_batch = [
            paddle.sum(error * error),
            paddle.sum(paddle.abs(error)),
            paddle.sum(prediction),
            paddle.sum(paddle.nn.functional.sigmoid(prediction)),
            paddle.sum(truth),
            paddle.sum(paddle.ones_like(truth)),
        ]
        if ins_tag_weight is not None:
            weight = paddle.reshape(_constant(ins_tag_weight), [-1])[0]
            of_batch[3], of_batch[5] = of_batch[3] * weight, of_batch[5] * weight
        totals = []
        for value in of_batch:
            total = global_var(unique_name.generate("ctr_metric_bundle"), [1], "float32", 0.0)
            totals.append(overwrite(total, total + value))
        return tuple(totals)

    return ctr_metric_bundle


def _constant(value: Any) -> Any:
    """The value as float32, without a gradient."""
    constant = paddle.cast(value, "float32") if value.dtype != paddle.float32 else paddle.assign(value)
    constant.stop_gradient = True
    return constant
