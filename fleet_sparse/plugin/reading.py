"""Reads what the user said with Paddle's own objects: optimizer, initializer, strategy.

Everything they can say is either read here or refused by name; nothing is ignored.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import paddle
from paddle.nn import initializer as initializers

from fleet_sparse.core.initializer import Initializer, constant, normal, truncated_normal, uniform
from fleet_sparse.errors import PlanError

logger = logging.getLogger(__name__)

_OBEYED = {"a_sync", "a_sync_configs", "gradient_scale_configs", "build_strategy"}


class OptimizerReading(NamedTuple):
    """The update rule that an optimizer stands for."""

    rule: str
    hyperparameters: tuple[tuple[str, float], ...]


def read_optimizer(optimizer: Any) -> OptimizerReading:
    """The update rule of a Paddle optimizer, with all its arguments.

    Raises:
        PlanError: An optimizer, or an argument of it, that pservers cannot follow.
    """
    kind = type(optimizer)
    name = kind.__name__
    readers = {
        paddle.optimizer.SGD: _read_sgd,
        paddle.optimizer.Adagrad: _read_adagrad,
        paddle.optimizer.Adam: _read_adam,
    }
    if kind not in readers:
        known = ", ".join(sorted(reader.__name__ for reader in readers))
        raise PlanError(f"optimizer {name}: pservers cannot follow it; they know {known}")
    if optimizer._grad_clip is not None:
        raise PlanError(
            f"optimizer {name}: grad_clip={type(optimizer._grad_clip).__name__} is not supported; leave it out"
        )
    if optimizer.regularization is not None:
        raise PlanError(f"optimizer {name}: weight_decay={optimizer.regularization} is not supported; leave it out")
    if optimizer._parameter_list is not None:
        raise PlanError(f"optimizer {name}: parameters were given; in a static graph leave them out: all are trained")
    if getattr(optimizer, "_multi_precision", False):
        raise PlanError(f"optimizer {name}: multi_precision is not supported; rows and parameters are float32")
    hyperparameters = readers[kind](optimizer)
    return OptimizerReading(name.lower(), tuple(sorted(hyperparameters.items())))


def _read_sgd(optimizer: Any) -> dict[str, float]:
    return {}


def _read_adagrad(optimizer: Any) -> dict[str, float]:
    return {
        "epsilon": float(optimizer._epsilon),
        "initial_accumulator_value": float(optimizer.initial_accumulator_value),
    }


def _read_adam(optimizer: Any) -> dict[str, float]:
    if getattr(optimizer, "_amsgrad", False):
        raise PlanError("optimizer Adam: amsgrad is not supported; leave it out")
    values = {"beta1": optimizer._beta1, "beta2": optimizer._beta2, "epsilon": optimizer._epsilon}
    for name, value in values.items():
        if not isinstance(value, (int, float)):
            raise PlanError(f"optimizer Adam: {name} is a {type(value).__name__}; pservers need a number")
    if not optimizer._lazy_mode:
        logger.warning(
            "optimizer Adam: tables are trained lazily, only the rows of ids that occur in a batch change. "
            "Paddle's Adam without lazy_mode also moves the others; write lazy_mode=True to say that you know"
        )
    return {name: float(value) for name, value in values.items()}


class InitializerReading(NamedTuple):
    """The initializer of a table and the seed the user gave it; 0 if none."""

    initializer: Initializer
    seed: int


def read_initializer(table: str, initializer: Any, size: tuple[int, int]) -> InitializerReading:
    """The initializer that a Paddle initializer stands for, for a parameter of shape `size`.

    Args:
        table: Named in errors.
        initializer: Of `paddle.nn.initializer`; None is Paddle's default for a weight, Xavier uniform.
        size: `(ids, dim)` as the user gave it; Xavier's fans are these.

    Raises:
        PlanError: One whose rows cannot be computed from the id alone.
    """
    if initializer is None:
        initializer = paddle.nn.initializer.XavierUniform()
    seed = int(getattr(initializer, "_seed", 0))
    match initializer:
        case initializers.Constant():
            return InitializerReading(constant(initializer._value), 0)
        case initializers.Uniform() if not initializer._diag_num:
            return InitializerReading(uniform(initializer._low, initializer._high), seed)
        case initializers.TruncatedNormal():
            read = truncated_normal(initializer._mean, initializer._std_dev, initializer._a, initializer._b)
            return InitializerReading(read, seed)
        case initializers.Normal():
            return InitializerReading(normal(initializer._mean, initializer._std_dev), seed)
        case initializers.XavierUniform() | initializers.XavierNormal():
            return InitializerReading(_xavier(initializer, size), seed)
    raise PlanError(
        f"table {table!r}: initializer {type(initializer).__name__} is not supported; "
        "write Constant, Uniform, Normal, TruncatedNormal, XavierUniform or XavierNormal"
    )


def _xavier(initializer: Any, size: tuple[int, int]) -> Initializer:
    """Glorot and Bengio, 2010: variance 2 / (fan_in + fan_out)."""
    fan_in = size[0] if initializer._fan_in is None else initializer._fan_in
    fan_out = size[1] if initializer._fan_out is None else initializer._fan_out
    std = initializer._gain * math.sqrt(2.0 / (fan_in + fan_out))
    if initializer._uniform:
        return uniform(-math.sqrt(3.0) * std, math.sqrt(3.0) * std)
    return normal(0.0, std)


def check_strategy(strategy: Any) -> None:
    """Refuses every switch of a `DistributedStrategy` that is on and not obeyed.

    Raises:
        PlanError: Names the first such switch and what to write instead.
    """
    message = strategy.strategy
    for field, value in message.ListFields():
        if field.name in _OBEYED or field.name.endswith("_configs"):  # configs say how, not whether
            continue
        if isinstance(value, (bool, int, float, str)) and value == field.default_value:
            continue
        raise PlanError(
            f"DistributedStrategy.{field.name}: is {value} and is not supported with pservers; leave it out"
        )
    if not strategy.a_sync:
        raise PlanError(
            "DistributedStrategy.a_sync: is False, and sync training does not exist yet; write a_sync = True"
        )
    configs = strategy.a_sync_configs
    if configs["k_steps"] > 0:
        raise PlanError(
            f"DistributedStrategy.a_sync_configs['k_steps']: is {configs['k_steps']}, and geo training does not exist "
            "yet; leave it out"
        )
    for name in ("use_ps_gpu", "use_gpu_graph"):
        if configs[name]:
            raise PlanError(f"DistributedStrategy.a_sync_configs[{name!r}]: is not supported; leave it out")
