"""`minimize` of a fleet optimizer: the program is rewritten, differentiated, and its updates go to the pservers."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.transpiler import rewrite
from fleet_sparse.transpiler.plan import plan_training
from fleet_sparse.transpiler.scan import scan

from . import bodies
from .dense import check_parameters, kept_parameters, trained_parameters
from .programs import fuse, note_trained
from .reading import OptimizerReading, check_lazy, check_strategy, read_optimizer
from .session import READ_ONLY, Session


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
    check_strategy(strategy)
    reading = read_optimizer(optimizer)
    plan = plan_training(scan(program))
    parameters = _parameters(program)
    trained = [parameter for parameter in parameters if not parameter.stop_gradient]
    check_parameters(trained)
    session.check_dense(parameter.name for parameter in trained)
    check_lazy(reading, (table.spec for table in plan.tables), strict=session.settings.strict_rules)
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
        if updated:
            pushed, grads = zip(*updated, strict=True)
            body = bodies.sparse_update([table.plan for table in pushed])
            rewrite.insert_sparse_update(pushed, grads, learning_rate, body)
        _update_dense(session, dense_grads, reading, learning_rate)
    _keep_others(session, parameters, {parameter.name for parameter, _ in dense_grads})
    rewrite.resolve(program, tables)
    rewrite.mark_train_only(program, lambda op: op.id() in forward)
    note_trained(program)
    return [], dense_grads


def _update_dense(
    session: Session,
    params_grads: list[tuple[pir.Value, pir.Value]],
    reading: OptimizerReading,
    learning_rate: pir.Value,
) -> None:
    """Trained parameters become one array that the pservers update."""
    if params_grads:
        parameters, grads = zip(*params_grads, strict=True)
        dense = trained_parameters(f"dense.{session.num_dense()}", parameters, reading)
        session.declare_dense(dense)
        rewrite.insert_dense_update(parameters, grads, learning_rate, bodies.dense_update(dense.spec, dense.shapes))


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
