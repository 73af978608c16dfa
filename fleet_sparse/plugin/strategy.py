"""Strategies: Paddle's `DistributedStrategy`, ours with what Paddle has no word for, and what they say.

Every switch is either read here or refused by name; nothing is ignored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from paddle.distributed.fleet import DistributedStrategy

from fleet_sparse.core.mode import ASYNC, AVG, GEO, SUM, SYNC, Mode
from fleet_sparse.errors import PlanError

_OBEYED = {"a_sync", "a_sync_configs", "gradient_scale_configs", "build_strategy"}
_OBEYED_CONFIGS = {"k_steps", "scale_strategy"}


class PserverStrategy(DistributedStrategy):  # type: ignore[misc]  # Paddle's classes are untyped here
    """A `fleet.DistributedStrategy` with a few fields more; give it to `fleet.distributed_optimizer`.

    ```python
    strategy = fleet_sparse.PserverStrategy(max_step_lag=4)
    strategy.a_sync = True
    ```

    Args:
        max_step_lag: Async training: how many steps a worker may be ahead of the slowest one before its pulls wait. 0
            is the order of steps of sync training. None, the default, lets nobody wait.
        delta_scale: Geo training (`a_sync_configs["k_steps"]` above 0): "avg" adds each worker's change of a row
            divided by the number of workers, "sum" adds it whole.
        examples_input: Sync training: the `paddle.static.data` whose first dimension counts the examples of a batch, by
            name. Left out, all inputs of the loss must have the same one.
        strict_rules: Refuse optimizers and decays with which plain Paddle also moves rows that no batch touched, as
            `FLEET_SPARSE_STRICT_RULES=1` does for all programs.

    Raises:
        PlanError: A value that has no meaning.
    """

    def __init__(
        self,
        *,
        max_step_lag: int | None = None,
        delta_scale: str = "avg",
        examples_input: str | None = None,
        strict_rules: bool = False,
    ) -> None:
        self.max_step_lag = max_step_lag
        self.delta_scale = delta_scale
        self.examples_input = examples_input
        self.strict_rules = strict_rules
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_step_lag" and not (value is None or (type(value) is int and value >= 0)):
            raise PlanError(f"PserverStrategy.max_step_lag: is {value!r}; write a number of steps from 0, or None")
        if name == "delta_scale" and value not in ("avg", "sum"):
            raise PlanError(f"PserverStrategy.delta_scale: is {value!r}; write 'avg' or 'sum'")
        super().__setattr__(name, value)


class StrategyConfig(NamedTuple):
    """What a strategy says."""

    mode: Mode
    examples_input: str | None
    """As of `PserverStrategy`."""
    strict_rules: bool
    """As of `PserverStrategy`."""


def read_strategy(strategy: Any) -> StrategyConfig:
    """The mode that a `DistributedStrategy` stands for, with what a `PserverStrategy` adds.

    Raises:
        PlanError: A switch that is on and not obeyed, or two that contradict each other; says what to write instead.
    """
    _check_switches(strategy)
    ours = strategy if isinstance(strategy, PserverStrategy) else PserverStrategy()
    scale = strategy.gradient_scale_configs["scale_strategy"]
    k_steps = strategy.a_sync_configs["k_steps"]
    is_geo = strategy.a_sync and k_steps > 0
    if scale not in (AVG, SUM):
        raise PlanError(
            f"DistributedStrategy.gradient_scale_configs['scale_strategy']: is {scale!r}; write 'avg' or 'sum', and "
            "scale the loss itself"
        )
    if scale == SUM and strategy.a_sync:
        raise PlanError(
            "DistributedStrategy.gradient_scale_configs['scale_strategy']: is 'sum' with a_sync = True, where every "
            "push is applied as it is; leave it out, or write a_sync = False"
        )
    _check_absent(
        ours.delta_scale != AVG and not is_geo, "PserverStrategy.delta_scale", ours.delta_scale, "k_steps above 0"
    )
    is_averaged = not strategy.a_sync and scale == AVG
    _check_absent(
        ours.examples_input is not None and not is_averaged,
        "PserverStrategy.examples_input",
        ours.examples_input,
        "a_sync = False and scale_strategy 'avg'",
    )
    if not strategy.a_sync:
        _check_absent(k_steps > 0, "DistributedStrategy.a_sync_configs['k_steps']", k_steps, "a_sync = True")
        _check_absent(ours.max_step_lag is not None, "PserverStrategy.max_step_lag", ours.max_step_lag, "a_sync = True")
        return StrategyConfig(Mode(SYNC, scale), ours.examples_input, ours.strict_rules)
    if is_geo:
        _check_absent(ours.max_step_lag is not None, "PserverStrategy.max_step_lag", ours.max_step_lag, "k_steps of 0")
        return StrategyConfig(Mode(GEO, ours.delta_scale, None, k_steps), None, ours.strict_rules)
    return StrategyConfig(Mode(ASYNC, max_step_lag=ours.max_step_lag), None, ours.strict_rules)


def _check_absent(is_present: bool, name: str, value: object, needs: str) -> None:
    if is_present:
        raise PlanError(f"{name}: is {value}, and only has a meaning with {needs}; leave it out, or write that")


def _check_switches(strategy: Any) -> None:
    """Refuses whatever none of our modes obeys: what differs from Paddle's default."""
    message = strategy.strategy
    for field, value in message.ListFields():
        if field.name in _OBEYED or field.name.endswith("_configs"):  # configs say how, not whether
            continue
        if isinstance(value, (bool, int, float, str)) and value == field.default_value:
            continue
        raise PlanError(
            f"DistributedStrategy.{field.name}: is {value} and is not supported with pservers; leave it out"
        )
    for configs in ("a_sync_configs", "gradient_scale_configs", "trainer_desc_configs"):
        for field, value in getattr(message, configs).ListFields():
            if field.name not in _OBEYED_CONFIGS and value != field.default_value:
                raise PlanError(
                    f"DistributedStrategy.{configs}[{field.name!r}]: is {value!r} and is not supported; leave it out"
                )
