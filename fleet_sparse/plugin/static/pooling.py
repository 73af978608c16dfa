"""pooled_embedding: fields with a variable number of ids, one row for each example.

The rows of a field are looked up as those of any lookup, and pooled by Paddle's ops, which have gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError

from ..dygraph import functional
from ..entry_config import read_entry
from .embedding import embedding
from .segments import COMBINERS, Field, Pooling, compute_segments, insert_segments, pooled

_INTEGERS = (paddle.int64, paddle.int32)


def pooled_embedding(  # noqa: PLR0913  # the arguments of Paddle's embedding, and three more
    fields: pir.Value | Sequence[pir.Value],
    size: Sequence[int],
    combiner: str = "sum",
    *,
    lengths: pir.Value | Sequence[pir.Value | None] | None = None,
    weights: pir.Value | Sequence[pir.Value | None] | None = None,
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
    entry: Any = None,
) -> pir.Value | list[pir.Value]:
    """Looks up the ids of fields of one table and pools the rows of each example: their sum, mean or sum / sqrt(n).

    All fields of a call are one lookup and one sum over segments, with Paddle's gradients.

    A field has a variable number of ids for each example. It is padded, `(batch, n)`, or ragged: the ids of all
    examples one after the other, `(total,)` or `(total, 1)`, with the number of ids of each example in `lengths`. Data
    sets feed ragged slots in this form, with `<slot>.lengths` as the lengths.

    ```python
    tags, lengths = paddle.static.data("tags", [-1], "int64"), paddle.static.data("tags.lengths", [-1], "int64")
    pooled = fleet_sparse.pooled_embedding(
        tags, [10**11, 16], "mean", lengths=lengths, is_sparse=True, is_distributed=True
    )
    ```

    The ids that count are those within the length that are not `padding_idx`. The result of an example without any is
    zeros, and trains nothing. With weights `w` and rows `e`, the sum is `sum(w e)`, the mean `sum(w e) / sum(w)` and
    sqrtn `sum(w e) / sqrt(sum(w^2))`; where a divisor is 0, the result is zeros. Weights get gradients.

    In dygraph `fields`, `lengths` and `weights` are tensors, and `param_attr` must name the table.

    Ids of a padded field that are past its length are still looked up and pushed, with a gradient of zero, so they take
    rows. Feed `padding_idx` there to leave them out. In sync training of several workers the first dimension of ragged
    ids is not the number of examples: name an input of which it is in `PserverStrategy(examples_input=...)`, as the
    label.

    Args:
        fields: Ids of one field, or of several, int64 or int32. All fields share one table.
        size: `(ids, dim)`, as of `paddle.static.nn.embedding`.
        combiner: `"sum"`, `"mean"` or `"sqrtn"`, which is the sum divided by the square root of the number of ids.
        lengths: Number of ids of each example, `(batch,)` or `(batch, 1)`, int64 or int32; None for a padded field
            whose padding is `padding_idx` alone. A list, as long as `fields`, if that is a list.
        weights: A weight for each id, float32, with the shape of the ids or one more dimension of 1; None for weights
            of 1. A list, as long as `fields`, if that is a list.
        is_sparse: As of `paddle.static.nn.embedding`.
        is_distributed: As of `paddle.static.nn.embedding`.
        padding_idx: Id that does not count and whose row is not trained; a negative one counts from the end of `size`.
        param_attr: As of `paddle.static.nn.embedding`.
        dtype: float32.
        entry: As of `paddle.static.nn.embedding`, but no policy that reads shows and clicks of each example.

    Returns:
        `(batch, dim)` float32; a list of them, one for each field, if `fields` is a list.

    Raises:
        PlanError: An argument, a dtype or a shape is not supported, or as of `paddle.static.nn.embedding`.
        ValueError: When the program runs, before a row is changed: a length is negative or above the width of its
            field, lengths do not add up to the number of ids, or shapes do not match. The message names the field.
    """
    if combiner not in COMBINERS:
        raise PlanError(f"pooled_embedding: combiner is {combiner!r}, should be 'sum', 'mean' or 'sqrtn'")
    is_one = not isinstance(fields, (list, tuple))
    entry_config = read_entry("pooled_embedding", entry)
    if entry_config is not None and entry_config.show_click is not None:
        raise PlanError(
            "pooled_embedding: entry reads shows and clicks of each example, which pooled ids do not have. Use another "
            "policy, or static.nn.embedding and paddle.sum(rows, axis=1)"
        )
    ids = _listed("fields", fields, is_one, None)
    of_fields = zip(
        ids,
        _listed("lengths", lengths, is_one, len(ids)),
        _listed("weights", weights, is_one, len(ids)),
        strict=True,
    )
    read = [_read(number, *inputs) for number, inputs in enumerate(of_fields)]
    arguments = (_flat_ids(read), size, is_sparse, is_distributed, padding_idx, param_attr, dtype, entry)
    if paddle.in_dynamic_mode():
        counted = read[0].ids if read[0].lengths is None else read[0].lengths
        rows = functional.embedding(*arguments, num_examples=int(counted.shape[0]))
    else:
        rows = embedding(*arguments)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += int(size[0])
    has_weights = any(field.weights is not None for field in read)
    has_cut = any(field.lengths is not None and not field.is_ragged for field in read)
    pooling = Pooling(combiner, padding_idx, int(size[1]), has_weights, needs_mask=has_weights or has_cut)
    make_segments = compute_segments if paddle.in_dynamic_mode() else insert_segments
    segments = make_segments(read, pooling)
    results = pooled(rows, _flat_weights(read) if has_weights else None, segments, combiner)
    if is_one or len(read) == 1:
        return results if is_one else [results]
    return paddle.split(paddle.reshape(results, [-1, len(read) * pooling.dim]), len(read), axis=1)


def _flat_ids(fields: Sequence[Field]) -> pir.Value:
    """The ids of all fields, `(T,)`: one lookup, whose ids `look_ahead` finds in the feed if all are fed."""
    flat = [field.ids if len(field.ids.shape) == 1 else paddle.reshape(field.ids, [-1]) for field in fields]
    if len(flat) == 1:
        return flat[0]
    return paddle.concat([ids if ids.dtype == paddle.int64 else paddle.cast(ids, "int64") for ids in flat])


def _flat_weights(fields: Sequence[Field]) -> pir.Value:
    """The weights of all ids, `(T, 1)`; 1 for fields without weights."""
    flat = []
    for field in fields:
        weights = field.weights
        if weights is None:
            weights = paddle.cast(paddle.ones_like(field.ids), "float32")
        flat.append(paddle.reshape(weights, [-1, 1]))
    return flat[0] if len(flat) == 1 else paddle.concat(flat)


def _listed(argument: str, given: Any, is_one: bool, length: int | None) -> list[Any]:
    if is_one:
        if isinstance(given, (list, tuple)):
            raise PlanError(f"pooled_embedding: {argument} is a list and fields is not. Give both as lists, or neither")
        return [given]
    if given is None and length is not None:
        return [None] * length
    if not isinstance(given, (list, tuple)):
        raise PlanError(f"pooled_embedding: fields is a list and {argument} is not. Give both as lists, or neither")
    if not given or (length is not None and len(given) != length):
        needed = "at least one" if length is None else f"{length}, one for each field"
        raise PlanError(f"pooled_embedding: {argument} has {len(given)} entries, should have {needed}")
    return list(given)


def _read(number: int, ids: pir.Value, lengths: pir.Value | None, weights: pir.Value | None) -> Field:
    """Checks the inputs of a field, as far as they are known while the program is built."""
    name = _name(number, ids)
    if ids.dtype not in _INTEGERS:
        raise PlanError(f"{name}: ids are {ids.dtype}, should be int64 or int32. Declare them with dtype 'int64'")
    shape = list(ids.shape)
    is_ragged = len(shape) == 1 or (lengths is not None and len(shape) == 2 and shape[1] == 1)
    if len(shape) not in (1, 2):
        raise PlanError(f"{name}: ids have shape {shape}, should be [batch, n], or [total] with lengths")
    if is_ragged and lengths is None:
        raise PlanError(
            f"{name}: ids have shape {shape} and no lengths. Give lengths, or declare padded ids of shape [-1, n]"
        )
    if lengths is not None:
        if lengths.dtype not in _INTEGERS:
            raise PlanError(f"{name}: lengths are {lengths.dtype}, should be int64 or int32")
        if len(lengths.shape) not in (1, 2) or list(lengths.shape[1:]) not in ([], [1]):
            raise PlanError(f"{name}: lengths have shape {list(lengths.shape)}, should be [batch]")
        if not is_ragged and _differ(shape[0], lengths.shape[0]):
            raise PlanError(f"{name}: lengths have shape {list(lengths.shape)}, should be [{shape[0]}]")
    if weights is not None:
        weights = _read_weights(name, shape, weights)
        weights = paddle.reshape(weights, [-1, 1]) if is_ragged else weights
    return Field(name, ids, lengths, weights, is_ragged)


def _read_weights(name: str, shape: list[int], weights: pir.Value) -> pir.Value:
    if weights.dtype != paddle.float32:
        raise PlanError(f"{name}: weights are {weights.dtype}, should be float32")
    given = list(weights.shape)
    has_one_more = len(given) == len(shape) + 1 and given[-1] == 1
    is_flat = shape[1:] == [1] and len(given) == 1
    same_rank = len(given) == len(shape)
    if not (has_one_more or is_flat or same_rank) or any(map(_differ, shape, given)):
        raise PlanError(f"{name}: weights have shape {given}, should be that of the ids, {shape}")
    return paddle.squeeze(weights, -1) if has_one_more and len(shape) == 2 else weights


def _differ(known: int, other: int) -> bool:
    return known != other and -1 not in (known, other)


def _name(number: int, ids: pir.Value) -> str:
    op = None if paddle.in_dynamic_mode() else ids.get_defining_op()
    if op is not None and str(op.name()) == "pd_op.data":
        return f"pooled_embedding: field {op.str_attr('name')!r}"
    return f"pooled_embedding: field {number}"
