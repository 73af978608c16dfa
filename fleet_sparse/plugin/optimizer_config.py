"""OptimizerConfig: the configuration that Paddle's optimizers and initializers stand for.

Every argument is either obeyed or refused by name; none is ignored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import paddle
from paddle.nn import initializer as initializers

from fleet_sparse.core.bounds import UNBOUNDED, Bounds
from fleet_sparse.core.clip import BY_GLOBAL_NORM, BY_NORM, BY_VALUE, Clip
from fleet_sparse.core.decay import Decay
from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.core.initializer import FLOAT32_MAX, Initializer, constant, normal, truncated_normal, uniform
from fleet_sparse.core.rules import RULES, read_only
from fleet_sparse.errors import PlanError

from .optimizer import PserverOptimizer

logger = logging.getLogger(__name__)


class OptimizerConfig(NamedTuple):
    """The update rule of an optimizer, with its arguments."""

    rule: str
    hyperparameters: tuple[tuple[str, float], ...]
    decay: Decay = Decay()
    """Weight decay of tables and parameters that have none of their own."""
    moves_every_row: str = ""
    """If Paddle's optimizer also changes rows without a gradient: its name, and the argument that makes it lazy if
    there is one. Otherwise empty."""
    clip: Clip | None = None
    """Clip of the gradients. A clip by value is also part of the specs, by `of_table` and `bounds_of`."""

    def of_table(self, embedding: EmbeddingSpec) -> tuple[tuple[str, float], ...]:
        """The hyperparameters of the table of `embedding`, including its decay and bounds."""
        if self.rule == read_only.name:
            return ()
        decay, bounds = self.decay_of(embedding), self.bounds_of(embedding.need_clip)
        clip = () if bounds == UNBOUNDED else (("clip_min", bounds.low), ("clip_max", bounds.high))
        return (*self.hyperparameters, ("l1_decay", decay.l1), ("l2_decay", decay.l2), *clip)

    def decay_of(self, embedding: EmbeddingSpec) -> Decay:
        """Returns the decay of the embedding's ParamAttr if it has one, else the optimizer's, as Paddle does."""
        return self.decay if embedding.decay is None else embedding.decay

    def bounds_of(self, need_clip: bool) -> Bounds:
        """The bounds of a clip by value for a table or dense parameter with this `need_clip`."""
        return UNBOUNDED if self.clip is None or not need_clip else self.clip.bounds


def read_optimizer(optimizer: Any, *, has_parameters: bool = False) -> OptimizerConfig:
    """Reads a Paddle optimizer or a `PserverOptimizer`.

    Args:
        optimizer: The optimizer.
        has_parameters: True in dygraph, where an optimizer is given its parameters.

    Raises:
        PlanError: The optimizer, or an argument of it, is not supported on pservers.
    """
    kind = type(optimizer)
    name = kind.__name__
    if kind not in _READERS:
        known = ", ".join(sorted(reader.__name__ for reader in _READERS))
        hint = ". AMP is not supported. Leave amp.decorate out" if "MixedPrecision" in name else ""
        raise PlanError(f"optimizer {name}: is not supported on pservers, should be one of {known}{hint}")
    clip = _read_clip(f"optimizer {name}: grad_clip", optimizer._grad_clip)
    if optimizer._parameter_list is not None and not has_parameters:
        raise PlanError(f"optimizer {name}: parameters are given. Leave them out: in a static graph all are trained")
    for argument in _REFUSED:
        if getattr(optimizer, f"_{argument}", None):
            raise PlanError(f"optimizer {name}: {argument} is not supported. Leave it out")
    values = _READERS[kind](optimizer)
    for argument, value in values.items():
        if not isinstance(value, (bool, int, float)):
            raise PlanError(f"optimizer {name}: {argument} is a {type(value).__name__}, should be a number")
    moves_every_row = ""
    if kind in _MOVE_EVERY_ROW and not bool(getattr(optimizer, "_lazy_mode", None)):
        moves_every_row = f"{name} without lazy_mode=True" if hasattr(optimizer, "_lazy_mode") else name
    return OptimizerConfig(
        optimizer.rule if isinstance(optimizer, PserverOptimizer) else name.lower(),
        tuple(sorted((argument, float(value)) for argument, value in values.items())),
        _decay_of(optimizer),
        moves_every_row,
        clip,
    )


def _read_clip(where: str, clip: Any) -> Clip | None:
    """Reads a Paddle clip; None for None.

    `group_name` is ignored because all parameters of an optimizer are one group, and `auto_skip_clip` because it only
    changes how Paddle computes the clip.

    Raises:
        PlanError: The class of the clip is not supported, or its bounds have no meaning.
    """
    if clip is None:
        return None
    kind = type(clip)
    where = f"{where}={kind.__name__}"
    if kind is paddle.nn.ClipGradByValue:
        # No finite gradient reaches these bounds, so that they stand for infinite ones.
        bounds = Bounds(*(min(max(bound, -FLOAT32_MAX), FLOAT32_MAX) for bound in (clip.min, clip.max)))
        if not bounds.low <= bounds.high:
            raise PlanError(f"{where}: min is {clip.min} and max is {clip.max}, min should be at most max")
        return Clip(BY_VALUE, bounds=bounds)
    if kind not in _NORMS:
        known = ", ".join(known.__name__ for known in (paddle.nn.ClipGradByValue, *_NORMS))
        raise PlanError(f"{where}: is not supported on pservers, should be one of {known}")
    if not 0 < clip.clip_norm <= FLOAT32_MAX:
        raise PlanError(f"{where}: clip_norm is {clip.clip_norm}, should be above 0 and finite")
    return Clip(_NORMS[kind], norm=clip.clip_norm)


def _decay_of(optimizer: Any) -> Decay:
    # Momentum has an L2 decay in attributes of its own, because its op in Paddle applies the decay.
    if getattr(optimizer, "_regularization_method", ""):
        return Decay(l2=optimizer._regularization_coeff)
    return read_decay(f"optimizer {type(optimizer).__name__}: weight_decay", optimizer.regularization) or Decay()


def read_decay(where: str, regularizer: Any) -> Decay | None:
    """Reads the coefficients of a Paddle regularizer; None for None.

    Args:
        where: Begins error messages.
        regularizer: `paddle.regularizer.L1Decay` or `L2Decay`.

    Raises:
        PlanError: The regularizer has another class, or its coefficient is not a number.
    """
    if regularizer is None:
        return None
    kind = type(regularizer)
    if kind not in (paddle.regularizer.L1Decay, paddle.regularizer.L2Decay):
        raise PlanError(f"{where}: is {kind.__name__}, should be paddle.regularizer.L1Decay or L2Decay")
    coefficient = regularizer._coeff
    if not isinstance(coefficient, (int, float)):
        raise PlanError(f"{where}: its coefficient is a {type(coefficient).__name__}, should be a number")
    return Decay(l1=float(coefficient)) if kind is paddle.regularizer.L1Decay else Decay(l2=float(coefficient))


def check_trust_ratio(optimizer: Any, tables: Iterable[EmbeddingSpec]) -> None:
    """Refuses to train tables with the trust ratio of Paddle's Lamb.

    Paddle computes one ratio per parameter, over all rows of a table; a pserver has only some of them.

    Raises:
        PlanError: The optimizer is Lamb with a trust ratio, and a table is trained.
    """
    if type(optimizer) is not paddle.optimizer.Lamb:
        return
    names = [repr(table.name) for table in tables if table.is_trainable]
    if names and (optimizer._lamb_weight_decay or optimizer.always_adapt):
        raise PlanError(
            f"optimizer Lamb: lamb_weight_decay is {optimizer._lamb_weight_decay}, always_adapt is "
            f"{bool(optimizer.always_adapt)}, and table {names[0]} is trained. Paddle's trust ratio is computed over "
            "all rows of a table, which pservers do not do. Write lamb_weight_decay=0.0 and always_adapt=False, or "
            "PserverOptimizer('lamb', ...) for a trust ratio per row"
        )


def check_lazy(config: OptimizerConfig, tables: Iterable[EmbeddingSpec], *, strict: bool) -> None:
    """Warns if plain Paddle would also change rows without a gradient, because pservers train lazily.

    Args:
        config: The optimizer.
        tables: The embeddings of the program.
        strict: True to refuse instead.

    Raises:
        PlanError: `strict` is set, and the optimizer, or the decay or clip of a table, is not lazy in Paddle.
    """
    trained = [table for table in tables if table.is_trainable]
    decayed = [repr(table.name) for table in trained if any(config.decay_of(table))]
    # For a dense parameter of Paddle a row without a gradient has a gradient of 0.
    pushed_off = [repr(table.name) for table in trained if not _holds_zero(config.bounds_of(table.need_clip))]
    reasons = [f"optimizer {config.moves_every_row}"] if trained and config.moves_every_row else []
    reasons += [f"weight decay of {', '.join(decayed)}"] if decayed else []
    reasons += [f"grad_clip without 0 between min and max of {', '.join(pushed_off)}"] if pushed_off else []
    if not reasons:
        return
    message = (
        f"{' and '.join(reasons)}: tables are trained lazily, only the rows of ids in the batch change; plain Paddle "
        "would also change the others"
    )
    if strict:
        raise PlanError(f"{message}. Unset FLEET_SPARSE_STRICT_RULES to train lazily")
    logger.warning(message)


def _holds_zero(bounds: Bounds) -> bool:
    return bounds.low <= 0 <= bounds.high


def _read_momentum(optimizer: Any) -> dict[str, Any]:
    if optimizer._rescale_grad != 1.0:
        raise PlanError(
            f"optimizer Momentum: rescale_grad is {optimizer._rescale_grad}, should be 1. Scale the loss instead"
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
    if optimizer.rule not in RULES or not RULES[optimizer.rule].trains:
        known = ", ".join(sorted(name for name, rule in RULES.items() if rule.trains))
        raise PlanError(f"optimizer PserverOptimizer: rule is {optimizer.rule!r}, should be one of {known}")
    known_names = dict(RULES[optimizer.rule].defaults)
    for argument in optimizer.hyperparameters:
        if argument not in known_names:
            raise PlanError(
                f"optimizer PserverOptimizer: rule {optimizer.rule!r} has no {argument!r}, "
                f"should be one of {', '.join(known_names) or 'none'}"
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

_NORMS = {paddle.nn.ClipGradByNorm: BY_NORM, paddle.nn.ClipGradByGlobalNorm: BY_GLOBAL_NORM}

# Optimizers of Paddle that change a row in every step, with or without a gradient, because they have a momentum or
# decay the row itself. Adam and AdamW have lazy_mode.
_MOVE_EVERY_ROW = {
    paddle.optimizer.Adam,
    paddle.optimizer.AdamW,
    paddle.optimizer.Adamax,
    paddle.optimizer.Momentum,
    paddle.optimizer.RMSProp,
    paddle.optimizer.Lamb,
}

# Arguments that no rule supports, by the attribute that holds them, without its underscore.
_REFUSED = (
    "multi_precision",
    "amsgrad",
    "lr_ratio",
    "apply_decay_param_fun",
    "exclude_from_weight_decay_fn",
    "use_lowprecision_moment",
)


class InitializerConfig(NamedTuple):
    """An initializer and its seed; 0 if the user gave none."""

    initializer: Initializer
    seed: int


def read_initializer(table: str, initializer: Any, size: tuple[int, int]) -> InitializerConfig:
    """Reads a Paddle initializer of a parameter of shape `size`.

    Args:
        table: Name of the table, for error messages.
        initializer: An initializer of `paddle.nn.initializer`; None for Paddle's default, Xavier uniform.
        size: `(ids, dim)` as the user gave it; Xavier's fans.

    Raises:
        PlanError: The first value of a row cannot be computed from its id alone.
    """
    if initializer is None:
        initializer = paddle.nn.initializer.XavierUniform()
    seed = int(getattr(initializer, "_seed", 0))
    match initializer:
        case initializers.Constant():
            return InitializerConfig(constant(initializer._value), 0)
        case initializers.Uniform() if not initializer._diag_num:
            return InitializerConfig(uniform(initializer._low, initializer._high), seed)
        case initializers.TruncatedNormal():
            read = truncated_normal(initializer._mean, initializer._std_dev, initializer._a, initializer._b)
            return InitializerConfig(read, seed)
        case initializers.Normal():
            return InitializerConfig(normal(initializer._mean, initializer._std_dev), seed)
        case initializers.XavierUniform() | initializers.XavierNormal():
            return InitializerConfig(_xavier(initializer, size), seed)
    raise PlanError(
        f"table {table!r}: initializer {type(initializer).__name__} is not supported, "
        "should be Constant, Uniform, Normal, TruncatedNormal, XavierUniform or XavierNormal"
    )


def _xavier(initializer: Any, size: tuple[int, int]) -> Initializer:
    """Glorot and Bengio, 2010: variance 2 / (fan_in + fan_out)."""
    fan_in = size[0] if initializer._fan_in is None else initializer._fan_in
    fan_out = size[1] if initializer._fan_out is None else initializer._fan_out
    std = initializer._gain * math.sqrt(2.0 / (fan_in + fan_out))
    if initializer._uniform:
        return uniform(-math.sqrt(3.0) * std, math.sqrt(3.0) * std)
    return normal(0.0, std)
