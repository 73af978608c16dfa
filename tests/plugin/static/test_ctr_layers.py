"""`continuous_value_model` and `data_norm` against their formulas in float64, with the pserver inside this process."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.errors import PlanError
from support.programs import ids_input, start

NUM_STEPS, RATE = 50, 0.01
DIM, NUM_IDS = 5, 12


@pytest.fixture(autouse=True)
def roles(plugin):
    fleet.init()


def minimize(loss, **fields):
    strategy = fleet_sparse.PserverStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    fleet.distributed_optimizer(paddle.optimizer.SGD(RATE), strategy).minimize(loss)


def weight(width):
    attr = paddle.ParamAttr(name="w", initializer=paddle.nn.initializer.Constant(0.3))
    return paddle.static.create_parameter([width, 1], "float32", attr=attr)


def squares(values, width):
    label = paddle.static.data("label", [-1, 1], "float32")
    return paddle.mean(paddle.square(paddle.matmul(values, weight(width)) - label))


def click_batch(step):
    rng = np.random.default_rng(step)
    show_click = np.stack([np.ones(4), rng.integers(0, 2, 4)], axis=1).astype(np.float32)
    labels = rng.random((4, 1)).astype(np.float32)
    return {"ids": rng.integers(0, NUM_IDS, (4, 3)), "show_click": show_click, "label": labels}


def click_model(use_cvm):
    attr = paddle.ParamAttr(name="T", initializer=paddle.nn.initializer.Constant(0.25))
    rows = paddle.static.nn.sparse_embedding(ids_input((-1, 3)), [NUM_IDS, DIM], param_attr=attr)
    pooled = paddle.sum(rows, axis=1)
    show_click = paddle.static.data("show_click", [-1, 2], "float32")
    values = paddle.static.nn.continuous_value_model(pooled, show_click, use_cvm)
    return rows, values, squares(values, DIM if use_cvm else DIM - 2)


class Clicks:
    """The table and the layer of `click_model`, in float64."""

    def __init__(self, use_cvm):
        self.use_cvm = use_cvm
        self.rows = np.full((NUM_IDS, DIM), 0.25)
        self.rows[:, :2] = 0
        self.weight = np.full((DIM if use_cvm else DIM - 2, 1), 0.3)

    def step(self, feed):
        ids, pooled = feed["ids"], self.rows[feed["ids"]].sum(axis=1)
        show = np.log(pooled[:, :1] + 1)
        click = np.log(pooled[:, 1:2] + 1) - show
        values = np.concatenate([show, click, pooled[:, 2:]], axis=1) if self.use_cvm else pooled[:, 2:]
        error = values @ self.weight - feed["label"]
        of_values = 2 * error / len(error) @ self.weight.T
        change = np.concatenate([feed["show_click"], -RATE * of_values[:, -(DIM - 2) :]], axis=1)
        self.weight -= RATE * values.T @ (2 * error / len(error))
        for place in range(ids.shape[1]):
            np.add.at(self.rows, ids[:, place], change)
        return np.mean(error**2)


@pytest.mark.parametrize("use_cvm", [True, False])
@pytest.mark.parametrize("is_sync", [True, False], ids=["sync", "async"])
def test_shows_and_clicks_add_up_as_the_formula_says(use_cvm, is_sync):
    rows, _, loss = click_model(use_cvm)
    minimize(loss, a_sync=not is_sync)
    executor, expected = start(), Clicks(use_cvm)
    for step in range(NUM_STEPS):
        feed = click_batch(step)
        (got,) = executor.run(feed=feed, fetch_list=[loss])
        assert float(got) == pytest.approx(expected.step(feed), rel=1e-5, abs=1e-6)
    feed = {**click_batch(0), "ids": np.arange(12).reshape(4, 3)}
    (got,) = executor.run(paddle.static.default_main_program().clone(for_test=True), feed=feed, fetch_list=[rows])
    np.testing.assert_array_equal(got.reshape(NUM_IDS, DIM)[:, :2], expected.rows[:, :2])
    np.testing.assert_allclose(got.reshape(NUM_IDS, DIM), expected.rows, rtol=1e-5, atol=1e-6)


def test_an_unseen_id_has_no_shows_and_clicks():
    rows, _, loss = click_model(use_cvm=True)
    minimize(loss)
    (got,) = start().run(feed=click_batch(0), fetch_list=[rows])
    assert (got[..., :2] == 0).all()
    assert (got[..., 2:] == 0.25).all()


def test_a_clip_does_not_concern_shows_and_clicks():
    rows, _, loss = click_model(use_cvm=True)
    clip = paddle.nn.ClipGradByGlobalNorm(1e-3)
    fleet.distributed_optimizer(paddle.optimizer.SGD(RATE, grad_clip=clip), None).minimize(loss)
    executor, feed = start(), {**click_batch(0), "ids": np.ones((4, 3), np.int64)}
    executor.run(feed=feed)
    (got,) = executor.run(feed=feed, fetch_list=[rows])
    assert got[0, 0, :2].tolist() == [12.0, 3 * feed["show_click"][:, 1].sum()]


def test_weight_decay_does_not_concern_shows_and_clicks():
    rows, _, loss = click_model(use_cvm=True)
    optimizer = paddle.optimizer.SGD(RATE, weight_decay=0.5)
    fleet.distributed_optimizer(optimizer, None).minimize(loss)
    executor, feed = start(), {**click_batch(0), "ids": np.ones((4, 3), np.int64)}
    for _ in range(3):
        executor.run(feed=feed)
    (got,) = executor.run(feed=feed, fetch_list=[rows])
    assert got[0, 0, 0] == 36.0


def test_a_table_keeps_shows_and_clicks_of_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    rows, _, loss = click_model(use_cvm=True)
    minimize(loss)
    executor = start()
    for step in range(3):
        executor.run(feed=click_batch(step))
    fleet.save_persistables(executor, "model")
    test = paddle.static.default_main_program().clone(for_test=True)
    (before,) = executor.run(test, feed=click_batch(0), fetch_list=[rows])
    executor.run(feed=click_batch(5))
    fleet.load_model("model", 0)
    (after,) = executor.run(test, feed=click_batch(0), fetch_list=[rows])
    np.testing.assert_array_equal(before, after)
    assert before[..., 0].max() > 0


def test_geo_training_with_shows_and_clicks_is_refused():
    _, _, loss = click_model(use_cvm=True)
    with pytest.raises(PlanError, match=r"'T'.*k_steps 0"):
        minimize(loss, a_sync_configs={"k_steps": 2})


@pytest.mark.parametrize(("input_shape", "cvm_shape"), [([-1, 2], [-1, 2]), ([-1, 3, 4], [-1, 2]), ([-1, 4], [-1, 1])])
def test_other_shapes_are_refused(input_shape, cvm_shape):
    values = paddle.static.data("values", input_shape, "float32")
    with pytest.raises(PlanError, match=r"^continuous_value_model: "):
        paddle.static.nn.continuous_value_model(values, paddle.static.data("cvm", cvm_shape, "float32"))


# data_norm

WIDTH = 4
FIRST = {"batch_size": 8.0, "batch_sum": 1.0, "batch_square": 7.0}
DECAY, EPSILON = 0.9, 1e-5


def norm_batch(step, slot_dim):
    rng = np.random.default_rng(step)
    values = rng.normal(1.0, 2.0, (6, WIDTH)).astype(np.float32)
    if slot_dim > 0:
        values[rng.integers(0, 6, 2), 0] = 0
    return {"values": values, "label": rng.random((6, 1)).astype(np.float32)}


class Norm:
    """`data_norm`, and the layer of `squares` above it, in float64."""

    def __init__(self, slot_dim):
        self.slot_dim = slot_dim
        self.sums = [np.full(WIDTH, value) for value in FIRST.values()]
        self.weight = np.full((WIDTH, 1), 0.3)

    def step(self, feed):
        values = feed["values"].astype(np.float64)
        size, total, square = self.sums
        mean, scale = total / size, np.sqrt(size / square)
        is_there = np.ones_like(values)
        if self.slot_dim > 0:
            is_there = np.repeat(np.abs(values[:, :: self.slot_dim]) >= 1e-7, self.slot_dim, axis=1).astype(float)
        result = (values - mean) * scale * is_there
        number = is_there.sum(axis=0)
        sums, squares_ = (values * is_there).sum(axis=0), ((values - mean) ** 2 * is_there).sum(axis=0)
        added = [number, sums, squares_ + number * EPSILON]
        if self.slot_dim > 0:
            added = [np.ones(WIDTH), sums / number, squares_ / number + number * EPSILON]
        self.sums = [DECAY * old + new for old, new in zip(self.sums, added, strict=True)]
        error = result @ self.weight - feed["label"]
        self.weight -= RATE * result.T @ (2 * error / len(error))
        return np.mean(error**2)


def norm_model(slot_dim, **options):
    values = paddle.static.data("values", [-1, WIDTH], "float32")
    normed = paddle.static.nn.data_norm(
        values, param_attr=FIRST, slot_dim=slot_dim, summary_decay_rate=DECAY, name="n", **options
    )
    return normed, squares(normed, WIDTH)


@pytest.mark.parametrize("slot_dim", [-1, 2])
def test_data_norm_adds_up_as_the_formula_says(slot_dim):
    _, loss = norm_model(slot_dim)
    minimize(loss)
    executor, expected = start(), Norm(slot_dim)
    names = ["n.batch_size", "n.batch_sum", "n.batch_square_sum"]
    for step in range(NUM_STEPS):
        feed = norm_batch(step, slot_dim)
        (got,) = executor.run(feed=feed, fetch_list=[loss])
        assert float(got) == pytest.approx(expected.step(feed), rel=1e-5, abs=1e-6)
    sums = [np.asarray(paddle.static.global_scope().find_var(name).get_tensor()) for name in names]
    np.testing.assert_allclose(sums, expected.sums, rtol=1e-5, atol=1e-6)


def test_data_norm_of_a_clone_for_test_changes_no_sums():
    normed, loss = norm_model(-1)
    minimize(loss)
    executor, feed = start(), norm_batch(0, -1)
    test = paddle.static.default_main_program().clone(for_test=True)
    results = [executor.run(test, feed=feed, fetch_list=[normed])[0] for _ in range(2)]
    np.testing.assert_array_equal(*results)


def test_data_norm_with_scale_and_shift_trains_both():
    _, loss = norm_model(-1, enable_scale_and_shift=True)
    minimize(loss)
    executor = start()
    executor.run(feed=norm_batch(0, -1))
    scope = paddle.static.global_scope()
    assert np.abs(np.asarray(scope.find_var("n.scale_w").get_tensor()) - 1).min() > 0
    assert np.abs(np.asarray(scope.find_var("n.bias").get_tensor())).min() > 0


def test_sums_of_data_norm_are_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    _, loss = norm_model(-1)
    minimize(loss)
    executor = start()
    executor.run(feed=norm_batch(0, -1))
    tensor = paddle.static.global_scope().find_var("n.batch_sum").get_tensor()
    before = np.array(tensor)
    fleet.save_persistables(executor, "model")
    executor.run(feed=norm_batch(1, -1))
    assert not np.array_equal(before, tensor)
    fleet.load_model("model", 0)
    np.testing.assert_array_equal(before, tensor)


@pytest.mark.parametrize("options", [{"slot_dim": 3}, {"data_layout": "NCDHW"}])
def test_data_norm_of_other_fields_is_refused(options):
    values = paddle.static.data("values", [-1, WIDTH], "float32")
    with pytest.raises(PlanError, match=r"^data_norm: "):
        paddle.static.nn.data_norm(values, **options)
