"""`minimize` of a fleet optimizer: the program is rewritten, differentiated, and its updates go to the pservers."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.core.mode import AVG, GEO, SUM, SYNC, Mode
from fleet_sparse.core.rules import RULES
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler import rewrite
from fleet_sparse.transpiler.plan import plan_training
from fleet_sparse.transpiler.scan import batch_inputs, scan
from fleet_sparse.worker.modes.step import StepClip

from ..optimizer_config import OptimizerConfig, check_lazy, read_optimizer
from ..session import READ_ONLY, Session
from ..strategy import StrategyReading, read_strategy
from . import op_callbacks
from .dense_parameters import DenseParameters, check_parameters, kept_parameters, needs_clip, trained_parameters
from .programs import fuse, note_trained


def minimize(
    session: Session,
    loss: pir.Value,
    optimizer: Any,
    strategy: Any,
    startup_program: pir.Program | None,
    no_grad_set: Any,
) -> tuple[list[Any], list[tuple[pir.Value, pir.Value]]]:
    """Makes the program of `loss` train on pservers; all refusals come before the program is touched.

    Returns:
        No optimizer ops (they run on the pservers) and the pairs of dense parameter and gradient.

    Raises:
        PlanError: The program, optimizer or strategy asks for what cannot be done.
    """
    program = loss.block.program
    startup_program = startup_program or paddle.static.default_startup_program()
    told = read_strategy(strategy)
    reading = read_optimizer(optimizer)
    plan = plan_training(scan(program))
    examples = _batch_inputs(loss, told)
    parameters = _parameters(program)
    trained = [parameter for parameter in parameters if not parameter.stop_gradient]
    check_parameters(trained)
    session.check_dense(parameter.name for parameter in trained)
    is_strict = told.strict_rules or session.settings.strict_rules
    _check_geo(told.mode, reading)
    check_lazy(reading, (table.spec for table in plan.tables), strict=is_strict)
    session.declare_mode(told.mode)
    for table in plan.tables:
        session.declare_table(table.spec, reading if table.spec.trainable else READ_ONLY)

    tables = fuse(program, plan, for_training=True) if plan.sites else ()
    forward = {op.id() for op in program.global_block().ops}
    rows = [table.rows for table in tables if table.plan.spec.trainable]
    params_grads = optimizer.backward(loss, startup_program, [*trained, *rows], no_grad_set)
    grads_of_rows = [(table, _grad_of(table.rows, params_grads)) for table in tables if table.plan.spec.trainable]
    updated = [(table, grad) for table, grad in grads_of_rows if grad is not None]
    dense_grads = [(p, g) for p, g in params_grads if not any(p.is_same(row) for row in rows)]
    with paddle.static.program_guard(program, startup_program):
        optimizer._create_global_learning_rate()
        learning_rate = optimizer._global_learning_rate()
        dense = _declare_dense(session, [parameter for parameter, _ in dense_grads], reading)
        if updated or dense:
            rewrite.insert_update(
                [table for table, _ in updated],
                [grad for _, grad in updated],
                [parameter for parameter, _ in dense_grads],
                [grad for _, grad in dense_grads],
                learning_rate,
                list(examples.values()),
                op_callbacks.update(
                    op_callbacks.UpdatePlan(
                        tuple(table.plan for table, _ in updated),
                        dense,
                        tuple(examples),
                        _step_clip(reading, updated, dense_grads),
                    )
                ),
            )
    _keep_others(session, parameters, {parameter.name for parameter, _ in dense_grads})
    rewrite.resolve(program, tables)
    rewrite.mark_train_only(program, lambda op: op.id() in forward)
    note_trained(program)
    return [], dense_grads


def _batch_inputs(loss: pir.Value, told: StrategyReading) -> dict[str, pir.Value]:
    """The inputs that say how many examples a batch has, by name; none where it makes no difference."""
    if told.mode.kind != SYNC or told.mode.scale != AVG:
        return {}
    inputs = batch_inputs(loss)
    if told.examples_input is None:
        return inputs
    if told.examples_input not in inputs:
        raise PlanError(
            f"PserverStrategy.examples_input: is {told.examples_input!r}; the loss is computed from "
            f"{', '.join(map(repr, inputs)) or 'no input with a first dimension of -1'}"
        )
    return {told.examples_input: inputs[told.examples_input]}


def _step_clip(
    reading: OptimizerConfig,
    updated: list[tuple[rewrite.Prefetched, pir.Value]],
    dense_grads: list[tuple[pir.Value, pir.Value]],
) -> StepClip | None:
    if reading.clip is None or not reading.clip.needs_norm:
        return None
    of_tables = [table.plan.spec.need_clip for table, _ in updated]
    return StepClip(reading.clip, (*of_tables, *(needs_clip(parameter) for parameter, _ in dense_grads)))


def _check_geo(mode: Mode, reading: OptimizerConfig) -> None:
    """Refuses a rule that geo training cannot follow."""
    if mode.kind == GEO and mode.scale == SUM and RULES[reading.rule].follows_state:
        raise PlanError(
            f"PserverStrategy.delta_scale: is 'sum', and rule {reading.rule!r} computes rows from its state alone, so "
            "that changes of several workers cannot be summed; write 'avg'"
        )


def _declare_dense(session: Session, parameters: list[pir.Value], reading: OptimizerConfig) -> DenseParameters | None:
    """Trained parameters become one array that the pservers update."""
    if not parameters:
        return None
    return session.declare_dense(trained_parameters(f"dense.{session.num_dense()}", parameters, reading))


def _keep_others(session: Session, parameters: list[pir.Value], trained: set[str]) -> None:
    """Other parameters become one array that the pservers keep, so that all workers begin with the same values."""
    known = trained | session.dense_names()
    kept = [p for p in parameters if p.name not in known and p.dtype == paddle.float32]
    if kept:
        session.declare_dense(kept_parameters(f"kept.{session.num_dense()}", kept))


def _parameters(program: pir.Program) -> list[pir.Value]:
    return sorted(program.global_block().all_parameters(), key=lambda parameter: str(parameter.name))


def _grad_of(value: pir.Value, params_grads: list[tuple[pir.Value, pir.Value]]) -> pir.Value | None:
    return next((grad for parameter, grad in params_grads if parameter.is_same(value)), None)
