"""User programs with flagged lookups, as tests of the plugin build them."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

DIM = 4


def flagged(ids: Any, name: str = "emb", value: float | None = 0.5, *, need_clip: bool = True, **changes: Any) -> Any:
    """Returns rows of a table whose first rows are `value`, or random if it is None."""
    first = paddle.nn.initializer.Uniform(-0.5, 0.5) if value is None else paddle.nn.initializer.Constant(value)
    attr = paddle.ParamAttr(name=name, initializer=first, need_clip=need_clip)
    arguments = {"size": [10**11, DIM], "is_sparse": True, "is_distributed": True, "param_attr": attr, **changes}
    return paddle.static.nn.embedding(ids, **arguments)


def ids_input(shape: tuple[int, ...] = (-1,), name: str = "ids", dtype: str = "int64") -> Any:
    return paddle.static.data(name, list(shape), dtype)


def linear(x: Any, name: str = "w") -> Any:
    """Returns a linear layer of `x` whose first weights are 1."""
    ones = paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Constant(1.0))
    return paddle.nn.Linear(int(x.shape[-1]), 1, weight_attr=ones, bias_attr=False)(x)


def minimize(loss: Any, optimizer: Any = None, *, is_async: bool = True) -> Any:
    """Minimizes a loss, by default with SGD of learning rate 1; returns what Paddle's `minimize` does."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = is_async
    return fleet.distributed_optimizer(optimizer or paddle.optimizer.SGD(1.0), strategy).minimize(loss)


def start() -> Any:
    """Runs the startup program and connects; returns the executor."""
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    return executor


def weight(name: str = "w") -> Any:
    """Returns the values of a dense parameter."""
    return np.array(paddle.static.global_scope().find_var(name).get_tensor())
