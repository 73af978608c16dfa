"""`fleet-sparse log`: arguments, output and exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.errors import FleetSparseError, SnapshotError
from fleet_sparse.pserver.admin.log_recovery import start_log, write_checkpoint
from fleet_sparse.pserver.admin.resumed import ResumedJob
from fleet_sparse.pserver.lease.coordinator import this_process
from fleet_sparse.pserver.lease.directory import LEASES, DirectoryCoordinator
from fleet_sparse.pserver.log.control_state import RegisteredWorker, ReportedProgress
from fleet_sparse.pserver.log.log_format import record_ends
from fleet_sparse.pserver.log.log_writer import LogWriter
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import Manifest, WorkerPosition
from fleet_sparse.snapshot.store import SnapshotStore
from fleet_sparse.worker.control.resumed import Position, parse_resumed
from support.logs import IDENTITY, close, load_into, logged_shard
from support.saves import loaded, rows_in
from support.shards import ADAM, SGD, FrameClient, floats, ids_of, make_shard, push


def log(*arguments: Any, fails: int = 0) -> str:
    """Runs a command; raises what it raises, and its output otherwise."""
    result = CliRunner().invoke(cli.app, ["log", *map(str, arguments)])
    if isinstance(result.exception, FleetSparseError):
        raise result.exception
    assert result.exit_code == fails, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log of two tables and three pushes."""
    shard = logged_shard(tmp_path / "shard-0-of-1", SGD, ADAM)
    client = FrameClient(shard)
    for _ in range(3):
        client.push(push(SGD, ids_of(1, 2), floats([1.0, 0.0], [2.0, 0.0])))
        assert shard.log is not None
        shard.log.writer.sync()
    close(shard)
    return tmp_path / "shard-0-of-1"


def test_inspect_counts_the_records_of_each_kind(directory: Path) -> None:
    (summary,) = json.loads(log("inspect", directory, "--json"))["logs"]
    assert summary["records"] == {"TABLE": 2, "APPLY": 3}
    assert (summary["shard"], summary["newest_lsn"], summary["checkpoint"]) == (0, 5, None)
    assert "3 APPLY" in log("inspect", directory)


def change(directory: Path, lsn: int) -> Path:
    """Changes a byte of a record; returns its segment."""
    path = next(directory.glob("*.fsl"))
    content = bytearray(path.read_bytes())
    (end,) = [end for head, end in record_ends(memoryview(content)) if head.lsn == lsn]
    content[end - 1] ^= 1
    path.write_bytes(content)
    return path


def test_verify_finds_a_changed_byte(directory: Path) -> None:
    assert log("verify", directory).endswith("good\n")
    path = change(directory, 4)
    assert str(path) in log("verify", directory, fails=1)
    assert json.loads(log("inspect", directory, "--json", fails=1))["logs"][0]["error"]


@pytest.mark.parametrize("is_loaded", [False, True], ids=["checkpoint", "load"])
def test_verify_finds_a_changed_byte_of_a_rows_file(directory: Path, is_loaded: bool) -> None:
    shard = logged_shard(directory)
    assert shard.log is not None
    if is_loaded:
        load_into(shard, make_shard(SGD, ADAM))
    else:
        write_checkpoint(shard)
    shard.log.writer.sync()
    close(shard)
    assert log("verify", directory).endswith("good\n")
    (path,) = directory.glob("load-*/*.fss" if is_loaded else "checkpoint-*/*.fss")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (summary,) = json.loads(log("verify", directory, "--json", fails=1))["logs"]
    assert path.name in summary["error"]
    log("inspect", directory)
    path.unlink()
    log("verify", directory, fails=1)


def test_verify_reads_no_rows_of_a_load_that_is_void(directory: Path) -> None:
    shard = logged_shard(directory)
    log_of_shard = shard.log
    assert log_of_shard is not None
    load_into(shard, make_shard(SGD, ADAM))
    log_of_shard.void()
    close(shard)
    close(logged_shard(directory))
    assert not list(directory.glob("load-*"))
    assert log("verify", directory).endswith("good\n")


def test_verify_names_a_torn_end(directory: Path) -> None:
    change(directory, 5)
    (summary,) = json.loads(log("verify", directory, "--json"))["logs"]
    assert (summary["error"], summary["torn_bytes"] > 0) == (None, True)


@pytest.mark.parametrize("name", ["", "nowhere", "serverlog.0"])
def test_a_missing_log_is_bad(tmp_path: Path, name: str) -> None:
    (tmp_path / "serverlog.0").touch()
    for command in ("verify", "inspect"):
        text = log(command, tmp_path / name, fails=1)
        assert text.startswith(f"{tmp_path / name}: there is no log")


def test_to_snapshot_has_the_rows_of_the_log(directory: Path, tmp_path: Path) -> None:
    log("to-snapshot", tmp_path / "model", directory)
    shards = loaded(tmp_path / "model", 1)
    rows = FrameClient(shards[0]).rows(SGD, 1, 2)
    assert rows == [[-2.5, 0.5], [-5.5, 0.5]]
    assert len(rows_in(shards, SGD)) == 2


