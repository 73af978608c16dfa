from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse import machine_memory
from fleet_sparse.errors import LeaseLost, SettingError, SnapshotError
from fleet_sparse.net_addresses import Address
from fleet_sparse.pserver import server
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.lease.lease import take_lease
from fleet_sparse.pserver.server import Options, lease_of, make_read_only_shard, make_shard, newest_of, take_shard
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import MANIFEST
from support.fake_coordinator import FakeCoordinator
from support.logs import close
from support.saves import save
from support.shards import DENSE, SGD, FrameClient, floats, ids_of, push
from support.shards import make_shard as shard_of


def test_restarted_pserver_takes_the_snapshot_that_replaced_its(tmp_path: Path) -> None:
    client = FrameClient(shard_of(SGD))
    client.push(push(SGD, ids_of(7), floats([1, 1])))
    save([client.shard], tmp_path / "model", save_id="one")
    client.push(push(SGD, ids_of(8), floats([1, 1])))
    save([client.shard], tmp_path / "model", save_id="two")  # the only one that stays
    address = Address("127.0.0.1", 0)
    options = Options(0, 1, address, (address,), recover="model/000001-full")
    shard, loaded = make_shard(options, Settings(root=str(tmp_path)))
    with closing(shard):
        assert loaded is not None
        assert (loaded.manifest.number, shard.states()[0].num_rows) == (2, 2)


@pytest.mark.guarantee("A8")
@pytest.mark.parametrize(("written_by", "number"), [("two", 2), ("given up", 1)])
def test_restarted_pserver_takes_a_completed_snapshot(tmp_path: Path, written_by: str, number: int) -> None:
    client = FrameClient(shard_of(SGD))
    client.push(push(SGD, ids_of(7), floats([1, 1])))
    save([client.shard], tmp_path / "model", save_id="one")
    save([client.shard], tmp_path / "model", save_id="two")
    written = {"written": "model/000002-full", "written_by": written_by}
    options = Options(0, 1, ADDRESS, (ADDRESS,), recover="model/000001-full", **written)
    assert newest_of(options, Settings(root=str(tmp_path))) == f"model/00000{number}-full"


def test_restarted_pserver_takes_no_snapshot_that_is_incomplete(tmp_path: Path) -> None:
    options = Options(0, 1, ADDRESS, (ADDRESS,), written="model/000002-full", written_by="two")
    assert newest_of(options, Settings(root=str(tmp_path))) is None


def test_restarted_pserver_takes_no_manifest_that_is_torn(tmp_path: Path) -> None:
    snapshot = tmp_path / "model" / "000002-full"
    snapshot.mkdir(parents=True)
    (snapshot / MANIFEST).write_text("{")
    options = Options(0, 1, ADDRESS, (ADDRESS,), written="model/000002-full", written_by="two")
    assert newest_of(options, Settings(root=str(tmp_path))) is None


def test_restarted_pserver_needs_to_see_the_newest_snapshot(tmp_path: Path) -> None:
    (tmp_path / "model").touch()  # where a directory should be
    options = Options(0, 1, ADDRESS, (ADDRESS,), written="model/000002-full", written_by="two")
    with pytest.raises(SnapshotError):
        newest_of(options, Settings(root=str(tmp_path)))


class FakeLifeline:
    """Counts the signs of life of a start, and keeps the end."""

    num_signs = 0
    is_ending = False

    def note_progress(self) -> None:
        self.num_signs += 1

    def report_ending(self) -> None:
        self.is_ending = True


ADDRESS = Address("127.0.0.1", 0)
LOGGED: dict[str, Any] = {"durability": "log", "job_id": "a job"}


def test_a_load_gives_signs_of_life(tmp_path: Path) -> None:
    client = FrameClient(shard_of(SGD))
    client.push(push(SGD, ids_of(7), floats([1, 1])))
    save([client.shard], tmp_path / "model", save_id="one")
    lifeline: Any = FakeLifeline()
    options = Options(0, 1, ADDRESS, (ADDRESS,), load_dirname="model", lifeline=lifeline)
    with closing(make_shard(options, Settings(root=str(tmp_path)))[0]):
        assert lifeline.num_signs > 0


def test_a_load_of_a_read_only_pserver_gives_signs_of_life(tmp_path: Path) -> None:
    client = FrameClient(shard_of(SGD))
    client.push(push(SGD, ids_of(7), floats([1, 1])))
    save([client.shard], tmp_path / "model", save_id="one")
    lifeline: Any = FakeLifeline()
    options = Options(0, 1, ADDRESS, (ADDRESS,), load_dirname="model", is_read_only=True, lifeline=lifeline)
    with closing(make_read_only_shard(options, Settings(root=str(tmp_path)))):
        assert lifeline.num_signs > 0


def test_a_replay_gives_signs_of_life(tmp_path: Path) -> None:
    settings = Settings(root=str(tmp_path), **LOGGED)
    lifeline: Any = FakeLifeline()
    options = Options(0, 1, ADDRESS, (ADDRESS,), lifeline=lifeline)
    with closing(make_shard(options, settings)[0]) as shard:
        assert lifeline.num_signs == 0
        assert shard.log is not None
        for spec in (SGD, replace(SGD, name="other")):
            shard.add_table(spec)
        shard.log.writer.close()
    with closing(make_shard(options, settings)[0]) as shard:
        assert lifeline.num_signs == 2
        assert shard.log is not None
        shard.log.writer.close()


