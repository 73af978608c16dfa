"""A lookup in dygraph without a layer, on a table that its `ParamAttr` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from fleet_sparse.errors import PlanError

from ..declared_table import checked_padding
from .layers import declare
from .training import training


def embedding(  # noqa: PLR0913  # the arguments of Paddle's embedding, and one more
    ids: Any,
    size: Sequence[int],
    is_sparse: bool,
    is_distributed: bool,
    padding_idx: int | None,
    param_attr: Any,
    dtype: str,
    entry: Any,
    *,
    num_examples: int,
) -> Any:
    """Looks rows up, as `paddle.static.nn.embedding` does in a program.

    Args:
        ids: int64 or int32 tensor of any shape.
        size: `[ids, dim]`.
        is_sparse: Must be True.
        is_distributed: True if every int64 is an id; False if ids must lie in `[0, size[0])`.
        padding_idx: Id whose row is zeros and is not trained; None for none.
        param_attr: `paddle.ParamAttr` with a name, which names the table.
        dtype: Must be float32.
        entry: Entry policy; None to give every id a row.
        num_examples: Number of examples of the batch.

    Raises:
        PlanError: An argument is not supported.
    """
    attr = paddle.ParamAttr._to_attr(param_attr)
    if not attr or not attr.name:
        raise PlanError(
            "pooled_embedding: param_attr has no name, and in dygraph each call would be another table. Write "
            "param_attr=paddle.ParamAttr(name=...)"
        )
    if not is_sparse:
        raise PlanError(
            f"table {attr.name!r}: is_sparse is False, and dygraph has pooling for tables. Write is_sparse=True"
        )
    if dtype not in ("float32", paddle.float32):
        raise PlanError(f"table {attr.name!r}: dtype is {dtype}, should be float32")
    declare(attr.name, size, attr, entry=entry, is_bounded=not is_distributed)
    return training().lookup(attr.name, checked_padding(attr.name, padding_idx, int(size[0])), ids, num_examples)
