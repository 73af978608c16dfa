"""Read-only pserver processes, and what their reader gets of them while the series goes on."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import Version
from fleet_sparse.errors import ErrorCode, PlanError, ProtocolError, SettingError, ShardUnavailable, TableMismatch
from fleet_sparse.local_pservers import LocalPservers, local_pservers
from fleet_sparse.serving.pserver_reader import PserverReader
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.store import open_chain
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION
from fleet_sparse.worker.net.channel import Channel
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.shard_link import Registration
from support.pservers import RemotePserver
from support.snapshots import ADAM, DENSE, SGD, DenseModel, Model, TableModel, save

IDS = np.array([-(2**63), -1, 0, 7, 2**63 - 1, *range(100, 160)], np.int64)
SHORT = Settings(deadline_s=20.0, retry_s=1.0, connect_s=30.0)


def model_of(value: float) -> Model:
    """All rows and dense values are this one."""
    row = np.full(2, value, np.float32).tobytes()
    values = np.full(DENSE.num_values, value, np.float32)
    dense = DenseModel(DENSE, values, np.zeros((2, DENSE.num_values), np.float32), 1)
    return Model((TableModel(SGD, {int(id_): (row, b"", 0) for id_ in IDS}), TableModel(ADAM, {})), (dense,))


def version_of(where: Path, name: str) -> Version:
    manifest = open_chain(directory_at(str(where / name)))[-1][1]
    return Version(manifest.number, int(manifest.checksum))


@contextmanager
def serving(root: Path, num_shards: int = 2, dirname: str = "rows", **variables: str) -> Iterator[LocalPservers]:
    variables = {"FLEET_SPARSE_VERSION_KEEP_S": "0.001", **variables}
    with local_pservers(
        num_shards, root=root, load_dirname=dirname, arguments=["--read-only"], environment=variables
    ) as pservers:
        yield pservers


def wait_for(reader: PserverReader, version: Version) -> None:
    known = reader.newest()
    while known != version:
        assert known is not None
        known = reader.await_version(known)


@pytest.mark.parametrize("channel", ["stream", "zmq"])
def test_pservers_follow_a_series_and_forget_the_oldest(
    tmp_path: Path, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "rows"
    versions = [version_of(where, save(where, model_of(1.0), 3))]
    settings = Settings(channel=channel)  # type: ignore[arg-type]
    with (
        serving(tmp_path, FLEET_SPARSE_CHANNEL=channel) as pservers,
        PserverReader(pservers.endpoints, settings) as reader,
    ):
        reading = reader.read({"sgd": IDS, "a/b@1": IDS[:0]}, ["dense"])
        assert (reading.version, set(reading.rows["sgd"].ravel()), set(reading.values["dense"])) == (
            versions[0],
            {1.0},
            {1.0},
        )
        assert reading.rows["a/b@1"].shape == (0, 3)
        for value in (2.0, 3.0):
            versions.append(version_of(where, save(where, model_of(value), kind="delta")))
            wait_for(reader, versions[-1])
            for back, expected in enumerate((value, value - 1)):
                reading = reader.read({"sgd": IDS}, ["dense"], version=versions[-1 - back])
                assert set(reading.rows["sgd"].ravel()) | set(reading.values["dense"]) == {expected}
            assert reader.read({"sgd": np.array([5, 5])}).rows["sgd"].tolist() == [[0.5, 0.5]] * 2
            changed = reader.changed(versions[-1], versions[-2])
            assert changed is not None
            assert sorted(changed["sgd"].tolist()) == sorted(IDS.tolist())
        assert reader.changed(versions[1], versions[0]) is None
        with pytest.raises(ProtocolError) as gone:
            reader.read({"sgd": IDS}, version=versions[0])
        assert gone.value.code is ErrorCode.VERSION_GONE


def test_every_reading_while_deltas_come_is_of_one_version(tmp_path: Path) -> None:
    where = tmp_path / "rows"
    truth = {version_of(where, save(where, model_of(0.0), 2)): 0.0}
    readings: list[tuple[Version, set[float]]] = []
    stop = threading.Event()
    with serving(tmp_path, 3) as pservers, PserverReader(pservers.endpoints, SHORT) as reader:

        def read() -> None:
            while not stop.is_set():
                reading = reader.read({"sgd": IDS}, ["dense"])
                found = set(reading.rows["sgd"].ravel().tolist()) | set(reading.values["dense"].tolist())
                readings.append((reading.version, found))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            with PserverReader(pservers.endpoints, SHORT) as other:
                for number in range(1, 8):
                    version = version_of(where, save(where, model_of(float(number)), 2, kind="delta"))
                    truth[version] = float(number)
                    wait_for(other, version)
        finally:
            stop.set()
            thread.join()
    assert len(readings) > 10
    assert [each for each in readings if each[1] != {truth[each[0]]}] == []
    numbers = [version.number for version, _ in readings]
    assert numbers == sorted(numbers)


def test_a_pserver_that_is_started_again_is_found(tmp_path: Path) -> None:
    where = tmp_path / "rows"
    save(where, model_of(1.0))
    with serving(tmp_path, 2) as pservers, PserverReader(pservers.endpoints, SHORT) as reader:
        assert set(reader.read({"sgd": IDS}).rows["sgd"].ravel()) == {1.0}
        pservers.processes[1].restart("--read-only", "--load", "rows")
        assert set(reader.read({"sgd": IDS}).rows["sgd"].ravel()) == {1.0}


def test_connections_are_opened_to_replicas_that_are_there(tmp_path: Path) -> None:
    save(tmp_path / "rows", model_of(1.0))
    opened: list[int] = []

    def open_and_note(registrations: Sequence[Registration], *arguments: Any, **options: Any) -> Channel:
        opened.append(len(registrations))
        return open_channel(registrations, *arguments, **options)

    with ExitStack() as stack:
        replicas = [stack.enter_context(serving(tmp_path, 1)) for _ in range(2)]
        endpoints = ["|".join(each.endpoints[0] for each in replicas)]
        reader = stack.enter_context(PserverReader(endpoints, SHORT, open_channel=open_and_note))
        replicas[0].processes[0].kill()
        while not reader.problems:
            time.sleep(0.01)
        replicas[1].processes[0].restart("--read-only", "--load", "rows")
        assert set(reader.read({"sgd": IDS}).rows["sgd"].ravel()) == {1.0}
        assert opened[-1] == 1
        num_opened = len(opened)
        replicas[0].processes[0].restart("--read-only", "--load", "rows")
        while reader.problems:
            time.sleep(0.01)
        reader.close()
        with pytest.raises(ShardUnavailable):
            reader.read({"sgd": IDS})
        assert len(opened) == num_opened


def test_one_snapshot_is_served_for_good(tmp_path: Path) -> None:
    where = tmp_path / "rows"
    name = save(where, model_of(1.0))
    with serving(tmp_path, 1, f"rows/{name}") as pservers, PserverReader(pservers.endpoints, SHORT) as reader:
        save(where, model_of(2.0), kind="delta")
        assert reader.newest() == version_of(where, name)
        shutil.rmtree(where)
        assert set(reader.read({"sgd": IDS}).rows["sgd"].ravel()) == {1.0}


def test_stats_name_versions_and_failed_adoptions(tmp_path: Path) -> None:
    where = tmp_path / "rows"
    first = version_of(where, save(where, model_of(1.0)))
    with serving(tmp_path, 1) as pservers, PserverReader(pservers.endpoints, SHORT) as reader:
        wider = TableModel(TableSpec(name="sgd", dim=5, rule="sgd", initializer=constant(0.5)), {})
        bad = save(where, Model((wider, model_of(0.0).tables[1]), model_of(0.0).dense))
        pserver = RemotePserver(pservers.endpoints[0])
        stats = pserver.call(messages.StatsRequest())
        while not stats.serving.num_failed:
            stats = pserver.call(messages.StatsRequest())
        assert [(each.number, each.checksum) for each in stats.serving.versions] == [tuple(first)]
        assert "dim 2 and 5" in stats.serving.last_failure
        shutil.rmtree(where / bad)
        wait_for(reader, version_of(where, save(where, model_of(3.0), kind="delta")))
        stats = pserver.call(messages.StatsRequest())
        assert (stats.serving.num_adopted, stats.serving.last_failure) == (1, "")
        pserver.close()


def test_calls_of_training_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "rows", model_of(1.0))
    with serving(tmp_path, 1) as pservers:
        pserver = RemotePserver(pservers.endpoints[0])
        with pytest.raises(PlanError, match="--read-only"):
            pserver.register(SGD)
        with pytest.raises(PlanError):
            pserver.call(messages.ShrinkRequest())
        attach = messages.AttachRequest(protocol_version=CONTROL_VERSION, client_id=b"c" * 16)
        other = TableSpec(name="sgd", dim=3, rule="sgd", initializer=constant(0.5))
        with pytest.raises(TableMismatch, match="dim 2 and 3"):
            pserver.call(messages.AttachRequest(**{**fields_of(attach), "specs": [other.to_json()]}))
        absent = TableSpec(name="absent", dim=3, rule="sgd", initializer=constant(0.5))
        with pytest.raises(TableMismatch, match="'absent'"):
            pserver.call(messages.AttachRequest(**{**fields_of(attach), "specs": [absent.to_json()]}))
        for wrong in ({"protocol_version": 5}, {"client_id": b""}):
            with pytest.raises(ProtocolError):
                pserver.call(messages.AttachRequest(**{**fields_of(attach), **wrong}))
        assert len(pserver.call(attach).tables) == 3
        pserver.close()


def fields_of(request: messages.AttachRequest) -> dict[str, object]:
    return {field.name: value for field, value in request.ListFields()}


def test_a_reader_at_pservers_that_train_is_refused(tmp_path: Path) -> None:
    with local_pservers(1, root=tmp_path) as pservers, pytest.raises(PlanError, match="--read-only"):
        PserverReader(pservers.endpoints, SHORT)


def test_wrong_arguments_of_a_read_are_named_before_it(tmp_path: Path) -> None:
    save(tmp_path / "rows", model_of(1.0))
    with serving(tmp_path, 2) as pservers:
        with pytest.raises(SettingError):
            PserverReader(pservers.endpoints[::-1], SHORT)
        with PserverReader(pservers.endpoints, SHORT) as reader:
            with pytest.raises(ValueError, match="'absent'"):
                reader.read({"absent": IDS})
            with pytest.raises(ValueError, match="'absent'"):
                reader.read({}, ["absent"])
            with pytest.raises(ValueError, match="float32"):
                reader.read({"sgd": IDS.astype(np.float32)})  # type: ignore[dict-item]


@pytest.mark.parametrize("arguments", [["--read-only"], ["--read-only", "--load", "rows", "--load-table", "sgd"]])
def test_read_only_needs_a_whole_snapshot(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "fleet_sparse.pserver", "--shard", "0", "--num-shards", "1"]
    ended = subprocess.run(
        [*command, "--control", "127.0.0.1:0", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "SettingError: --read-only" in ended.stderr


def test_a_pserver_does_not_start_with_a_damaged_serve_file(tmp_path: Path) -> None:
    save(tmp_path / "rows", model_of(1.0))
    (tmp_path / "rows" / "SERVE.json").write_bytes(b"{}")
    command = [sys.executable, "-m", "fleet_sparse.pserver", "--shard", "0", "--num-shards", "1", "--read-only"]
    ended = subprocess.run(
        [*command, "--control", "127.0.0.1:0", "--load", "rows"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "SERVE.json" in ended.stderr


def test_a_reader_that_waits_for_pservers_says_for_which(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), pytest.raises(ShardUnavailable):
        PserverReader("127.0.0.1:1|127.0.0.1:2", Settings(connect_s=1.5))
    assert [each for each in caplog.messages if "not up yet" in each] == [
        "shard 0 at 127.0.0.1:1|127.0.0.1:2 is not up yet, waiting for up to 1.5 s"
    ]
