"""Training with real pservers and workers equals training in NumPy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.jobs import environment
from support.logistic import LocalModel, loss_of, make_data, train
from support.pserver_job import PserverJob

TESTS = Path(__file__).parent.parent
NUM_EPOCHS = 2


def run_workers(endpoints: Sequence[str], num_workers: int) -> list[dict[str, Any]]:
    """Returns the result that each worker process printed."""
    command = [sys.executable, "-m", "support.logistic", "--endpoints", *endpoints, "--num-workers", str(num_workers)]
    workers = [
        subprocess.Popen(
            [*command, "--num-epochs", str(NUM_EPOCHS), "--worker", str(worker)],
            cwd=TESTS,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for worker in range(num_workers)
    ]
    results = []
    try:
        for worker in workers:
            out, errors = worker.communicate(timeout=100)
            assert worker.returncode == 0, errors
            results.append(json.loads(out))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return results


def local() -> tuple[list[float], float]:
    data = make_data()
    model = LocalModel(data)
    losses = train(model, data.batches(0, 1, NUM_EPOCHS))
    return losses, loss_of(model.logits(data.ids), data.labels)


def test_one_worker_follows_numpy_step_by_step(pserver_job: PserverJob) -> None:
    (result,) = run_workers(pserver_job(2).endpoints, 1)
    losses, final = local()
    np.testing.assert_allclose(result["losses"], losses, rtol=0, atol=1e-6)
    assert abs(result["final"] - final) < 1e-6
    assert final < losses[0] - 0.1  # something was learned


def test_two_workers_reach_the_loss_of_one(pserver_job: PserverJob) -> None:
    results = run_workers(pserver_job(2).endpoints, 2)
    _, final = local()
    assert results[0]["final"] == results[1]["final"]
    assert abs(results[0]["final"] - final) < 0.01
