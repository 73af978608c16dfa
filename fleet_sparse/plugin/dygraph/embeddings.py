"""The layer `Embeddings`, which looks rows up in the tables of several layers at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
from paddle.jit.marker import force_dynamic

from .layers import check_untraced
from .swap import table_of
from .training import Lookup, training


@force_dynamic  # `to_static` with `full_graph=False` compiles what is around it
class Embeddings(paddle.nn.LayerDict):  # type: ignore[misc]  # Paddle's classes are untyped here
    """Looks rows up in the tables of several layers at once: one request to every shard, not one for each layer.

    It is a `paddle.nn.LayerDict`. Layers may share a table. In static graph mode it calls its layers, whose lookups
    are one request there anyway.

    ```python
    emb = fleet_sparse.nn.Embeddings({
        "user": fleet_sparse.nn.Embedding(10**11, 16),
        "tags": fleet_sparse.nn.Embedding(10**11, 8, padding_idx=0),
    })
    rows = emb({"user": users, "tags": tags})  # users [batch], tags [batch, 5]
    rows["user"], rows["tags"]  # [batch, 16], [batch, 5, 8]
    ```

    Args:
        layers: Layers by their names: `fleet_sparse.nn.Embedding` or `paddle.nn.Embedding`. A layer that is no table is
            called alone.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        super().__init__(dict(layers))

    def forward(self, ids: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the rows of the ids of each layer, by the names in `ids`.

        Args:
            ids: int64 or int32 tensors of any shape, by the names of their layers; layers may be missing.

        Raises:
            PlanError: The call is traced by `paddle.jit.to_static`.
            FleetSparseError: Before `fleet.init_worker()`.
            ValueError: A name is not that of a layer, ids are not integers, or one is outside of a bounded table.
        """
        if unknown := sorted(set(ids) - set(self)):
            raise ValueError(f"fleet_sparse.nn.Embeddings: {unknown[0]!r} is no layer; layers are {', '.join(self)}")
        found: dict[str, Any] = {}
        lookups: dict[str, Lookup] = {}
        for name, of_layer in ids.items():
            table = table_of(self[name]) if paddle.in_dynamic_mode() else None
            if table is None:
                found[name] = self[name](of_layer)
            else:
                check_untraced(table[0])
                lookups[name] = Lookup(*table, of_layer)
        if lookups:
            found |= zip(lookups, training().look_up([*lookups.values()]), strict=True)
        return {name: found[name] for name in ids}
