"""Layers and functions of Paddle with sparse=True in programs that are given to fleet, and in others."""

from __future__ import annotations

import logging

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.core.initializer import constant, normal, truncated_normal, uniform
from fleet_sparse.errors import PlanError
from fleet_sparse.plugin.active_session import active
from fleet_sparse.transpiler.describe import describe
from support.programs import flagged, ids_input, linear, start

NUM_IDS, DIM = 20, 4
BATCHES = [np.random.default_rng(seed).integers(0, NUM_IDS, (6, 3)) for seed in range(8)]


@pytest.fixture(autouse=True)
def roles(plugin):
    fleet.init()


def layer(name="emb", *, sparse=True, padding_idx=None, first=None, **attributes):
    first = first or paddle.nn.initializer.Constant(0.5)
    attr = paddle.ParamAttr(name=name, initializer=first, **attributes)
    return paddle.nn.Embedding(NUM_IDS, DIM, padding_idx=padding_idx, sparse=sparse, weight_attr=attr)


def loss_of(rows):
    return paddle.mean(paddle.square(linear(rows) - 3.0))


def minimize(loss, optimizer=None, **fields):
    strategy = fleet_sparse.PserverStrategy(**fields)
    optimizer = optimizer or paddle.optimizer.SGD(0.1)
    return fleet.distributed_optimizer(optimizer, strategy).minimize(loss)


def run(program, fetch, executor, ids=BATCHES[0]):
    return executor.run(program, feed={"ids": ids}, fetch_list=[fetch])[0]


def main_program():
    return paddle.static.default_main_program()


def losses(build, train):
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.static.scope_guard(paddle.static.Scope()),
        paddle.utils.unique_name.guard(),
    ):
        loss = build()
        executor = train(loss)
        return [float(run(main_program(), loss, executor, ids)) for ids in BATCHES]


def plainly(loss):
    paddle.optimizer.SGD(0.1).minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    return executor


def on_pservers(loss):
    minimize(loss)
    return start()


def of_layer():
    return loss_of(layer(padding_idx=3)(ids_input((-1, 3))))


def of_two_lookups():
    embedding, ids = layer(), ids_input((-1, 3))
    return loss_of(embedding(ids) + embedding(ids % 5))


def of_function():
    weight = paddle.static.create_parameter(
        [NUM_IDS, DIM], "float32", attr=paddle.ParamAttr("w0", initializer=paddle.nn.initializer.Constant(0.5))
    )
    return loss_of(paddle.nn.functional.embedding(ids_input((-1, 3)), weight, padding_idx=1, sparse=True))


@pytest.mark.parametrize("build", [of_layer, of_two_lookups, of_function])
def test_losses_equal_plain_paddles(build):
    np.testing.assert_allclose(losses(build, on_pservers), losses(build, plainly), rtol=0, atol=1e-6)


def test_sparse_layer_is_a_table_of_its_parameters_name():
    loss = loss_of(paddle.nn.Embedding(NUM_IDS, DIM, sparse=True)(ids_input()))
    minimize(loss)
    (name,) = active().catalog.tables
    assert name == "embedding_0.w_0"


def test_parameter_of_a_table_is_never_made():
    minimize(of_layer())
    start()
    assert [each.name for each in main_program().global_block().all_parameters()] == ["w"]
    assert "emb" not in describe(paddle.static.default_startup_program())
    assert paddle.static.global_scope().find_var("emb") is None


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (paddle.nn.initializer.Constant(0.25), constant(0.25)),
        (paddle.nn.initializer.Uniform(-0.5, 0.25), uniform(-0.5, 0.25)),
        (paddle.nn.initializer.Normal(0.0, 0.5), normal(0.0, 0.5)),
        (paddle.nn.initializer.TruncatedNormal(0.0, 0.5), truncated_normal(0.0, 0.5, -2.0, 2.0)),
    ],
)
def test_initializer_is_read_from_the_startup_program(first, expected):
    minimize(loss_of(layer(first=first)(ids_input())))
    assert active().catalog.tables["emb"].initializer == expected


def test_default_initializer_is_paddles():
    emb = paddle.nn.Embedding(NUM_IDS, DIM, sparse=True, weight_attr=paddle.ParamAttr(name="emb"))
    minimize(loss_of(emb(ids_input())))
    kind, low, high, *_ = active().catalog.tables["emb"].initializer
    assert (kind, low, high) == ("uniform", -high, pytest.approx((6 / (NUM_IDS + DIM)) ** 0.5))


def test_attributes_of_the_weight_are_read():
    frozen = layer("frozen", trainable=False)(ids_input())
    minimize(loss_of(layer(learning_rate=0.5, regularizer=paddle.regularizer.L2Decay(0.25))(ids_input()) + frozen))
    layers = active().catalog.layers
    assert (layers["emb"].learning_rate, layers["emb"].decay.l2, layers["emb"].size) == (0.5, 0.25, NUM_IDS)
    assert (layers["frozen"].is_trainable, layers["emb"].is_trainable) == (False, True)


def test_ids_are_checked_against_the_size():
    loss = of_layer()
    minimize(loss)
    with pytest.raises(ValueError, match="20"):
        run(main_program(), loss, start(), np.array([[1, 2, NUM_IDS]]))


