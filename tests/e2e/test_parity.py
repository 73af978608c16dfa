"""Real pserver and worker processes against one process of plain Paddle, in each mode."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from fleet_sparse.cli.parity import Optimizer
from fleet_sparse.local_pservers import Child, local_pservers, run_together
from support.jobs import SCRIPTS, environment

TOLERANCE = 1e-6


def parity(num_servers, num_workers, *arguments):
    """The command, ended with exit code 0: what it printed."""
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


@pytest.fixture
def trained(tmp_path):
    """`trained(num_servers, num_workers, *arguments)`: what plain Paddle and each worker trained with this command."""

    def train(num_servers, num_workers, *arguments):
        command = [sys.executable, *arguments]
        children = [Child("plain Paddle", [*command, "--plain", str(num_workers)], environment())]
        with local_pservers(num_servers, root=tmp_path, log=subprocess.DEVNULL) as pservers:
            for worker in range(num_workers):
                role = pservers.environment(worker, num_workers)
                children.append(Child(f"worker {worker}", command, environment(**role)))
            outputs = run_together(children, limit_s=110)
        return [json.loads(output.splitlines()[-1])["trained"] for output in outputs]

    return train


@pytest.fixture
def dyadic_job(trained):
    """`dyadic_job(num_servers, num_workers, mode, scale)`: what plain Paddle and each worker trained with SGD."""

    def train(num_servers, num_workers, mode, scale):
        arguments = ["-m", "fleet_sparse.plugin.parity", "sgd", "--model", "dyadic", "--rows"]
        of_processes = trained(num_servers, num_workers, *arguments, "--mode", mode, "--scale", scale)
        return [of_process["sgd"] for of_process in of_processes]

    return train


@pytest.mark.parametrize(
    ("num_servers", "num_workers", "scale"),
    [(0, 1, "avg"), (1, 1, "avg"), (2, 2, "avg"), (2, 2, "sum"), (3, 2, "avg")],
)
def test_losses_of_every_worker_in_sync_equal_plain_paddles(num_servers, num_workers, scale):
    output = parity(num_servers, num_workers, "--mode", "sync", "--scale", scale)
    assert output.count("yes") == num_workers * len(Optimizer)


def test_losses_with_a_clip_equal_plain_paddles_on_several_workers():
    output = parity(2, 2, "--clip", "global-norm", "--optimizer", "adam")
    assert "50 steps, sync (scale avg), clip by global-norm, 2 workers, 2 pservers" in output
    assert output.count("yes") == 2


def test_losses_with_each_clip_and_a_decay_equal_plain_paddles_on_several_workers(trained):
    clips = ["by_value", "by_norm", "by_global_norm"]
    plain, *workers = trained(2, 2, str(SCRIPTS / "clipped_parity.py"), "unclipped", *clips)
    unclipped = np.array(plain["unclipped"]["losses"])
    for clip in clips:
        losses = np.array(plain[clip]["losses"])
        of_workers = np.transpose([worker[clip]["losses"] for worker in workers])
        np.testing.assert_allclose(of_workers, losses, rtol=0, atol=TOLERANCE)
        assert np.abs(unclipped - losses).max() > 1e-3


@pytest.mark.parametrize(
    ("mode", "title"),
    [
        (["async"], "async"),
        (["async", "--max-step-lag", "0"], "async (max-step-lag 0)"),
        (["geo", "--k-steps", "3"], "geo (scale avg, k-steps 3)"),
    ],
)
def test_losses_of_one_worker_in_other_modes_equal_plain_paddles(mode, title):
    output = parity(3, 1, "--mode", *mode)
    assert f"50 steps, {title}, 1 worker, 3 pservers" in output
    assert output.count("yes") == len(Optimizer)


def test_losses_of_several_workers_in_async_are_not_judged():
    output = parity(1, 2, "--mode", "async", "--optimizer", "adam")
    assert output.count("not judged") == 2
    assert "async with several workers: what each sees depends on time" in output


@pytest.mark.parametrize(("num_servers", "num_workers", "scale"), [(2, 3, "avg"), (3, 4, "sum")])
def test_dyadic_model_in_sync_has_the_bits_of_plain_paddle(dyadic_job, num_servers, num_workers, scale):
    plain, *workers = dyadic_job(num_servers, num_workers, "sync", scale)
    for index, worker in enumerate(workers):
        assert worker["losses"] == [losses[index] for losses in plain["losses"]]
        assert worker["rows"] == plain["rows"]


def test_every_push_in_async_is_applied_once(dyadic_job):
    plain, *workers = dyadic_job(2, 3, "async", "sum")
    for worker in workers:
        assert worker["rows"] == plain["rows"]
