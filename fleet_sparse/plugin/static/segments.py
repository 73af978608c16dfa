"""The op of segments: which ids of a field belong to which example and which of them count.

All of it depends on ids and lengths alone, so it has no gradient, and one op computes it for all fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base.libpaddle import pir

from fleet_sparse.transpiler.op_names import SEGMENTS
from fleet_sparse.transpiler.raw_op import Body, Outputs, OutSpec, emit


class Field(NamedTuple):
    """Inputs of one field."""

    name: str
    """What errors call it."""
    ids: pir.Value
    """`(batch, n)`, or `(total,)` of a ragged field."""
    lengths: pir.Value | None
    """`(batch,)` or `(batch, 1)`."""
    weights: pir.Value | None
    """`(batch, n)`, or `(total, 1)` of a ragged field."""
    is_ragged: bool


class Segments(NamedTuple):
    """Outputs for one field; None where it needs none."""

    owners: pir.Value | None = None
    """`(total, 1)` int64: the example of each id of a ragged field."""
    zeros: pir.Value | None = None
    """`(batch, dim)` float32: what the rows of a ragged field are added to."""
    mask: pir.Value | None = None
    """float32, 1 for ids that count, else 0: `(batch, n)`, or `(total, 1)` of a ragged field."""
    factors: pir.Value | None = None
    """`(batch, 1)` float32: 1 / n or 1 / sqrt(n), with n the number of ids that count; 0 without any."""


class _Plan(NamedTuple):
    """What the op reads and computes for one field."""

    name: str
    combiner: str
    padding_idx: int | None
    dim: int
    is_ragged: bool
    has_lengths: bool
    has_weights: bool

    @property
    def needs_mask(self) -> bool:
        """True if rows are ignored that are not zeros, or weights that are part of a divisor."""
        is_cut = self.has_lengths and not self.is_ragged
        return is_cut or (self.has_weights and self.combiner != "sum" and self.padding_idx is not None)

    @property
    def needs_factors(self) -> bool:
        """True if the divisors depend on ids and lengths alone."""
        return self.combiner != "sum" and not self.has_weights

    @property
    def is_trivial(self) -> bool:
        """True if there is nothing to check or to compute."""
        return not (self.has_lengths or self.has_weights or self.needs_factors)

    def outputs(self) -> dict[str, OutSpec]:
        """Outputs by name, as of `Segments`, in its order."""
        found = {}
        if self.is_ragged:
            found["owners"] = OutSpec((-1, 1), "int64")
            found["zeros"] = OutSpec((-1, self.dim), "float32")
        if self.needs_mask:
            found["mask"] = OutSpec((-1, 1) if self.is_ragged else (-1, -1), "float32")
        if self.needs_factors:
            found["factors"] = OutSpec((-1, 1), "float32")
        return found


def insert_segments(fields: Sequence[Field], combiner: str, padding_idx: int | None, dim: int) -> list[Segments]:
    """Inserts the op for all fields of a call, if one of them needs it.

    Args:
        fields: Inputs of the op.
        combiner: `"sum"`, `"mean"` or `"sqrtn"`.
        padding_idx: Id that does not count, at least 0; None for none.
        dim: Number of floats of a row.
    """
    plans, inputs = [], []
    for name, ids, lengths, weights, is_ragged in fields:
        plan = _Plan(name, combiner, padding_idx, dim, is_ragged, lengths is not None, weights is not None)
        plans.append(plan)
        if plan.is_trivial:
            continue
        inputs.append(ids)
        if lengths is not None:
            inputs.append(lengths)
        if weights is not None:
            inputs.append(paddle.shape(weights))  # not the weights: they may have a gradient, and this op has none
    specs = [spec for plan in plans if not plan.is_trivial for spec in plan.outputs().values()]
    if not inputs:
        return [Segments() for _ in plans]
    if not specs:  # an op has at least one output
        specs = [OutSpec((1,), "int32")]
    values = iter(emit(SEGMENTS, _body([plan for plan in plans if not plan.is_trivial]), inputs, specs, {}))
    found = []
    for plan in plans:
        of_field = {} if plan.is_trivial else {name: next(values) for name in plan.outputs()}
        for value in of_field.values():
            value.stop_gradient = True
        found.append(Segments(**of_field))
    return found


def _body(plans: Sequence[_Plan]) -> Body:
    has_outputs = any(plan.outputs() for plan in plans)

    def body(inputs: list[NDArray[np.int64]], outputs: Outputs) -> None:
        given, index = iter(inputs), 0
        for plan in plans:
            ids = next(given)
            lengths = next(given).reshape(-1) if plan.has_lengths else None
            if plan.has_weights:
                _check_weights(plan, ids, tuple(next(given)))
            for array in _computed(plan, ids, lengths):
                outputs.allocate(index, array.shape)[...] = array
                index += 1
        if not has_outputs:
            outputs.set_number(0, 0)

    return body


def _computed(plan: _Plan, ids: NDArray[np.int64], lengths: NDArray[np.int64] | None) -> Iterator[NDArray[np.generic]]:
    """Checks lengths and yields the outputs for one field, in the order of `Segments`."""
    is_counted = None if plan.padding_idx is None else ids != plan.padding_idx
    if plan.is_ragged:
        assert lengths is not None
        _check_ragged(plan.name, ids, lengths)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        num_counted = lengths if is_counted is None else np.bincount(owners[is_counted], minlength=len(lengths))
        yield owners.reshape(-1, 1)
        yield np.zeros((len(lengths), plan.dim), np.float32)
        if plan.needs_mask:
            assert is_counted is not None
            yield is_counted.reshape(-1, 1)
    else:
        if lengths is not None:
            _check_padded(plan.name, ids, lengths)
            is_inside = np.arange(ids.shape[1]) < lengths.reshape(-1, 1)
            is_counted = is_inside if is_counted is None else is_counted & is_inside
        num_counted = np.full(len(ids), ids.shape[1]) if is_counted is None else is_counted.sum(axis=1)
        if plan.needs_mask:
            assert is_counted is not None
            yield is_counted
    if plan.needs_factors:
        divisors = num_counted if plan.combiner == "mean" else np.sqrt(num_counted)
        yield np.where(num_counted > 0, 1 / np.maximum(divisors, 1), 0).reshape(-1, 1)


def _check_ragged(name: str, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    _check_not_negative(name, lengths)
    total = int(lengths.sum(dtype=np.int64))
    if total != ids.size:
        raise ValueError(f"{name}: lengths add up to {total}, should be the number of ids, {ids.size}")


def _check_padded(name: str, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    num_examples, width = ids.shape
    if len(lengths) != num_examples:
        raise ValueError(f"{name}: has {len(lengths)} lengths, should have one for each example, {num_examples}")
    _check_not_negative(name, lengths)
    if lengths.size and lengths.max() > width:
        wrong = int(lengths.argmax())
        raise ValueError(f"{name}: length {lengths[wrong]} of example {wrong} is above the width of the ids, {width}")


def _check_not_negative(name: str, lengths: NDArray[np.int64]) -> None:
    if lengths.size and lengths.min() < 0:
        wrong = int(lengths.argmin())
        raise ValueError(f"{name}: length {lengths[wrong]} of example {wrong} is negative, should be 0 or more")


def _check_weights(plan: _Plan, ids: NDArray[np.int64], shape: tuple[int, ...]) -> None:
    needed = (ids.size, 1) if plan.is_ragged else ids.shape
    if shape != needed:
        raise ValueError(
            f"{plan.name}: weights have shape {_without_ones(shape, plan)}, should be that of the ids, {ids.shape}"
        )


def _without_ones(shape: tuple[int, ...], plan: _Plan) -> tuple[int, ...]:
    return tuple(int(size) for size in (shape[:1] if plan.is_ragged else shape))
