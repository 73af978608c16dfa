"""Programs with flagged lookups whose op bodies use tables in a dict: no pservers, no plugin."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleet_sparse.core.initializer import constant
from fleet_sparse.transpiler.placeholder import SiteSpec, mark
from fleet_sparse.transpiler.plan import Plan
from fleet_sparse.transpiler.raw_op import Body, Outputs


def site(table: str = "emb", **changes: Any) -> SiteSpec:
    values: dict[str, Any] = {
        "table": table,
        "dim": 4,
        "initializer": constant(0.0),
        "seed": 0,
        "num_ids": 10**11,
        "bounded": False,
        "padding_idx": None,
        "learning_rate": 1.0,
        "trainable": True,
    }
    return SiteSpec(**{**values, **changes})


def rows_of(ids: np.ndarray, dim: int) -> np.ndarray:
    """Row of an id in the tests: its number, then ones."""
    rows = np.ones((*ids.shape, dim), np.float32)
    rows[..., 0] = ids
    return rows


def lookup_body(spec: SiteSpec) -> Body:
    def body(inputs: list[Any], outputs: Outputs) -> None:
        outputs.allocate(0, (*inputs[0].shape, spec.dim))[...] = rows_of(inputs[0], spec.dim)

    return body


def prefetch_body(plan: Plan) -> Body:
    def body(inputs: list[Any], outputs: Outputs) -> None:
        for number, table in enumerate(plan.tables):
            parts = [inputs[index].reshape(-1) for index in table.sites]
            unique, inverse = np.unique(np.concatenate(parts), return_inverse=True)
            rows = outputs.allocate(3 * number, (len(unique) + table.is_padded, table.spec.dim))
            rows[:] = 0
            rows[: len(unique)] = rows_of(unique, table.spec.dim)
            outputs.allocate(3 * number + 1, unique.shape)[:] = unique
            outputs.allocate(3 * number + 2, (1,))[:] = len(unique)
            for index, part in zip(
                table.sites, np.split(inverse, np.cumsum([len(p) for p in parts])[:-1]), strict=True
            ):
                ids = inputs[index]
                outputs.allocate(3 * len(plan.tables) + index, ids.shape).reshape(-1)[:] = part

    return body


def look_up(ids: Any, table: str = "emb", **changes: Any) -> Any:
    spec = site(table, **changes)
    return mark(ids, spec, lookup_body(spec))
