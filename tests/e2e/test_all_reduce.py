"""Dense parameters of several workers that Gloo merges and Paddle's optimizers train, in real processes."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from support.jobs import TIMEOUT_S, job, outputs_of, wait_for_line

SCRIPT = "all_reduce.py"
TOLERANCE = 1e-6
END_S = 60
"""Longest time in which a worker ends whose peer died: Gloo gives up after 30 s."""


class Trained(NamedTuple):
    """Output of a worker."""

    losses: NDArray[np.float64]
    values: dict[str, NDArray[np.float32]]


def trained(output: str) -> Trained:
    losses = [float.fromhex(text) for text in re.findall(r"^loss (\S+)", output, re.MULTILINE)]
    found = re.findall(r"^values (\S+) ([0-9a-f]+)$", output, re.MULTILINE)
    return Trained(np.array(losses), {name: np.frombuffer(bytes.fromhex(text), np.float32) for name, text in found})


def run(
    directory: Path, dense: str, optimizer: str, endpoints: str, steps: str = "50,49", **more: Any
) -> list[Trained]:
    variables = {"DENSE": dense, "OPTIMIZER": optimizer, "STEPS": steps, "PADDLE_TRAINER_ENDPOINTS": endpoints}
    num_workers = len(steps.split(","))
    return [trained(output) for output in outputs_of(SCRIPT, directory, num_workers, **variables, **more)]


def are_equal_bit_by_bit(first: Trained, second: Trained) -> bool:
    return all(first.values[name].tobytes() == values.tobytes() for name, values in second.values.items())


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("Adam", marks=pytest.mark.slow),
        "clipped SGD",
        pytest.param("SGD", marks=pytest.mark.slow),
        pytest.param("Adagrad", marks=pytest.mark.slow),
    ],
)
@pytest.mark.guarantee("D9", "D10")
def test_all_reduced_training_equals_that_on_pservers(tmp_path: Path, endpoints: str, optimizer: str) -> None:
    """Over 50 steps, some with unequal batches; worker 0 trains the last one without worker 1."""
    on_pservers = run(tmp_path, "pservers", optimizer, endpoints)
    reduced = run(tmp_path, "all_reduce", optimizer, endpoints)
    assert are_equal_bit_by_bit(*reduced)
    for expected, worker in zip(on_pservers, reduced, strict=True):
        assert worker.losses.shape == expected.losses.shape
        assert np.abs(worker.losses - expected.losses).max() < TOLERANCE
        for name, values in expected.values.items():
            np.testing.assert_allclose(worker.values[name], values, rtol=0, atol=TOLERANCE)
    assert reduced[0].losses[:8].mean() > reduced[0].losses[40:48].mean() + 0.01, "it learned something"


@pytest.mark.slow
@pytest.mark.guarantee("D11")
def test_snapshots_pass_between_both_ways_of_training(tmp_path: Path, endpoints: str) -> None:
    whole = run(tmp_path, "pservers", "Adam", endpoints, "30,30")
    run(tmp_path, "all_reduce", "Adam", endpoints, "10,10", SAVE="one")
    run(tmp_path, "pservers", "Adam", endpoints, "10,10", FIRST="10", LOAD="one", SAVE="two")
    last = run(tmp_path, "all_reduce", "Adam", endpoints, "10,10", FIRST="20", LOAD="two")
    assert are_equal_bit_by_bit(*last)
    for expected, worker in zip(whole, last, strict=True):
        np.testing.assert_allclose(worker.losses, expected.losses[20:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.guarantee("D12")
def test_a_worker_that_dies_ends_the_other_one_in_time(tmp_path: Path, endpoints: str, death: signal.Signals) -> None:
    limits = {"FLEET_SPARSE_WORKER_LOST_S": "2", "FLEET_SPARSE_HEARTBEAT_S": "0.3"}
    variables = {"DENSE": "all_reduce", "OPTIMIZER": "SGD", "PADDLE_TRAINER_ENDPOINTS": endpoints, **limits}
    with job(SCRIPT, tmp_path, of_pservers=limits, **variables) as (_, workers):
        for worker in workers:
            wait_for_line(worker, "step 50")
        workers[1].send_signal(death)
        begun_s = time.monotonic()
        output = workers[0].communicate(timeout=TIMEOUT_S)[0]
        took_s = time.monotonic() - begun_s
    assert took_s < END_S
    is_aborted = workers[0].returncode == -signal.SIGABRT  # by a thread of Gloo: nothing of ours can catch it
    is_named = "worker 1 is lost" in output or "FleetSparseError: all-reduce: another worker ended" in output
    assert is_aborted or (is_named and workers[0].returncode != 0), output
