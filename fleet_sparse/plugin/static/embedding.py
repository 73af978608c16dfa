"""`paddle.static.nn.embedding` and `paddle.static.nn.sparse_embedding` as pservers understand them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import _C_ops
from paddle.base import unique_name
from paddle.base.layer_helper import LayerHelper
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.placeholder import SiteSpec, mark

from ..optimizer_config import read_decay, read_initializer
from . import op_callbacks

_SPARSE_TABLE_CLASSES = ("CommonSparseTable", "MemorySparseTable")


def embedding(
    input: pir.Value,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
) -> pir.Value:
    """Rows of a table; with `is_sparse` the table is on the pservers, without it is a parameter of this process.

    Args:
        input: Ids, int64 or int32, of any rank.
        size: `(ids, dim)`. With `is_distributed` any int64 is an id and `ids` is a promise of how many distinct ones
            come; with `is_sparse` alone they must lie in `[0, ids)`.
        is_sparse: Keep the table on pservers.
        is_distributed: The ids are not bounded by `size`; needs `is_sparse`.
        padding_idx: Id whose row is zeros and is not trained; a negative one counts from the end of `size`.
        param_attr: Name, initializer, learning rate, regularizer, trainable and need_clip are read; lookups of one name
            share one table.
        dtype: float32.

    Returns:
        Rows of shape `input.shape + [dim]`, float32.

    Raises:
        PlanError: Something else was asked for; says what to write instead.
    """
    if not is_sparse:
        if is_distributed:
            raise PlanError("embedding: is_distributed is set and is_sparse is not; write is_sparse=True as well")
        return _local(input, size, padding_idx, param_attr, dtype)
    return _flagged("embedding", input, size, padding_idx, param_attr, dtype, bounded=not is_distributed, promised=True)


def sparse_embedding(
    input: pir.Value,
    size: Sequence[int],
    padding_idx: int | None = None,
    is_test: bool = False,
    entry: Any = None,
    table_class: str = "MemorySparseTable",
    param_attr: Any = None,
    dtype: str = "float32",
    slot: int | None = None,
) -> pir.Value:
    """Rows of a table on the pservers whose first size says nothing: it grows with the ids that are trained.

    As `embedding` with both flags. `is_test` changes nothing, because a pull never creates a row.

    Raises:
        PlanError: `entry`, `slot` or a `table_class` that is not supported, or as `embedding`.
    """
    if entry is not None:
        raise PlanError(f"sparse_embedding: entry={type(entry).__name__} is not supported yet; leave it out")
    if slot is not None:
        raise PlanError("sparse_embedding: slot is not supported; leave it out")
    if table_class not in _SPARSE_TABLE_CLASSES:
        raise PlanError(f"sparse_embedding: table_class {table_class!r} is not supported; write 'MemorySparseTable'")
    return _flagged("sparse_embedding", input, size, padding_idx, param_attr, dtype, bounded=False, promised=False)


def _flagged(
    kind: str,
    ids: pir.Value,
    size: Sequence[int],
    padding_idx: int | None,
    param_attr: Any,
    dtype: str,
    *,
    bounded: bool,
    promised: bool,
) -> pir.Value:
    helper = LayerHelper(kind, param_attr=param_attr)
    attr = helper.param_attr
    table = attr.name or unique_name.generate(f"{helper.name}.w")
    num_ids, dim = _checked_size(table, size)
    _check_dtypes(table, ids, dtype)
    reading = read_initializer(table, attr.initializer, (num_ids, dim))
    site = SiteSpec(
        table=table,
        dim=dim,
        initializer=reading.initializer,
        seed=reading.seed,
        num_ids=num_ids if promised else None,
        bounded=bounded,
        padding_idx=_checked_padding(table, padding_idx, num_ids),
        learning_rate=float(attr.learning_rate),
        trainable=bool(attr.trainable),
        decay=read_decay(f"table {table!r}: ParamAttr regularizer", attr.regularizer),
        need_clip=bool(attr.need_clip),
    )
    return mark(ids, site, op_callbacks.lookup(site))


def _local(ids: pir.Value, size: Sequence[int], padding_idx: int | None, param_attr: Any, dtype: str) -> pir.Value:
    """An unflagged lookup, which Paddle 3.3's own `static.nn.embedding` cannot build in its default IR."""
    helper = LayerHelper("embedding", param_attr=param_attr)
    weight = helper.create_parameter(attr=helper.param_attr, shape=list(size), dtype=dtype, is_bias=False)
    padding = _checked_padding(weight.name, padding_idx, int(size[0]))
    return _C_ops.embedding(ids, weight, -1 if padding is None else padding, False)


def _checked_size(table: str, size: Sequence[int]) -> tuple[int, int]:
    if len(size) != 2:
        raise PlanError(f"table {table!r}: size is {list(size)}; write [ids, dim]")
    num_ids, dim = int(size[0]), int(size[1])
    if num_ids < 1 or dim < 1:
        raise PlanError(f"table {table!r}: size is {list(size)}; both numbers must be positive")
    return num_ids, dim


def _checked_padding(table: str, padding_idx: int | None, num_ids: int) -> int | None:
    if padding_idx is None:
        return None
    if padding_idx < -num_ids:
        raise PlanError(f"table {table!r}: padding_idx {padding_idx} is below -{num_ids}, the first id of its size")
    return padding_idx if padding_idx >= 0 else num_ids + padding_idx


def _check_dtypes(table: str, ids: pir.Value, dtype: str) -> None:
    if ids.dtype not in (paddle.int64, paddle.int32):
        raise PlanError(f"table {table!r}: ids are {ids.dtype}; they must be int64 or int32")
    if dtype not in ("float32", paddle.float32):
        raise PlanError(f"table {table!r}: dtype is {dtype}; rows are float32")
