"""Programs with flagged lookups whose op bodies use tables in a dict: no pservers, no plugin."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.core.initializer import constant
from fleet_sparse.transpiler.placeholder import SiteSpec, insert_placeholder
from fleet_sparse.transpiler.plan import RewritePlan
from fleet_sparse.transpiler.raw_op import Body, Outputs


def embedding(name: str = "emb", **changes: Any) -> EmbeddingSpec:
    values: dict[str, Any] = {"dim": 4, "initializer": constant(0.0), "size": 10**11}
    return EmbeddingSpec(name=name, **{**values, **changes})


def rows_of(ids: np.ndarray, dim: int) -> np.ndarray:
    """Returns the test row of an id: the id, then ones."""
    rows = np.ones((*ids.shape, dim), np.float32)
    rows[..., 0] = ids
    return rows


def lookup_body(spec: SiteSpec) -> Body:
    def body(inputs: list[Any], outputs: Outputs) -> None:
        outputs.allocate(0, (*inputs[0].shape, spec.embedding.dim))[...] = rows_of(inputs[0], spec.embedding.dim)

    return body


def prefetch_body(plan: RewritePlan, *, for_training: bool = False) -> Body:
    def body(inputs: list[Any], outputs: Outputs) -> None:
        for number, table in enumerate(plan.tables):
            parts = [inputs[index].reshape(-1) for index in table.sites]
            unique, inverse = np.unique(np.concatenate(parts), return_inverse=True)
            rows = outputs.allocate(number, (len(unique) + table.is_padded, table.embedding.dim))
            rows[:] = 0
            rows[: len(unique)] = rows_of(unique, table.embedding.dim)
            for index, part in zip(
                table.sites, np.split(inverse, np.cumsum([len(p) for p in parts])[:-1]), strict=True
            ):
                ids = inputs[index]
                outputs.allocate(len(plan.tables) + index, ids.shape).reshape(-1)[:] = part
        if for_training:
            outputs.set_number(len(plan.tables) + len(plan.sites), 7)

    return body


def look_up(ids: Any, name: str = "emb", *, padding_idx: int | None = None, **changes: Any) -> Any:
    spec = SiteSpec(embedding(name, **changes), padding_idx)
    return insert_placeholder(ids, spec, lookup_body(spec))
