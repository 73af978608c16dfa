"""Dygraph scripts as users start them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import paddle
import pytest

from support.dygraph import plain_losses
from support.jobs import TIMEOUT_S, environment, fleetrun, numbers, output_of, outputs_of, python

MODES = ["async", "lag", "geo"]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Losses of whole batches in plain Paddle."""
    paddle.disable_static()
    try:
        return plain_losses(lambda parameters: paddle.optimizer.Adagrad(0.1, parameters=parameters))
    finally:
        paddle.enable_static()


def test_2_workers_on_2_pservers_train_as_plain_paddle(tmp_path, expected):
    job = fleetrun("dygraph.py", tmp_path, num_servers=2, num_workers=2)
    logs = [job.logs[f"workerlog.{worker}"] for worker in range(2)]
    losses = np.mean([numbers("loss", log) for log in logs], axis=0)  # both have half of each batch
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    assert numbers("total", logs[0]) == numbers("total", logs[1])
    assert all("worker done" in log for log in logs)
    assert (tmp_path / "model" / "000001-full" / "MANIFEST.json").exists()


def test_all_reduce_of_2_workers_trains_as_plain_paddle(tmp_path, monkeypatch, expected):
    monkeypatch.setenv("MODE", "all_reduce")
    job = fleetrun("dygraph.py", tmp_path, num_servers=2, num_workers=2)
    logs = [job.logs[f"workerlog.{worker}"] for worker in range(2)]
    losses = np.mean([numbers("loss", log) for log in logs], axis=0)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_2_workers_end_with_equal_models_and_save(tmp_path, mode):
    outputs = outputs_of("dygraph.py", tmp_path, MODE=mode)
    first, second = (numbers("total", output) for output in outputs)
    assert first == second
    assert all(numbers("loss", output)[-1] < 0.5 for output in outputs)
    assert (tmp_path / "model" / "000001-full" / "MANIFEST.json").exists()


def test_script_alone_trains_as_plain_paddle(tmp_path, expected):
    np.testing.assert_allclose(numbers("loss", output_of("dygraph.py", tmp_path)), expected, rtol=0, atol=1e-6)


@pytest.mark.guarantee("H4")
def test_a_full_row_cache_trains_a_layer_called_often_as_none(tmp_path, expected):
    without, output = (output_of("dygraph.py", tmp_path, CALLS="each field", ROW_LAG=lag) for lag in ("0", "30"))
    np.testing.assert_allclose(numbers("loss", without), expected, rtol=0, atol=1e-6)
    assert numbers("loss", output) == numbers("loss", without)
    assert numbers("total", output) == numbers("total", without)


def test_one_line_trains_tables_of_a_script_without_fleet(tmp_path):
    output = output_of("dygraph_trainer.py", tmp_path)
    losses = numbers("loss", output)
    assert losses[-1] < losses[0]
    assert (tmp_path / "tables" / "000001-full" / "shard-0-of-1.fss").exists()


def test_a_script_that_exits_with_a_status_saves_nothing(tmp_path):
    with python("dygraph_trainer.py", tmp_path, FAILS_AFTER="2") as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3, output
    assert not (tmp_path / "tables").exists()


def test_one_line_makes_a_job_of_a_script_without_fleet(tmp_path):
    job = fleetrun("dygraph_trainer.py", tmp_path, num_servers=2, num_workers=2)
    for worker in range(2):
        losses = numbers("loss", job.logs[f"workerlog.{worker}"])
        assert losses[-1] < losses[0], job.logs
    assert (tmp_path / "tables" / "000001-full" / "shard-1-of-2.fss").exists()


def test_example_of_the_page_learns_and_saves(tmp_path):
    command = [sys.executable, "-m", "fleet_sparse.models.dygraph_dnn"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert numbers("loss", done.stdout)[-1] < 0.1
    assert (tmp_path / "dygraph_dnn" / "000001-full" / "MANIFEST.json").exists()
