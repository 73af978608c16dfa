"""`fleet_sparse.nn.Embeddings` looks the ids of several layers up by one request to every shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

import fleet_sparse
from support.dygraph import DIM, NUM_IDS, constant, num_rows, sparse_layer, started, table_layer

pytestmark = pytest.mark.usefixtures("job")

USERS, ITEMS, TAGS = [[1, 2], [2, 3]], [4, 5], [[[7], [1]], [[9], [3]]]


def sgd(parameters: Any) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=parameters)


def make_layers() -> dict[str, Any]:
    """Three layers on two tables."""
    return {"users": table_layer("shared"), "items": sparse_layer("items"), "tags": table_layer("shared")}


def ids_of_fields() -> dict[str, Any]:
    return {"users": paddle.to_tensor(USERS), "items": paddle.to_tensor(ITEMS), "tags": paddle.to_tensor(TAGS)}


def num_requests() -> int:
    return int(fleet_sparse.stats()["pservers"][0]["requests"])


def train(look_up: Any, optimizer: Any, num_steps: int) -> list[Any]:
    """Trains rows towards 1; returns the rows of each step."""
    steps = []
    for _ in range(num_steps):
        rows = look_up(ids_of_fields())
        steps.append([rows[name].numpy() for name in sorted(rows)])
        sum(((each - 1.0) ** 2).sum() for each in rows.values()).backward()
        optimizer.step()
        optimizer.clear_grad()
    return steps


def test_layers_together_train_as_each_alone():
    layers, single = fleet_sparse.nn.Embeddings(make_layers()), {name: table_layer(f"one_{name}") for name in "ab"}
    single = {"users": single["a"], "items": single["b"], "tags": single["a"]}
    optimizer = started(paddle.nn.Linear(DIM, 1), sgd)
    together = train(layers, optimizer, 4)
    alone = train(lambda ids: {name: single[name](each) for name, each in ids.items()}, optimizer, 4)
    for one, other in zip(together, alone, strict=True):
        for rows, expected in zip(one, other, strict=True):
            np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-7)
    assert (num_rows("shared"), num_rows("items")) == (num_rows("one_a"), num_rows("one_b")) == (4, 2)


def test_a_step_of_26_layers_is_two_requests():
    layers = fleet_sparse.nn.Embeddings({f"C{field}": table_layer(f"C{field}") for field in range(26)})
    optimizer = started(paddle.nn.Linear(DIM, 1), sgd)
    ids = {name: paddle.to_tensor([1, 2]) for name in layers}
    sum(rows.sum() for rows in layers(ids).values()).backward()
    optimizer.step()
    before = num_requests()
    sum(rows.sum() for rows in layers(ids).values()).backward()
    optimizer.step()
    assert num_requests() - before == 2  # a pull and a push; of the layers alone 27


def test_layers_that_are_left_out_are_not_looked_up():
    layers = fleet_sparse.nn.Embeddings(make_layers())
    optimizer = started(paddle.nn.Linear(DIM, 1), sgd)
    rows = layers({"items": paddle.to_tensor(ITEMS)})
    assert {name: each.shape for name, each in rows.items()} == {"items": [2, DIM]}
    rows["items"].sum().backward()
    optimizer.step()
    assert (num_rows("shared"), num_rows("items")) == (0, 2)


def test_dense_embedding_among_the_layers_is_called():
    dense = paddle.nn.Embedding(NUM_IDS, DIM, weight_attr=constant("dense", 0.5))
    layers = fleet_sparse.nn.Embeddings({"dense": dense, "table": table_layer()})
    optimizer = started(layers, sgd)
    rows = layers({"table": paddle.to_tensor([1]), "dense": paddle.to_tensor([2])})
    assert list(rows) == ["table", "dense"]
    (rows["table"].sum() + rows["dense"].sum()).backward()
    optimizer.step()
    np.testing.assert_allclose(dense.weight.numpy()[2], np.full(DIM, 0.4), atol=1e-7)
    assert num_rows() == 1


def test_name_without_a_layer_is_refused_by_name():
    layers = fleet_sparse.nn.Embeddings(make_layers())
    started(paddle.nn.Linear(DIM, 1), sgd)
    with pytest.raises(ValueError, match="'user'"):
        layers({"user": paddle.to_tensor([1])})


def test_frozen_table_among_the_layers_has_no_gradient():
    attr = paddle.ParamAttr(name="frozen", trainable=False, initializer=paddle.nn.initializer.Constant(0.1))
    frozen = fleet_sparse.nn.Embedding(10**11, DIM, weight_attr=attr)
    layers = fleet_sparse.nn.Embeddings({"frozen": frozen, "trained": table_layer("trained")})
    optimizer = started(paddle.nn.Linear(DIM, 1), sgd)
    rows = layers({"frozen": paddle.to_tensor([1]), "trained": paddle.to_tensor([1])})
    sum(each.sum() for each in rows.values()).backward()
    optimizer.step()
    assert (num_rows("frozen"), num_rows("trained")) == (0, 1)


def test_program_builds_the_lookup_of_each_layer():
    paddle.enable_static()
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        attr = constant("of_program")
        layers = fleet_sparse.nn.Embeddings({"a": fleet_sparse.nn.Embedding(10**11, DIM, weight_attr=attr)})
        rows = layers({"a": paddle.static.data("a", [None, 3], "int64")})
        assert rows["a"].shape == [-1, 3, DIM]
