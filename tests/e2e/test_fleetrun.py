"""Scripts that users write, started as users start them: real fleetrun, real pservers, real Paddle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from support.jobs import TIMEOUT_S, fleetrun, numbers, output_of, python, wait_for_line


def server_environment(port: int) -> dict[str, str]:
    return {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{port}",
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_PORT": str(port),
        "POD_IP": "127.0.0.1",
    }


def test_sparse_embedding_trains_on_2_pservers_with_2_workers(tmp_path):
    job = fleetrun("sparse_embedding.py", tmp_path, num_servers=2, num_workers=2)
    losses = [numbers("loss", job.logs[f"workerlog.{worker}"]) for worker in range(2)]
    # The first worker to pull sees untrained rows; the other may be later.
    assert max(worker[0] for worker in losses) > 0.6, job.logs
    assert max(worker[-1] for worker in losses) < 0.05, job.logs
    for worker in range(2):
        assert "worker done" in job.logs[f"workerlog.{worker}"]
    assert sorted(path.name for path in (tmp_path / "model" / "000001-full").iterdir()) == [
        "MANIFEST.json",
        "shard-0-of-2.fss",
        "shard-1-of-2.fss",
    ]


def test_distributed_embedding_trains_on_2_pservers(tmp_path):
    job = fleetrun("distributed_embedding.py", tmp_path, num_servers=2, num_workers=2)
    losses = [numbers("test loss", job.logs[f"workerlog.{worker}"]) for worker in range(2)]
    assert losses[0] == losses[1], job.logs
    assert losses[0][0] < 0.1


class Trained(NamedTuple):
    """The output and directory of a finished job of one process."""

    directory: Path
    output: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    directory = tmp_path_factory.mktemp("trained")
    return Trained(directory, output_of("distributed_embedding.py", directory))


@pytest.fixture(scope="module")
def saved_rows(trained: Trained) -> str:
    """Returns the line of saved rows that a job of one process prints."""
    output = output_of("evaluate.py", trained.directory)
    (line,) = [line for line in output.splitlines() if line.startswith("rows ")]
    return line


def test_the_same_script_runs_in_one_process(trained):
    assert numbers("test loss", trained.output)[0] < 0.1, trained.output


def test_saved_rows_are_the_same_in_another_job(trained, saved_rows, tmp_path):
    """Three pservers load the snapshot of one; tests/pserver/admin/test_snapshot_loader.py has other numbers."""
    shutil.copytree(trained.directory / "model", tmp_path / "model")
    job = fleetrun("evaluate.py", tmp_path, num_servers=3, num_workers=1)
    assert saved_rows in job.logs["workerlog.0"]


def test_run_server_becomes_a_pserver_without_paddle(tmp_path):
    with python("endless.py", tmp_path, **server_environment(0)) as process:
        try:
            pid = int(wait_for_line(process, r"starts: pid (\d+)")[1])
            wait_for_line(process, "is ready")
            supervisor, pserver = (Path(f"/proc/{each}/maps").read_text() for each in (process.pid, pid))
            process.terminate()
            output, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert "numba" in pserver or "llvmlite" in pserver
    assert "paddle" not in pserver
    assert "numpy" not in supervisor


def test_table_of_1e11_rows_takes_no_memory_of_the_trainer(tmp_path):
    peaks = []
    for size in ("10", "100000000000"):
        peaks += numbers("peak MB", output_of("memory.py", tmp_path, SIZE=size))
    assert abs(peaks[1] - peaks[0]) < 20, peaks
