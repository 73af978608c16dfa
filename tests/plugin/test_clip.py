"""Clipped training of user programs against plain Paddle, with the pserver inside this process."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest
from paddle.nn import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue

import fleet_sparse
from fleet_sparse.core.clip import clipped
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.plugin.optimizer_config import read_optimizer
from fleet_sparse.tools.parity.training import OPTIMIZERS, TOLERANCE, run_parity
from support.programs import flagged, minimize, start, weight

CLIPS = ["value", "norm", "global norm"]


@pytest.fixture
def dygraph():
    paddle.disable_static()
    yield
    paddle.enable_static()


@pytest.mark.usefixtures("dygraph")
def test_norm_of_repeated_rows_is_that_of_their_sums():
    embedding = paddle.nn.Embedding(6, 1, sparse=True)
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
    "clip", [ClipGradByValue(0.5), ClipGradByNorm(1.0), ClipGradByGlobalNorm(1.0)], ids=CLIPS
)


def inputs():
    return paddle.static.data("ids", [-1], "int64"), paddle.static.data("weights", [-1, 1], "float32")


def weight_of(name, size, need_clip=True):
    attr = paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Constant(1.0), need_clip=need_clip)
    return paddle.create_parameter([size], "float32", attr=attr)


def one_step(rows, ids, weights):
    """The first column of `rows`, looked up after a step of these ids and weights."""
    executor = start()
    feed = {"ids": np.array(ids), "weights": np.array(weights, np.float32).reshape(-1, 1)}
    executor.run(feed=feed, fetch_list=[])
    feed["weights"] = np.zeros_like(feed["weights"])
    return [values[:, 0].tolist() for values in executor.run(feed=feed, fetch_list=rows)]


@in_one_process
@pytest.mark.usefixtures("paddle_clips_values")
@pytest.mark.parametrize(
    "clip",
    [lambda: ClipGradByValue(1e-3, -5e-4), lambda: ClipGradByNorm(0.02), lambda: ClipGradByGlobalNorm(0.05)],
    ids=CLIPS,
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
@with_each_clip
def test_what_needs_no_clip_is_left_alone(clip):
    ids, weights = inputs()
    rows = [flagged(ids), flagged(ids, "free", need_clip=False)]
    free = 8 * paddle.sum(weights) * paddle.sum(weight_of("w", 1, need_clip=False))
    minimize(
        paddle.sum(rows[0] * weights) + paddle.sum(2 * rows[1] * weights) + free,
        paddle.optimizer.SGD(1.0, grad_clip=clip),
    )
    # The clipped table's gradient is 1 in each of 4 columns: norm 2.
    assert one_step(rows, [1], [1]) == [[0.0], [-1.5]]
    assert weight().tolist() == [1 - 8]


@in_one_process
def test_padding_counts_for_no_norm():
    ids, weights = inputs()
    rows = flagged(ids, padding_idx=3)
    minimize(paddle.sum(rows * weights), paddle.optimizer.SGD(1.0, grad_clip=ClipGradByNorm(1.0)))
    assert one_step([rows], [3, 1], [100, 1]) == [[0.0, 0.0]]


@in_one_process
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@with_each_clip
@pytest.mark.guarantee("C5")
def test_gradient_that_is_not_finite_is_refused_with_a_clip(clip, wrong):
    ids, weights = inputs()
    rows = flagged(ids)
    minimize(paddle.sum(rows * weights), paddle.optimizer.SGD(1.0, grad_clip=clip))
    with pytest.raises(FleetSparseError, match="table 'emb'"):
        one_step([rows], [1], [wrong])
