"""Every model against its paper's equations, written down a second time in numpy, and what all of them must do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from fleet_sparse.models.deepfm import deepfm
from fleet_sparse.models.dnn import dnn
from fleet_sparse.models.wide_deep import wide_deep
from support.click_models import HIDDEN, BuiltModel

MODELS = [dnn, wide_deep, deepfm]


def deep(a: Any, p: dict[str, Any], name: str) -> Any:
    for layer in range(len(HIDDEN)):
        a = np.maximum(a @ p[f"{name}.{layer}.weight"] + p[f"{name}.{layer}.bias"], 0)
    return a @ p[f"{name}.out.weight"] + p[f"{name}.out.bias"]


@pytest.mark.parametrize("model", MODELS)
def test_loss_falls(build: Callable[[Any], BuiltModel], model: Any) -> None:
    built = build(model)
    losses = [float(built.run(built.main, built.loss)[0]) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_a_column(build: Callable[[Any], BuiltModel], model: Any) -> None:
    built = build(model)
    (logits,) = built.run(built.evaluation, built.evaluation_logits)
    assert (logits.shape, logits.dtype) == ((64, 1), np.float32)


@pytest.mark.parametrize("model", MODELS)
def test_the_evaluation_program_sees_what_was_trained(build: Callable[[Any], BuiltModel], model: Any) -> None:
    built = build(model)
    for _ in range(3):
        built.run(built.main, built.loss)
    (evaluated,) = built.run(built.evaluation, built.evaluation_logits)
    (trained,) = built.run(built.main, built.logits)  # before the update of this step
    np.testing.assert_allclose(evaluated, trained, rtol=1e-5, atol=1e-6)


def test_dnn_is_the_papers_equation(build: Callable[[Any], BuiltModel]) -> None:
    built = build(dnn)
    p, ids, x = built.parameters(), built.feed["ids"], built.feed["dense"]
    r = p["dnn.e"][ids].reshape(len(ids), -1)
    expected = deep(np.concatenate([r, x], 1), p, "dnn")
    np.testing.assert_allclose(built.run(built.main, built.logits)[0], expected, rtol=1e-4, atol=1e-5)


def test_wide_deep_is_the_papers_equation(build: Callable[[Any], BuiltModel]) -> None:
    built = build(wide_deep)
    p, ids, x = built.parameters(), built.feed["ids"], built.feed["dense"]
    wide = p["wide_deep.w"][ids].sum(1) + x @ p["wide_deep.wide.weight"]
    a = np.concatenate([p["wide_deep.e"][ids].reshape(len(ids), -1), x], 1)
    expected = wide + deep(a, p, "wide_deep")
    np.testing.assert_allclose(built.run(built.main, built.logits)[0], expected, rtol=1e-4, atol=1e-5)


def test_deepfm_is_the_papers_equation(build: Callable[[Any], BuiltModel]) -> None:
    built = build(deepfm)
    p, ids, x = built.parameters(), built.feed["ids"], built.feed["dense"]
    e = np.concatenate([p["deepfm.v"][ids], x[:, :, np.newaxis] * p["deepfm.dense_v"]], 1)
    y_fm = p["deepfm.w"][ids].sum(1) + x @ p["deepfm.dense_w"]
    for i, j in combinations(range(e.shape[1]), 2):
        y_fm += (e[:, i] * e[:, j]).sum(1, keepdims=True)
    expected = y_fm + deep(e.reshape(len(e), -1), p, "deepfm")
    np.testing.assert_allclose(built.run(built.main, built.logits)[0], expected, rtol=1e-4, atol=1e-5)
