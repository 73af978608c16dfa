"""The op of segments: which example each id of some fields belongs to, and which ids count; and sums over segments.

What the op computes depends on ids and lengths alone, so it has no gradient. The sums are Paddle's ops, which have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base.libpaddle import pir

from fleet_sparse.transpiler.op_names import SEGMENTS
from fleet_sparse.transpiler.raw_op import Body, Outputs, OutSpec, emit
from fleet_sparse.transpiler.segments import ATTRIBUTE, FieldInputs, SegmentsSpec

_SUM, _MEAN, _ = COMBINERS = ("sum", "mean", "sqrtn")
_DTYPES = {"float32": paddle.float32, "int64": paddle.int64}


class Field(NamedTuple):
    """Inputs of one field."""

    name: str
    """Name of the field in errors."""
    ids: pir.Value
    """`(batch, n)`; `(total,)` or `(total, 1)` of a ragged field."""
    lengths: pir.Value | None
    """`(batch,)` or `(batch, 1)`."""
    weights: pir.Value | None
    """`(batch, n)`, or `(total, 1)` of a ragged field."""
    is_ragged: bool


class Pooling(NamedTuple):
    """The way in which rows of some fields of a table are pooled."""

    combiner: str
    """`"sum"`, `"mean"` or `"sqrtn"`."""
    padding_idx: int | None
    """Id that does not count, at least 0; None for none."""
    dim: int
    """Number of floats of a row."""
    has_weights: bool
    """True if a field has weights."""
    needs_mask: bool
    """True if a field has weights, or ids past its lengths."""

    @property
    def needs_factors(self) -> bool:
        """True if the divisors depend on ids and lengths alone."""
        return self.combiner != "sum" and not self.has_weights


class Segments(NamedTuple):
    """Outputs of the op. T is the number of ids of all fields, in the order of the fields; F the number of fields.

    A segment is what one example has in one field: number `example * F + field`.
    """

    owners: pir.Value
    """`(T, 1)` int64: the segment of each id."""
    zeros: pir.Value
    """`(batch * F, dim)` float32: what the rows are added to."""
    mask: pir.Value | None = None
    """`(T, 1)` float32: 1 for ids that count, else 0."""
    factors: pir.Value | None = None
    """`(batch * F, 1)` float32: 1 / n or 1 / sqrt(n), with n the number of ids that count; 0 without any."""


class _FieldPlan(NamedTuple):
    """Numbers of the inputs of the op that a field has."""

    name: str
    is_ragged: bool
    has_lengths: bool
    has_weights: bool


def insert_segments(fields: Sequence[Field], pooling: Pooling) -> Segments:
    """Inserts the op for all fields of a call. It raises `ValueError` if lengths or shapes do not fit the ids."""
    plans, inputs = _inputs(fields, paddle.shape)
    outputs = _outputs(pooling)
    spec = SegmentsSpec(
        tuple(FieldInputs(plan.is_ragged, plan.has_lengths, plan.has_weights) for plan in plans),
        pooling.dim,
        pooling.padding_idx,
        pooling.needs_mask,
        pooling.combiner if pooling.needs_factors else "",
    )
    values = emit(SEGMENTS, _body(plans, pooling), inputs, list(outputs.values()), {ATTRIBUTE: spec.to_json()})
    for value in values:
        value.stop_gradient = True
    return Segments(**dict(zip(outputs, values, strict=True)))


def compute_segments(fields: Sequence[Field], pooling: Pooling) -> Segments:
    """As `insert_segments`, at once, for fields of dygraph tensors."""
    plans, inputs = _inputs(fields, lambda weights: np.array(weights.shape))
    outputs = _outputs(pooling)
    computed = Outputs([_DTYPES[spec.dtype] for spec in outputs.values()])
    arrays = [each if isinstance(each, np.ndarray) else each.numpy() for each in inputs]
    _body(plans, pooling)(arrays, computed)
    return Segments(**dict(zip(outputs, computed.tensors(), strict=True)))


def _inputs(fields: Sequence[Field], shape_of: Callable[[Any], Any]) -> tuple[list[_FieldPlan], list[Any]]:
    """The plans of the fields, and the inputs of the op."""
    plans, inputs = [], []
    for name, ids, lengths, weights, is_ragged in fields:
        plans.append(_FieldPlan(name, is_ragged, lengths is not None, weights is not None))
        inputs.append(ids)
        if lengths is not None:
            inputs.append(lengths)
        if weights is not None:
            inputs.append(shape_of(weights))  # not the weights: they may have a gradient, and this op has none
    return plans, inputs


def _outputs(pooling: Pooling) -> dict[str, OutSpec]:
    """The outputs of the op, by the names of `Segments`."""
    outputs = {"owners": OutSpec((-1, 1), "int64"), "zeros": OutSpec((-1, pooling.dim), "float32")}
    if pooling.needs_mask:
        outputs["mask"] = OutSpec((-1, 1), "float32")
    if pooling.needs_factors:
        outputs["factors"] = OutSpec((-1, 1), "float32")
    return outputs


def _body(plans: Sequence[_FieldPlan], pooling: Pooling) -> Body:
    num_fields = len(plans)

    def body(inputs: list[NDArray[Any]], outputs: Outputs) -> None:
        given = iter(inputs)
        all_ids, all_lengths = [], []
        for plan in plans:
            ids = next(given)
            lengths = next(given).reshape(-1) if plan.has_lengths else None
            if plan.has_weights:
                _check_weights(plan, ids, tuple(map(int, next(given))))
            all_ids.append(ids)
            all_lengths.append(_checked_lengths(plan, ids, lengths))
        num_examples = _num_examples(plans, all_lengths)
        owners = outputs.allocate(0, (sum(ids.size for ids in all_ids), 1)).reshape(-1)
        num_segments = num_examples * num_fields
        outputs.allocate(1, (num_segments, pooling.dim))[...] = 0
        is_counted = np.ones(owners.size, np.bool_) if pooling.needs_mask or pooling.needs_factors else None
        begin = 0
        for number, (plan, ids, lengths) in enumerate(zip(plans, all_ids, all_lengths, strict=True)):
            end = begin + ids.size
            segments = np.arange(number, num_segments, num_fields)
            if plan.is_ragged:
                owners[begin:end] = np.repeat(segments, lengths)
            else:
                owners[begin:end].reshape(ids.shape)[...] = segments.reshape(-1, 1)
            if is_counted is not None:
                _count(plan, pooling, ids, lengths, is_counted[begin:end])
            begin = end
        if is_counted is None:
            return
        if pooling.needs_mask:
            outputs.allocate(2, (owners.size, 1))[:, 0] = is_counted
        if pooling.needs_factors:
            num_counted = np.bincount(owners[is_counted], minlength=num_segments)
            divisors = np.maximum(num_counted, 1)
            factors = 1 / (divisors if pooling.combiner == "mean" else np.sqrt(divisors))
            factors[num_counted == 0] = 0
            outputs.allocate(3 if pooling.needs_mask else 2, (num_segments, 1))[:, 0] = factors

    return body


def _count(
    plan: _FieldPlan, pooling: Pooling, ids: NDArray[Any], lengths: NDArray[Any], is_counted: NDArray[np.bool_]
) -> None:
    """Clears `is_counted` of the ids of a field that do not count."""
    if pooling.padding_idx is not None:
        np.not_equal(ids.reshape(-1), pooling.padding_idx, out=is_counted)
    if plan.has_lengths and not plan.is_ragged:
        is_counted.reshape(ids.shape)[...] &= np.arange(ids.shape[1]) < lengths.reshape(-1, 1)


def _checked_lengths(plan: _FieldPlan, ids: NDArray[Any], lengths: NDArray[Any] | None) -> NDArray[Any]:
    """The number of ids of each example; of a padded field without lengths its width."""
    if lengths is None:
        return np.full(ids.shape[0], ids.shape[1])
    if not plan.is_ragged and len(lengths) != len(ids):
        raise ValueError(f"{plan.name}: has {len(lengths)} lengths, should have one for each example, {len(ids)}")
    if lengths.size and lengths.min() < 0:
        wrong = int(lengths.argmin())
        raise ValueError(f"{plan.name}: length {lengths[wrong]} of example {wrong} is negative, should be 0 or more")
    if plan.is_ragged:
        total = int(lengths.sum(dtype=np.int64))
        if total != ids.size:
            raise ValueError(f"{plan.name}: lengths add up to {total}, should be the number of ids, {ids.size}")
    elif lengths.size and lengths.max() > ids.shape[1]:
        wrong = int(lengths.argmax())
        raise ValueError(
            f"{plan.name}: length {lengths[wrong]} of example {wrong} is above the width of the ids, {ids.shape[1]}"
        )
    return lengths


def _num_examples(plans: Sequence[_FieldPlan], lengths: Sequence[NDArray[Any]]) -> int:
    num_examples = len(lengths[0])
    for plan, each in zip(plans, lengths, strict=True):
        if len(each) != num_examples:
            raise ValueError(f"{plan.name}: has {len(each)} examples, the first field has {num_examples}")
    return num_examples


def _check_weights(plan: _FieldPlan, ids: NDArray[Any], shape: tuple[int, ...]) -> None:
    if shape != ((ids.size, 1) if plan.is_ragged else ids.shape):
        given = shape[:1] if plan.is_ragged else shape
        raise ValueError(f"{plan.name}: weights have shape {given}, should be that of the ids, {ids.shape}")


def pooled(rows: pir.Value, weights: pir.Value | None, segments: Segments, combiner: str) -> pir.Value:
    """Returns the pooled rows of each segment."""
    if segments.mask is not None:  # weights always have a mask, so that the op has checked their shapes before
        weights = segments.mask if weights is None else weights * segments.mask
    total = paddle.scatter_nd_add(segments.zeros, segments.owners, rows if weights is None else rows * weights)
    if segments.factors is not None:
        return total * segments.factors
    if combiner == _SUM:
        return total
    assert weights is not None  # without weights there are factors
    divided_by = weights if combiner == _MEAN else weights * weights
    divisors = paddle.scatter_nd_add(segments.zeros[:, :1], segments.owners, divided_by)
    is_zero = divisors == 0
    safe = paddle.where(is_zero, paddle.ones_like(divisors), divisors)  # so that no gradient is of 1 / 0
    safe = safe if combiner == _MEAN else paddle.sqrt(safe)
    return paddle.where(is_zero, paddle.zeros_like(total), total / safe)
