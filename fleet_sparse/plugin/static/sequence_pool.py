"""`paddle.static.nn.sequence_pool` of looked-up rows, which Paddle 3 has in its old IR alone.

In Paddle 2 a ragged slot had the number of values of each line with it (LoD). Here the numbers are an input of their
own, `<slot>.lengths`, which `sequence_pool` declares and data sets feed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError

from ..datasets.slots import lengths_name
from .segments import Field, Pooling, insert_segments, pooled

_COMBINERS = {"sum": "sum", "average": "mean", "sqrt": "sqrtn"}
"""Combiner of `pooled_embedding` by Paddle's pool_type."""


def wrap_sequence_pool(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `paddle.static.nn.sequence_pool`; arguments are Paddle's.

    The result has shape `(batch, dim)`. An example without values gets `pad_value`.

    Raises:
        PlanError: The pool type is not supported, or the input is not computed from one ragged slot.
    """

    @wraps(stock)
    def sequence_pool(input: Any, pool_type: str, is_test: bool = False, pad_value: float = 0.0) -> Any:
        if not paddle.framework.in_pir_mode():
            return stock(input, pool_type, is_test, pad_value)
        combiner = _COMBINERS.get(pool_type.lower())
        if combiner is None:
            raise PlanError(f"sequence_pool: pool_type is {pool_type!r}, should be 'sum', 'average' or 'sqrt'")
        if pad_value != 0:
            raise PlanError(f"sequence_pool: pad_value is {pad_value}, should be 0. Leave it out")
        slot = _slot_of(input)
        name = str(slot.str_attr("name"))
        lengths = declared_lengths(input.block.program, name)
        if lengths is None:
            lengths = paddle.static.data(lengths_name(name), [-1], "int64")
        dim = int(input.shape[-1])
        field = Field(f"sequence_pool: slot {name!r}", slot.result(0), lengths, None, is_ragged=True)
        segments = insert_segments([field], Pooling(combiner, None, dim, has_weights=False, needs_mask=False))
        return pooled(paddle.reshape(input, [-1, dim]), None, segments, combiner)

    return sequence_pool


def declared_lengths(program: pir.Program, slot: str) -> pir.Value | None:
    """Returns the input of `program` with the number of values that each line has in a slot; None without one."""
    wanted = lengths_name(slot)
    for op in program.global_block().ops:
        if str(op.name()) == "pd_op.data" and op.str_attr("name") == wanted:
            return op.result(0)
    return None


def _slot_of(value: pir.Value) -> pir.Operation:
    """Returns the op of the one ragged input that `value` is computed from."""
    shape, found, seen = list(value.shape), {}, set()
    waiting = [value]
    while waiting:
        op = waiting.pop().get_defining_op()
        if op is None or op.id() in seen:
            continue
        seen.add(op.id())
        if str(op.name()) == "pd_op.data":
            found[str(op.str_attr("name"))] = op
        waiting += op.operands_source()
    ragged = [op for op in found.values() if list(op.result(0).shape) in ([-1], [-1, 1])]
    if len(found) == 1 and ragged and len(shape) >= 2 and shape[-1] > 0 and all(size == 1 for size in shape[1:-1]):
        return ragged[0]
    names = ", ".join(f"{name!r} of shape {list(op.result(0).shape)}" for name, op in sorted(found.items()))
    raise PlanError(
        f"sequence_pool: its input has shape {shape} and is computed from {names or 'no input'}, should be rows of one "
        "input of shape [-1, 1]. Write fleet_sparse.pooled_embedding for other fields of variable length"
    )
