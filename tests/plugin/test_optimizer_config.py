from __future__ import annotations

import math

import paddle
import pytest
from paddle.regularizer import WeightDecayRegularizer

from fleet_sparse.core.bounds import UNBOUNDED, Bounds
from fleet_sparse.core.clip import BY_GLOBAL_NORM, BY_NORM, BY_VALUE, Clip
from fleet_sparse.core.decay import Decay
from fleet_sparse.core.initializer import constant, normal, truncated_normal, uniform
from fleet_sparse.errors import PlanError
from fleet_sparse.plugin.optimizer import PserverOptimizer
from fleet_sparse.plugin.optimizer_config import check_lazy, check_trust_ratio, read_initializer, read_optimizer
from support.lookups import embedding


def with_attribute(optimizer, name, value):
    """Sets an attribute as an argument does that Paddle refuses on a CPU."""
    setattr(optimizer, name, value)
    return optimizer


def clipped(clip):
    return paddle.optimizer.SGD(0.1, grad_clip=clip)


class OwnClip(paddle.nn.ClipGradByNorm):
    pass


@pytest.fixture(autouse=True)
def static_graph():
    paddle.enable_static()


# Optimizers


@pytest.mark.parametrize(
    ("optimizer", "rule", "hyperparameters"),
    [
        (lambda: paddle.optimizer.SGD(0.1), "sgd", {}),
        (
            lambda: paddle.optimizer.Adagrad(0.1, epsilon=1e-3, initial_accumulator_value=0.5),
            "adagrad",
            {"epsilon": 1e-3, "initial_accumulator_value": 0.5},
        ),
        (
            lambda: paddle.optimizer.Adam(0.1, beta1=0.8, beta2=0.9, epsilon=1e-4, lazy_mode=True),
            "adam",
            {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-4},
        ),
        (
            lambda: paddle.optimizer.AdamW(0.1, beta1=0.8, beta2=0.9, epsilon=1e-4, weight_decay=0.5),
            "adamw",
            {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-4, "coeff": 0.5},
        ),
        (
            lambda: paddle.optimizer.Adamax(0.1, beta1=0.8, beta2=0.9, epsilon=1e-4),
            "adamax",
            {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-4},
        ),
        (
            lambda: paddle.optimizer.Momentum(0.1, momentum=0.5, use_nesterov=True),
            "momentum",
            {"mu": 0.5, "use_nesterov": 1.0},
        ),
        (
            lambda: paddle.optimizer.RMSProp(0.1, rho=0.8, epsilon=1e-4, momentum=0.5, centered=True),
            "rmsprop",
            {"rho": 0.8, "epsilon": 1e-4, "momentum": 0.5, "centered": 1.0},
        ),
        (
            lambda: paddle.optimizer.Lamb(0.1, 0.5, beta1=0.8, beta2=0.9, epsilon=1e-4, always_adapt=True),
            "lamb",
            {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-4, "decay": 0.5, "always_adapt": 1.0},
        ),
        (lambda: PserverOptimizer("ftrl", 0.1, l1=0.5), "ftrl", {"l1": 0.5}),
    ],
)
def test_optimizer_is_read_with_its_arguments(optimizer, rule, hyperparameters):
    reading = read_optimizer(optimizer())
    assert (reading.rule, dict(reading.hyperparameters)) == (rule, hyperparameters)


L1, L2 = paddle.regularizer.L1Decay, paddle.regularizer.L2Decay


@pytest.mark.parametrize(
    ("optimizer", "decay"),
    [
        (lambda: paddle.optimizer.SGD(0.1), Decay()),
        (lambda: paddle.optimizer.SGD(0.1, weight_decay=0.5), Decay(l2=0.5)),
        (lambda: paddle.optimizer.SGD(0.1, weight_decay=1), Decay(l2=1.0)),
        (lambda: paddle.optimizer.Adagrad(0.1, weight_decay=L2(0.5)), Decay(l2=0.5)),
        (lambda: paddle.optimizer.RMSProp(0.1, weight_decay=L1(0.5)), Decay(l1=0.5)),
        (lambda: paddle.optimizer.Momentum(0.1), Decay()),
        (lambda: paddle.optimizer.Momentum(0.1, weight_decay=0.5), Decay(l2=0.5)),
        (lambda: paddle.optimizer.Momentum(0.1, weight_decay=L2(0.5)), Decay(l2=0.5)),
        (lambda: paddle.optimizer.Momentum(0.1, weight_decay=L1(0.5)), Decay(l1=0.5)),
        (lambda: paddle.optimizer.AdamW(0.1, weight_decay=0.5), Decay()),
        (lambda: PserverOptimizer("ftrl", 0.1, weight_decay=0.5), Decay(l2=0.5)),
    ],
)
def test_weight_decay_is_read(optimizer, decay):
    assert read_optimizer(optimizer()).decay == decay


