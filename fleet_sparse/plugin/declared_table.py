"""Reads the table that a lookup declares from its arguments and its `ParamAttr`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.errors import PlanError

from .entry_config import EntryConfig
from .optimizer_config import InitializerConfig, read_decay


def declared_table(
    name: str,
    attr: Any,
    size: tuple[int, int],
    first_values: InitializerConfig,
    entry: EntryConfig | None,
    *,
    is_bounded: bool,
    has_size: bool,
) -> EmbeddingSpec:
    """The table of a lookup.

    Args:
        name: Name of the table.
        attr: `paddle.ParamAttr`.
        size: `(ids, dim)`.
        first_values: Initializer of the rows.
        entry: Which ids get a row; None for all.
        is_bounded: True if ids must lie in `[0, ids)`.
        has_size: True if `size` promises a number of ids.

    Raises:
        PlanError: The regularizer is not supported.
    """
    return EmbeddingSpec(
        name=name,
        dim=size[1],
        initializer=first_values.initializer,
        seed=first_values.seed,
        size=size[0] if has_size else None,
        is_bounded=is_bounded,
        learning_rate=float(attr.learning_rate),
        is_trainable=bool(attr.trainable),
        decay=read_decay(f"table {name!r}: ParamAttr regularizer", attr.regularizer),
        need_clip=bool(attr.need_clip),
        entry=None if entry is None else entry.entry,
        show_click=None if entry is None else entry.show_click,
    )


def checked_size(table: str, size: Sequence[int]) -> tuple[int, int]:
    """Returns `(ids, dim)`.

    Raises:
        PlanError: There are not two positive numbers.
    """
    if len(size) != 2:
        raise PlanError(f"table {table!r}: size is {list(size)}, should be [ids, dim]")
    num_ids, dim = int(size[0]), int(size[1])
    if num_ids < 1 or dim < 1:
        raise PlanError(f"table {table!r}: size is {list(size)}, both numbers should be positive")
    return num_ids, dim


def checked_padding(table: str, padding_idx: int | None, num_ids: int) -> int | None:
    """Returns the padding id; a negative one counts from the end.

    Raises:
        PlanError: It lies before the first id.
    """
    if padding_idx is None:
        return None
    if padding_idx < -num_ids:
        raise PlanError(f"table {table!r}: padding_idx is {padding_idx}, should be at least -{num_ids}")
    return padding_idx if padding_idx >= 0 else num_ids + padding_idx
