"""Rewrites a Program according to a `RewritePlan`. Makes no decisions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from functools import cache
from typing import NamedTuple

import paddle
from paddle import _C_ops
from paddle.base.libpaddle import pir

from .op_names import PREFETCH, UPDATE
from .placeholder import SITES, sites_to_json
from .plan import RewritePlan, TablePlan
from .raw_op import Body, OutSpec, emit, name_of

TRAIN_ONLY = "fleet_sparse_train_only"

_row_inputs = itertools.count()


class PrefetchedTable(NamedTuple):
    """Values of the Program that hold one table's part of a prefetch."""

    plan: TablePlan
    rows: pir.Value
    """(distinct ids, dim) float32, and one more row of zeros if the table is padded. While the Program is
    differentiated it is an input that stands in for `prefetched_rows`, because the prefetch op has no gradient."""
    prefetched_rows: pir.Value
    positions: tuple[pir.Value, ...]
    """Index of each id in the rows, int64 of the shape of the ids, for each of its lookups."""
    ticket: pir.Value | None
    """(1,) int64, the same for all tables of a prefetch: stands for the ids of the rows. None outside of training."""


class FusedProgram(NamedTuple):
    """Result of `fuse`."""

    tables: tuple[PrefetchedTable, ...]
    replaced: tuple[tuple[pir.Value, pir.Value], ...]
    """The value of the op of each lookup, and the value that replaced it."""


def fuse(program: pir.Program, plan: RewritePlan, body: Body, *, for_training: bool) -> FusedProgram:
    """Replaces the lookups of `plan` by one prefetch op and a local lookup at each site.

    Args:
        program: Changed in place.
        plan: The plan of this Program as it is now.
        body: Body of the prefetch op: reads the ids of each site; fills the rows of each table, then for each site the
            index of each of its ids in the rows, int64 of the shape of the ids, then in training the ticket.
        for_training: Makes rows differentiable until `resolve` is called, and adds the ticket.
    """
    sites = plan.sites
    first = min(sites, key=lambda site: site.position).op
    for op in plan.hoisted:
        op.move_before(first)
    block = program.global_block()
    with paddle.static.program_guard(program, paddle.static.Program()):
        pir.set_insertion_point(first)
        id_values = [site.op.operand_source(0) for site in sites]
        outputs = [OutSpec((-1, table.embedding.dim), "float32") for table in plan.tables]
        outputs += [OutSpec(tuple(value.shape), "int64") for value in id_values]
        if for_training:
            outputs.append(OutSpec((1,), "int64"))
        values = emit(PREFETCH, body, id_values, outputs, {SITES: sites_to_json([site.spec for site in sites])})
        ticket = values[-1] if for_training else None
        tables = []
        row_of_site: dict[int, pir.Value] = {}
        for table, rows in zip(plan.tables, values, strict=False):
            local = _row_input(table) if for_training and table.embedding.is_trainable else rows
            positions = tuple(values[len(plan.tables) + site] for site in table.sites)
            tables.append(PrefetchedTable(table, local, rows, positions, ticket))
            row_of_site.update(dict.fromkeys(table.sites, local))
        replaced = []
        for position, site in enumerate(sites):
            pir.set_insertion_point(site.op)
            local_index = values[len(plan.tables) + position]
            result = _C_ops.embedding(local_index, row_of_site[position], -1, False)
            site.op.result(0).replace_all_uses_with(result)
            replaced.append((site.op.result(0), result))
            _retired().add(site.op)
        pir.set_insertion_point_to_block_end(block)
    return FusedProgram(tuple(tables), tuple(replaced))


def resolve(program: pir.Program, tables: Sequence[PrefetchedTable]) -> None:
    """Replaces the inputs that stood in for prefetched rows, once the Program has its gradients."""
    for table in tables:
        if table.rows.is_same(table.prefetched_rows):
            continue
        row_input = table.rows.get_defining_op()
        table.rows.replace_all_uses_with(table.prefetched_rows)
        program.global_block().remove_op(row_input)


def remove_parameters(program: pir.Program, names: Container[str]) -> None:
    """Removes the parameters `names`, which nothing reads any more. A user may still hold their values."""
    for op in list(program.global_block().ops):
        if str(op.name()) == "builtin.parameter" and op.str_attr("parameter_name") in names:
            _retired().keep(op)


