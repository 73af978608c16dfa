from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_sparse.core.mode import GEO, SYNC, Mode
from fleet_sparse.models import synthetic, train
from fleet_sparse.models.source import Batch
from fleet_sparse.models.train import Metrics
from fleet_sparse.plugin.strategy import read_strategy

SMALL = ("--data", "synthetic", "10000", "--batch-size", "256")


def run_embedded(folder: Path, *options: str) -> dict[str, Any]:
    """In a process of its own, because the plugin changes Paddle."""
    command = [sys.executable, "-m", "fleet_sparse.models.train", "--metrics", "metrics.json", *SMALL, *options]
    subprocess.run(command, cwd=folder, check=True, timeout=100)
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics


def run_plain(tmp_path: Path, *options: str) -> dict[str, Any]:
    path = tmp_path / "metrics.json"
    train.main(["--plain", "--metrics", str(path), *options])
    metrics: dict[str, Any] = json.loads(path.read_text())
    return metrics


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Snapshot of a training with an embedded pserver, and its metrics."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_embedded(folder, "--save", "model")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Metrics of the same training in plain Paddle."""
    paddle.enable_static()
    with paddle.static.scope_guard(paddle.static.Scope()), paddle.utils.unique_name.guard():
        return run_plain(tmp_path_factory.mktemp("plain"), *SMALL)


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(np.concatenate(columns) for columns in zip(*batches, strict=True)))


@pytest.mark.usefixtures("static_graph")
@pytest.mark.parametrize("model", train.MODELS)
def test_plain_paddle_learns_the_planted_truth(tmp_path: Path, model: str) -> None:
    metrics = run_plain(tmp_path, "--model", model, "--data", "synthetic", "20000", "--batch-size", "256")
    assert metrics["test_auc"] > 0.6
    assert (metrics["kind"], metrics["num_steps"], metrics["num_examples"]) == ("plain", 79, 20000)
    assert metrics["test_examples"] == 2000


def assert_same_training(embedded: dict[str, Any], plain: dict[str, Any]) -> None:
    assert embedded["kind"] == "embedded"
    assert embedded["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-4)
    assert embedded["test_auc"] == pytest.approx(plain["test_auc"], abs=1e-3)
    assert embedded["bytes_pulled"] > 0
    assert embedded["bytes_pushed"] > 0


@pytest.mark.parametrize("options", [("--mode", "sync"), ("--max-step-lag", "2"), ("--mode", "geo", "--k-steps", "7")])
def test_an_embedded_pserver_trains_as_plain_paddle_in_any_mode(
    tmp_path: Path, options: tuple[str, ...], plain: dict[str, Any]
) -> None:
    assert_same_training(run_embedded(tmp_path, *options), plain)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ([], Mode()),
        (["--mode", "sync"], Mode(SYNC)),
        (["--mode", "async", "--max-step-lag", "0"], Mode(max_step_lag=0)),
        (["--mode", "geo", "--k-steps", "5"], Mode(GEO, k_steps=5)),
    ],
)
def test_the_options_say_the_mode(options: list[str], mode: Mode) -> None:
    assert read_strategy(train.strategy(train.parse(options))).mode == mode


def test_rows_are_there_again_after_saving_and_loading(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, trained = saved
    loaded = run_embedded(folder, "--epochs", "0", "--load", "model")
    assert loaded["num_steps"] == 0
    assert loaded["test_auc"] == pytest.approx(trained["test_auc"], abs=1e-9)
    assert loaded["pserver_rows"] == trained["pserver_rows"]


def test_starts_as_a_file_as_fleetrun_starts_it(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(train.__file__)), "--help"]
    result = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith("usage: python -m fleet_sparse.models.train")


@pytest.mark.usefixtures("static_graph")
def test_plain_paddle_trains_on_files(tmp_path: Path) -> None:
    truth = synthetic.draw(200, seed=0).batch
    path = tmp_path / "part-0"
    with open(path, "w") as file:
        for ids, dense, label in zip(truth.ids, truth.dense, truth.label, strict=True):
            tokens = [f"click:{label[0]:.0f}", *(f"dense_feature:{value}" for value in dense)]
            tokens += [f"{slot}:{feasign}" for slot, feasign in enumerate(ids, 1)]
            print(*tokens, file=file)
    metrics = run_plain(tmp_path, "--data", "slots", str(path), "--batch-size", "10", "--model", "wide_deep")
    assert (metrics["num_examples"], metrics["test_examples"]) == (180, 20)


def test_the_vocabulary_has_training_and_test_ids() -> None:
    source = synthetic.source(batch_size=64, num_batches=3, num_test_batches=2, seed=0)
    batches = [*source.train(0, 0, 1), *source.test()]
    assert np.array_equal(train.vocabulary(source), np.unique(np.concatenate([batch.ids for batch in batches])))


@pytest.mark.parametrize("batch_size", [1, 256, 700, 5000])
def test_synthetic_examples_are_the_same_in_batches_of_any_size(batch_size: int) -> None:
    def examples(size: int) -> list[Batch]:
        source = train.open_source(train.parse(["--data", "synthetic", "1100", "--batch-size", str(size)]))
        trained = list(source.train(0, 0, 1))
        assert source.num_batches == len(trained)
        assert [len(batch.label) for batch in trained[:-1]] == [size] * (len(trained) - 1)
        return [joined(trained), joined(list(source.test()))]

    for one, other in zip(examples(512), examples(batch_size), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_workers_write_files_of_their_own(tmp_path: Path) -> None:
    for index in range(2):
        Metrics("distributed", worker_index=index, num_examples=100, train_s=2.0).write(tmp_path / "run.json")
    files = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(files) == {"run.json", "run.worker-1.json"}
    assert files["run.worker-1.json"]["worker_index"] == 1
    assert files["run.json"]["examples_per_s"] == 50


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--data", "movies"], "--data movies"),
        (["--data", "criteo"], "--data criteo: 0 "),
        (["--data", "flights", "x"], "--data flights: 1 "),
        (["--data", "synthetic", "many"], "--data synthetic: 'many'"),
        (["--plain", "--save", "model"], "--plain: "),
        (["--plain", "--load", "model"], "--plain: "),
        (["--plain", "--mode", "sync"], "--plain: "),
        (["--plain", "--max-step-lag", "1"], "--plain: "),
        (["--mode", "sync", "--max-step-lag", "1"], "--max-step-lag: "),
        (["--mode", "geo"], "--k-steps: is 0"),
        (["--k-steps", "5"], "--k-steps: is 5"),
        (["--batch-size", "0"], "'0' should be a whole number, at least 1"),
        (["--model", "dlrm"], "invalid choice: 'dlrm'"),
    ],
)
def test_options_without_sense_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit):
        train.parse(arguments)
    assert complaint in capsys.readouterr().err
