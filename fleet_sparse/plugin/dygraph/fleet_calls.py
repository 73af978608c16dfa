"""Methods that `install()` replaces for dygraph: of Paddle's layers, optimizers, `paddle.Model` and fleet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import paddle
from paddle.base.framework import _dygraph_guard
from paddle.distributed import fleet as fleet_module
from paddle.hapi.model import DynamicGraphAdapter
from paddle.optimizer import LBFGS, Adam, AdamW, Optimizer

from ..runtime import FleetSparseRuntime
from .swap import swap, tables_of, uses_pservers, wrap_create_parameter
from .training import training


def replaced_methods() -> Iterator[tuple[Any, str, Any]]:
    """Yields the owner, name and replacement of each method."""
    yield paddle.nn.Embedding, "create_parameter", wrap_create_parameter(paddle.nn.Embedding.create_parameter)
    yield Optimizer, "__init__", _wrap_built(Optimizer.__init__)
    for kind in (Optimizer, Adam, AdamW, LBFGS):
        yield kind, "step", _wrap_step(kind.step)
    yield Optimizer, "clear_grad", _wrap_clear_grad(Optimizer.clear_grad)
    yield Optimizer, "minimize", _wrap_minimize(Optimizer.minimize)
    yield paddle.nn.Layer, "clear_gradients", _wrap_clear_gradients(paddle.nn.Layer.clear_gradients)
    yield DynamicGraphAdapter, "__init__", _wrap_adapter(DynamicGraphAdapter.__init__)
    yield fleet_module, "distributed_optimizer", _wrap_optimizer(fleet_module.distributed_optimizer)
    yield fleet_module, "distributed_model", _wrap_model(fleet_module.distributed_model)


def init_without_collectives(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `Fleet.init` for a job with pservers: in dygraph Paddle would connect the workers for collectives."""
    with _dygraph_guard(None):
        return stock(*args, **kwargs)


def _wrap_step(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `step` of a class of optimizers."""

    @wraps(stock)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not uses_pservers() or not (training().is_job or training().optimizer is self):
            return stock(self, *args, **kwargs)
        if training().optimizer is not self:
            training().refuse(self)
        return training().step(lambda: stock(self, *args, **kwargs))

    return step


def _wrap_built(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if uses_pservers():
            training().note_built(self)

    return __init__


def _wrap_clear_grad(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def clear_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if uses_pservers() and training().optimizer is self:
            training().clear()
        stock(self, *args, **kwargs)

    return clear_grad


def _wrap_clear_gradients(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def clear_gradients(self: Any, *args: Any, **kwargs: Any) -> None:
        if uses_pservers():
            training().clear(tables_of(self))
        stock(self, *args, **kwargs)

    return clear_gradients


def _wrap_minimize(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def minimize(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if not uses_pservers() or not (training().is_job or training().optimizer is self):
            return stock(self, loss, *args, **kwargs)
        self.step()
        return [], []

    return minimize


def _wrap_adapter(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def __init__(self: Any, model: Any) -> None:
        if not uses_pservers():
            stock(self, model)
            return
        training().use_model(model.network)
        with _as_only_worker():
            stock(self, model)

    return __init__


@contextmanager
def _as_only_worker() -> Iterator[None]:
    """During the block Paddle reads that this is the only worker, and connects it with no other for collectives."""
    num_workers = os.environ.pop("PADDLE_TRAINERS_NUM", None)
    try:
        yield
    finally:
        if num_workers is not None:
            os.environ["PADDLE_TRAINERS_NUM"] = num_workers


def _check_initialized(call: str) -> None:
    """Raises `PlanError` if this is dygraph and `fleet.init()` was not called in it, for pservers or collectives."""
    fleet = fleet_module.fleet
    is_collective = fleet._role_maker is not None and not isinstance(fleet._runtime_handle, FleetSparseRuntime)
    if paddle.in_dynamic_mode() and not is_collective:
        training().check_initialized(call)


def _wrap_optimizer(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def distributed_optimizer(optimizer: Any, strategy: Any = None) -> Any:
        if not uses_pservers():
            _check_initialized("distributed_optimizer")
            return stock(optimizer, strategy)
        fleet = fleet_module.fleet
        chosen = fleet._user_defined_strategy if strategy is None else strategy
        training().use_optimizer(optimizer, chosen, fleet._runtime_handle.num_workers)
        return optimizer

    return distributed_optimizer


def _wrap_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def distributed_model(model: Any) -> Any:
        if not uses_pservers():
            _check_initialized("distributed_model")
            return stock(model)
        swap(model)
        training().use_model(model)
        return model

    return distributed_model
