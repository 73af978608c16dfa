"""`fleet-sparse parity`: arguments, verdicts and errors; its trainings are tested in tests/plugin and tests/e2e."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from support.jobs import environment


def parity(*arguments):
    return CliRunner().invoke(cli.app, ["parity", *arguments], env={"COLUMNS": "120"})


@pytest.fixture
def losses(monkeypatch):
    """`losses(on_pservers, in_plain_paddle)`: what the processes of one worker with SGD will have printed."""

    def set_losses(*of_processes):
        outputs = [
            json.dumps({"tolerance": 1e-6, "trained": {"sgd": {"losses": of_process}}}) for of_process in of_processes
        ]
        monkeypatch.setattr(cli.parity, "run_together", lambda children, limit_s: outputs)

    return set_losses


def test_the_largest_difference_of_a_step_is_shown(losses) -> None:
    losses([0.5, 0.25 + 2**-21, 0.125], [[0.5], [0.25], [0.125]])
    result = parity("--servers", "0", "--optimizer", "sgd", "--steps", "3")
    assert "3 steps, sync (scale avg), 1 worker, embedded pserver" in result.output
    assert "0.500000 │  0.125000 │        4.8e-07 │    yes" in result.output
    assert result.exit_code == 0


def test_the_clip_is_handed_on_and_shown(losses, monkeypatch) -> None:
    losses([0.5], [[0.5]])
    commands = []
    run_together = cli.parity.run_together
    monkeypatch.setattr(
        cli.parity,
        "run_together",
        lambda children, **limits: commands.extend(children) or run_together(children, **limits),
    )
    result = parity("--servers", "0", "--optimizer", "sgd", "--clip", "global-norm")
    assert "50 steps, sync (scale avg), clip by global-norm, 1 worker" in result.output
    assert all(child.command[child.command.index("--clip") + 1] == "global-norm" for child in commands)
    assert [child.name for child in commands] == ["worker 0", "plain Paddle"]


def test_a_difference_above_the_tolerance_is_no_parity(losses) -> None:
    losses([0.5, 0.25], [[0.5], [0.250002]])
    result = parity("--servers", "0", "--optimizer", "sgd")
    assert "NO: above 1e-06" in result.output
    assert result.exit_code == 1


def test_a_loss_that_is_no_number_is_no_parity(losses) -> None:
    losses([0.5, float("nan"), 0.25], [[0.5], [float("nan")], [0.25]])
    result = parity("--servers", "0", "--optimizer", "sgd")
    assert "NO: above 1e-06" in result.output
    assert result.exit_code == 1


def test_losses_of_several_workers_in_async_are_not_judged(losses) -> None:
    losses([0.5], [0.75], [[0.5, 0.25]])
    result = parity("--mode", "async", "--workers", "2", "--optimizer", "adam")
    assert result.output.count("not judged") == 2
    assert "async with several workers" in result.output
    assert result.exit_code == 0


def test_what_is_not_compared_is_printed(losses) -> None:
    losses([0.5], [[0.5]])
    output = parity("--servers", "0").output
    assert "ftrl: not compared" in output
    assert "lamb: compared with lamb_weight_decay=0.0" in output


@pytest.fixture
def differences(monkeypatch):
    """`differences(*of_ways)`: what the worker of a job that serves will have printed."""

    def set_differences(*of_ways):
        ways = [{"way": name, "version": 1, "kind": "full", "difference": value} for name, value in of_ways]
        output = json.dumps({"tolerance": 1e-6, "compared": ways})
        monkeypatch.setattr(cli.serving_parity, "run_together", lambda children, limit_s: [output])

    return set_differences


def test_each_way_of_serving_is_shown(differences) -> None:
    differences(("plain model", 2e-7), ("ONNX model", None))
    result = parity("--serving", "--servers", "0")
    assert re.search(r"plain model +│ 1 \(full\) │ +2\.0e-07 │ +yes", result.output)
    assert re.search(r"ONNX model +│ 1 \(full\) │ +- │ +skipped", result.output)
    assert "skipped: ONNX model: needs fleet-sparse[onnx]" in result.output
    assert result.exit_code == 0


@pytest.mark.parametrize("difference", [2e-6, float("nan"), float("inf")])
def test_a_served_model_that_differs_is_no_parity(differences, difference) -> None:
    differences(("plain model", 0.0), ("Predictor", difference))
    result = parity("--serving", "--servers", "0")
    assert "NO: above 1e-06" in result.output
    assert result.exit_code == 1


# All the error paths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--servers", "many"], "Invalid value for '--servers'"),
        (["--workers", "0"], "Invalid value for '--workers'"),
        (["--mode", "lazy"], "Invalid value for '--mode'"),
        (["--optimizer", "ftrl"], "Invalid value for '--optimizer'"),
        (["--clip", "value"], "Invalid value for '--clip'"),
        (["--servers", "0", "--workers", "2"], "Invalid value for --workers: is 2"),
        (["--max-step-lag", "4"], "Invalid value for --max-step-lag"),
        (["--k-steps", "4"], "Invalid value for --k-steps"),
        (["--mode", "async", "--scale", "sum"], "Invalid value for --scale"),
        (["--mode", "geo", "--max-step-lag", "0"], "Invalid value for --max-step-lag"),
        (["--readers", "2"], "Invalid value for --readers"),
        (["--serving", "--readers", "0"], "Invalid value for '--readers'"),
        (["--serving", "--workers", "2"], "Invalid value for --workers"),
        (["--serving", "--mode", "geo"], "Invalid value for --mode"),
        (["--serving", "--k-steps", "4"], "Invalid value for --k-steps"),
    ],
)
def test_wrong_argument_is_an_error_without_a_trace(arguments, message) -> None:
    result = parity(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_error_of_a_process_is_a_message_without_a_trace() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "fleet_sparse.cli", "parity", "--servers", "0"],
        env=environment(COLUMNS="1000", FLEET_SPARSE_WORMS="1"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 2
    assert "ended with exit code 1: FLEET_SPARSE_WORMS: unknown setting" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
