"""`paddle.static.auc` with statistics that last from run to run, and with the results that Paddle 2 returned."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import paddle
from paddle import _C_ops
from paddle.base import unique_name
from paddle.base.libpaddle import pir

from .global_var import global_var, overwrite


def wrap_auc(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `paddle.static.auc`; arguments are Paddle's.

    In the new IR, Paddle 3.3 makes the statistics again in every run, returns other results than its documentation
    says, and declares the op's float64 result as int64, so that a cast of it fails.
    """

    @wraps(stock)
    def auc(
        input: Any,
        label: Any,
        curve: str = "ROC",
        num_thresholds: int = 2**12 - 1,
        topk: int = 1,
        slide_steps: int = 1,
        ins_tag_weight: Any = None,
    ) -> Any:
        if not paddle.framework.in_pir_mode():
            return stock(input, label, curve, num_thresholds, topk, slide_steps, ins_tag_weight)
        if ins_tag_weight is None:
            ins_tag_weight = paddle.full([1, 1], 1.0, "float32")
        num_bins = num_thresholds + 1
        # Statistics of the newest batches: a ring of slide_steps histograms, their sum, and the number of the batch.
        of_batch = _statistics([(1 + slide_steps) * num_bins + 1])
        of_all = _statistics([1, num_bins])
        values = []
        for statistics, steps in ((of_batch, slide_steps), (of_all, 0)):
            value, *updated = _C_ops.auc(input, label, *statistics, ins_tag_weight, curve, num_thresholds, steps)
            for place, new in zip(statistics, updated, strict=True):
                overwrite(place, new)
            values.append(overwrite(global_var(unique_name.generate("auc"), [], "float64", 0.0), value))
        batch_auc, all_auc = values
        return all_auc, batch_auc, [*of_batch, *of_all]

    return auc


def _statistics(shape: list[int]) -> list[pir.Value]:
    """Counts of positive and of negative examples in each bin, named as Paddle 2 named them."""
    return [global_var(unique_name.generate("_generated_var"), shape, "int64", 0) for _ in range(2)]
