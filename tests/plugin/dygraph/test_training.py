"""A dygraph model with tables trains as in plain Paddle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet

import fleet_sparse
from fleet_sparse.errors import FleetSparseError, PlanError, PushRefused
from support.dygraph import (
    DIM,
    FIELDS,
    Model,
    batches,
    constant,
    loss_of,
    num_rows,
    plain_layer,
    plain_losses,
    rows_of,
    sparse_layer,
    started,
    table_layer,
    trained,
)

pytestmark = pytest.mark.usefixtures("job")

OPTIMIZERS = {
    "sgd": lambda parameters: paddle.optimizer.SGD(0.1, parameters=parameters),
    "adagrad": lambda parameters: paddle.optimizer.Adagrad(0.1, parameters=parameters),
    "adam": lambda parameters: paddle.optimizer.Adam(0.01, lazy_mode=True, parameters=parameters),
    "clip_by_global_norm": lambda parameters: paddle.optimizer.SGD(
        0.5, parameters=parameters, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.05)
    ),
    "clip_by_value": lambda parameters: paddle.optimizer.SGD(
        0.5, parameters=parameters, grad_clip=paddle.nn.ClipGradByValue(0.001)
    ),
    "scheduler": lambda parameters: paddle.optimizer.SGD(
        paddle.optimizer.lr.NaturalExpDecay(0.5, 0.1), parameters=parameters
    ),
}
SGD = OPTIMIZERS["sgd"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layer", [sparse_layer, table_layer])
def test_50_steps_are_those_of_plain_paddle(layer, optimizer):
    expected = plain_losses(OPTIMIZERS[optimizer])
    model = Model(layer())
    losses = trained(model, started(model, OPTIMIZERS[optimizer]), 50)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)


def test_gradients_of_several_backward_passes_are_summed():
    expected = plain_losses(SGD, 20, num_parts=3)
    model = Model(table_layer())
    losses = trained(model, started(model, SGD), 20, num_parts=3)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)


def test_clear_grad_drops_gradients_of_rows():
    model = Model(table_layer())
    optimizer = started(model, SGD)
    loss_of(model, *next(batches(1))).backward()
    optimizer.clear_grad()
    optimizer.step()
    assert num_rows() == 0


def uncleared_losses(model: Any, optimizer: Any, clear: Callable[[int], None]) -> list[float]:
    """Losses of 12 steps, after each of which `clear` may clear gradients."""
    losses = []
    for step, (ids, labels) in enumerate(batches(12)):
        loss = loss_of(model, ids, labels)
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        clear(step)
    return losses


CLEARED = {
    "never": lambda model, optimizer: lambda step: None,
    "every_third_step": lambda model, optimizer: lambda step: step % 3 == 2 and optimizer.clear_grad(),
    "by_the_older_name": lambda model, optimizer: lambda step: optimizer.clear_gradients(),
    "by_the_model": lambda model, optimizer: lambda step: model.clear_gradients(),
}


@pytest.mark.parametrize("cleared", CLEARED)
@pytest.mark.parametrize("rule", ["adagrad", "adam", "clip_by_value"])
def test_gradients_stay_until_they_are_cleared_as_in_paddle(rule, cleared):
    with paddle.utils.unique_name.guard():
        model = Model(plain_layer())
        optimizer = OPTIMIZERS[rule](model.parameters())
        expected = uncleared_losses(model, optimizer, CLEARED[cleared](model, optimizer))
    model = Model(table_layer())
    optimizer = started(model, OPTIMIZERS[rule])
    losses = uncleared_losses(model, optimizer, CLEARED[cleared](model, optimizer))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=3e-6)


def test_steps_without_clear_grad_are_warned_of_once(caplog):
    model = Model(table_layer())
    uncleared_losses(model, started(model, SGD), lambda step: None)
    assert [each.message.split(":")[0] for each in caplog.records if "clear_grad" in each.message] == ["optimizer.step"]


def test_clear_gradients_of_a_part_clears_its_tables():
    one, other = table_layer("one"), table_layer("other")
    optimizer = started(paddle.nn.Linear(DIM, 1), SGD)
    (one(paddle.to_tensor([1])).sum() + other(paddle.to_tensor([1])).sum()).backward()
    one.clear_gradients()
    optimizer.step()
    assert (num_rows("one"), num_rows("other")) == (0, 1)


def test_gradients_that_stay_are_counted_once_by_an_entry():
    entry = paddle.distributed.CountFilterEntry(3)
    layer = fleet_sparse.nn.Embedding(10**11, DIM, weight_attr=constant("emb"), entry=entry)
    optimizer = started(paddle.nn.Linear(DIM, 1), SGD)
    layer(paddle.to_tensor([1])).sum().backward()
    for _ in range(5):
        optimizer.step()
    assert num_rows() == 0


def test_minimize_of_the_optimizer_is_a_step():
    model = Model(table_layer())
    optimizer = started(model, SGD)
    loss = loss_of(model, *next(batches(1)))
    loss.backward()
    optimizer.minimize(loss)
    assert num_rows() == 49  # all but the padding


def test_layer_called_twice_in_a_forward_gets_both_gradients():
    layer = table_layer()
    model = paddle.nn.Linear(DIM, 1)
    optimizer = started(model, SGD)
    (layer(paddle.to_tensor([1, 2])).sum() + 2 * layer(paddle.to_tensor([2, 4])).sum()).backward()
    optimizer.step()
    with paddle.no_grad():
        rows = layer(paddle.to_tensor([1, 2, 4])).numpy()[:, 0]
    np.testing.assert_allclose(rows, [0.0, -0.2, -0.1], atol=1e-7)


def test_layers_of_one_name_share_a_table():
    first, second = table_layer("shared"), table_layer("shared")
    optimizer = started(paddle.nn.Linear(DIM, 1), SGD)
    first(paddle.to_tensor([1])).sum().backward()
    optimizer.step()
    with paddle.no_grad():
        np.testing.assert_allclose(second(paddle.to_tensor([1])).numpy(), np.zeros((1, DIM)), atol=1e-7)


def test_only_tables_that_are_looked_up_are_trained():
    used, unused = table_layer("used"), table_layer("unused")
    optimizer = started(paddle.nn.Linear(DIM, 1), SGD)
    used(paddle.to_tensor([1])).sum().backward()
    with paddle.no_grad():
        unused(paddle.to_tensor([1]))
    optimizer.step()
    assert (num_rows("used"), num_rows("unused")) == (1, 0)


def test_frozen_table_has_no_gradient():
    attr = paddle.ParamAttr(name="emb", trainable=False)
    layer = fleet_sparse.nn.Embedding(10**11, DIM, weight_attr=attr)
    optimizer = started(paddle.nn.Linear(DIM, 1), SGD)
    rows = layer(paddle.to_tensor([1]))
    optimizer.step()
    assert rows.stop_gradient
    assert num_rows() == 0


def test_no_grad_reads_rows_and_creates_none():
    model = Model(table_layer())
    optimizer = started(model, SGD)
    rows = rows_of(model, [-1, 2**62])
    optimizer.step()
    np.testing.assert_array_equal(rows, np.full((2, DIM), 0.1, np.float32))
    assert num_rows() == 0


def test_forward_without_backward_creates_no_row():
    model = Model(table_layer()).eval()
    optimizer = started(model, SGD)
    model(next(batches(1))[0])
    optimizer.step()
    assert num_rows() == 0


def test_batch_of_no_ids_trains():
    model = Model(table_layer())
    optimizer = started(model, SGD)
    out = model(paddle.zeros([0, FIELDS], "int64"))
    out.sum().backward()
    optimizer.step()
    assert out.shape == [0, 1]
    assert num_rows() == 0


def test_ids_of_int32_and_any_rank_are_looked_up():
    layer = table_layer()
    started(paddle.nn.Linear(DIM, 1), SGD)
    assert layer(paddle.ones([2, 3, 4], "int32")).shape == [2, 3, 4, DIM]
    assert layer(paddle.to_tensor(1)).shape == [DIM]


def test_bounded_table_refuses_ids_outside():
    layer = fleet_sparse.nn.Embedding(10, DIM, is_bounded=True, weight_attr=constant("emb"))
    started(paddle.nn.Linear(DIM, 1), SGD)
    with pytest.raises(ValueError, match=r"id 10 is outside \[0, 10\)"):
        layer(paddle.to_tensor([1, 10]))


def test_gradient_that_is_not_finite_trains_nothing():
    model = Model(table_layer())
    optimizer = started(model, SGD)
    before = model.linear.weight.numpy()
    (model(next(batches(1))[0]).sum() * float("nan")).backward()
    with pytest.raises(PushRefused):
        optimizer.step()
    np.testing.assert_array_equal(model.linear.weight.numpy(), before)
    assert num_rows() == 0


def test_error_of_the_optimizer_itself_is_logged(monkeypatch, caplog):
    model = Model(table_layer())
    optimizer = started(model, SGD)
    loss_of(model, *next(batches(1))).backward()

    def fail(*args: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(paddle.optimizer.SGD, "_append_optimize_op", fail)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert num_rows() == 49
    assert [each.message.split(":")[0] for each in caplog.records if each.levelname == "ERROR"] == ["optimizer.step"]


def test_entry_counts_ids_of_all_lookups_of_a_step():
    entry = paddle.distributed.CountFilterEntry(3)
    layer = fleet_sparse.nn.Embedding(10**11, DIM, weight_attr=constant("emb"), entry=entry)
    optimizer = started(paddle.nn.Linear(DIM, 1), SGD)
    (layer(paddle.to_tensor([1, 1, 2])).sum() + layer(paddle.to_tensor([1, 2])).sum()).backward()
    optimizer.step()
    assert num_rows() == 0  # admitted from the next push on
    layer(paddle.to_tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    assert num_rows() == 1


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_pooled_rows_train_as_the_rows_of_a_layer(combiner):
    layer = table_layer("rows")
    optimizer = started(paddle.nn.Linear(DIM, 1), SGD)
    for _ in range(2):
        pooled = fleet_sparse.pooled_embedding(
            paddle.to_tensor([1, 2, 3]),
            [10**11, DIM],
            combiner,
            lengths=paddle.to_tensor([2, 0, 1]),
            is_sparse=True,
            is_distributed=True,
            param_attr=constant("pooled"),
        )
        rows = layer(paddle.to_tensor([1, 2, 5]))
        divisor = {"sum": 1.0, "mean": 2.0, "sqrtn": 2**0.5}[combiner]
        expected = paddle.stack([rows[:2].sum(0) / divisor, paddle.zeros([DIM]), rows[2]])
        np.testing.assert_allclose(pooled.numpy(), expected.numpy(), atol=1e-6)
        (pooled.sum() + expected.sum()).backward()
        optimizer.step()


def test_amp_trains_rows_in_float32():
    model = Model(table_layer())
    optimizer = started(model, SGD)
    ids, labels = next(batches(1))
    with pytest.warns(UserWarning, match="CPU|CUDAPlace"):  # Paddle has no AMP on a CPU
        scaler = paddle.amp.GradScaler()
    scaler.scale(loss_of(model, ids, labels)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert num_rows() == 49


def test_recomputed_lookup_is_trained_once():
    model = Model(table_layer())
    optimizer = started(model, SGD)
    weight = paddle.ones([1])
    weight.stop_gradient = False

    def forward(scale):
        return model.embedding(paddle.to_tensor([1])) * scale

    fleet.utils.recompute(forward, weight).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(model, [1]), np.zeros((1, DIM)), atol=1e-7)


def test_pserver_optimizer_trains_rows_and_parameters():
    model = Model(table_layer())
    optimizer = started(
        model, lambda parameters: fleet_sparse.PserverOptimizer("ftrl", 0.1, parameters=parameters, l1=0.0)
    )
    before = model.linear.weight.numpy()
    losses = trained(model, optimizer, 20)
    assert losses[-1] < losses[0]
    assert (model.linear.weight.numpy() != before).any()


@pytest.mark.parametrize("mode", ["async", "lag", "geo"])
def test_one_worker_trains_in_every_mode_as_in_sync(mode):
    strategy = fleet_sparse.PserverStrategy(max_step_lag=2 if mode == "lag" else None)
    strategy.a_sync = True
    if mode == "geo":
        strategy.a_sync_configs = {"k_steps": 3}
    expected = plain_losses(SGD, 20)
    model = Model(table_layer())
    losses = trained(model, started(model, SGD, strategy), 20)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)


def test_model_without_parameters_trains():
    layer = table_layer()
    optimizer = started(layer, SGD)
    layer(paddle.to_tensor([1])).sum().backward()
    optimizer.step()
    assert num_rows() == 1


def test_layer_before_init_worker_is_refused():
    with pytest.raises(FleetSparseError, match="init_worker"):
        table_layer()(paddle.to_tensor([1]))


def test_optimizer_that_fleet_does_not_have_is_refused():
    model = Model(table_layer())
    started(model, SGD)
    other = SGD(model.parameters())
    loss_of(model, *next(batches(1))).backward()
    with pytest.raises(PlanError, match="SGD"):
        other.step()


def test_second_optimizer_is_refused():
    model = Model(table_layer())
    started(model, SGD)
    with pytest.raises(PlanError, match="second"):
        fleet.distributed_optimizer(SGD(model.parameters()))


def test_unknown_optimizer_is_refused_by_name():
    with pytest.raises(PlanError, match="Adadelta"):
        fleet.distributed_optimizer(paddle.optimizer.Adadelta(0.1, parameters=Model(table_layer()).parameters()))


def test_groups_of_parameters_are_refused():
    model = Model(table_layer())
    groups = [{"params": model.parameters(), "learning_rate": 0.1}]
    with pytest.raises(PlanError, match="groups"):
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=groups))


def test_layers_that_declare_a_table_differently_are_refused():
    table_layer("emb")
    with pytest.raises(PlanError, match=r"'emb'.*dim"):
        fleet_sparse.nn.Embedding(10**11, DIM + 1, weight_attr=constant("emb"))
