"""Reads what the user said with Paddle's own objects: optimizer, initializer, strategy.

Everything they can say is either read here or refused by name; nothing is ignored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import paddle
from paddle.nn import initializer as initializers

from fleet_sparse.core.decay import Decay
from fleet_sparse.core.initializer import Initializer, constant, normal, truncated_normal, uniform
from fleet_sparse.core.rules import RULES, read_only
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.marker import SiteSpec

from .optimizer import PserverOptimizer

logger = logging.getLogger(__name__)

_OBEYED = {"a_sync", "a_sync_configs", "gradient_scale_configs", "build_strategy"}


class OptimizerReading(NamedTuple):
    """The update rule that an optimizer stands for."""

    rule: str
    hyperparameters: tuple[tuple[str, float], ...]
    decay: Decay = Decay()
    """Of tables and parameters that have none of their own."""
    moves_every_row: str = ""
    """The optimizer's name if Paddle's also moves rows without a gradient, and what makes it lazy if there is
    something; else empty."""

    def of_table(self, site: SiteSpec) -> tuple[tuple[str, float], ...]:
        """The hyperparameters of the table of `site`, its decay among them."""
        if self.rule == read_only.name:
            return ()
        decay = self.decay_of(site)
        return (*self.hyperparameters, ("l1_decay", decay.l1), ("l2_decay", decay.l2))

    def decay_of(self, site: SiteSpec) -> Decay:
        """ParamAttr's decay if it has one, else the optimizer's, as in Paddle."""
        return self.decay if site.decay is None else site.decay


def read_optimizer(optimizer: Any) -> OptimizerReading:
    """The update rule of a Paddle optimizer or a `PserverOptimizer`, with all its arguments.

    Raises:
        PlanError: An optimizer, or an argument of it, that pservers cannot follow.
    """
    kind = type(optimizer)
    name = kind.__name__
    if kind not in _READERS:
        known = ", ".join(sorted(reader.__name__ for reader in _READERS))
        raise PlanError(f"optimizer {name}: pservers cannot follow it; they know {known}")
    if optimizer._grad_clip is not None:
        raise PlanError(
            f"optimizer {name}: grad_clip={type(optimizer._grad_clip).__name__} is not supported; leave it out"
        )
    if optimizer._parameter_list is not None:
        raise PlanError(f"optimizer {name}: parameters were given; in a static graph leave them out: all are trained")
    for argument in _REFUSED:
        if getattr(optimizer, f"_{argument}", None):
            raise PlanError(f"optimizer {name}: {argument} is not supported; leave it out")
    values = _READERS[kind](optimizer)
    for argument, value in values.items():
        if not isinstance(value, (bool, int, float)):
            raise PlanError(f"optimizer {name}: {argument} is a {type(value).__name__}; pservers need a number")
    moves_every_row = ""
    if kind in _MOVE_EVERY_ROW and not bool(getattr(optimizer, "_lazy_mode", None)):
        moves_every_row = f"{name} without lazy_mode=True" if hasattr(optimizer, "_lazy_mode") else name
    return OptimizerReading(
        optimizer.rule if isinstance(optimizer, PserverOptimizer) else name.lower(),
        tuple(sorted((argument, float(value)) for argument, value in values.items())),
        _decay_of(optimizer),
        moves_every_row,
    )


def _decay_of(optimizer: Any) -> Decay:
    # Momentum keeps an L2 decay to itself, since its op in Paddle does the decay too.
    if getattr(optimizer, "_regularization_method", ""):
        return Decay(l2=optimizer._regularization_coeff)
    return read_decay(f"optimizer {type(optimizer).__name__}: weight_decay", optimizer.regularization) or Decay()


def read_decay(where: str, regularizer: Any) -> Decay | None:
    """The coefficients of a Paddle regularizer; None for None.

    Args:
        where: Named in errors.
        regularizer: `paddle.regularizer.L1Decay` or `L2Decay`.

    Raises:
        PlanError: It is something else, or its coefficient is not a number.
    """
    if regularizer is None:
        return None
    kind = type(regularizer)
    if kind not in (paddle.regularizer.L1Decay, paddle.regularizer.L2Decay):
        raise PlanError(f"{where}: is {kind.__name__}; write paddle.regularizer.L1Decay or L2Decay")
    coefficient = regularizer._coeff
    if not isinstance(coefficient, (int, float)):
        raise PlanError(f"{where}: its coefficient is a {type(coefficient).__name__}; pservers need a number")
    return Decay(l1=float(coefficient)) if kind is paddle.regularizer.L1Decay else Decay(l2=float(coefficient))


def check_lazy(reading: OptimizerReading, tables: Iterable[SiteSpec], *, strict: bool) -> None:
    """Says, in one warning, that tables are trained lazily where plain Paddle would also move rows without a gradient.

    Args:
        reading: Of the optimizer.
        tables: Of the program.
        strict: Refuse instead.

    Raises:
        PlanError: `strict`, and the optimizer or the decay of a table is not lazy in Paddle.
    """
    trained = [table for table in tables if table.trainable]
    decayed = [repr(table.table) for table in trained if any(reading.decay_of(table))]
    reasons = [f"optimizer {reading.moves_every_row}"] if trained and reading.moves_every_row else []
    reasons += [f"weight decay of {', '.join(decayed)}"] if decayed else []
    if not reasons:
        return
    message = (
        f"{' and '.join(reasons)}: tables are trained lazily, only the rows of ids that occur in a batch change; "
        "plain Paddle would also move the others"
    )
    if strict:
        raise PlanError(f"{message}. Unset FLEET_SPARSE_STRICT_RULES to train lazily")
    logger.warning(message)


def _read_momentum(optimizer: Any) -> dict[str, Any]:
    if optimizer._rescale_grad != 1.0:
        raise PlanError(
            f"optimizer Momentum: rescale_grad is {optimizer._rescale_grad}, and only 1 is supported; scale the loss"
        )
    return {"mu": optimizer._momentum, "use_nesterov": optimizer._use_nesterov}


def _read_rmsprop(optimizer: Any) -> dict[str, Any]:
    return {
        "rho": optimizer._rho,
        "epsilon": optimizer._epsilon,
        "momentum": optimizer._momentum,
        "centered": optimizer._centered,
    }


def _read_adagrad(optimizer: Any) -> dict[str, Any]:
    return {"epsilon": optimizer._epsilon, "initial_accumulator_value": optimizer.initial_accumulator_value}


def _read_betas(optimizer: Any) -> dict[str, Any]:
    return {"beta1": optimizer._beta1, "beta2": optimizer._beta2, "epsilon": optimizer._epsilon}


def _read_lamb(optimizer: Any) -> dict[str, Any]:
    decay, always_adapt = optimizer._lamb_weight_decay, optimizer.always_adapt
    return {**_read_betas(optimizer), "decay": decay, "always_adapt": always_adapt}


def _read_pserver_optimizer(optimizer: PserverOptimizer) -> dict[str, Any]:
    if optimizer.rule not in RULES or RULES[optimizer.rule].kernel is None:
        known = ", ".join(sorted(name for name, rule in RULES.items() if rule.kernel is not None))
        raise PlanError(f"optimizer PserverOptimizer: rule is {optimizer.rule!r}, should be one of {known}")
    known_names = dict(RULES[optimizer.rule].defaults)
    for argument in optimizer.hyperparameters:
        if argument not in known_names:
            raise PlanError(
                f"optimizer PserverOptimizer: rule {optimizer.rule!r} has no {argument!r}; "
                f"it has {', '.join(known_names) or 'no hyperparameters'}"
            )
    return optimizer.hyperparameters


_READERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    paddle.optimizer.SGD: lambda optimizer: {},
    paddle.optimizer.Adagrad: _read_adagrad,
    paddle.optimizer.Adam: _read_betas,
    paddle.optimizer.AdamW: lambda optimizer: {**_read_betas(optimizer), "coeff": optimizer._weight_decay},
    paddle.optimizer.Adamax: _read_betas,
    paddle.optimizer.Momentum: _read_momentum,
    paddle.optimizer.RMSProp: _read_rmsprop,
    paddle.optimizer.Lamb: _read_lamb,
    PserverOptimizer: _read_pserver_optimizer,
}

# Paddle's update rules with which a row moves in every step, with a gradient or without: they keep a momentum, or decay
# the row itself. Adam and AdamW have lazy_mode.
_MOVE_EVERY_ROW = {
    paddle.optimizer.Adam,
    paddle.optimizer.AdamW,
    paddle.optimizer.Adamax,
    paddle.optimizer.Momentum,
    paddle.optimizer.RMSProp,
    paddle.optimizer.Lamb,
}

# Arguments that no rule follows, by the attribute (behind an underscore) that keeps them.
_REFUSED = (
    "multi_precision",
    "amsgrad",
    "lr_ratio",
    "apply_decay_param_fun",
    "exclude_from_weight_decay_fn",
    "use_lowprecision_moment",
)


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
    k_steps = strategy.a_sync_configs["k_steps"]
    if k_steps > 0:
        raise PlanError(
            f"DistributedStrategy.a_sync_configs['k_steps']: is {k_steps}, and geo training does not exist yet; "
            "leave it out"
        )
    for configs in ("a_sync_configs", "gradient_scale_configs", "trainer_desc_configs"):
        _check_configs(configs, getattr(message, configs))


def _check_configs(configs: str, message: Any) -> None:
    """Refuses what none of our modes obeys: whatever differs from Paddle's default."""
    for field, value in message.ListFields():
        if field.name != "k_steps" and value != field.default_value:
            raise PlanError(
                f"DistributedStrategy.{configs}[{field.name!r}]: is {value!r} and is not supported; leave it out"
            )
