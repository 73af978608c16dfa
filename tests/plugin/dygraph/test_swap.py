"""`paddle.nn.Embedding(sparse=True)` in a dygraph job with pservers."""

from __future__ import annotations

import copy

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet

import fleet_sparse
from fleet_sparse.errors import PlanError
from support.dygraph import (
    DIM,
    NUM_IDS,
    Model,
    batches,
    loss_of,
    num_rows,
    plain_layer,
    sparse_layer,
    started,
    table_layer,
)

SGD = paddle.optimizer.SGD


def sgd(parameters):
    return SGD(0.1, parameters=parameters)


@pytest.mark.usefixtures("job")
def test_weight_of_a_sparse_layer_is_never_made():
    model = Model(paddle.nn.Embedding(10**11, DIM, sparse=True))
    assert [each.name for each in model.parameters()] == ["dense_w", "dense_b"]
    assert list(model.state_dict()) == ["linear.weight", "linear.bias"]


@pytest.mark.usefixtures("job")
def test_default_name_is_that_of_plain_paddle():
    assert paddle.nn.Embedding(NUM_IDS, DIM, sparse=True).weight.name == "embedding_0.w_0"
    assert paddle.nn.Embedding(NUM_IDS, DIM).weight.name == "embedding_1.w_0"


@pytest.mark.usefixtures("job")
def test_ids_past_the_size_are_refused():
    layer = sparse_layer()
    started(paddle.nn.Linear(1, 1), sgd)
    with pytest.raises(ValueError, match=f"id {NUM_IDS} is outside"):
        layer(paddle.to_tensor([NUM_IDS]))


@pytest.mark.usefixtures("job")
def test_reading_the_weight_is_refused_by_name():
    with pytest.raises(PlanError, match="'emb'"):
        sparse_layer().weight.numpy()
    with pytest.raises(PlanError, match="'emb2'"):
        _ = table_layer("emb2").weight


@pytest.mark.usefixtures("job")
def test_layer_without_sparse_stays_a_parameter():
    layer = paddle.nn.Embedding(NUM_IDS, DIM)
    assert layer.weight.shape == [NUM_IDS, DIM]


@pytest.mark.usefixtures("job")
def test_max_norm_is_refused():
    with pytest.raises(PlanError, match="max_norm"):
        paddle.nn.Embedding(NUM_IDS, DIM, sparse=True, max_norm=1.0)


@pytest.mark.usefixtures("job")
def test_copied_model_looks_up_the_same_table():
    model = Model(sparse_layer())
    other = copy.deepcopy(model)
    started(model, sgd)
    ids, _ = next(batches(1))
    np.testing.assert_array_equal(model(ids).numpy(), other(ids).numpy())


@pytest.mark.usefixtures("job")
def test_named_layers_stay_parameters():
    fleet.init(strategy=fleet_sparse.PserverStrategy(dense_embeddings=["user_*"]))
    user, item = sparse_layer("user_id"), sparse_layer("item_id")
    assert user.weight.shape == [NUM_IDS, DIM]
    assert [each.name for each in user.parameters()] == ["user_id"]
    assert not item.parameters()


@pytest.mark.usefixtures("job")
def test_layer_built_before_init_is_swapped_with_its_model():
    fleet_sparse.uninstall()
    model = Model(sparse_layer("before"))
    fleet_sparse.install()
    fleet.init()
    optimizer = fleet.distributed_optimizer(sgd(model.parameters()))
    assert fleet.distributed_model(model) is model
    assert "before" not in [each.name for each in (*model.parameters(), *optimizer._parameter_list)]
    fleet.init_worker()
    loss_of(model, *next(batches(1))).backward()
    optimizer.step()
    assert num_rows("before") == NUM_IDS - 1


@pytest.mark.usefixtures("job")
def test_weight_that_another_layer_has_stays_a_parameter():
    fleet_sparse.uninstall()
    embedding = sparse_layer("tied")
    other = paddle.nn.Linear(1, 1)
    other.tied = embedding.weight
    fleet_sparse.install()
    fleet.init()
    fleet.distributed_model(paddle.nn.LayerList([embedding, other]))
    assert embedding.weight is other.tied


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("layer", [sparse_layer, table_layer])
def test_to_static_with_a_full_graph_is_refused_by_name(layer):
    model = Model(layer())
    started(model, sgd)
    with pytest.raises(PlanError, match="to_static"):
        paddle.jit.to_static(model, full_graph=True)(next(batches(1))[0])


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("layer", [sparse_layer, table_layer])
def test_to_static_without_a_full_graph_trains(layer):
    model = Model(layer())
    optimizer = started(model, sgd)
    ids, labels = next(batches(1))
    expected = float(loss_of(model, ids, labels))
    traced = paddle.jit.to_static(model, full_graph=False)
    loss = loss_of(traced, ids, labels)
    loss.backward()
    optimizer.step()
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert num_rows() == NUM_IDS - 1


def test_model_without_init_is_refused_by_name():
    paddle.disable_static()
    fleet_sparse.install()
    try:
        with pytest.raises(PlanError, match=r"distributed_model: fleet\.init"):
            fleet.distributed_model(Model(plain_layer()))
    finally:
        fleet_sparse.uninstall()
        paddle.enable_static()


def test_layer_without_fleet_is_plain_paddle():
    paddle.disable_static()
    fleet_sparse.install()
    try:
        layer = paddle.nn.Embedding(NUM_IDS, DIM, sparse=True)
        optimizer = sgd(layer.parameters())
        before = layer.weight.numpy()
        layer(paddle.to_tensor([1, 2])).sum().backward()
        optimizer.step()
        assert (layer.weight.numpy() != before).any(axis=1).sum() == 2
    finally:
        fleet_sparse.uninstall()
        paddle.enable_static()
