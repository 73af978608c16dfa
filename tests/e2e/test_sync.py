"""Sync training of real processes: the rows of each step, saves, and lost workers and pservers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_sparse.local_pservers import PserverProcess
from support.jobs import job, numbers, output_of, outputs_of, wait_for_line

SCRIPT = "sync_counter.py"
DEADLINE_S = 3
LOST_S = 2
EXIT_S = 10
"""Time to exit after the error, on a busy machine, with stack traces and Paddle's own exit."""


DEADLINE = {"FLEET_SPARSE_DEADLINE_S": str(DEADLINE_S)}


@pytest.mark.guarantee("S6")
def test_save_between_steps_has_the_state_after_the_last_step(tmp_path: Path) -> None:
    """The job has three workers; the last one has fewer batches."""
    outputs = outputs_of(SCRIPT, tmp_path, 3, STEPS="9,9,5", SAVE_AT="3")
    assert [numbers("count", output) for output in outputs] == [[-23.0]] * 3, outputs
    assert numbers("count", output_of(SCRIPT, tmp_path, LOAD="1", STEPS="0")) == [-9.0]


@pytest.mark.guarantee("D1")
def test_all_workers_start_with_the_values_of_worker_0(tmp_path: Path) -> None:
    outputs = outputs_of("initial_dense.py", tmp_path)
    (first,), (second,) = (numbers("before", output) for output in outputs)
    assert first != second
    assert [numbers("after", output) for output in outputs] == [[first], [first]]


@pytest.mark.parametrize(("death", "lost_s"), [(signal.SIGKILL, 60), (signal.SIGSTOP, LOST_S)])
@pytest.mark.guarantee("S8")
def test_lost_worker_ends_the_others_and_is_named(tmp_path: Path, death: signal.Signals, lost_s: int) -> None:
    environment = {"FLEET_SPARSE_WORKER_LOST_S": str(lost_s), "FLEET_SPARSE_HEARTBEAT_S": "0.3"}
    with job(SCRIPT, tmp_path, of_pservers=environment, **DEADLINE, **environment) as (_, workers):
        for worker in workers:
            wait_for_line(worker, "step")
        workers[1].send_signal(death)
        begun_s = time.monotonic()
        output = workers[0].communicate(timeout=60)[0]
        took_s = time.monotonic() - begun_s
    assert workers[0].returncode not in (0, -signal.SIGKILL), output
    assert "WorkerLost: shard" in output, output
    assert "worker 1 is lost" in output, output
    assert took_s <= LOST_S + EXIT_S


@pytest.mark.parametrize("clip", [{}, {"CLIP": "1"}], ids=["plain", "clipped"])
@pytest.mark.guarantee("I5")
def test_a_step_refused_for_a_tables_size_is_one_of_the_others(tmp_path: Path, clip: dict[str, str]) -> None:
    outputs = outputs_of("sync_size_limit.py", tmp_path, **clip)
    assert ["step 2 refused" in output for output in outputs] == [False, True], outputs
    assert numbers(r"weight in \d", outputs[0]) == [0, -2, -4, -5, -7], outputs
    assert numbers(r"weight in \d", outputs[1]) == [0, -2, -5, -7], outputs
    for output in outputs:
        assert numbers(r"row \d", output) == [-9.0] * 8, output
        assert numbers("rows", output) == [8], output


@pytest.mark.guarantee("F1")
@pytest.mark.parametrize("fate", [PserverProcess.kill, PserverProcess.suspend, PserverProcess.restart])
def test_killed_hung_or_restarted_pserver_ends_every_worker(
    tmp_path: Path, fate: Callable[[PserverProcess], None]
) -> None:
    with job(SCRIPT, tmp_path, **DEADLINE) as (pservers, workers):
        for worker in workers:
            wait_for_line(worker, "step")
        fate(pservers.processes[1])
        begun_s = time.monotonic()
        outputs = [worker.communicate(timeout=60)[0] for worker in workers]
        took_s = time.monotonic() - begun_s
    for output in outputs:
        assert "ShardUnavailable: shard 1 at " in output, output
    assert took_s <= DEADLINE_S + EXIT_S


def test_a_program_that_is_built_late_trains_with_the_others(tmp_path: Path) -> None:
    losses = [numbers("loss", output) for output in outputs_of("late_program.py", tmp_path)]
    assert losses[0] == losses[1]
    assert losses[0][0] == -1.0, "four steps of SGD, each of a mean of 4 values"