def test_a_first_checkpoint_that_fails_is_no_log_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start loads the snapshot as well: the log has nothing but the state of that checkpoint."""
    client = FrameClient(shard_of(SGD))
    client.push(push(SGD, ids_of(7), floats([1, 1])))
    save([client.shard], tmp_path / "model", save_id="one")
    options = Options(0, 1, ADDRESS, (ADDRESS,), load_dirname="model")
    settings = Settings(root=str(tmp_path), **LOGGED)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Save, "write", fail)
        with pytest.raises(SnapshotError):
            make_shard(options, settings)
    for is_first in (True, False):
        shard, loaded = make_shard(options, settings)
        with closing(shard):
            assert (loaded is not None, shard.states()[0].num_rows) == (is_first, 1)
            assert shard.log is not None
            shard.log.writer.close()


def test_each_attempt_of_a_start_has_a_lease_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FrameClient(shard_of(SGD))
    save([client.shard], tmp_path / "model", save_id="one")
    options, settings = Options(0, 1, ADDRESS, (ADDRESS,), load_dirname="model"), Settings(root=str(tmp_path), **LOGGED)
    with monkeypatch.context() as away:
        away.setattr(server, "load", fail)
        with pytest.raises(SnapshotError):
            take_shard(options, settings)
    _, lease, shard, _ = take_shard(options, settings)
    assert lease is not None
    assert lease.generation == 2
    close(shard)
    lease.release()


def test_a_supervised_pserver_without_its_log_is_no_older_one(tmp_path: Path) -> None:
    options = Options(0, 1, ADDRESS, (ADDRESS,), generation=1000)
    _, lease, shard, _ = take_shard(options, Settings(root=str(tmp_path), **LOGGED))
    assert lease is not None
    assert lease.generation == 1000
    close(shard)
    lease.release()


@pytest.mark.guarantee("W11")
def test_a_log_that_another_one_writes_ends_the_lease(tmp_path: Path) -> None:
    settings = Settings(root=str(tmp_path), **LOGGED)
    options, shards = Options(0, 1, ADDRESS, (ADDRESS,)), []
    leases = [take_lease(FakeCoordinator(), "shard", 3600.0, job="a job", after=after) for after in (0, 1)]
    for lease in leases:  # of two coordinators
        shards.append(make_shard(options, settings, lease)[0])
    former, _ = leases
    assert not former.is_lost
    with pytest.raises(LeaseLost):
        shards[0].begin_checkpoint()
    with pytest.raises(LeaseLost, match="generation 2"):
        former.check()
    for shard, lease in zip(shards, leases, strict=True):
        close(shard)
        lease.release()


def fail(*arguments: Any, **more: Any) -> None:
    raise SnapshotError("the disk is full")


def test_a_restart_waits_while_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, settings = Options(0, 1, ADDRESS, (ADDRESS,), is_restart=True), Settings(root=str(tmp_path), **LOGGED)
    shard, _ = make_shard(options, settings)
    shard.add_table(DENSE)
    close(shard)
    available_bytes = [0, 1 << 30]
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: available_bytes.pop(0))
    monkeypatch.setattr(server, "RETRY_S", 0.0)
    _, lease, again, _ = server._patiently(partial(take_shard, options, settings), options, settings)
    assert [each.name for each in again.states()] == [DENSE.name]
    assert lease is not None
    close(again)
    lease.release()


@pytest.mark.parametrize(
    ("coordinator", "variable"), [("", "FLEET_SPARSE_LOG"), ("etcd://127.0.0.1:1/job", "FLEET_SPARSE_COORDINATOR")]
)
def test_a_lease_that_cannot_be_asked_for_names_its_setting(tmp_path: Path, coordinator: str, variable: str) -> None:
    if coordinator:
        pytest.importorskip("etcd3gw")
    else:
        (tmp_path / "log").touch()
    settings = Settings(root=str(tmp_path), coordinator=coordinator, **LOGGED)
    with pytest.raises(SettingError, match=rf"^{variable}: "):
        lease_of(Options(0, 1, ADDRESS, (ADDRESS,)), settings)


class Reached(Exception):
    """A start came this far."""


@pytest.fixture
def without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three names are not resolved."""
    failures = [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")] * 3
    resolve = socket.getaddrinfo

    def resolve_later(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return resolve(*arguments, **options)

    def reach(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr(socket, "getaddrinfo", resolve_later)
    monkeypatch.setattr(server, "RETRY_S", 0.0)
    monkeypatch.setattr(server, "check_free", reach)
    monkeypatch.setattr(server, "_handle_stops", lambda _: None)


@pytest.mark.usefixtures("without_names")
@pytest.mark.parametrize(("is_restart", "error"), [(False, SettingError), (True, Reached)])
def test_a_restarted_pserver_waits_for_its_name(is_restart: bool, error: type[Exception]) -> None:
    control = Address("localhost", 0)
    with pytest.raises(error):
        server.serve(Options(0, 1, control, (control,), is_restart=is_restart), Settings(failover_s=30.0))


def test_the_end_of_a_job_is_told_before_its_pserver_stops() -> None:
    """It may be killed at any time after that: nothing is to be started again."""
    lifeline: Any = FakeLifeline()
    told = []

    class DataPlane:
        def stop(self) -> None:
            told.append(lifeline.is_ending)

    stopped: Any = DataPlane()
    server._finish(shard_of(SGD), stopped, lifeline)
    assert told == [True]