def test_value_of_the_lookup_can_be_fetched():
    rows = layer()(ids_input((-1, 3)))
    minimize(loss_of(rows))
    np.testing.assert_array_equal(run(main_program(), rows, start()), np.full((6, 3, DIM), 0.5, np.float32))


@pytest.mark.parametrize("pattern", ["emb", "e*"])
def test_a_switch_names_exceptions(pattern):
    minimize(loss_of(layer()(ids_input()) + layer("other")(ids_input())), dense_embeddings=[pattern])
    assert list(active().catalog.tables) == ["other"]
    assert "emb" in active().catalog.dense_names()


def test_strategy_of_paddle_names_exceptions_as_local_sparse():
    loss = of_layer()
    strategy = fleet.DistributedStrategy()
    strategy.trainer_desc_configs = {"local_sparse": ["emb"]}
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(loss)
    assert not active().catalog.tables


def test_dense_embeddings_that_is_one_name_is_refused():
    with pytest.raises(PlanError, match=r"PserverStrategy\.dense_embeddings"):
        fleet_sparse.PserverStrategy(dense_embeddings="emb")


def test_weight_that_is_read_otherwise_stays_dense_aloud(caplog):
    embedding = layer()
    rows = embedding(ids_input())
    with caplog.at_level(logging.WARNING):
        minimize(loss_of(rows) + paddle.mean(embedding.weight))
    assert not active().catalog.tables
    assert "'emb'" in caplog.text
    assert "pd_op.mean" in caplog.text


def test_layer_without_sparse_stays_a_parameter():
    minimize(loss_of(layer(sparse=False)(ids_input())))
    assert not active().catalog.tables


def test_initializer_of_given_values_is_refused_by_name():
    values = np.zeros((NUM_IDS, DIM), np.float32)
    loss = loss_of(layer(first=paddle.nn.initializer.Assign(values))(ids_input()))
    with pytest.raises(PlanError, match=r"table 'emb'.*dense_embeddings=\['emb'\]"):
        minimize(loss)


def test_lookup_without_its_startup_program_is_refused():
    loss = of_layer()
    with pytest.raises(PlanError, match=r"table 'emb'.*startup program"):
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss, paddle.static.Program())


def test_flagged_lookup_and_layer_share_a_table_by_name():
    ids = ids_input((-1, 3))
    minimize(loss_of(layer()(ids) + flagged(ids, size=[NUM_IDS, DIM], is_distributed=False)))
    assert list(active().catalog.tables) == ["emb"]


# Other programs


def test_evaluation_program_reads_the_table():
    minimize(loss_of(layer()(ids_input((-1, 3)))))
    executor = start()
    evaluation, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(evaluation, startup):
        ids = ids_input((-1, 3))
        rows = layer(first=paddle.nn.initializer.Constant(9.0))(ids)
    executor.run(startup)
    np.testing.assert_array_equal(run(evaluation, rows, executor), np.full((6, 3, DIM), 0.5, np.float32))
    assert paddle.static.global_scope().find_var("emb") is None


@pytest.mark.parametrize("before", [True, False])
def test_clone_for_test_reads_the_table(before):
    loss = of_layer()
    test = main_program().clone(for_test=True) if before else None
    minimize(loss)
    executor = start()
    test = test or main_program().clone(for_test=True)
    first = float(run(test, loss, executor))
    run(main_program(), loss, executor)
    assert float(run(test, loss, executor)) < first


def test_evaluation_that_reads_the_weight_is_refused():
    minimize(of_layer())
    executor = start()
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        ids = ids_input((-1, 3))
        embedding = layer()
        value = paddle.mean(embedding(ids)) + paddle.mean(embedding.weight)
        with pytest.raises(PlanError, match="table 'emb'"):
            run(main_program(), value, executor)


def test_program_of_another_optimizer_is_left_to_paddle():
    minimize(of_layer())
    executor = start()
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.static.scope_guard(paddle.static.Scope()),
    ):
        loss = loss_of(layer(first=paddle.nn.initializer.Constant(2.0))(ids_input((-1, 3))))
        paddle.optimizer.SGD(0.1).minimize(loss)
        executor.run(paddle.static.default_startup_program())
        run(main_program(), loss, executor)
        weight = np.array(paddle.static.global_scope().find_var("emb").get_tensor())
    assert weight.shape == (NUM_IDS, DIM)
    assert weight.min() < 2.0


def test_program_that_is_not_given_to_fleet_is_plain_paddle():
    loss = of_layer()
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    assert float(run(main_program(), loss, executor)) > 0
    assert np.array(paddle.static.global_scope().find_var("emb").get_tensor()).shape == (NUM_IDS, DIM)


def test_dygraph_layer_is_plain_paddle():
    paddle.disable_static()
    try:
        embedding = paddle.nn.Embedding(NUM_IDS, DIM, sparse=True)
        optimizer = paddle.optimizer.SGD(0.1, parameters=embedding.parameters())
        before = embedding.weight.numpy()
        embedding(paddle.to_tensor([1, 2])).sum().backward()
        optimizer.step()
        assert (embedding.weight.numpy() != before).any(axis=1).sum() == 2
    finally:
        paddle.enable_static()