def test_decay_of_a_table_comes_before_that_of_the_optimizer():
    reading = read_optimizer(paddle.optimizer.SGD(0.1, weight_decay=0.5))
    assert reading.of_table(embedding()) == (("l1_decay", 0.0), ("l2_decay", 0.5))
    assert reading.of_table(embedding(decay=Decay(l1=0.25))) == (("l1_decay", 0.25), ("l2_decay", 0.0))
    assert reading.of_table(embedding(decay=Decay())) == (("l1_decay", 0.0), ("l2_decay", 0.0))


@pytest.mark.parametrize(
    ("grad_clip", "clip"),
    [
        (None, None),
        (paddle.nn.ClipGradByValue(0.5), Clip(BY_VALUE, Bounds(-0.5, 0.5))),
        (paddle.nn.ClipGradByValue(0.5, -2), Clip(BY_VALUE, Bounds(-2.0, 0.5))),
        (paddle.nn.ClipGradByValue(math.inf, -1), Clip(BY_VALUE, Bounds(low=-1.0))),
        (paddle.nn.ClipGradByNorm(2), Clip(BY_NORM, norm=2.0)),
        (paddle.nn.ClipGradByGlobalNorm(0.25, "mine", auto_skip_clip=True), Clip(BY_GLOBAL_NORM, norm=0.25)),
    ],
    ids=str,
)
def test_clip_is_read(grad_clip, clip):
    assert read_optimizer(clipped(grad_clip)).clip == clip


def test_clip_by_value_is_part_of_the_tables_that_need_it():
    reading = read_optimizer(clipped(paddle.nn.ClipGradByValue(0.5)))
    assert dict(reading.of_table(embedding())) == {"l1_decay": 0.0, "l2_decay": 0.0, "clip_min": -0.5, "clip_max": 0.5}
    assert dict(reading.of_table(embedding(need_clip=False))) == {"l1_decay": 0.0, "l2_decay": 0.0}
    assert (reading.bounds_of(True), reading.bounds_of(False)) == (Bounds(-0.5, 0.5), UNBOUNDED)


@pytest.mark.parametrize("clip", [paddle.nn.ClipGradByNorm(0.5), paddle.nn.ClipGradByGlobalNorm(0.5)])
def test_clip_by_norm_is_no_part_of_a_table(clip):
    assert read_optimizer(clipped(clip)).of_table(embedding()) == (("l1_decay", 0.0), ("l2_decay", 0.0))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax", "Momentum", "RMSProp", "Lamb"])
def test_optimizer_that_moves_every_row_is_lazy_and_says_so_once(name, caplog):
    check_lazy(read_optimizer(getattr(paddle.optimizer, name)(0.1)), [embedding("a"), embedding("b")], strict=False)
    assert caplog.text.count(name) == len(caplog.records) == 1


@pytest.mark.parametrize(
    ("optimizer", "table", "message"),
    [
        (
            lambda: paddle.optimizer.Adam(0.1),
            embedding(),
            "Adam .*lazy_mode=True",
        ),
        (lambda: paddle.optimizer.Momentum(0.1), embedding(), "Momentum"),
        (
            lambda: paddle.optimizer.SGD(0.1, weight_decay=0.1),
            embedding(),
            "'emb'",
        ),
        (lambda: paddle.optimizer.SGD(0.1), embedding(decay=Decay(l1=0.1)), "'emb'"),
        (
            lambda: clipped(paddle.nn.ClipGradByValue(2.0, 1.0)),
            embedding(),
            "grad_clip.*'emb'",
        ),
        (
            lambda: paddle.optimizer.RMSProp(0.1, weight_decay=0.1),
            embedding(),
            "RMSProp.*'emb'",
        ),
    ],
)
def test_strict_rules_refuse_optimizers_that_are_not_lazy(optimizer, table, message):
    with pytest.raises(PlanError, match=message):
        check_lazy(read_optimizer(optimizer()), [table], strict=True)


@pytest.mark.parametrize(
    ("optimizer", "tables"),
    [
        (lambda: paddle.optimizer.Adam(0.1, lazy_mode=True), [embedding()]),
        (lambda: paddle.optimizer.AdamW(0.1, lazy_mode=True), [embedding()]),
        (lambda: paddle.optimizer.SGD(0.1), [embedding()]),
        (lambda: paddle.optimizer.Adagrad(0.1), [embedding()]),
        (lambda: PserverOptimizer("adam", 0.1), [embedding()]),
        (lambda: clipped(paddle.nn.ClipGradByValue(2.0, 0.0)), [embedding()]),
        (lambda: clipped(paddle.nn.ClipGradByValue(2.0, 1.0)), [embedding(need_clip=False)]),
        (lambda: paddle.optimizer.SGD(0.1, weight_decay=0.1), [embedding(decay=Decay())]),
        (lambda: paddle.optimizer.Momentum(0.1, weight_decay=0.1), []),
        (lambda: paddle.optimizer.Momentum(0.1, weight_decay=0.1), [embedding(is_trainable=False)]),
    ],
)
def test_lazy_optimizers_do_not_warn(optimizer, tables, caplog):
    check_lazy(read_optimizer(optimizer()), tables, strict=True)
    assert caplog.text == ""


