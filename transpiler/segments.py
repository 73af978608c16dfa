"""The op of segments as attributes, and as ops that stock Paddle can save.

The op computes which example each id of some fields belongs to, and which ids count (`plugin/static/segments.py`). In a
program for inference Paddle's own ops take its place; they do not check that lengths fit the ids.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import paddle
from paddle.base.libpaddle import pir

ATTRIBUTE = "fleet_sparse_segments"


class FieldInputs(NamedTuple):
    """Which inputs of the op a field has, after its ids."""

    is_ragged: bool
    has_lengths: bool
    has_weights: bool


class SegmentsSpec(NamedTuple):
    """What an op of segments computes."""

    fields: tuple[FieldInputs, ...]
    dim: int
    padding_idx: int | None
    has_mask: bool
    factors: str
    """`"mean"` or `"sqrtn"` if it has the output of factors, otherwise empty."""

    def to_json(self) -> str:
        """One line of JSON; `parse_segments` reads it."""
        return json.dumps(self)


def parse_segments(text: str) -> SegmentsSpec:
    """The spec that `SegmentsSpec.to_json` wrote."""
    fields, *others = json.loads(text)
    return SegmentsSpec(tuple(FieldInputs(*field) for field in fields), *others)


class FieldWithLengths(NamedTuple):
    """Inputs of a field that has lengths."""

    per_id: tuple[pir.Value, ...]
    """Ids, and weights if there are: their first dimension is not the number of examples if the field is ragged."""
    lengths: pir.Value
    """Number of ids of each example."""
    is_ragged: bool


def fields_with_lengths(op: pir.Operation) -> list[FieldWithLengths]:
    """The fields of an op of segments that have lengths; all ragged ones do."""
    spec, operands = parse_segments(op.str_attr(ATTRIBUTE)), iter(op.operands_source())
    found = []
    for field in spec.fields:
        per_id = [next(operands)]
        lengths = next(operands) if field.has_lengths else None
        if field.has_weights:
            per_id.append(next(operands).get_defining_op().operand_source(0))  # the operand is their shape
        if lengths is not None:
            found.append(FieldWithLengths(tuple(map(_unshaped, per_id)), _unshaped(lengths), field.is_ragged))
    return found


def _unshaped(value: pir.Value) -> pir.Value:
    """The value that `value` is, in another shape."""
    while str(value.get_defining_op().name()) in ("pd_op.reshape", "pd_op.squeeze"):
        value = value.get_defining_op().operand_source(0)
    return value


def replace_segments(op: pir.Operation) -> None:
    """Replaces an op of segments by Paddle's own ops, in place. Its program is the default main program."""
    pir.set_insertion_point(op)
    spec, operands = parse_segments(op.str_attr(ATTRIBUTE)), iter(op.operands_source())
    num_fields = len(spec.fields)
    owners, counted, zero = [], [], None
    for number, field in enumerate(spec.fields):
        ids = next(operands)
        lengths = paddle.reshape(paddle.cast(next(operands), "int64"), [-1]) if field.has_lengths else None
        if field.has_weights:
            next(operands)  # their shape, which is not checked
        if zero is None:  # of each example
            zero = paddle.sum(ids * 0, axis=1) if lengths is None else lengths * 0
        if field.is_ragged:
            examples = paddle.searchsorted(paddle.cumsum(lengths), _numbers(paddle.reshape(ids, [-1]), 0), right=True)
        else:
            examples = paddle.reshape(_numbers(ids, 0), [-1])
        owners.append(examples * num_fields + number)
        counted.append(_counted(ids, None if field.is_ragged else lengths, spec.padding_idx))
    assert zero is not None, "there is at least one field"
    zeros = paddle.reshape(
        paddle.tile(paddle.reshape(paddle.cast(zero, "float32"), [-1, 1]), [1, num_fields * spec.dim]), [-1, spec.dim]
    )
    all_owners, mask = (paddle.reshape(_joined(each), [-1, 1]) for each in (owners, counted))
    results = [all_owners, zeros, *([mask] if spec.has_mask else [])]
    if spec.factors:
        num_counted = paddle.scatter_nd_add(zeros[:, :1], all_owners, mask)
        divisors = paddle.maximum(num_counted, paddle.full([1], 1.0))
        divisors = divisors if spec.factors == "mean" else paddle.sqrt(divisors)
        factors = paddle.divide(paddle.ones_like(divisors), divisors)  # paddle2onnx does not know `1 / divisors`
        results.append(paddle.where(num_counted > 0, factors, paddle.zeros_like(divisors)))
    for old, new in zip(op.results(), results, strict=True):
        old.replace_all_uses_with(new)
    op.get_parent_block().remove_op(op)


def _numbers(ids: Any, axis: int) -> Any:
    """For each id its index along an axis, int64."""
    return paddle.cumsum(paddle.ones_like(paddle.cast(ids, "int64")), axis=axis) - 1


def _counted(ids: Any, lengths: Any, padding_idx: int | None) -> Any:
    """1 for each id that counts, else 0, `(n,)` float32."""
    counted = paddle.ones_like(paddle.cast(ids, "float32"))
    if padding_idx is not None:
        counted = counted * paddle.cast(ids != paddle.full([1], padding_idx, ids.dtype), "float32")
    if lengths is not None:
        counted = counted * paddle.cast(_numbers(ids, 1) < paddle.reshape(lengths, [-1, 1]), "float32")
    return paddle.reshape(counted, [-1])


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else paddle.concat(parts)
