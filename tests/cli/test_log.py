"""`fleet-sparse log`: arguments, output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.errors import FleetSparseError, SnapshotError
from fleet_sparse.pserver.admin.log_recovery import start_log
from fleet_sparse.pserver.log.control_state import RegisteredWorker
from fleet_sparse.settings import Settings
from support.logs import close, logged_shard
from support.saves import loaded, rows_in
from support.shards import ADAM, SGD, FrameClient, floats, ids_of, make_shard, push


def log(*arguments: Any, fails: int = 0) -> str:
    """Runs a command; raises what it raises, and its output otherwise."""
    result = CliRunner().invoke(cli.app, ["log", *map(str, arguments)])
    if isinstance(result.exception, FleetSparseError):
        raise result.exception
    assert result.exit_code == fails, result.output
    return result.output


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log of two tables and three pushes."""
    shard = logged_shard(tmp_path / "shard-0-of-1", SGD, ADAM)
    client = FrameClient(shard)
    for _ in range(3):
        client.push(push(SGD, ids_of(1, 2), floats([1.0, 0.0], [2.0, 0.0])))
    close(shard)
    return tmp_path / "shard-0-of-1"


def test_inspect_counts_the_records_of_each_kind(directory: Path) -> None:
    (summary,) = json.loads(log("inspect", directory, "--json"))["logs"]
    assert summary["records"] == {"TABLE": 2, "APPLY": 3}
    assert (summary["shard"], summary["newest_lsn"], summary["checkpoint"]) == (0, 5, None)
    assert "3 APPLY" in log("inspect", directory)


def test_verify_finds_a_changed_byte(directory: Path) -> None:
    assert log("verify", directory).endswith("good\n")
    path = next(directory.glob("*.fsl"))
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert str(path) in log("verify", directory, fails=1)
    assert json.loads(log("inspect", directory, "--json", fails=1))["logs"][0]["error"]


def test_a_missing_log_is_bad(tmp_path: Path) -> None:
    log("verify", tmp_path, fails=1)
    log("inspect", tmp_path, fails=1)


def test_to_snapshot_has_the_rows_of_the_log(directory: Path, tmp_path: Path) -> None:
    log("to-snapshot", tmp_path / "model", directory)
    shards = loaded(tmp_path / "model", 1)
    rows = FrameClient(shards[0]).rows(SGD, 1, 2)
    assert rows == [[-2.5, 0.5], [-5.5, 0.5]]
    assert len(rows_in(shards, SGD)) == 2


def test_to_snapshot_needs_one_log_of_each_shard(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError):
        log("to-snapshot", tmp_path / "model", directory, directory)
    with pytest.raises(SnapshotError):
        log("to-snapshot", tmp_path / "model", tmp_path / "nothing")


def shard_log(directory: Path, index: int, *, job_id: str, workers_job: int) -> Path:
    """Writes the log of one of two shards, whose supervisor gave it an id."""
    shard = make_shard(shard=index, num_shards=2)
    path = directory / f"shard-{index}-of-2"
    start_log(shard, path, Settings(durability="log", job_id=job_id), segment_bytes=1 << 16)
    assert shard.log is not None
    if workers_job:
        shard.log.note(RegisteredWorker(0, 1, bytes(16), 1, None, workers_job, ("", "", ""), True, 0))
    close(shard)
    return path


@pytest.mark.parametrize(
    ("job_ids", "workers_jobs", "is_one_job"),
    [("ab", (5, 5), True), ("aa", (5, 0), True), ("ab", (5, 6), False), ("ab", (5, 0), False), ("ab", (0, 0), False)],
)
def test_to_snapshot_takes_logs_of_one_job(
    tmp_path: Path, job_ids: str, workers_jobs: tuple[int, int], is_one_job: bool
) -> None:
    paths = [shard_log(tmp_path, index, job_id=job_ids[index], workers_job=workers_jobs[index]) for index in range(2)]
    if is_one_job:
        log("to-snapshot", tmp_path / "model", *paths)
        return
    with pytest.raises(SnapshotError):
        log("to-snapshot", tmp_path / "model", *paths)
    assert list((tmp_path / "model").iterdir()) == []
