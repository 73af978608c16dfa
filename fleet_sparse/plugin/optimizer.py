"""PserverOptimizer: an optimizer for update rules for which Paddle has no class."""

from __future__ import annotations

from typing import Any

import paddle

from fleet_sparse.errors import PlanError


class PserverOptimizer(paddle.optimizer.Optimizer):  # type: ignore[misc]  # Paddle's classes are untyped here
    """Trains tables and dense parameters with an update rule that is named, as in `PserverOptimizer("ftrl", 0.1)`.

    Args:
        rule: A key of `fleet_sparse.core.rules.RULES`.
        learning_rate: A number or a scheduler, as in Paddle's optimizers.
        parameters: As in Paddle's optimizers: needed in dygraph.
        weight_decay: As in Paddle's optimizers.
        grad_clip: As in Paddle's optimizers.
        hyperparameters: Hyperparameters of the rule; the others have their defaults.

    Attributes:
        rule: As given.
        hyperparameters: As given.
    """

    def __init__(
        self,
        rule: str,
        learning_rate: Any,
        *,
        parameters: Any = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        **hyperparameters: float,
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay=weight_decay, grad_clip=grad_clip)
        self.rule = rule
        self.hyperparameters = hyperparameters

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        raise PlanError(
            "optimizer PserverOptimizer: trains on pservers only. Give it to fleet.distributed_optimizer(...)"
        )
