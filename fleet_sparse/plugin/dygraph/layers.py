"""The layer `Embedding`, whose rows are on pservers, and what takes the place of the weight of a layer of Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import paddle
from paddle.base import unique_name
from paddle.base.dygraph.base import in_to_static_mode
from paddle.jit.marker import force_dynamic

from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.errors import PlanError

from ..declared_table import checked_padding, checked_size, declared_table
from ..entry_config import read_entry
from ..optimizer_config import read_initializer
from ..static import embedding as static
from .training import training


@force_dynamic  # `to_static` with `full_graph=False` compiles what is around it
class Embedding(paddle.nn.Layer):  # type: ignore[misc]  # Paddle's classes are untyped here
    """Looks up rows of a table on the pservers; in dygraph what `paddle.static.nn.embedding` is in a program.

    It has no parameter: not in memory, not in `state_dict()`, not in the optimizer. Layers with one name share one
    table. Each call is one request to every shard, so that one call with the ids of several fields is faster than a
    call for each. In static graph mode the layer builds a lookup of the program.

    ```python
    emb = fleet_sparse.nn.Embedding(10**11, 16)
    rows = emb(ids)  # ids [batch, fields] -> rows [batch, fields, 16]
    ```

    Args:
        num_embeddings: Every int64 is a valid id, and this promises an upper bound of the number of distinct ids. With
            `is_bounded` ids must lie in `[0, num_embeddings)`.
        embedding_dim: Floats of a row.
        padding_idx: Id whose row is zeros and is not trained; a negative one counts from the end of `num_embeddings`.
        is_bounded: True to refuse ids outside of `[0, num_embeddings)`.
        weight_attr: `paddle.ParamAttr`: its name, initializer, learning rate, regularizer, trainable and need_clip are
            used. Its default initializer is Xavier uniform.
        entry: Which ids get a row: `CountFilterEntry` or `ProbabilityEntry` of `paddle.distributed`, or
            `fleet_sparse.entry`; None for all ids.
        name: Prefix of the layer's name.

    Attributes:
        table: Name of the table.
        padding_idx: The padding id, which is not negative; None for none.

    Raises:
        PlanError: An argument is not supported; the message says what to write instead.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        is_bounded: bool = False,
        weight_attr: Any = None,
        entry: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self._arguments = (num_embeddings, embedding_dim, padding_idx, is_bounded, weight_attr, entry)
        attr = _attr_of(weight_attr)
        self.table: str = attr.name or unique_name.generate(f"{self._full_name}.w")
        self.padding_idx = checked_padding(self.table, padding_idx, num_embeddings)
        if paddle.in_dynamic_mode():
            declare(self.table, (num_embeddings, embedding_dim), attr, entry=entry, is_bounded=is_bounded)

    def forward(self, ids: Any) -> Any:
        """Returns rows of shape `ids.shape + [embedding_dim]`, float32; `ids` are int64 or int32 of any shape.

        Raises:
            PlanError: The call is traced by `paddle.jit.to_static`.
            FleetSparseError: Before `fleet.init_worker()`.
            ValueError: Ids are not integers, or one is outside of a bounded table.
        """
        if paddle.in_dynamic_mode():
            return training().lookup(self.table, self.padding_idx, ids)
        check_untraced(self.table)
        num_embeddings, dim, padding_idx, is_bounded, weight_attr, entry = self._arguments
        attr = _attr_of(weight_attr)
        attr.name = self.table
        return static.embedding(
            ids, (num_embeddings, dim), True, not is_bounded, padding_idx, param_attr=attr, entry=entry
        )

    @property
    def weight(self) -> NoReturn:
        """There is none.

        Raises:
            PlanError: Always.
        """
        raise PlanError(
            f"table {self.table!r}: weight of fleet_sparse.nn.Embedding is read, but its rows are on the pservers. "
            "Look rows up by calling the layer"
        )

    def extra_repr(self) -> str:
        """The arguments, as Paddle prints layers."""
        return f"{self._arguments[0]}, {self._arguments[1]}, table={self.table!r}"


class TableWeight:
    """Takes the place of the `weight` of a `paddle.nn.Embedding` whose rows are on pservers.

    Args:
        name: Name of the weight, and of the table.
        shape: `[ids, dim]`.
        padding_idx: Padding id of the layer.

    Attributes:
        name: As given.
        shape: As given.
        padding_idx: The padding id, at least 0; None for none.
        stop_gradient: True if the rows are not trained.
    """

    def __init__(self, name: str, shape: Sequence[int], padding_idx: int | None) -> None:
        self.name = name
        self.shape = list(shape)
        self.padding_idx = checked_padding(name, padding_idx, int(shape[0]))
        self.stop_gradient = True

    def _is_initialized(self) -> bool:
        return False  # Paddle's constructor writes no row of padding

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise PlanError(
            f"table {self.name!r}: weight.{attribute} of its layer is read, but its rows are on the pservers. Look "
            "rows up by calling the layer, or keep the weight a parameter: "
            f"PserverStrategy(dense_embeddings=[{self.name!r}]) in fleet.init"
        )


def declare(
    table: str,
    size: Sequence[int],
    attr: Any,
    *,
    entry: Any = None,
    is_bounded: bool,
) -> EmbeddingSpec:
    """Declares the table of a layer; returns what it declares.

    Raises:
        PlanError: An argument is not supported, or another layer declares the table differently.
    """
    num_ids, dim = checked_size(table, size)
    first_values = read_initializer(table, attr.initializer, (num_ids, dim))
    spec = declared_table(
        table,
        attr,
        (num_ids, dim),
        first_values,
        read_entry(f"table {table!r}", entry),
        is_bounded=is_bounded,
        has_size=True,
    )
    training().add_table(spec)
    return spec


def check_untraced(table: str) -> None:
    """Refuses a lookup that Paddle traces.

    Raises:
        PlanError: `paddle.jit.to_static` or `paddle.jit.save` traces it.
    """
    if in_to_static_mode():
        raise PlanError(
            f"table {table!r}: paddle.jit.to_static cannot trace a lookup on pservers. Apply it to the layers that "
            "take the rows, or build the model in static graph mode"
        )


def _attr_of(weight_attr: Any) -> Any:
    attr = paddle.ParamAttr._to_attr(weight_attr)
    if not attr:
        raise PlanError("fleet_sparse.nn.Embedding: weight_attr is False, should be a ParamAttr or None")
    return attr
