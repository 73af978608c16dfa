"""`minimize` of a fleet optimizer: rewrites and differentiates the program, and pushes its gradients to pservers."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.core.mode import AVG, GEO, SUM, SYNC, Mode
from fleet_sparse.core.rules import RULES
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler import rewrite
from fleet_sparse.transpiler.plan import plan_training
from fleet_sparse.transpiler.scan import batch_inputs, parameters_of, scan
from fleet_sparse.worker.modes.step import StepClip
from fleet_sparse.worker.net.requests import max_dense_values

from ..catalog import READ_ONLY
from ..optimizer_config import OptimizerConfig, check_lazy, check_trust_ratio, read_optimizer
from ..paddle_support import check_flags
from ..session import Session
from ..strategy import StrategyConfig, read_strategy
from . import op_callbacks
from .dense_parameters import DenseParameters, check_parameters, frozen_parameters, needs_clip, trained_parameters
from .programs import fuse, note_trained


def minimize(
    session: Session,
    loss: pir.Value,
    optimizer: Any,
    strategy: Any,
    startup_program: pir.Program | None,
    no_grad_set: Any,
    *,
    num_pservers: int,
) -> tuple[list[Any], list[tuple[pir.Value, pir.Value]]]:
    """Makes the program of `loss` train on pservers. Every refusal is raised before the program is changed.

    Returns:
        An empty list of optimizer ops, which run on the pservers, and pairs of dense parameter and gradient.

    Raises:
        InstallError: A flag of Paddle was set with which training is wrong.
        PlanError: The program, optimizer or strategy asks for something that is not supported.
    """
    program = loss.block.program
    startup_program = startup_program or paddle.static.default_startup_program()
    check_flags()
    strategy_config = read_strategy(strategy)
    config = read_optimizer(optimizer)
    plan = plan_training(scan(program))
    examples = _batch_inputs(loss, strategy_config)
    parameters = _parameters(program)
    trained = [parameter for parameter in parameters if not parameter.stop_gradient]
    check_parameters(trained)
    session.catalog.check_untrained(parameter.name for parameter in trained)
    is_strict = strategy_config.strict_rules or session.settings.strict_rules
    _check_geo(strategy_config.mode, config)
    check_trust_ratio(optimizer, (table.embedding for table in plan.tables))
    max_values = max_dense_values(session.settings.max_frame_bytes)
    undeclared = [p for p in parameters if p.name not in session.catalog.dense_names()]
    _check_dense_sizes(undeclared, parameters_of(loss), config, num_pservers, max_values)
    check_lazy(config, (table.embedding for table in plan.tables), strict=is_strict)
    session.catalog.declare_mode(strategy_config.mode)
    if strategy_config.refuse_ids_past_size:
        for table in plan.tables:
            session.catalog.declare_size(table.embedding)
    for table in plan.tables:
        session.catalog.declare_table(table.embedding, config if table.embedding.is_trainable else READ_ONLY)

    tables = fuse(session, program, plan, for_training=True) if plan.sites else ()
    forward = {op.id() for op in program.global_block().ops}
    trainable = [table for table in tables if table.plan.embedding.is_trainable]
    rows = [table.rows for table in trainable]
    params_grads = optimizer.backward(loss, startup_program, [*trained, *rows], no_grad_set)
    grads_of_rows = [(table, _grad_of(table.rows, params_grads)) for table in trainable]
    updated = [(table, grad) for table, grad in grads_of_rows if grad is not None]
    dense_grads = [(p, g) for p, g in params_grads if not any(p.is_same(row) for row in rows)]
    with paddle.static.program_guard(program, startup_program):
        optimizer._create_global_learning_rate()
        learning_rate = optimizer._global_learning_rate()
        dense = _declare_dense(session, [parameter for parameter, _ in dense_grads], config)
        if updated or dense:
            rewrite.insert_update(
                [table for table, _ in updated],
                [grad for _, grad in updated],
                [parameter for parameter, _ in dense_grads],
                [grad for _, grad in dense_grads],
                learning_rate,
                list(examples.values()),
                op_callbacks.update(
                    session,
                    op_callbacks.UpdatePlan(
                        tuple(table.plan for table, _ in updated),
                        dense,
                        tuple(examples),
                        _step_clip(config, updated, dense_grads),
                    ),
                ),
            )
    _freeze_others(session, parameters, {parameter.name for parameter, _ in dense_grads})
    rewrite.resolve(program, tables)
    rewrite.mark_train_only(program, lambda op: op.id() in forward)
    note_trained(program)
    return [], dense_grads


def _batch_inputs(loss: pir.Value, strategy_config: StrategyConfig) -> dict[str, pir.Value]:
    """The inputs whose first dimension is the number of examples, by name; none if it makes no difference."""
    if strategy_config.mode.kind != SYNC or strategy_config.mode.scale != AVG:
        return {}
    inputs = batch_inputs(loss)
    if strategy_config.examples_input is None:
        return inputs
    if strategy_config.examples_input not in inputs:
        raise PlanError(
            f"PserverStrategy.examples_input: is {strategy_config.examples_input!r}; the loss is computed from "
            f"{', '.join(map(repr, inputs)) or 'no input with a first dimension of -1'}"
        )
    return {strategy_config.examples_input: inputs[strategy_config.examples_input]}


def _step_clip(
    config: OptimizerConfig,
    updated: list[tuple[rewrite.PrefetchedTable, pir.Value]],
    dense_grads: list[tuple[pir.Value, pir.Value]],
) -> StepClip | None:
    if config.clip is None or not config.clip.needs_norm:
        return None
    of_tables = [table.plan.embedding.need_clip for table, _ in updated]
    return StepClip(config.clip, (*of_tables, *(needs_clip(parameter) for parameter, _ in dense_grads)))


def _check_geo(mode: Mode, config: OptimizerConfig) -> None:
    """Refuses a rule that geo training does not support."""
    if mode.kind == GEO and mode.scale == SUM and RULES[config.rule].follows_state:
        raise PlanError(
            f"PserverStrategy.delta_scale: is 'sum', and rule {config.rule!r} computes rows from its state alone, so "
            "that changes of several workers cannot be summed. Write 'avg'"
        )


def _check_dense_sizes(
    parameters: list[pir.Value], needed: set[str], config: OptimizerConfig, num_pservers: int, max_values: int
) -> None:
    """Refuses dense arrays of which a pserver's part does not fit into one frame.

    Args:
        parameters: Parameters of the program that no other program declared.
        needed: Names of those that the loss is computed from.
        config: The optimizer.
        num_pservers: Number of pservers.
        max_values: Largest number of values per pserver.
    """
    floats = [parameter for parameter in parameters if parameter.dtype == paddle.float32]
    trained = [parameter for parameter in floats if parameter.name in needed and not parameter.stop_gradient]
    others = [parameter for parameter in floats if parameter.name not in {each.name for each in trained}]
    arrays = [trained_parameters("dense", trained, config)] if trained else []
    arrays += [frozen_parameters("frozen", others)] if others else []
    for array in arrays:
        ranges = [array.spec.range_of(shard, num_pservers) for shard in range(num_pservers)]
        largest = max(end - begin for begin, end in ranges)
        if largest > max_values:
            kind = "trained" if array.is_trained else "frozen"
            raise PlanError(
                f"minimize: the {kind} dense parameters have {largest} values on one of {num_pservers} pservers, "
                f"should be at most {max_values}, which fit into a frame. Set FLEET_SPARSE_MAX_FRAME_BYTES to "
                f"{4 * largest + (1 << 20)} for workers and pservers, or use more pservers"
            )


def _declare_dense(session: Session, parameters: list[pir.Value], config: OptimizerConfig) -> DenseParameters | None:
    """Declares trained parameters as one array that the pservers update."""
    if not parameters:
        return None
    return session.catalog.declare_dense(trained_parameters(f"dense.{len(session.catalog.dense)}", parameters, config))


def _freeze_others(session: Session, parameters: list[pir.Value], trained: set[str]) -> None:
    """Declares other parameters as one frozen array, so that all workers begin with the same values."""
    known = trained | session.catalog.dense_names()
    frozen = [p for p in parameters if p.name not in known and p.dtype == paddle.float32]
    if frozen:
        session.catalog.declare_dense(frozen_parameters(f"kept.{len(session.catalog.dense)}", frozen))


def _parameters(program: pir.Program) -> list[pir.Value]:
    return sorted(program.global_block().all_parameters(), key=lambda parameter: str(parameter.name))


def _grad_of(value: pir.Value, params_grads: list[tuple[pir.Value, pir.Value]]) -> pir.Value | None:
    return next((grad for parameter, grad in params_grads if parameter.is_same(value)), None)
