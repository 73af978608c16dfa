"""A pserver process that is killed while it trains, and started again with its log."""

from __future__ import annotations

import itertools
import random
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread, Timer

import grpc
import numpy as np
import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.local_pservers import PserverProcess
from fleet_sparse.pserver.log.checkpoint import CHECKPOINT
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.tools.snapshots.diff import diff
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.frame_format import Op
from support.pservers import RemotePserver, RemoteShard, logged_pserver
from support.saves import save
from support.shards import ADAM, SGD, FrameClient, floats, ids_of, make_shard, pull, push

IDS = np.arange(50)
GRADS = floats(*([1.0, 0.0] for _ in IDS))


def client_of(remote: RemotePserver) -> FrameClient[RemoteShard]:
    """Returns the client of all pushes, connected again; it continues behind those that are applied."""
    client = FrameClient(remote.register(SGD, job_id="a"))
    client.seq = client.ask(Op.PULL, pull(SGD, ids_of(1))).header.push_seq
    return client


def push_all(client: FrameClient[RemoteShard]) -> None:
    assert client.push(push(SGD, IDS, GRADS)).error is None


def log_of(directory: Path) -> Path:
    return directory / "log" / "shard-0-of-1"


def save_all(remote: RemotePserver, save_id: str, kind: str = "full") -> str:
    """Makes a save as worker 0 does; returns the path of the snapshot."""
    plan = remote.call(messages.PlanSaveRequest(dirname="model", save_id=save_id, kind=kind))
    if remote.call(messages.BeginSaveRequest(plan=plan, position=messages.WorkerPosition())).needs_full:
        remote.call(messages.EndSaveRequest(save_id=save_id))
        return save_all(remote, f"{save_id}-full")
    file = remote.call(messages.WriteSaveRequest(save_id=save_id))
    finished = remote.call(messages.FinishSaveRequest(plan=plan, files=[file]))
    remote.call(messages.EndSaveRequest(save_id=save_id, committed=True, checksum=finished.checksum))
    return str(finished.snapshot)


def save_until_killed(remote: RemotePserver) -> None:
    """Saves, a full snapshot and then deltas, until the pserver does not answer."""
    with suppress(grpc.RpcError, FleetSparseError):
        for number in itertools.count():
            save_all(remote, f"{secrets.token_hex(4)}-{number}", "delta" if number else "full")


def rounds(directory: Path, num_rounds: int, seed: int = 3, *, saves: bool = False, **variables: str) -> int:
    """Kills a pserver that often while it gets pushes, and perhaps saves; returns the number of pushes.

    After each start every row has each acked push once, and the one that was not acked at most once.
    """
    generator, num_acked = random.Random(seed), 0
    for _ in range(num_rounds):
        with logged_pserver(directory, **variables) as (pserver, remote):
            client = client_of(remote)
            assert client.seq in (num_acked, num_acked + 1)
            num_acked = client.seq
            assert {row[0] for row in client.rows(SGD, *IDS.tolist())} == {0.5 - num_acked}
            saving = Thread(target=save_until_killed, args=(remote,))
            if saves:
                saving.start()
            timer = Timer(generator.uniform(0.0, 0.3 if saves else 0.05), pserver.process.kill)
            timer.start()
            with pytest.raises(ConnectionError):
                while True:
                    push_all(client)
                    num_acked = client.seq
            timer.join()
            if saves:
                saving.join()
        if saves:
            shutil.rmtree(directory / "model", ignore_errors=True)
    return num_acked


@pytest.mark.guarantee("W1")
def test_a_killed_pserver_has_every_acked_push(tmp_path: Path) -> None:
    assert rounds(tmp_path, 3) > 0


@pytest.mark.guarantee("W1")
def test_a_pserver_that_is_killed_during_saves_has_every_push(tmp_path: Path) -> None:
    assert rounds(tmp_path, 3, saves=True) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills_during_saves_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    assert rounds(tmp_path, 10, seed, saves=True, FLEET_SPARSE_CHECKPOINT_BYTES="50000") > 10


@pytest.mark.guarantee("W1")
def test_a_killed_pserver_needs_no_snapshot_that_it_saved(tmp_path: Path) -> None:
    with logged_pserver(tmp_path) as (_, remote):
        client = client_of(remote)
        push_all(client)
        shutil.rmtree(save_all(remote, "a"))
        push_all(client)
    assert next(log_of(tmp_path).glob("checkpoint-*/*.fss")).stat().st_nlink == 1
    with logged_pserver(tmp_path) as (_, remote):
        client = client_of(remote)
        assert client.seq == 2
        assert client.rows(SGD, 1) == [[-1.5, 0.5]]


