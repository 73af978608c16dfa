"""Dygraph models with tables, and the same in plain Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet

import fleet_sparse

NUM_IDS, DIM, FIELDS = 50, 4, 3
PADDING = 3
_WEIGHTS = np.random.RandomState(2).randn(FIELDS * DIM, 1).astype(np.float32) * 0.3


def constant(name: str, value: float = 0.1) -> paddle.ParamAttr:
    return paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Constant(value))


def plain_layer() -> Any:
    """A lookup in plain Paddle."""
    return paddle.nn.Embedding(NUM_IDS, DIM, padding_idx=PADDING, weight_attr=constant("plain"))


def sparse_layer(name: str = "emb") -> Any:
    """A layer of Paddle whose weight becomes a table."""
    return paddle.nn.Embedding(NUM_IDS, DIM, padding_idx=PADDING, sparse=True, weight_attr=constant(name))


def table_layer(name: str = "emb") -> Any:
    """A layer of ours."""
    return fleet_sparse.nn.Embedding(10**11, DIM, padding_idx=PADDING, weight_attr=constant(name))


class Model(paddle.nn.Layer):
    """One linear layer over the rows of three fields."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding
        attr = paddle.ParamAttr(name="dense_w", initializer=paddle.nn.initializer.Assign(_WEIGHTS))
        self.linear = paddle.nn.Linear(FIELDS * DIM, 1, weight_attr=attr, bias_attr=constant("dense_b", 0.0))

    def forward(self, ids: Any) -> Any:
        return self.linear(paddle.reshape(self.embedding(ids), [-1, FIELDS * DIM]))


def batches(num_steps: int) -> Iterator[tuple[Any, Any]]:
    """Ids and labels. Each batch has every id, so that lazy rules and Paddle's dense ones are equal."""
    random = np.random.RandomState(7)
    for _ in range(num_steps):
        ids = np.concatenate([np.arange(NUM_IDS), random.randint(0, NUM_IDS, 22)]).reshape(-1, FIELDS)
        yield paddle.to_tensor(ids), paddle.to_tensor((ids.sum(1, keepdims=True) % 2).astype(np.float32))


def loss_of(model: Any, ids: Any, labels: Any) -> Any:
    return paddle.nn.functional.binary_cross_entropy_with_logits(model(ids), labels)


def trained(model: Any, optimizer: Any, num_steps: int, *, num_parts: int = 1) -> list[float]:
    """Trains; returns the loss of each step, which has the gradients of `num_parts` backward passes."""
    losses = []
    for ids, labels in batches(num_steps):
        for part in range(num_parts):
            loss = loss_of(model, ids[part::num_parts], labels[part::num_parts])
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.clear_grad()
        if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
            optimizer._learning_rate.step()
    return losses


def plain_losses(make_optimizer: Callable[[Any], Any], num_steps: int = 50, *, num_parts: int = 1) -> list[float]:
    """Losses in plain Paddle."""
    with paddle.utils.unique_name.guard():
        model = Model(plain_layer())
        return trained(model, make_optimizer(model.parameters()), num_steps, num_parts=num_parts)


def started(model: Any, make_optimizer: Callable[[Any], Any], strategy: Any = None) -> Any:
    """Gives model and optimizer to fleet and connects; returns the optimizer."""
    optimizer = fleet.distributed_optimizer(make_optimizer(model.parameters()), strategy)
    fleet.distributed_model(model)
    fleet.init_worker()
    return optimizer


def rows_of(model: Any, ids: list[int]) -> Any:
    """The rows of ids, as an evaluation reads them."""
    with paddle.no_grad():
        return model.embedding(paddle.to_tensor(ids)).numpy()


def num_rows(table: str = "emb") -> int:
    """Number of rows that the pserver has."""
    return int(fleet_sparse.stats()["pservers"][0]["tables"][table])