@pytest.mark.parametrize("arguments", [{}, {"lamb_weight_decay": 0.0, "always_adapt": True}])
def test_the_trust_ratio_of_lamb_is_refused_for_tables(arguments):
    optimizer = paddle.optimizer.Lamb(0.1, **arguments)
    check_trust_ratio(optimizer, [embedding(is_trainable=False)])
    with pytest.raises(PlanError, match=r"Lamb.*'emb'.*lamb_weight_decay=0\.0"):
        check_trust_ratio(optimizer, [embedding()])


@pytest.mark.parametrize(
    "optimizer",
    [lambda: paddle.optimizer.Lamb(0.1, lamb_weight_decay=0.0), lambda: PserverOptimizer("lamb", 0.1)],
)
def test_lamb_without_a_trust_ratio_of_paddles_trains_tables(optimizer):
    check_trust_ratio(optimizer(), [embedding()])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: paddle.optimizer.Rprop(0.1), "Rprop"),
        (lambda: paddle.optimizer.Momentum(0.1, rescale_grad=0.5), "Momentum.*rescale_grad.*0.5"),
        (lambda: paddle.optimizer.Momentum(0.1, multi_precision=True), "Momentum.*multi_precision"),
        (lambda: paddle.optimizer.AdamW(0.1, apply_decay_param_fun=bool), "AdamW.*apply_decay_param_fun"),
        (lambda: paddle.optimizer.AdamW(0.1, amsgrad=True), "AdamW.*amsgrad"),
        (lambda: with_attribute(paddle.optimizer.AdamW(0.1), "_lr_ratio", float), "AdamW.*lr_ratio"),
        (lambda: paddle.optimizer.Lamb(0.1, exclude_from_weight_decay_fn=bool), "Lamb.*exclude_from_weight_decay_fn"),
        (lambda: PserverOptimizer("ftl", 0.1), "'ftl'.*adagrad"),
        (lambda: PserverOptimizer("read_only", 0.1), "'read_only'"),
        (lambda: PserverOptimizer("ftrl", 0.1, l3=0.1), "'ftrl'.*'l3'"),
        (lambda: PserverOptimizer("ftrl", 0.1, l1="a lot"), "l1.*str"),
        (
            lambda: paddle.optimizer.SGD(0.1, grad_clip=OwnClip(1.0)),
            "grad_clip=OwnClip.*ClipGradByValue",
        ),
        (lambda: clipped(paddle.nn.ClipGradByValue(1.0, 2.0)), "grad_clip=ClipGradByValue.*2.0.*1.0"),
        (lambda: clipped(paddle.nn.ClipGradByValue(1.0, math.nan)), "grad_clip=ClipGradByValue.*nan"),
        (lambda: clipped(paddle.nn.ClipGradByNorm(0.0)), "grad_clip=ClipGradByNorm.*clip_norm.*0.0"),
        (lambda: clipped(paddle.nn.ClipGradByNorm(-1.0)), r"clip_norm.*-1\.0"),
        (lambda: clipped(paddle.nn.ClipGradByGlobalNorm(math.inf)), "ClipGradByGlobalNorm.*inf"),
        (lambda: clipped(paddle.nn.ClipGradByGlobalNorm(math.nan)), "clip_norm.*nan"),
        (
            lambda: with_attribute(paddle.optimizer.SGD(0.1), "regularization", WeightDecayRegularizer()),
            "weight_decay.*WeightDecayRegularizer",
        ),
        (lambda: paddle.optimizer.SGD(0.1, weight_decay=L2("a lot")), "weight_decay.*str"),
        (lambda: paddle.optimizer.Adam(0.1, amsgrad=True), "amsgrad"),
        (lambda: paddle.optimizer.Adam(0.1, multi_precision=True), "multi_precision"),
    ],
)
def test_unsupported_optimizer_arguments_are_refused_by_name(optimizer, message):
    with pytest.raises(PlanError, match=message):
        read_optimizer(optimizer())


# Initializers

_XAVIER_STD = math.sqrt(2.0 / (100 + 4))


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [
        (paddle.nn.initializer.Constant(0.5), constant(0.5)),
        (paddle.nn.initializer.Uniform(-0.2, 0.3), uniform(-0.2, 0.3)),
        (paddle.nn.initializer.Normal(0.1, 0.2), normal(0.1, 0.2)),
        (paddle.nn.initializer.TruncatedNormal(0.1, 0.2, -0.3, 0.4), truncated_normal(0.1, 0.2, -0.3, 0.4)),
        (paddle.nn.initializer.XavierNormal(), normal(0.0, _XAVIER_STD)),
        (paddle.nn.initializer.XavierUniform(), uniform(-math.sqrt(3) * _XAVIER_STD, math.sqrt(3) * _XAVIER_STD)),
        (None, uniform(-math.sqrt(3) * _XAVIER_STD, math.sqrt(3) * _XAVIER_STD)),
    ],
)
def test_initializer_is_read_with_its_arguments(initializer, expected):
    assert read_initializer("emb", initializer, (100, 4)).initializer == expected


def test_initializer_of_given_rows_is_refused():
    with pytest.raises(PlanError, match=r"'emb'.*Assign"):
        read_initializer("emb", paddle.nn.initializer.Assign([[1.0]]), (1, 1))
