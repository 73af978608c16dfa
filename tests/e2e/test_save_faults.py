"""Saves that fail because the disk is full or a pserver dies: real processes, real files."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError, SnapshotError
from fleet_sparse.local_pservers import LocalPservers
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.jobs import TIMEOUT_S, python
from support.pserver_job import PserverJob, connected, save
from support.saves import saved_rows

SPEC = TableSpec(name="table", dim=16, rule="adagrad", initializer=constant(0.0))
IDS = np.arange(20_000, dtype=np.int64)
FEW_BYTES = 1 << 20


def push(client: Client, step: int) -> None:
    unique, _ = Deduplicator(Placement.even(2)).unique([IDS], SPEC.salt)
    grads = np.full((len(IDS), SPEC.dim), 1.0, np.float32)
    client.push([RowBatch(SPEC, unique, grads, 1.0, step)])
    client.flush()


def num_steps_in(root: Path) -> int:
    """Returns the number of complete pushes in the newest snapshot."""
    (value,) = np.unique(saved_rows(root / "model", SPEC, IDS))
    # Adagrad, with gradients and a learning rate of 1.
    sums = np.cumsum(-1 / np.sqrt(np.arange(1, 10)))
    (num_steps,) = np.flatnonzero(np.isclose(sums, value, rtol=1e-5))
    return int(num_steps) + 1


def limit_files(pservers: LocalPservers, num_bytes: int) -> None:
    """Limits the size of files that the pservers write."""
    for pserver in pservers.processes:
        resource.prlimit(pserver.process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def snapshots(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "model").iterdir())


def test_save_on_a_full_disk_keeps_the_snapshot_before(pserver_job: PserverJob, tmp_path: Path) -> None:
    pservers = pserver_job(2)
    with connected(pservers.endpoints, [SPEC], Settings()) as (control, client):
        push(client, 1)
        save(control, "model")
        limit_files(pservers, FEW_BYTES)
        push(client, 2)
        with pytest.raises(SnapshotError, match=r"shard-\d-of-2\.fss"):
            save(control, "model")
        assert snapshots(tmp_path) == ["000001-full"]
        push(client, 3)
        limit_files(pservers, resource.RLIM_INFINITY)
        assert save(control, "model") == str(tmp_path / "model" / "000002-full")
        push(client, 4)
    assert num_steps_in(tmp_path) == 3


@pytest.mark.parametrize("delay_ms", [0, 3, 8, 20])
def test_pserver_killed_during_a_save_leaves_a_snapshot(pserver_job: PserverJob, tmp_path: Path, delay_ms: int) -> None:
    pservers = pserver_job(2)
    with connected(pservers.endpoints, [SPEC], Settings(deadline_s=1.0, retry_s=0.2)) as (control, client):
        push(client, 1)
        save(control, "model")
        push(client, 2)
        victim = threading.Timer(delay_ms / 1000, pservers.processes[delay_ms % 2].process.kill)
        victim.start()
        try:
            save(control, "model")
        except FleetSparseError:
            least = 1  # there may be a snapshot all the same: only the last answer was lost
        else:
            least = 2
        victim.join()
    assert num_steps_in(tmp_path) in range(least, 3)


def test_background_save_is_complete_when_the_script_ends(tmp_path: Path) -> None:
    script = python("save_and_leave.py", tmp_path, FLEET_SPARSE_ROOT=str(tmp_path))
    output, _ = script.communicate(timeout=TIMEOUT_S)
    assert script.returncode == 0, output
    assert snapshots(tmp_path) == ["000001-full"]
