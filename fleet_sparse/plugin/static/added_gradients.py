"""Gradients that a layer states itself, besides those that follow from the loss.

A layer adds the product of a value and its gradient to the program, as an op with an attribute, which a clone keeps.
`minimize` differentiates the sum of the loss and these products; the loss that a user fetches stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.transpiler.rewrite import TRAIN_ONLY

_ADDED = "fleet_sparse_added_gradient"
_SUMMARY, _DECAY = "fleet_sparse_summary", "fleet_sparse_summary_decay"


def add_gradient(value: pir.Value, gradient: pir.Value) -> pir.Operation:
    """Adds `gradient`, of the shape of `value`, to the gradient of `value`. Returns the op that stands for it."""
    gradient.stop_gradient = True
    product = value * gradient
    total = paddle.sum(product)
    for each in (product, total):
        each.get_defining_op().set_bool_attr(TRAIN_ONLY, True)
    op = total.get_defining_op()
    op.set_bool_attr(_ADDED, True)
    return op


def add_summary(parameter: pir.Value, of_batch: pir.Value, decay: float) -> None:
    """Makes each training step set a parameter to its value times `decay`, plus `of_batch`. No optimizer trains it."""
    op = add_gradient(parameter, of_batch)
    op.set_str_attr(_SUMMARY, parameter.name)
    op.set_str_attr(_DECAY, repr(decay))


def with_added(loss: pir.Value) -> pir.Value:
    """The value to differentiate: the loss, plus the products of its program."""
    ops = [op for op in loss.block.ops if op.has_attr(_ADDED)]
    if not ops:
        return loss
    with paddle.static.program_guard(loss.block.program):
        total = paddle.add_n([op.result(0) for op in ops])
        return loss + paddle.reshape(total, list(loss.shape)).astype(loss.dtype)


def summaries_of(program: pir.Program) -> Mapping[str, float]:
    """Names of the parameters with a summary, and the decay of each."""
    ops = [op for op in program.global_block().ops if op.has_attr(_SUMMARY)]
    return {op.str_attr(_SUMMARY): float(op.str_attr(_DECAY)) for op in ops}
