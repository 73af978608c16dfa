"""`paddle.static.nn.embedding` and `paddle.static.nn.sparse_embedding` with tables on pservers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import paddle
from paddle import _C_ops
from paddle.base import unique_name
from paddle.base.layer_helper import LayerHelper
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.placeholder import SiteSpec, insert_placeholder

from ..active_session import active
from ..declared_table import checked_padding, checked_size, declared_table
from ..entry_config import read_entry
from ..optimizer_config import InitializerConfig, read_initializer
from . import op_callbacks

_log = logging.getLogger(__name__)

# Initializers of the first lookup on each table of a program.
_initializers: WeakKeyDictionary[pir.Program, dict[str, InitializerConfig]] = WeakKeyDictionary()

_SPARSE_TABLE_CLASSES = ("CommonSparseTable", "MemorySparseTable")


def embedding(
    input: pir.Value,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
    entry: Any = None,
) -> pir.Value:
    """Looks up rows of a table, which is on the pservers with `is_sparse` and a parameter of this process without.

    Args:
        input: Ids, int64 or int32, of any rank.
        size: `(ids, dim)`. With `is_distributed` every int64 is a valid id, and `ids` promises an upper bound of the
            number of distinct ids; with `is_sparse` alone ids must lie in `[0, ids)`.
        is_sparse: Keeps the table on pservers.
        is_distributed: Ids are not bounded by `size`; needs `is_sparse`.
        padding_idx: Id whose row is zeros and is not trained; a negative one counts from the end of `size`.
        param_attr: Its name, initializer, learning rate, regularizer, trainable and need_clip are used; lookups of one
            name share one table.
        dtype: float32.
        entry: Which ids get a row: `CountFilterEntry`, `ProbabilityEntry` or `ShowClickEntry` of `paddle.distributed`,
            or `fleet_sparse.entry`. Until it gets one an id reads zeros and is not trained. None for all ids.

    Returns:
        Rows of shape `input.shape + [dim]`, float32.

    Raises:
        PlanError: An argument is not supported; the message says what to write instead.
    """
    if not is_sparse:
        if is_distributed:
            raise PlanError("embedding: is_distributed is True and is_sparse is False. Write is_sparse=True as well")
        if entry is not None:
            raise PlanError("embedding: entry is given and is_sparse is False. Write is_sparse=True as well")
        return _local(input, size, padding_idx, param_attr, dtype)
    is_bounded = not is_distributed
    return _flagged(
        "embedding", input, size, padding_idx, param_attr, dtype, entry, is_bounded=is_bounded, has_size=True
    )


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
    """Looks up rows of a table on the pservers that grows with the ids that are trained; its first size is ignored.

    Works as `embedding` with both flags. `is_test` changes nothing, because a pull never creates a row. `slot` changes
    nothing either: with Paddle's own pservers it is a number that is saved with each row.

    Raises:
        PlanError: `table_class` is not supported, or as of `embedding`.
    """
    if slot is not None:
        _log.warning("sparse_embedding: slot %s changes nothing here: Paddle writes it beside each saved row", slot)
    if table_class not in _SPARSE_TABLE_CLASSES:
        raise PlanError(f"sparse_embedding: table_class {table_class!r} is not supported. Write 'MemorySparseTable'")
    return _flagged(
        "sparse_embedding", input, size, padding_idx, param_attr, dtype, entry, is_bounded=False, has_size=False
    )


def _flagged(
    kind: str,
    ids: pir.Value,
    size: Sequence[int],
    padding_idx: int | None,
    param_attr: Any,
    dtype: str,
    entry: Any,
    *,
    is_bounded: bool,
    has_size: bool,
) -> pir.Value:
    helper = LayerHelper(kind, param_attr=param_attr)
    attr = helper.param_attr
    table = attr.name or unique_name.generate(f"{helper.name}.w")
    num_ids, dim = checked_size(table, size)
    _check_dtypes(table, ids, dtype)
    entry_config = read_entry(f"table {table!r}", entry)
    first_values = _first_values(table, attr.initializer, (num_ids, dim))
    embedding_spec = declared_table(
        table, attr, (num_ids, dim), first_values, entry_config, is_bounded=is_bounded, has_size=has_size
    )
    site = SiteSpec(embedding_spec, checked_padding(table, padding_idx, num_ids))
    return insert_placeholder(ids, site, op_callbacks.lookup(active(), site))


def _local(ids: pir.Value, size: Sequence[int], padding_idx: int | None, param_attr: Any, dtype: str) -> pir.Value:
    """Builds an unflagged lookup, which Paddle 3.3's own `static.nn.embedding` cannot do in the default IR."""
    helper = LayerHelper("embedding", param_attr=param_attr)
    weight = helper.create_parameter(attr=helper.param_attr, shape=list(size), dtype=dtype, is_bias=False)
    padding = checked_padding(weight.name, padding_idx, int(size[0]))
    return _C_ops.embedding(ids, weight, -1 if padding is None else padding, False)


def _first_values(table: str, initializer: Any, size: tuple[int, int]) -> InitializerConfig:
    """The initializer of a lookup; one that gives none has that of the first lookup on its table, as in Paddle."""
    known = _initializers.setdefault(paddle.static.default_main_program(), {})
    if initializer is None and table in known:
        return known[table]
    read = read_initializer(table, initializer, size)
    known.setdefault(table, read)
    return read


def _check_dtypes(table: str, ids: pir.Value, dtype: str) -> None:
    if ids.dtype not in (paddle.int64, paddle.int32):
        raise PlanError(
            f"table {table!r}: ids are {ids.dtype}, should be int64 or int32. Declare them with dtype 'int64'"
        )
    if dtype not in ("float32", paddle.float32):
        raise PlanError(f"table {table!r}: dtype is {dtype}, should be float32")
