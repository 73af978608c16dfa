"""Evaluations read the values that other workers trained."""

from __future__ import annotations

from support.jobs import fleetrun, numbers


def test_idle_worker_evaluates_with_the_trained_weights(tmp_path):
    job = fleetrun("freshness.py", tmp_path, num_servers=2, num_workers=2)
    trained, other = (numbers("evaluated", job.logs[f"workerlog.{worker}"]) for worker in range(2))
    assert len(trained) == 2, job.logs
    assert trained == other
    assert trained[0] != trained[1]
