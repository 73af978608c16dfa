"""Clipped training against plain Paddle: a shard's values with Paddle's gradients, and user programs in one process."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest
from paddle.nn import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue

import fleet_sparse
from fleet_sparse.core.clip import DensePart, clipped
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.plugin.optimizer_config import read_optimizer
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables.dense import DenseRange
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.tools.parity.training import OPTIMIZERS, TOLERANCE, run_parity
from fleet_sparse.transpiler.scan import scan
from support.lookups import embedding

DIM = 4

# Values of a shard, with Paddle's gradients.

NUM_IDS, BATCH, NUM_STEPS = 6, 9, 10
# Bounds and norms that every step exceeds.
CLIPS = {
    "value": lambda: ClipGradByValue(0.2, -0.1),
    "norm": lambda: ClipGradByNorm(0.25),
    "global norm": lambda: ClipGradByGlobalNorm(0.5, auto_skip_clip=True),
}


@pytest.fixture
def dygraph():
    paddle.disable_static()
    yield
    paddle.enable_static()


class PlainModel:
    """Squared errors of a linear layer over the rows of an embedding, whose gradient is dense."""

    def __init__(self):
        rng = np.random.default_rng(5)
        self.rows = self._parameter("rows", rng.standard_normal((NUM_IDS, DIM)))
        self.weight = self._parameter("weight", rng.standard_normal((DIM, 1)))
        self.bias = self._parameter("bias", np.ones(1), need_clip=False)

    @property
    def parameters(self):
        return [self.rows, self.weight, self.bias]

    def _parameter(self, name, values, need_clip=True):
        attr = paddle.ParamAttr(initializer=paddle.nn.initializer.Assign(values), need_clip=need_clip)
        return paddle.create_parameter(list(values.shape), "float32", attr=attr)

    def backward(self, step):
        rng = np.random.default_rng(step)
        ids = rng.permutation(np.resize(np.arange(NUM_IDS), BATCH))
        target = paddle.to_tensor(3 * rng.standard_normal((BATCH, 1)), "float32")
        rows = paddle.nn.functional.embedding(paddle.to_tensor(ids), self.rows)
        paddle.mean((paddle.matmul(rows, self.weight) + self.bias - target) ** 2).backward()

    def values(self):
        return np.concatenate([parameter.numpy().reshape(-1) for parameter in self.parameters])


def trained_by_paddle(make_optimizer, clip):
    model = PlainModel()
    optimizer = make_optimizer(parameters=model.parameters, grad_clip=clip)
    for step in range(NUM_STEPS):
        model.backward(step)
        optimizer.step()
        optimizer.clear_grad()
    return model.values()


def trained_by_a_shard(reading):
    """Worker and shard by hand: the worker clips by norm, the shard by value."""
    model = PlainModel()
    rows, (weight, bias) = model.rows.numpy(), (model.weight.numpy().reshape(-1), model.bias.numpy())
    spec = embedding(dim=DIM)
    table = TableSpec(
        name="rows", dim=DIM, rule=reading.rule, hyperparameters=reading.of_table(spec), initializer=spec.initializer
    )
    segments = (
        Segment("weight", 0, DIM, 1.0, *reading.decay, *reading.bounds_of(True)),
        Segment("bias", DIM, 1, 1.0, *reading.decay, *reading.bounds_of(False)),
    )
    store, ids = TableStore(table), np.arange(NUM_IDS)
    dense = DenseRange(DenseSpec("dense", reading.rule, reading.hyperparameters, segments), 0, 1)
    try:
        store.load(Rows.of(ids, rows, np.zeros((NUM_IDS, table.update_rule.num_states, DIM), np.float32)))
        dense.assign(np.concatenate([weight, bias]))
        for step in range(NUM_STEPS):
            model.backward(step)
            of_rows = model.rows.grad.numpy()
            of_dense = np.concatenate([model.weight.grad.numpy().reshape(-1), model.bias.grad.numpy()])
            if reading.clip.needs_norm:
                parts = [DensePart(dense.spec, of_dense)]
                (of_rows,), (of_dense,) = clipped(reading.clip, [True, True, False], [of_rows], parts)
            store.push(ids, of_rows, 0.1, step + 1)
            dense.push(of_dense, 0.1, step + 1)
            store.pull(ids, rows)
            for parameter, values in zip(
                model.parameters, (rows, dense.values[:DIM].reshape(DIM, 1), dense.values[DIM:]), strict=True
            ):
                parameter.set_value(values)
                parameter.clear_gradient()
    finally:
        store.close()
    return model.values()


@pytest.mark.usefixtures("dygraph")
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("rule", [paddle.optimizer.SGD, paddle.optimizer.Adagrad])
def test_values_equal_plain_paddles(clip, rule):
    def make_optimizer(**arguments):
        return rule(0.1, weight_decay=0.05, **arguments)

    plain = trained_by_paddle(make_optimizer, CLIPS[clip]())
    paddle.enable_static()
    reading = read_optimizer(make_optimizer(grad_clip=CLIPS[clip]()))
    paddle.disable_static()
    np.testing.assert_allclose(trained_by_a_shard(reading), plain, rtol=0, atol=1e-6)
    assert abs(trained_by_paddle(make_optimizer, None) - plain).max() > 1e-2


@pytest.mark.usefixtures("dygraph")
def test_norm_of_rows_that_repeat_is_that_of_their_sums_in_paddle_too():
    embedding = paddle.nn.Embedding(NUM_IDS, 1, sparse=True)
    before = embedding.weight.numpy()
    optimizer = paddle.optimizer.SGD(1.0, parameters=embedding.parameters(), grad_clip=ClipGradByNorm(1.0))
    paddle.sum(embedding(paddle.to_tensor([1, 1, 1, 2, 2, 2, 2]))).backward()
    optimizer.step()
    (expected,), _ = clipped(read_clip(ClipGradByNorm(1.0)), [True], [np.array([[3], [4]], np.float32)], [])
    np.testing.assert_allclose((before - embedding.weight.numpy())[1:3], expected, rtol=1e-6)


def read_clip(clip):
    paddle.enable_static()
    return read_optimizer(paddle.optimizer.SGD(0.1, grad_clip=clip)).clip


# User programs


@pytest.fixture
def roles(plugin):
    fleet.init()


@pytest.fixture
def paddle_clips_values(monkeypatch):
    """Paddle 3.3 has no clip by value for static programs in its default IR; this is its dygraph one."""

    def clip(self, params_grads):
        return [(p, paddle.clip(g, min=self.min, max=self.max)) for p, g in params_grads]

    monkeypatch.setattr(ClipGradByValue, "_pir_clip", clip)


in_one_process = pytest.mark.usefixtures("roles")
with_each_clip = pytest.mark.parametrize(
    "clip", [ClipGradByValue(0.5), ClipGradByNorm(1.0), ClipGradByGlobalNorm(1.0)], ids=list(CLIPS)
)


def inputs():
    return paddle.static.data("ids", [-1], "int64"), paddle.static.data("weights", [-1, 1], "float32")


def flagged(ids, name="emb", need_clip=True, **changes):
    attr = paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Constant(0.5), need_clip=need_clip)
    arguments = {"size": [10**11, DIM], "is_sparse": True, "is_distributed": True, "param_attr": attr, **changes}
    return paddle.static.nn.embedding(ids, **arguments)


def weight_of(name, size, need_clip=True):
    attr = paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Constant(1.0), need_clip=need_clip)
    return paddle.create_parameter([size], "float32", attr=attr)


def minimize(loss, clip, **arguments):
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    optimizer = paddle.optimizer.SGD(1.0, grad_clip=clip, **arguments)
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)


def one_step(rows, ids, weights):
    """The first column of `rows`, looked up after a step of these ids and weights."""
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    feed = {"ids": np.array(ids), "weights": np.array(weights, np.float32).reshape(-1, 1)}
    executor.run(feed=feed, fetch_list=[])
    feed["weights"] = np.zeros_like(feed["weights"])
    return [values[:, 0].tolist() for values in executor.run(feed=feed, fetch_list=rows)]


def value_of(name):
    return np.array(paddle.static.global_scope().find_var(name).get_tensor()).tolist()


@in_one_process
@pytest.mark.usefixtures("paddle_clips_values")
@pytest.mark.parametrize(
    "clip",
    [lambda: ClipGradByValue(1e-3, -5e-4), lambda: ClipGradByNorm(0.02), lambda: ClipGradByGlobalNorm(0.05)],
    ids=list(CLIPS),
)
@pytest.mark.parametrize(
    "rule",
    [
        lambda clip: paddle.optimizer.SGD(1.0, grad_clip=clip),
        lambda clip: paddle.optimizer.Adagrad(0.05, initial_accumulator_value=0.1, grad_clip=clip),
    ],
    ids=["SGD", "Adagrad"],
)
def test_losses_equal_plain_paddles(clip, rule, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "clipped", lambda: rule(clip()))
    parity = run_parity("clipped", 30)
    assert parity.largest_difference <= TOLERANCE
    monkeypatch.setitem(OPTIMIZERS, "clipped", lambda: rule(None))
    fleet_sparse.uninstall()  # the same names once more
    assert abs(run_parity("clipped", 30).plain - parity.plain).max() > 1e-4


@in_one_process
def test_need_clip_of_param_attr_is_read():
    ids, _ = inputs()
    flagged(ids, need_clip=False)
    flagged(ids, "other")
    assert [site.spec.embedding.need_clip for site in scan(paddle.static.default_main_program()).sites] == [False, True]


@in_one_process
def test_by_value_the_sum_of_a_rows_gradients_is_clipped():
    ids, weights = inputs()
    rows = flagged(ids)
    minimize(paddle.sum(rows * weights), ClipGradByValue(1.0))
    assert one_step([rows], [1, 1, 2, 3], [0.75, 0.75, -3, 0.25]) == [[-0.5, -0.5, 1.5, 0.25]]


@in_one_process
def test_by_value_dense_parameters_are_clipped_too():
    ids, weights = inputs()
    rows = flagged(ids)
    minimize(paddle.sum(rows * weights) + paddle.sum(weights) * paddle.sum(weight_of("w", 2)), ClipGradByValue(1.0))
    one_step([rows], [1], [3])
    assert value_of("w") == [0.0, 0.0]


@in_one_process
def test_by_norm_a_table_is_one_parameter_with_all_rows_of_the_step():
    ids, weights = inputs()
    rows = [flagged(ids), flagged(ids, "other")]
    minimize(paddle.sum(rows[0] * weights) + paddle.sum(2 * rows[1] * weights), ClipGradByNorm(2.5))
    # The gradients 1.5 and 2 of one table, in each of 4 columns, have norm 5; those of the other have norm 10.
    assert one_step(rows, [1, 1, 2], [0.75, 0.75, 2]) == [[-0.25, -0.25, -0.5]] * 2


@in_one_process
def test_by_norm_each_dense_parameter_has_its_own():
    ids, weights = inputs()
    rows, factor = flagged(ids), paddle.sum(weights)
    loss = paddle.sum(rows * weights) + factor * (paddle.sum(weight_of("v", 4)) + 3 * paddle.sum(weight_of("w", 1)))
    minimize(loss, ClipGradByNorm(1.0))
    one_step([rows], [1], [1])
    assert (value_of("v"), value_of("w")) == ([0.5] * 4, [0.0])


@in_one_process
def test_by_global_norm_tables_and_dense_parameters_are_scaled_alike():
    ids, weights = inputs()
    rows = flagged(ids)
    loss = paddle.sum(rows * weights) + 6 * paddle.max(weights) * paddle.sum(weight_of("w", 1))
    minimize(loss, ClipGradByGlobalNorm(6.5))
    # The rows' gradient has norm 5 as above, that of w is 12; together 13.
    assert one_step([rows], [1, 1, 2], [0.75, 0.75, 2]) == [[-0.25, -0.25, -0.5]]
    assert value_of("w") == [1 - 6]


@in_one_process
@with_each_clip
def test_what_needs_no_clip_is_left_alone(clip):
    ids, weights = inputs()
    rows = [flagged(ids), flagged(ids, "free", need_clip=False)]
    free = 8 * paddle.sum(weights) * paddle.sum(weight_of("w", 1, need_clip=False))
    minimize(paddle.sum(rows[0] * weights) + paddle.sum(2 * rows[1] * weights) + free, clip)
    # The clipped table's gradient is 1 in each of 4 columns: norm 2.
    assert one_step(rows, [1], [1]) == [[0.0], [-1.5]]
    assert value_of("w") == [1 - 8]


@in_one_process
@with_each_clip
def test_decay_comes_on_top_of_the_clipped_gradient(clip):
    ids, weights = inputs()
    rows = flagged(ids)
    minimize(paddle.sum(rows * weights), clip, weight_decay=4.0)
    assert one_step([rows], [1], [1]) == [[0.5 - (0.5 + 4.0 * 0.5)]]


@in_one_process
def test_padding_counts_for_no_norm():
    ids, weights = inputs()
    rows = flagged(ids, padding_idx=3)
    minimize(paddle.sum(rows * weights), ClipGradByNorm(1.0))
    assert one_step([rows], [3, 1], [100, 1]) == [[0.0, 0.0]]


@in_one_process
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@with_each_clip
@pytest.mark.guarantee("C5")
def test_gradient_that_is_not_finite_is_refused_whatever_clips_it(clip, wrong):
    ids, weights = inputs()
    rows = flagged(ids)
    minimize(paddle.sum(rows * weights), clip)
    with pytest.raises(FleetSparseError, match="table 'emb'"):
        one_step([rows], [1], [wrong])
