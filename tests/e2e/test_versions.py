"""Read-only pservers follow promotions and rollbacks, and their answers are computed again without them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.serving.model import read_model
from fleet_sparse.serving.predictor import Prediction, Predictor
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import directory_at
from support.jobs import TIMEOUT_S, environment, outputs_of

SHARDS = {"arguments": ["--read-only"], "environment": {"FLEET_SPARSE_VERSION_KEEP_S": "0.05"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a job saved a model in four versions."""
    root = tmp_path_factory.mktemp("versions")
    outputs_of("versions.py", root, 1, num_servers=2)
    return root


def fleet_sparse(root: Path, *arguments: object, fails: int = 0) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "fleet_sparse.cli", *map(str, arguments)]
    ended = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == fails, ended.stderr
    return ended.stdout + ended.stderr


def ids_of(root: Path) -> NDArray[np.int64]:
    with np.load(root / "truth-1.npz") as truth:
        ids: NDArray[np.int64] = truth["ids"]
    return ids


def predictions_of(root: Path, number: int) -> NDArray[Any]:
    with np.load(root / f"truth-{number}.npz") as truth:
        found: NDArray[Any] = truth["prediction"].reshape(-1)
    return found


def answered(predictor: Predictor, number: int, feed: dict[str, NDArray[Any]]) -> Prediction:
    """Predicts until a version is served."""
    deadline = time.monotonic() + TIMEOUT_S
    while (prediction := predictor.run(feed)).version.number != number:
        assert time.monotonic() < deadline, f"version {number} is not served"
    return prediction


def test_commands_are_followed_and_answers_computed_again(model: Path) -> None:
    feed = {"ids": ids_of(model)}
    np.savez(model / "feeds.npz", allow_pickle=True, **feed)
    answers = {}
    with (
        local_pservers(3, root=model, load_dirname="serve/rows", **SHARDS) as pservers,
        Predictor(str(model / "serve"), pservers.endpoints, settings=Settings()) as predictor,
    ):
        for command, number in (("unpin", 4), ("promote 2", 2), ("promote 1", 1), ("rollback", 2), ("promote 3", 3)):
            fleet_sparse(model, "version", command.split()[0], "serve", *command.split()[1:])
            prediction = answered(predictor, number, feed)
            again = answers.setdefault(number, prediction)
            assert [each.tobytes() for each in again.outputs.values()] == [
                each.tobytes() for each in prediction.outputs.values()
            ]
        assert predictor.stats().last_failure == ""
        with (
            local_pservers(1, root=model, load_dirname="serve/rows", **SHARDS) as later,
            Predictor(str(model / "serve"), later.endpoints, settings=Settings()) as other,
        ):
            assert other.run(feed).version == answers[3].version
    for number, (outputs, version) in answers.items():
        shown = fleet_sparse(model, "predict", "serve", "feeds.npz", "out.npz", "--version", number)
        assert "the network was saved" not in shown
        ((name, expected),) = outputs.items()
        np.testing.assert_allclose(expected.reshape(-1), predictions_of(model, number), rtol=1e-6, atol=1e-6)
        with np.load(model / "out.npz", allow_pickle=False) as out:
            assert out[name].tobytes() == expected.tobytes()
            assert (int(out["version.number"]), str(out["version.checksum"])) == (number, f"{version.checksum:016x}")
    fleet_sparse(model, "predict", "serve", "feeds.npz", "out.npz")
    with np.load(model / "out.npz") as out:
        assert int(out["version.number"]) == 3  # which is served


def test_a_candidate_that_is_worse_is_refused(model: Path) -> None:
    newest, oldest = predictions_of(model, 4), predictions_of(model, 1)
    labels = newest > np.median(newest)
    np.savez(model / "labelled.npz", ids=ids_of(model).repeat(20, 0), click=labels.repeat(20))
    fleet_sparse(model, "version", "promote", "serve", 4)
    before = (model / "serve" / "rows" / "SERVE.json").read_bytes()
    check = ["--check", "labelled.npz", "--label", "click", "--max-calibration-error", 1e9]
    shown = fleet_sparse(model, "version", "promote", "serve", 1, *check, fails=1)
    below = oldest[labels][:, None] > oldest[~labels][None, :]
    auc = (below + 0.5 * (oldest[labels][:, None] == oldest[~labels][None, :])).mean()
    assert f"its AUC is {auc:.6f}, that of the served version 1.000000" in shown
    assert "served: 4" in shown
    assert "candidate: 1" in shown
    assert (model / "serve" / "rows" / "SERVE.json").read_bytes() == before
    fleet_sparse(model, "version", "promote", "serve", 1)
    assert "1.000000" in fleet_sparse(model, "version", "promote", "serve", *check)
    assert "snapshot 4 " in fleet_sparse(model, "version", "pin", "serve")


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"item": 1}, "'item'"),
        ({}, "'ids'"),
        ({"ids": np.ones((2, 4))}, "'ids'"),
        ({"ids": np.ones((2, 3), int)}, "'ids'"),
    ],
)
def test_wrong_feeds_of_a_prediction_are_named(model: Path, arrays: dict[str, Any], named: str) -> None:
    np.savez(model / "wrong.npz", allow_pickle=True, **arrays)
    shown = fleet_sparse(model, "predict", "serve", "wrong.npz", "absent.npz", fails=2)
    assert f"wrong.npz: feed {named}" in shown
    assert not (model / "absent.npz").exists()


def test_a_network_that_is_newer_than_the_version_is_said(model: Path) -> None:
    np.savez(model / "feeds.npz", allow_pickle=True, ids=ids_of(model))
    served = read_model(directory_at(model / "serve"))
    (model / "serve" / "SERVING.json").write_bytes(msgspec.structs.replace(served, number=3).to_json())
    for number in (2, 3):
        shown = fleet_sparse(model, "predict", "serve", "feeds.npz", "out.npz", "--version", number)
        assert ("the network was saved with snapshot 3" in shown) == (number == 2)
    (model / "serve" / "SERVING.json").write_bytes(served.to_json())