def test_to_snapshot_needs_one_log_of_each_shard(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="each once"):
        log("to-snapshot", tmp_path / "model", directory, directory)
    with pytest.raises(SnapshotError, match="there is no log"):
        log("to-snapshot", tmp_path / "model", tmp_path / "nothing")
    other = tmp_path / "other"
    with closing(LogWriter(other, IDENTITY._replace(shard=1, num_shards=2))):
        pass
    with pytest.raises(SnapshotError, match="2 lists of pservers"):
        log("to-snapshot", tmp_path / "model", directory, other)


@pytest.fixture
def coordinator(directory: Path) -> Iterator[DirectoryCoordinator]:
    """Holds the lease of the log."""
    coordinator = DirectoryCoordinator(directory.parent / LEASES, "a job")
    assert coordinator.lease(directory.name, 60.0) == 1
    yield coordinator
    coordinator.close()


def test_to_snapshot_refuses_a_log_that_is_written(
    directory: Path, coordinator: DirectoryCoordinator, tmp_path: Path
) -> None:
    with pytest.raises(SnapshotError):
        log("to-snapshot", tmp_path / "model", directory)
    assert not (tmp_path / "model").exists()
    coordinator.release(directory.name)
    log("to-snapshot", tmp_path / "model", directory)


def test_verify_and_inspect_name_the_writer(directory: Path, coordinator: DirectoryCoordinator) -> None:
    assert this_process() in log("verify", directory)
    assert json.loads(log("verify", directory, "--json"))["logs"][0]["writer"] == this_process()
    assert this_process() in log("inspect", directory)
    coordinator.release(directory.name)
    assert json.loads(log("verify", directory, "--json"))["logs"][0]["writer"] is None


def test_a_segment_that_a_pserver_removes_is_reported(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(_: Path) -> Any:
        raise FileNotFoundError("removed")

    monkeypatch.setattr("fleet_sparse.pserver.log.log_reader.read_header", removed)
    assert "removed" in log("verify", directory, fails=1)


def snapshot_of_workers(directory: Path, *reports: ReportedProgress, num_workers: int = 2) -> Manifest:
    """Returns the manifest of a snapshot of a log whose workers reported their progress."""
    shard = logged_shard(directory / "shard-0-of-1", SGD)
    assert shard.log is not None
    for worker in range(num_workers):
        client_id = bytes([worker]) * 16
        shard.log.note(
            RegisteredWorker(worker, num_workers, client_id, 1, None, 5, ("", "", ""), worker == 0, 0, False)
        )
    for report in reports:
        shard.log.note(report)
    close(shard)
    log("to-snapshot", directory / "model", directory / "shard-0-of-1")
    return SnapshotStore(directory_at(directory / "model")).manifest("000001-full")


def test_to_snapshot_has_the_newest_positions_of_workers(tmp_path: Path) -> None:
    reports = [
        ReportedProgress(1, 7, '{"epoch": 0, "batch": 7}'),
        ReportedProgress(0, 5, '{"epoch": 0, "batch": 5}'),
        ReportedProgress(1, 9, '{"epoch": 1, "batch": 2}'),
    ]
    manifest = snapshot_of_workers(tmp_path, *reports)
    expected = (WorkerPosition(0, 5, {"epoch": 0, "batch": 5}), WorkerPosition(1, 9, {"epoch": 1, "batch": 2}))
    assert manifest.workers == expected


def test_a_worker_continues_from_the_positions_of_to_snapshot(tmp_path: Path) -> None:
    reports = [ReportedProgress(worker, 9, '{"epoch": 1, "batch": 2}') for worker in range(2)]
    text = ResumedJob(snapshot_of_workers(tmp_path, *reports)).json_for(1)
    resumed = parse_resumed(text, 2, in_step=False)
    assert (resumed.step, resumed.position) == (9, Position(1, 2))


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], ()),
        ([ReportedProgress(1, 3, "")], (WorkerPosition(0, 0), WorkerPosition(1, 3))),
        ([ReportedProgress(0, 3, "no JSON")], (WorkerPosition(0, 3), WorkerPosition(1, 0))),
        ([ReportedProgress(0, 3, "NaN")], (WorkerPosition(0, 3), WorkerPosition(1, 0))),
    ],
)
def test_unknown_positions_of_to_snapshot(
    tmp_path: Path, reports: list[ReportedProgress], expected: tuple[WorkerPosition, ...]
) -> None:
    assert snapshot_of_workers(tmp_path, *reports).workers == expected


def shard_log(directory: Path, index: int, *, job_id: str, workers_job: int) -> Path:
    """Writes the log of one of two shards, whose supervisor gave it an id."""
    shard = make_shard(shard=index, num_shards=2)
    path = directory / f"shard-{index}-of-2"
    start_log(shard, path, Settings(durability="log", job_id=job_id), segment_bytes=1 << 16)
    assert shard.log is not None
    if workers_job:
        shard.log.note(RegisteredWorker(0, 1, bytes(16), 1, None, workers_job, ("", "", ""), True, 0, False))
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
