"""Fully connected layers with names that the main and the evaluation program share."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import ParamAttr


def linear(inputs: paddle.pir.Value, width: int, *, name: str, has_bias: bool = True) -> paddle.pir.Value:
    """One layer `W a + b` with parameters `<name>.weight` and `<name>.bias`.

    Args:
        inputs: `(batch, n)` float32, n known.
        width: Number of outputs.
        name: First part of the names of its parameters.
        has_bias: False leaves `b` out.
    """
    bias = ParamAttr(name=f"{name}.bias") if has_bias else False
    return paddle.static.nn.fc(inputs, width, weight_attr=ParamAttr(name=f"{name}.weight"), bias_attr=bias)


def perceptron(
    inputs: paddle.pir.Value, widths: Sequence[int], *, name: str, activation: str = "relu"
) -> paddle.pir.Value:
    """Layers with an activation each; layer `i` has parameters `<name>.<i>.weight` and `<name>.<i>.bias`.

    Args:
        inputs: `(batch, n)` float32, n known.
        widths: Widths of the layers; without any, the inputs are returned.
        name: First part of the names of the parameters.
        activation: Name of an activation of Paddle's `fc`.
    """
    for layer, width in enumerate(widths):
        inputs = paddle.static.nn.fc(
            inputs,
            width,
            activation=activation,
            weight_attr=ParamAttr(name=f"{name}.{layer}.weight"),
            bias_attr=ParamAttr(name=f"{name}.{layer}.bias"),
        )
    return inputs
