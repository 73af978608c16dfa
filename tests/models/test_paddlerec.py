from __future__ import annotations

from pathlib import Path

import pytest

from fleet_sparse.models.paddlerec import read_config

CONFIG = """
# a comment
runner:
  train_data_dir: "data/train"
  test_data_dir: "data/test"
  train_reader_path: "reader"
  use_gpu: False
  train_batch_size: 2
  epochs: 3
  sync_mode: "geo"
  geo_step: 100

hyper_parameters:
  optimizer:
    class: Adam
    learning_rate: 0.001
  sparse_inputs_slots: 4
  sparse_feature_dim: 9
  dense_input_dim: 13
  fc_sizes: [512, 256]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "dnn").mkdir()
    return tmp_path / "dnn" / "config.yaml"


def test_settings_become_options(path: Path) -> None:
    path.write_text(CONFIG)
    text = " ".join(read_config(path).arguments)
    assert text == (
        "--model dnn --batch-size 2 --epochs 3 --dim 9 --num-dense 13 --hidden 512 256 --optimizer adam "
        f"--learning-rate 0.001 --slots 1,2,3 --data slots {path.parent}/data/train {path.parent}/data/test "
        "--mode geo --k-steps 100"
    )


def test_settings_that_change_nothing_are_named(path: Path) -> None:
    path.write_text(CONFIG)
    assert read_config(path).unused == ["runner.train_reader_path", "runner.use_gpu"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("runner: {epochs: many}", "runner.epochs"),
        ("runner: {sync_mode: gpubox}", "runner.sync_mode"),
        ("hyper_parameters: {fc_sizes: 7}", "hyper_parameters.fc_sizes"),
        ("runner: [", "YAML"),
    ],
)
def test_wrong_settings_are_refused(path: Path, text: str, name: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=name):
        read_config(path)


def test_an_empty_file_names_the_model_alone(path: Path) -> None:
    path.write_text("")
    assert read_config(path).arguments == ["--model", "dnn", "--mode", "async"]
