from __future__ import annotations

from pathlib import Path

import pytest

from fleet_sparse.models.options import parse


def test_models_have_the_data_that_they_train_on() -> None:
    assert parse([]).data == ["flights"]
    assert parse(["--model", "esmm"]).data == ["synthetic"]


def test_options_override_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "deepfm" / "config.yaml"
    config.parent.mkdir()
    config.write_text("runner: {epochs: 3, print_interval: 2, train_batch_size: 5}")
    options = parse(["-m", str(config), "--epochs", "7"])
    assert (options.model, options.epochs, options.batch_size) == ("deepfm", 7, 5)
    assert options.config_unused == ["runner.print_interval"]


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
        (["--field-sizes", "criteo"], "--field-sizes: is for --data synthetic"),
        (["--model", "esmm", "--drift-at", "5"], "--drift-at: is for --data synthetic"),
        (["--data", "synthetic", "--field-sizes", "criteo", "few"], "--field-sizes: is 'criteo few'"),
        (["--plain", "--max-row-drift", "0.1"], "--plain: "),
        (["--cache-rows", "5"], "--cache-rows: "),
        (["--cache-min-dim", "2"], "--cache-min-dim: "),
        (["--model", "dlrm"], "invalid choice: 'dlrm'"),
        (["--model", "din", "--data", "flights"], "--model din"),
        (["--model", "mmoe", "--hidden"], "--hidden"),
        (["--config", "absent/config.yaml"], "--config"),
    ],
)
def test_options_without_sense_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert complaint in capsys.readouterr().err