def insert_update(
    tables: Sequence[PrefetchedTable],
    grads: Sequence[pir.Value],
    dense_grads: Sequence[pir.Value],
    learning_rate: pir.Value,
    batch_inputs: Sequence[pir.Value],
    statistics: Sequence[pir.Value],
    outputs: Sequence[OutSpec],
    body: Body,
) -> tuple[pir.Value, ...]:
    """Inserts the op that pushes the gradients of a step; returns its outputs.

    Args:
        tables: The tables whose rows have a gradient.
        grads: Gradient of the rows of each table.
        dense_grads: Gradients of dense parameters that the body reads.
        learning_rate: The optimizer's learning rate, a scalar.
        batch_inputs: Inputs of which the body reads the shapes.
        statistics: Values from which the body computes statistics of the ids.
        outputs: What the body fills; if empty, a token.
        body: Reads the learning rate, the shape of each batch input, the ticket if there are tables, the gradients of
            their rows, the statistics, then the dense gradients.
    """
    inputs = [learning_rate, *(paddle.shape(value) for value in batch_inputs)]
    inputs += [table.ticket for table in tables[:1]]
    inputs += grads
    inputs += statistics
    return emit(UPDATE, body, [*inputs, *dense_grads], outputs or [OutSpec((1,), "int32")], {})


def overwrite(parameters: Sequence[pir.Value], values: Sequence[pir.Value]) -> None:
    """Makes the step assign each parameter its new value."""
    for parameter, value in zip(parameters, values, strict=True):
        _C_ops.assign_out_(value, parameter)


def op_ids(program: pir.Program) -> set[int]:
    """Numbers of the ops of the main block of `program`."""
    return {op.id() for op in program.global_block().ops}


def redirect(program: pir.Program, old: pir.Value, new: pir.Value, *, unchanged: Container[int]) -> None:
    """Makes the ops of the main block read `new` where they read `old`; not those whose numbers are `unchanged`."""
    for op in program.global_block().ops:
        if op.id() in unchanged:
            continue
        for index, value in enumerate(op.operands_source()):
            if value.initialized() and value.is_same(old):
                op.operand(index).set_source(new)


def has_prefetch(program: pir.Program) -> bool:
    """Returns whether the main block of `program` has a prefetch op."""
    return any(name_of(op) == PREFETCH for op in program.global_block().ops)


def mark_train_only(program: pir.Program, is_forward: Callable[[pir.Operation], bool]) -> None:
    """Marks every op of the main block that is not forward, so that `without_training` finds it in a clone."""
    for op in program.global_block().ops:
        if not is_forward(op):
            op.set_bool_attr(TRAIN_ONLY, True)


def without_training(program: pir.Program, body: Body | None) -> None:
    """Removes the ops that `mark_train_only` marked and switches dropout and normalisation to test mode, in place.

    Args:
        program: Changed in place.
        body: Body of a prefetch op for evaluation, which replaces that of training; None to leave it.
    """
    block = program.global_block()
    for op in reversed(list(block.ops)):
        if op.has_attr(TRAIN_ONLY):
            block.remove_op(op)
        elif body is not None and name_of(op) == PREFETCH:
            _replace_prefetch(program, op, body)
    program.set_is_test_attr()


def _replace_prefetch(program: pir.Program, op: pir.Operation, body: Body) -> None:
    old = op.results()[:-1]
    with paddle.static.program_guard(program, paddle.static.Program()):
        pir.set_insertion_point(op)
        dtypes = ["float32" if value.dtype == paddle.float32 else "int64" for value in old]
        outputs = [OutSpec(tuple(value.shape), dtype) for value, dtype in zip(old, dtypes, strict=True)]
        new = emit(PREFETCH, body, op.operands_source(), outputs, {SITES: op.str_attr(SITES)})
        pir.set_insertion_point_to_block_end(program.global_block())
    for old_value, new_value in zip(old, new, strict=True):
        old_value.replace_all_uses_with(new_value)
    program.global_block().remove_op(op)


def _row_input(table: TablePlan) -> pir.Value:
    name = f"fs_rows_{table.embedding.name}_{next(_row_inputs)}"
    rows = paddle.static.data(name, [-1, table.embedding.dim], "float32")
    rows.stop_gradient = False
    return rows


class _Retired:
    """Keeps replaced ops alive in a Program that is never run.

    A user may still hold the value of such an op; freeing the op would leave a dangling pointer.
    """

    def __init__(self) -> None:
        self._program = paddle.static.Program()
        with paddle.static.program_guard(self._program, paddle.static.Program()):
            self._ids = paddle.static.data("fs_retired", [1], "int64")
            self._weight = paddle.static.data("fs_retired_weight", [1, 1], "float32")
            self._end = _C_ops.scale(self._ids, 1.0, 0.0, True).get_defining_op()

    def add(self, op: pir.Operation) -> None:
        """Adds a lookup; what it reads no longer has this use."""
        op.operand(0).set_source(self._ids)
        if op.num_operands() > 1:
            op.operand(1).set_source(self._weight)
        self.keep(op)

    def keep(self, op: pir.Operation) -> None:
        """Adds an op that reads nothing of its Program."""
        op.move_before(self._end)


@cache
def _retired() -> _Retired:
    return _Retired()