@pytest.mark.guarantee("W1")
def test_a_save_after_a_kill_equals_one_without_it(tmp_path: Path) -> None:
    saves = []
    for name, is_killed in (("undisturbed", False), ("killed", True)):
        directory = tmp_path / name
        directory.mkdir()
        with logged_pserver(directory) as (pserver, remote):
            client = FrameClient(remote.register(ADAM, job_id="a"))
            for number in range(20):
                rng = np.random.default_rng(number)
                ids = np.unique(rng.integers(0, 90, 30))
                grads = rng.normal(0, 1, (len(ids), ADAM.dim)).astype(np.float32)
                assert client.push(push(ADAM, ids, grads)).error is None
                if number == 9:  # what comes behind it is in the log alone
                    save_all(remote, "checkpoint")
            if not is_killed:
                saves.append(save_all(remote, "end"))
            pserver.process.kill()
        if is_killed:
            with logged_pserver(directory) as (_, remote):
                saves.append(save_all(remote, "end"))
    with open_content(saves[0]) as undisturbed, open_content(saves[1]) as killed:
        assert diff(undisturbed, killed).is_equal


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("durability", ["log", "sync"])
def test_two_hundred_kills_lose_and_double_nothing(tmp_path: Path, durability: str, seed: int) -> None:
    # Ten kills each. A checkpoint every 50 KB, so that some hit one.
    variables = {"FLEET_SPARSE_DURABILITY": durability, "FLEET_SPARSE_CHECKPOINT_BYTES": "50000"}
    assert rounds(tmp_path, 10, seed, **variables) > 10


def test_stop_removes_the_log_and_a_signal_leaves_it(tmp_path: Path) -> None:
    with logged_pserver(tmp_path) as (pserver, remote):
        push_all(client_of(remote))
        pserver.terminate()
        pserver.wait()
    assert LogReader(log_of(tmp_path)).paths
    with logged_pserver(tmp_path) as (pserver, remote):
        remote.call(messages.StopRequest())
        pserver.wait()
    assert not log_of(tmp_path).exists()


def test_a_checkpoint_is_written_while_a_pserver_serves(tmp_path: Path) -> None:
    with logged_pserver(tmp_path, FLEET_SPARSE_CHECKPOINT_BYTES="5000") as (_, remote):
        client = client_of(remote)
        deadline = time.monotonic() + 30
        while not (log_of(tmp_path) / CHECKPOINT).exists():
            assert time.monotonic() < deadline
            push_all(client)
        seq = client.seq
    with logged_pserver(tmp_path) as (_, remote):
        client = client_of(remote)
        assert client.seq == seq
        assert client.rows(SGD, 1) == [[0.5 - seq, 0.5]]


def test_a_loaded_snapshot_is_in_the_log(tmp_path: Path) -> None:
    shard = make_shard(SGD)
    FrameClient(shard).push(push(SGD, IDS, 4 * GRADS))
    save([shard], tmp_path / "model")
    for number in range(2):  # the second start has the log, and does not load
        with logged_pserver(tmp_path, "--load", "model") as (_, remote):
            client = client_of(remote)
            assert client.seq == number + 1  # the snapshot has the first push
            assert client.rows(SGD, 1) == [[-3.5 - number, 0.5]]
            push_all(client)


FAILING_DISK = """
import errno, os
from pathlib import Path

RULES = []
_real, _failing = os.fdatasync, Path(os.environ["FAILING_DISK"])


def _sync(file):
    if _failing.exists():
        _failing.unlink()
        raise OSError(errno.EIO, "input/output error")
    _real(file)


os.fdatasync = _sync
"""


@pytest.mark.guarantee("W13")
def test_a_pserver_whose_disk_fails_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "failing_disk.py").write_text(FAILING_DISK)
    failing = tmp_path / "failing"
    variables = {
        "FAILING_DISK": str(failing),
        "FLEET_SPARSE_RULES": "failing_disk",
        "FLEET_SPARSE_DURABILITY": "sync",
        "PYTHONPATH": str(tmp_path),
    }
    with logged_pserver(tmp_path, "--supervised", **variables) as (pserver, remote):
        client = client_of(remote)
        push_all(client)
        failing.touch()
        with pytest.raises(ConnectionError):
            push_all(client)
        assert not failing.exists()
        again, client = connected_again(pserver)
        assert client.seq == 1
        push_all(client)
        assert client.rows(SGD, 1) == [[-1.5, 0.5]]
        again.close()


def connected_again(pserver: PserverProcess) -> tuple[RemotePserver, FrameClient[RemoteShard]]:
    """Returns connection and client once the supervisor has started the pserver again."""
    deadline = time.monotonic() + 60
    while True:
        again = RemotePserver(pserver.endpoint)
        try:
            return again, client_of(again)
        except grpc.RpcError:
            again.close()
            assert time.monotonic() < deadline
            time.sleep(0.05)
