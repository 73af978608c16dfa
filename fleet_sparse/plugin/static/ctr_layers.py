"""Layers of Paddle 2 for click models, of ops that Paddle 3 has: `continuous_value_model` and `data_norm`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import paddle
from paddle.base.layer_helper import LayerHelper
from paddle.base.libpaddle import pir

from fleet_sparse.core.table_spec import NUM_SHOW_CLICK
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.scan import SHOW_CLICK

from .added_gradients import add_gradient, add_summary

_SMALLEST_SHOW = 1e-7
"""Paddle's: a field whose shows are closer to 0 was not in the example."""


def wrap_continuous_value_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `static.nn.continuous_value_model`, which Paddle 3.3 cannot do in its new IR. Arguments are Paddle's.

    The first two values of each row of `input` are its shows and clicks. With `use_cvm` they become `log(show + 1)` and
    `log(click + 1) - log(show + 1)`; without it they are left out. Their gradient is `cvm`, as in Paddle: if `input`
    has rows of a table, pushes add the shows and clicks of each example to those of its ids.
    """

    @wraps(stock)
    def continuous_value_model(input: Any, cvm: Any, use_cvm: bool = True) -> Any:  # Paddle's name
        if not paddle.framework.in_pir_mode():
            return stock(input, cvm, use_cvm)
        _check_shape("continuous_value_model", "input", input, NUM_SHOW_CLICK + 1)
        _check_shape("continuous_value_model", "cvm", cvm, NUM_SHOW_CLICK)
        counts = paddle.slice(input, [1], [0], [NUM_SHOW_CLICK])
        counts.get_defining_op().set_bool_attr(SHOW_CLICK, True)
        add_gradient(counts, paddle.cast(paddle.slice(cvm, [1], [0], [NUM_SHOW_CLICK]), input.dtype))
        others = paddle.slice(input, [1], [NUM_SHOW_CLICK], [input.shape[1]])
        if not use_cvm:
            return others
        fixed = paddle.assign(counts)
        fixed.stop_gradient = True
        logs = paddle.log(fixed + 1.0)
        show, click = paddle.split(logs, NUM_SHOW_CLICK, axis=1)
        return paddle.concat([show, click - show, others], axis=1)

    return continuous_value_model


def data_norm(  # noqa: PLR0913, PLR0917  # the arguments of Paddle's
    input: Any,
    act: str | None = None,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    slot_dim: int = -1,
    sync_stats: bool = False,
    summary_decay_rate: float = 0.9999999,
    enable_scale_and_shift: bool = False,
) -> Any:
    """Normalizes each column of `input` by sums over all examples so far: `paddle.static.nn.data_norm` of Paddle 2.

    The sums are the parameters `<name>.batch_size`, `<name>.batch_sum` and `<name>.batch_square_sum`. A training step
    multiplies them by `summary_decay_rate` and adds those of its batch; in a job of several workers the pservers do,
    for each worker. `in_place`, `moving_mean_name`, `moving_variance_name`, `do_model_average_for_mean_and_var` and
    `sync_stats` change nothing.

    Args:
        input: `(examples, columns)`.
        act: Activation of the result.
        epsilon: Added to the square of each example.
        param_attr: A dict with first values of the sums: `batch_size`, `batch_sum`, `batch_square`; with
            `enable_scale_and_shift` also `scale_w` and `bias`.
        data_layout: "NCHW" or "NHWC", which are the same for two dimensions.
        in_place: Ignored.
        name: Beginning of the names of the parameters; "dn" by default.
        moving_mean_name: Ignored.
        moving_variance_name: Ignored.
        do_model_average_for_mean_and_var: Ignored.
        slot_dim: Number of columns of each field, whose first one has its shows: where they are 0, the field of this
            example is 0, and is not added to the sums. Not above 0: there are no fields.
        sync_stats: Ignored.
        summary_decay_rate: Factor on the sums in each step.
        enable_scale_and_shift: Then multiplies by a trained scale and adds a trained bias.

    Raises:
        PlanError: The input has not two dimensions, or does not consist of fields of `slot_dim` columns.
    """
    if data_layout not in ("NCHW", "NHWC"):
        raise PlanError(f"data_norm: data_layout is {data_layout!r}, should be 'NCHW' or 'NHWC'")
    _check_shape("data_norm", "input", input, 1)
    width = int(input.shape[1])
    if slot_dim > 0 and width % slot_dim:
        raise PlanError(f"data_norm: input has {width} columns, should have a multiple of slot_dim, {slot_dim}")
    first = param_attr if isinstance(param_attr, dict) else {}
    prefix = name or "dn"

    def parameter(suffix: str, value: float) -> pir.Value:
        initializer = paddle.nn.initializer.Constant(float(value))
        attr = paddle.ParamAttr(name=f"{prefix}.{suffix}", initializer=initializer)
        return paddle.static.create_parameter([width], input.dtype, attr=attr)

    sums = [
        parameter("batch_size", first.get("batch_size", 1e4)),
        parameter("batch_sum", first.get("batch_sum", 0.0)),
        parameter("batch_square_sum", first.get("batch_square", 1e4)),
    ]
    size, total, square = (_fixed(each) for each in sums)
    mean, scale = total / size, paddle.sqrt(size / square)
    values = _fixed(input)
    is_present = None
    if slot_dim > 0:
        shows = paddle.reshape(values, [-1, width // slot_dim, slot_dim])[:, :, :1]
        of_fields = paddle.cast(paddle.abs(shows) >= _SMALLEST_SHOW, input.dtype)
        is_present = paddle.reshape(paddle.expand(of_fields, [-1, -1, slot_dim]), [-1, width])
    for each, of_batch in zip(sums, _of_batch(values, mean, epsilon, is_present), strict=True):
        add_summary(each, of_batch, summary_decay_rate)
    result = (input - mean) * scale
    if enable_scale_and_shift:
        result = result * parameter("scale_w", first.get("scale_w", 1.0)) + parameter("bias", first.get("bias", 0.0))
        if is_present is not None:
            result = result * is_present
    elif is_present is not None:
        # As in Paddle: the gradient of a field that is not there is that of one that is.
        result = result - _fixed(result * (1.0 - is_present))
    return LayerHelper("data_norm", act=act).append_activation(result)


def _of_batch(values: pir.Value, mean: pir.Value, epsilon: float, is_present: pir.Value | None) -> list[pir.Value]:
    """What a batch adds to number, sum and sum of squares: sums, or for fields the means of those that are there."""
    squares = paddle.square(values - mean)
    if is_present is None:
        number = paddle.sum(paddle.ones_like(values), axis=0)
        return [number, paddle.sum(values, axis=0), paddle.sum(squares, axis=0) + number * epsilon]
    number = paddle.sum(is_present, axis=0)
    divisor = paddle.clip(number, min=1.0)
    total, square = (paddle.sum(each * is_present, axis=0) / divisor for each in (values, squares))
    return [paddle.clip(number, max=1.0), total, square + number * epsilon]


def _fixed(value: pir.Value) -> pir.Value:
    """The value without a gradient."""
    fixed = paddle.assign(value)
    fixed.stop_gradient = True
    return fixed


def _check_shape(layer: str, name: str, value: pir.Value, width: int) -> None:
    shape = list(value.shape)
    if len(shape) != 2 or shape[1] < width:
        raise PlanError(f"{layer}: {name} has shape {shape}, should be [examples, {width} or more]")
