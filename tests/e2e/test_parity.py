"""Real pserver and worker processes against one process of plain Paddle, in each mode."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from fleet_sparse.cli.parity import OptimizerChoice
from fleet_sparse.local_pservers import Child, local_pservers, run_together
from support.jobs import SCRIPTS, environment
from support.onnx_extra import HAS_ONNX

TOLERANCE = 1e-6


def parity(num_servers, num_workers, *arguments):
    """`fleet-sparse parity`, ended with exit code 0: what it printed."""
    command = [sys.executable, "-m", "fleet_sparse.cli", "parity", *arguments]
    ended = subprocess.run(
        [*command, "--servers", str(num_servers), "--workers", str(num_workers)],
        env=environment(COLUMNS="120"),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


MODULE = ["-m", "fleet_sparse.tools.parity.training"]
EVERY = [*MODULE, *OptimizerChoice]


@cache
def plain_paddles(num_workers, *arguments):
    """Losses and rows of plain Paddle in place of `num_workers` workers, by optimizer. Trained once for all tests."""
    command = [sys.executable, *arguments, "--plain", str(num_workers)]
    return trained_by([Child("plain Paddle", command, environment())])[0]


def trained_by(children):
    """Losses and rows of each process, by optimizer."""
    return [json.loads(output.splitlines()[-1])["trained"] for output in run_together(children, limit_s=110)]


@pytest.fixture
def trained(tmp_path):
    """`trained(num_servers, num_workers, *arguments)`: what each worker trained with this command.

    Without pservers the only worker has one inside.
    """

    def train(num_servers, num_workers, *arguments):
        command = [sys.executable, *arguments]
        if num_servers == 0:
            return trained_by([Child("worker 0", command, environment())])
        with local_pservers(num_servers, root=tmp_path, log=subprocess.DEVNULL) as pservers:
            roles = [pservers.environment(worker, num_workers) for worker in range(num_workers)]
            return trained_by(
                [Child(f"worker {worker}", command, environment(**role)) for worker, role in enumerate(roles)]
            )

    return train


@pytest.fixture
def dyadic_job(trained):
    """`dyadic_job(num_servers, num_workers, mode, scale)`: what plain Paddle and each worker trained with SGD."""

    def train(num_servers, num_workers, mode, scale):
        arguments = [*MODULE, "sgd", "--model", "dyadic", "--rows", "--mode", mode, "--scale", scale]
        plain, workers = plain_paddles(num_workers, *arguments), trained(num_servers, num_workers, *arguments)
        return [of_process["sgd"] for of_process in (plain, *workers)]

    return train


def assert_equal_losses(plain, workers, optimizers):
    for optimizer in optimizers:
        losses = np.array(plain[optimizer]["losses"])
        assert losses.shape == (50, len(workers))
        of_workers = np.transpose([worker[optimizer]["losses"] for worker in workers])
        np.testing.assert_allclose(of_workers, losses, rtol=0, atol=TOLERANCE, err_msg=optimizer)


def test_parity_command_finds_equal_losses_of_every_optimizer():
    output = parity(2, 2)
    assert "50 steps, sync (scale avg), 2 workers, 2 pservers" in output
    assert output.count("yes") == 2 * len(OptimizerChoice)


@pytest.mark.slow
def test_parity_command_finds_equal_predictions_of_every_way():
    output = parity(3, 1, "--serving", "--readers", "2", "--steps", "5")
    assert "5 steps before each save, 3 pservers" in output
    assert output.count("yes") == (8 if HAS_ONNX else 6)
    assert ("skipped" in output) is not HAS_ONNX
    assert "Predictor on 2 pservers" in output
    assert "2 (delta)" in output


JOBS = [
    (2, 2, "sum", ["adamax", "momentum"]),
    (0, 1, "avg", ["sgd", "adagrad"]),
    (1, 1, "avg", ["adam", "adamw"]),
    (3, 2, "avg", ["rmsprop", "lamb"]),
]


@pytest.mark.parametrize(
    ("num_servers", "num_workers", "scale", "optimizers"),
    [JOBS[0], *(pytest.param(*job, marks=pytest.mark.slow) for job in JOBS[1:])],
)
@pytest.mark.guarantee("E8", "S1", "D2")
def test_losses_of_every_worker_in_sync_equal_plain_paddles(trained, num_servers, num_workers, scale, optimizers):
    """Each number of processes and each scale with two optimizers; all of them are in the test before.

    A rule works on one row at a time, so that what it computes depends neither on how many shards there are nor on how
    many workers' gradients were merged: each of these is compared by itself, and tests/test_sync_grid.py has every rule
    with every number of both, in one process.
    """
    workers = trained(num_servers, num_workers, *MODULE, *optimizers, "--scale", scale)
    one_process = EVERY if num_workers == 1 else [*MODULE, *optimizers, "--scale", scale]
    assert_equal_losses(plain_paddles(num_workers, *one_process), workers, optimizers)


def test_every_optimizer_is_in_the_jobs():
    assert sorted(optimizer for *_, optimizers in JOBS for optimizer in optimizers) == sorted(OptimizerChoice)


SHAPES = [(0, 1, "avg"), (1, 1, "avg"), (2, 2, "avg"), (2, 2, "sum"), (3, 2, "avg")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer", OptimizerChoice)
@pytest.mark.parametrize(("num_servers", "num_workers", "scale"), SHAPES)
def test_losses_of_the_grid_equal_plain_paddles(trained, num_servers, num_workers, scale, optimizer):
    """Every rule with every job shape; ordinary runs have a part of it."""
    workers = trained(num_servers, num_workers, *MODULE, optimizer, "--scale", scale)
    assert_equal_losses(plain_paddles(num_workers, *EVERY, "--scale", scale), workers, [optimizer])


@pytest.mark.slow
@pytest.mark.guarantee("C3")
def test_parity_command_with_a_clip_finds_equal_losses():
    output = parity(2, 2, "--clip", "global-norm", "--optimizer", "adam")
    assert "50 steps, sync (scale avg), clip by global-norm, 2 workers, 2 pservers" in output
    assert output.count("yes") == 2


@pytest.mark.guarantee("C1", "C2", "C3")
def test_losses_with_each_clip_and_decay_equal_plain_paddles(trained):
    clips = ["by_value", "by_norm", "by_global_norm"]
    command = [str(SCRIPTS / "clipped_parity.py"), "unclipped", *clips]
    plain, workers = plain_paddles(2, *command), trained(2, 2, *command)
    assert_equal_losses(plain, workers, clips)
    for clip in clips:
        assert np.abs(np.subtract(plain["unclipped"]["losses"], plain[clip]["losses"])).max() > 1e-3


@pytest.mark.parametrize(
    ("mode", "optimizers"),
    [
        (["async"], OptimizerChoice),
        (["async", "--max-step-lag", "0"], ["sgd", "adam"]),
        (["geo", "--k-steps", "3"], OptimizerChoice),
    ],
    ids=["async", "lag 0", "geo"],
)
@pytest.mark.guarantee("A2")
def test_losses_of_one_worker_in_other_modes_equal_plain_paddles(trained, mode, optimizers):
    """With a bound on the lag pushes are applied as without, by the same rules; two optimizers show that they are."""
    workers = trained(3, 1, *MODULE, *optimizers, "--mode", *mode)
    assert_equal_losses(plain_paddles(1, *EVERY), workers, optimizers)


@pytest.mark.parametrize(
    ("num_servers", "num_workers", "scale"), [(2, 3, "avg"), pytest.param(3, 4, "sum", marks=pytest.mark.slow)]
)
def test_dyadic_model_in_sync_has_the_bits_of_plain_paddle(dyadic_job, num_servers, num_workers, scale):
    plain, *workers = dyadic_job(num_servers, num_workers, "sync", scale)
    for index, worker in enumerate(workers):
        assert worker["losses"] == [losses[index] for losses in plain["losses"]]
        assert worker["rows"] == plain["rows"]


def test_every_push_in_async_is_applied_once(dyadic_job):
    plain, *workers = dyadic_job(2, 2, "async", "sum")
    for worker in workers:
        assert worker["rows"] == plain["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_servers", "num_workers", "max_step_lag"), [(2, 3, 0), (3, 4, 2)])
def test_every_push_with_a_step_lag_is_applied_once(trained, num_servers, num_workers, max_step_lag):
    """The gradients of the dyadic model do not depend on its rows, so neither do sums of them on their order."""
    arguments = [*MODULE, "sgd", "--model", "dyadic", "--rows", "--scale", "sum"]
    workers = trained(num_servers, num_workers, *arguments, "--mode", "async", "--max-step-lag", str(max_step_lag))
    plain = plain_paddles(num_workers, *arguments)
    assert all(worker["sgd"]["rows"] == plain["sgd"]["rows"] for worker in workers)


@pytest.mark.slow
@pytest.mark.parametrize(("num_servers", "num_workers", "k_steps"), [(2, 2, 5), (3, 4, 7)])
def test_every_change_in_geo_is_added_once(trained, num_servers, num_workers, k_steps):
    """The last exchange is that of the barrier at the end: 50 steps are no multiple of 7."""
    arguments = [*MODULE, "sgd", "--model", "dyadic", "--rows", "--scale", "sum"]
    workers = trained(num_servers, num_workers, *arguments, "--mode", "geo", "--k-steps", str(k_steps))
    plain = plain_paddles(num_workers, *arguments)
    assert all(worker["sgd"]["rows"] == plain["sgd"]["rows"] for worker in workers)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [["async", "--max-step-lag", "2"], ["geo", "--k-steps", "3"]], ids=["step lag", "geo"])
def test_several_workers_in_other_modes_reach_plain_paddles_loss(trained, mode):
    """The last ten losses are above plain Paddle's by at most half of what it gains in 50 steps."""
    plain = plain_paddles(3, *EVERY)
    workers = trained(2, 3, *EVERY, "--mode", *mode)
    for optimizer in OptimizerChoice:
        expected = np.array(plain[optimizer]["losses"])
        first, last = expected[:10].mean(), expected[-10:].mean()
        reached = np.mean([worker[optimizer]["losses"][-10:] for worker in workers])
        assert reached <= last + (first - last) / 2, optimizer
