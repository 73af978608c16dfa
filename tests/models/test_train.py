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
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.models import drawn, synthetic, train
from fleet_sparse.models.options import parse
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


@pytest.mark.usefixtures("static_graph")
def test_plain_paddle_learns_the_planted_truth(tmp_path: Path) -> None:
    metrics = run_plain(tmp_path, "--data", "synthetic", "20000", "--batch-size", "256")
    assert metrics["test_auc"] > 0.6
    assert (metrics["kind"], metrics["num_steps"], metrics["num_examples"]) == ("plain", 79, 20000)
    assert metrics["test_examples"] == 2000


@pytest.mark.parametrize("model", ["din", "esmm", "word2vec", "dssm"])
def test_models_of_other_shapes_train_as_in_plain_paddle(tmp_path: Path, model: str) -> None:
    options = ("--model", model, "--data", "synthetic", "2000", "--learning-rate", "0.05")
    embedded, plain = run_embedded(tmp_path, *options), run_embedded(tmp_path, *options, "--plain")
    assert embedded["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-4)
    assert embedded["test_aucs"] == pytest.approx(plain["test_aucs"], abs=1e-3)


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
        (["--max-row-drift", "0.5"], Mode(row_bound=RowBound(drift=0.5))),
        (["--mode", "sync", "--max-row-lag", "9"], Mode(SYNC, row_bound=RowBound(lag=9, share=0.25))),
        (["--max-row-lag", "9", "--max-row-lag-share", "none"], Mode(row_bound=RowBound(lag=9))),
    ],
)
def test_the_options_say_the_mode(options: list[str], mode: Mode) -> None:
    assert read_strategy(train.strategy(parse(options))).mode == mode


def test_the_options_say_the_field_sizes_and_the_move() -> None:
    options = ["--data", "synthetic", "2048", "--batch-size", "256"]
    sizes = ["--field-sizes", "criteo", "100000"]
    sources = [train.open_source(parse([*options, *more])) for more in (sizes, [*sizes, "--drift-at", "4"])]
    still, moved = ([batch.ids for batch in source.train(0, 0, 1)] for source in sources)
    assert len(np.unique(np.concatenate(still)[:, 5])) == 24
    assert [np.array_equal(*ids) for ids in zip(still, moved, strict=True)] == [True] * 4 + [False] * 4


def test_one_worker_with_a_row_cache_trains_as_without(tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    metrics = run_embedded(tmp_path, "--max-row-drift", "0.02", "--cache-rows", "500")
    assert metrics["test_auc"] == saved[1]["test_auc"]
    assert metrics["row_cache"]["deepfm.v"]["hits"] > 0


def test_tables_below_the_smallest_dim_are_not_cached(tmp_path: Path) -> None:
    metrics = run_embedded(tmp_path, "--epochs", "1", "--max-row-drift", "0.02", "--cache-min-dim", "2")
    assert list(metrics["row_cache"]) == ["deepfm.v"]


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
    source = drawn.source(synthetic.draw, 200, batch_size=64, seed=0)
    batches = [*source.train(0, 0, 1), *source.test()]
    assert np.array_equal(train.vocabulary(source), np.unique(np.concatenate([batch.ids for batch in batches])))


def test_workers_write_files_of_their_own(tmp_path: Path) -> None:
    for index in range(2):
        Metrics("distributed", worker_index=index, num_examples=100, train_s=2.0).write(tmp_path / "run.json")
    files = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(files) == {"run.json", "run.worker-1.json"}
    assert files["run.worker-1.json"]["worker_index"] == 1
    assert files["run.json"]["examples_per_s"] == 50
