"""Every model against its paper's equations, written down a second time in numpy, and what all of them must do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from fleet_sparse.models import dcn, dcn_v2, mmoe, xdeepfm, zoo
from support.click_models import DIM, HIDDEN, BuiltModel

SHAPES = {
    "mmoe": {"num_labels": 2},
    "esmm": {"num_labels": 2},
    "word2vec": {"num_fields": 2},
    "dssm": {"num_fields": 6},
}
"""Shapes of the models whose examples are not those of clicks."""


@pytest.fixture(params=zoo.MODELS)
def built(build: Callable[..., BuiltModel], request: pytest.FixtureRequest) -> BuiltModel:
    return build(zoo.MODELS[request.param].network, **SHAPES.get(request.param, {}))


def logits_of(built: BuiltModel) -> Any:
    return built.run(built.main, built.logits)[0]


def sigmoid(logit: Any) -> Any:
    return 1 / (1 + np.exp(-logit))


def deep(a: Any, p: dict[str, Any], name: str) -> Any:
    for layer in range(len(HIDDEN)):
        a = np.maximum(a @ p[f"{name}.{layer}.weight"] + p[f"{name}.{layer}.bias"], 0)
    return a @ p[f"{name}.out.weight"] + p[f"{name}.out.bias"]


def test_loss_falls(built: BuiltModel) -> None:
    losses = [float(built.run(built.main, built.loss)[0]) for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0]


def test_logits_have_a_column_for_each_label(built: BuiltModel) -> None:
    (logits,) = built.run(built.evaluation, built.evaluation_logits)
    assert (logits.shape, logits.dtype) == (built.feed["label"].shape, np.float32)


def test_the_evaluation_program_sees_what_was_trained(built: BuiltModel) -> None:
    for _ in range(3):
        built.run(built.main, built.loss)
    (evaluated,) = built.run(built.evaluation, built.evaluation_logits)
    (trained,) = built.run(built.main, built.logits)  # before the update of this step
    np.testing.assert_allclose(evaluated, trained, rtol=1e-5, atol=1e-6)


def test_dnn_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(zoo.MODELS["dnn"].network)
    p, ids, x = built.parameters(), built.feed["ids"], built.feed["dense"]
    r = p["dnn.e"][ids].reshape(len(ids), -1)
    expected = deep(np.concatenate([r, x], 1), p, "dnn")
    np.testing.assert_allclose(built.run(built.main, built.logits)[0], expected, rtol=1e-4, atol=1e-5)


def test_wide_deep_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(zoo.MODELS["wide_deep"].network)
    p, ids, x = built.parameters(), built.feed["ids"], built.feed["dense"]
    wide = p["wide_deep.w"][ids].sum(1) + x @ p["wide_deep.wide.weight"]
    a = np.concatenate([p["wide_deep.e"][ids].reshape(len(ids), -1), x], 1)
    expected = wide + deep(a, p, "wide_deep")
    np.testing.assert_allclose(built.run(built.main, built.logits)[0], expected, rtol=1e-4, atol=1e-5)


def test_deepfm_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(zoo.MODELS["deepfm"].network)
    p, ids, x = built.parameters(), built.feed["ids"], built.feed["dense"]
    e = np.concatenate([p["deepfm.v"][ids], x[:, :, np.newaxis] * p["deepfm.dense_v"]], 1)
    y_fm = p["deepfm.w"][ids].sum(1) + x @ p["deepfm.dense_w"]
    for i, j in combinations(range(e.shape[1]), 2):
        y_fm += (e[:, i] * e[:, j]).sum(1, keepdims=True)
    expected = y_fm + deep(e.reshape(len(e), -1), p, "deepfm")
    np.testing.assert_allclose(built.run(built.main, built.logits)[0], expected, rtol=1e-4, atol=1e-5)


def test_dcn_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(dcn.dcn)
    p, ids = built.parameters(), built.feed["ids"]
    x_0 = np.concatenate([p["dcn.e"][ids].reshape(len(ids), -1), built.feed["dense"]], 1)
    x = a = x_0
    for layer in range(dcn.NUM_CROSS_LAYERS):
        x = x_0 * (x @ p[f"dcn.cross.{layer}.weight"]) + p[f"dcn.cross.{layer}.bias"] + x
    for layer in range(len(HIDDEN)):
        a = np.maximum(a @ p[f"dcn.{layer}.weight"] + p[f"dcn.{layer}.bias"], 0)
    expected = np.concatenate([x, a], 1) @ p["dcn.out.weight"] + p["dcn.out.bias"]
    np.testing.assert_allclose(logits_of(built), expected, rtol=1e-3, atol=1e-4)


def test_dcn_v2_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(dcn_v2.dcn_v2)
    p, ids = built.parameters(), built.feed["ids"]
    x_0 = np.concatenate([p["dcn_v2.e"][ids].reshape(len(ids), -1), built.feed["dense"]], 1)
    x = x_0
    for layer in range(dcn_v2.NUM_CROSS_LAYERS):
        x = x_0 * (x @ p[f"dcn_v2.cross.{layer}.weight"] + p[f"dcn_v2.cross.{layer}.bias"]) + x
    a = x_0
    for layer in range(len(HIDDEN)):
        a = np.maximum(a @ p[f"dcn_v2.{layer}.weight"] + p[f"dcn_v2.{layer}.bias"], 0)
    expected = np.concatenate([x, a], 1) @ p["dcn_v2.out.weight"] + p["dcn_v2.out.bias"]
    np.testing.assert_allclose(logits_of(built), expected, rtol=1e-3, atol=1e-4)


def test_xdeepfm_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(xdeepfm.xdeepfm)
    p, ids, dense = built.parameters(), built.feed["ids"], built.feed["dense"]
    x_0 = np.concatenate([p["xdeepfm.e"][ids], dense[:, :, np.newaxis] * p["xdeepfm.dense_e"]], 1)
    y = p["xdeepfm.w"][ids].sum(1) + dense @ p["xdeepfm.dense_w.weight"]
    x, pooled = x_0, []
    for layer, num_maps in enumerate(xdeepfm.NUM_FEATURE_MAPS):
        w = p[f"xdeepfm.cin.{layer}"].reshape(num_maps, x.shape[1], x_0.shape[1])
        x = np.einsum("hij,bid,bjd->bhd", w, x, x_0)
        pooled.append(x.sum(2))
    expected = y + np.concatenate(pooled, 1) @ p["xdeepfm.cin.out.weight"]
    expected += deep(x_0.reshape(len(ids), -1), p, "xdeepfm")
    np.testing.assert_allclose(logits_of(built), expected, rtol=1e-3, atol=1e-3)


def test_din_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(zoo.MODELS["din"].network)
    p, ids = built.parameters(), built.feed["ids"]
    rows = np.where(ids[..., np.newaxis] == 0, 0, p["din.item"][ids])
    candidate = rows[:, 0]
    interest = np.zeros_like(candidate)
    for e in rows[:, 1:].swapaxes(0, 1):
        unit = np.concatenate([e, e - candidate, e * candidate, candidate], 1)
        unit = np.maximum(unit @ p["din.activation.0.weight"] + p["din.activation.0.bias"], 0)
        interest += (unit @ p["din.activation.out.weight"] + p["din.activation.out.bias"]) * e
    expected = deep(np.concatenate([interest, candidate, built.feed["dense"]], 1), p, "din")
    np.testing.assert_allclose(logits_of(built), expected, rtol=1e-3, atol=1e-4)


def test_mmoe_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(mmoe.mmoe, num_labels=2)
    p, ids = built.parameters(), built.feed["ids"]
    x = np.concatenate([p["mmoe.e"][ids].reshape(len(ids), -1), built.feed["dense"]], 1)
    experts = [
        np.maximum(x @ p[f"mmoe.expert.{i}.0.weight"] + p[f"mmoe.expert.{i}.0.bias"], 0)
        for i in range(mmoe.NUM_EXPERTS)
    ]
    expected = []
    for task in range(mmoe.NUM_TASKS):
        gate = np.exp(x @ p[f"mmoe.gate.{task}.weight"])
        gate /= gate.sum(1, keepdims=True)
        mixed = sum(gate[:, i : i + 1] * expert for i, expert in enumerate(experts))
        tower = np.maximum(mixed @ p[f"mmoe.tower.{task}.0.weight"] + p[f"mmoe.tower.{task}.0.bias"], 0)
        expected.append(tower @ p[f"mmoe.tower.{task}.out.weight"] + p[f"mmoe.tower.{task}.out.bias"])
    np.testing.assert_allclose(logits_of(built), np.concatenate(expected, 1), rtol=1e-3, atol=1e-4)


def test_esmm_multiplies_the_chances(build: Callable[..., BuiltModel]) -> None:
    built = build(zoo.MODELS["esmm"].network, num_labels=2)
    p, ids = built.parameters(), built.feed["ids"]
    x = np.concatenate([p["esmm.e"][ids].reshape(len(ids), -1), built.feed["dense"]], 1)
    click, conversion = sigmoid(deep(x, p, "esmm.ctr")), sigmoid(deep(x, p, "esmm.cvr"))
    expected = np.concatenate([click, click * conversion], 1)
    np.testing.assert_allclose(sigmoid(logits_of(built)), expected, rtol=1e-3, atol=1e-6)


def test_word2vec_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(zoo.MODELS["word2vec"].network, num_fields=2)
    p, (word, context) = built.parameters(), built.feed["ids"].T
    expected = (p["word2vec.input"][word] * p["word2vec.output"][context]).sum(1, keepdims=True)
    np.testing.assert_allclose(logits_of(built), expected, rtol=1e-4, atol=1e-5)


def test_dssm_is_the_papers_equation(build: Callable[..., BuiltModel]) -> None:
    built = build(zoo.MODELS["dssm"].network, num_fields=6)
    p, ids = built.parameters(), built.feed["ids"]
    rows = np.where(ids[..., np.newaxis] == 0, 0, p["dssm.word"][ids])
    towers = []
    for name, words in (("query", rows[:, :3]), ("document", rows[:, 3:])):
        y = words.sum(1).reshape(-1, DIM)
        for layer in range(len(HIDDEN)):
            y = np.tanh(y @ p[f"dssm.{name}.{layer}.weight"] + p[f"dssm.{name}.{layer}.bias"])
        towers.append(y / np.linalg.norm(y, axis=1, keepdims=True))
    expected = p["dssm.gamma"] * (towers[0] * towers[1]).sum(1, keepdims=True) + p["dssm.bias"]
    np.testing.assert_allclose(logits_of(built), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("model", "num_fields"), [("word2vec", 3), ("dssm", 5)])
def test_examples_of_another_shape_are_refused(build: Callable[..., BuiltModel], model: str, num_fields: int) -> None:
    with pytest.raises(ValueError, match=f"{model}: .* {num_fields} ids"):
        build(zoo.MODELS[model].network, num_fields=num_fields)
