"""Test AUC of the models on pservers, beside that of the truth that the labels were drawn from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.models import drawn, zoo
from fleet_sparse.models.auc import auc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADAGRAD = ("--optimizer", "adagrad", "--learning-rate")
LEARNT = {
    "din": (0.6, ("--optimizer", "adam", "--learning-rate", "0.003", "--batch-size", "128")),
    "mmoe": (0.5, (*ADAGRAD, "0.03")),
    "esmm": (0.5, (*ADAGRAD, "0.03")),
    "word2vec": (0.6, (*ADAGRAD, "0.1", "--batch-size", "128")),
    "dssm": (0.8, (*ADAGRAD, "0.1")),
}
"""By model: the share that it should reach of the truth's AUC above chance, and options."""


def trained(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fleet_sparse.models.train", "--metrics", "metrics.json", *options]
    subprocess.run(command, cwd=folder, check=True, timeout=500)
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics


@pytest.mark.parametrize("model", LEARNT)
def test_a_model_learns_the_planted_truth(tmp_path: Path, model: str) -> None:
    share, options = LEARNT[model]
    metrics = trained(tmp_path, "--model", model, "--data", "synthetic", "200000", *options)
    truth = zoo.MODELS[model].draw(20_000, seed=0, stream=drawn.TEST_STREAM)
    for of_task, label, logit in zip(metrics["test_aucs"], truth.batch.label.T, truth.logit.T, strict=True):
        assert of_task - 0.5 > share * (auc(label, logit) - 0.5)


@pytest.mark.parametrize("model", ["dcn_v2", "xdeepfm"])
def test_a_click_model_learns_the_flights(tmp_path: Path, model: str) -> None:
    assert trained(tmp_path, "--model", model)["test_auc"] > 0.79
