"""`paddle.nn.Embedding(sparse=True)` in dygraph: its rows are a table in a job with pservers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import paddle
from paddle.base import unique_name
from paddle.distributed import fleet as fleet_module
from paddle.jit.marker import force_dynamic

from fleet_sparse.errors import PlanError

from ..runtime import FleetSparseRuntime
from ..static.dense_parameters import is_float32
from ..strategy import dense_embeddings_of
from .layers import Embedding, TableWeight, check_untraced, declare
from .training import training

logger = logging.getLogger(__name__)


def wrap_create_parameter(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `create_parameter` of `paddle.nn.Embedding`: the weight of a sparse one is never made."""

    @wraps(stock)
    def create_parameter(self: Any, shape: Any, attr: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (self._sparse and type(self) is paddle.nn.Embedding and uses_pservers()):
            return stock(self, shape, attr, *args, **kwargs)
        read = paddle.ParamAttr._to_attr(attr)
        name = read.name or unique_name.generate(f"{self._helper.name}.w")
        if is_dense(name):
            read.name = name
            return stock(self, shape, read, *args, **kwargs)
        _declare(self, name, shape, read)
        self.__class__ = _TableEmbedding
        return TableWeight(name, shape, self._padding_idx)

    return create_parameter


@force_dynamic  # `to_static` with `full_graph=False` compiles what is around it
class _TableEmbedding(paddle.nn.Embedding):  # type: ignore[misc]  # Paddle's classes are untyped here
    """A `paddle.nn.Embedding` whose rows are on pservers; layers of Paddle's class become layers of this one."""

    def forward(self, x: Any) -> Any:
        """Looks rows up, as `paddle.nn.Embedding` does.

        Raises:
            PlanError: The call is traced by `paddle.jit.to_static`.
        """
        check_untraced(self.weight.name)
        return training().lookup(self.weight.name, self.weight.padding_idx, x)


def swap(model: Any) -> None:
    """Makes tables of the sparse embeddings of `model` that were built before `fleet.init()`, and drops their weights.

    Rows begin with the values of the layer's initializer. A weight that several layers share stays a parameter, after a
    warning.

    Raises:
        PlanError: A layer asks for something that tables do not have.
    """
    owners: dict[int, list[Any]] = {}
    for layer in model.sublayers(include_self=True):
        for weight in layer.parameters(include_sublayers=False):
            owners.setdefault(id(weight), []).append(layer)
    for layer in model.sublayers(include_self=True):
        if type(layer) is not paddle.nn.Embedding or not layer._sparse:
            continue
        weight = layer.weight
        if is_dense(weight.name) or not is_float32(weight):
            continue
        if any(not (isinstance(owner, paddle.nn.Embedding) and owner._sparse) for owner in owners[id(weight)]):
            logger.warning("embedding %r has sparse=True and stays a parameter: another layer has it too", weight.name)
            continue
        _declare(layer, weight.name, weight.shape, paddle.ParamAttr._to_attr(layer._weight_attr))
        del layer.weight
        layer.__class__ = _TableEmbedding
        layer.weight = TableWeight(weight.name, weight.shape, layer._padding_idx)
        training().drop_parameter(weight)


def table_of(layer: Any) -> tuple[str, int | None] | None:
    """Returns the table and padding id of a layer that looks rows up; None for any other layer."""
    if isinstance(layer, Embedding):
        return layer.table, layer.padding_idx
    if isinstance(layer, _TableEmbedding):
        return layer.weight.name, layer.weight.padding_idx
    return None


def tables_of(model: Any) -> set[str]:
    """Returns the names of the tables of a model's layers."""
    found = map(table_of, model.sublayers(include_self=True))
    return {each[0] for each in found if each is not None}


def uses_pservers() -> bool:
    """True if this is dygraph, and `fleet.init()` was called in dygraph for a job with pservers."""
    has_runtime = isinstance(fleet_module.fleet._runtime_handle, FleetSparseRuntime)
    return paddle.in_dynamic_mode() and has_runtime and training().is_initialized


def is_dense(name: str) -> bool:
    """True if the strategy names the weight `name` as one that stays a dense parameter."""
    strategy = fleet_module.fleet._user_defined_strategy
    return any(fnmatchcase(name, pattern) for pattern in dense_embeddings_of(strategy))


def _declare(layer: Any, name: str, shape: Any, attr: Any) -> None:
    options = {"max_norm": layer._max_norm, "scale_grad_by_freq": layer._scale_grad_by_freq}
    for option, value in options.items():
        if value:
            raise PlanError(
                f"table {name!r}: {option} of nn.Embedding(sparse=True) is not supported on pservers. Leave it out, or "
                f"keep the weight a parameter: PserverStrategy(dense_embeddings=[{name!r}]) in fleet.init"
            )
    declare(name, shape, attr, is_bounded=True)
