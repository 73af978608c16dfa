"""New ids without end: a pserver keeps within its memory, counts ids without a row, and trains the rows it has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.local_pservers import PserverProcess
from fleet_sparse.settings import Settings
from fleet_sparse.worker.rows.deduplicator import Deduplicator, UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.pserver_job import connected
from support.shards import CLUSTER

TABLE = TableSpec(name="wide", dim=64, rule="sgd", initializer=constant(0.5))
NUM_FIRST = 1_000
NUM_NEW = 100_000
GROUP = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 1 << 30


@contextmanager
def control_group(name: str) -> Iterator[Path]:
    """A control group of 1 GB; skips the test where none can be made."""
    group = GROUP / name
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def ids_from(begin: int, count: int) -> UniqueIds:
    unique, _ = Deduplicator(Placement.even(1)).unique([np.arange(begin, begin + count)], TABLE.salt)
    return unique


def check_new_ids_without_end(process: PserverProcess, num_batches: int) -> None:
    """Pushes new ids, and those that came first, in each step."""
    ones = np.ones((NUM_NEW, TABLE.dim), np.float32)
    rows = np.empty((NUM_NEW, TABLE.dim), np.float32)
    first = ids_from(0, NUM_FIRST)
    with connected([process.endpoint], [TABLE], Settings(), mode=Mode()) as (control, client):
        for step in range(1, num_batches + 1):
            client.push([RowBatch(TABLE, first, ones[:NUM_FIRST], 1.0, step)])
            client.push([RowBatch(TABLE, ids_from(step * NUM_NEW, NUM_NEW), ones, 1.0, step)])
            client.pull([RowBatch(TABLE, first, rows[:NUM_FIRST])])
            assert (rows[:NUM_FIRST] == 0.5 - step).all()
        (state,) = control.stats()[0].tables
        num_trained = 0
        for step in range(1, num_batches + 1):
            client.pull([RowBatch(TABLE, ids_from(step * NUM_NEW, NUM_NEW), rows)])
            has_row = rows[:, 0] == -0.5
            assert (rows == np.where(has_row, -0.5, 0.5)[:, None]).all()
            num_trained += int(has_row.sum())
    assert process.process.poll() is None
    assert state.num_rejected_ids > 0
    assert state.num_rows == NUM_FIRST + num_trained
    assert state.num_rows + state.num_rejected_ids == NUM_FIRST + num_batches * NUM_NEW
    print(f"new ids: {state.num_rows} rows, {state.num_rejected_ids} ids without one")


def started(directory: Path, **variables: str) -> PserverProcess:
    environment = {"FLEET_SPARSE_ROOT": str(directory), **variables}
    return PserverProcess(
        0, 1, cluster_id=CLUSTER, directory=directory, environment=environment, log=directory / "pserver.log"
    )


def test_new_ids_past_max_bytes_get_no_rows(tmp_path: Path) -> None:
    process = started(tmp_path, FLEET_SPARSE_MAX_BYTES=str(100 << 20))
    try:
        check_new_ids_without_end(process, 6)
    finally:
        process.kill()
    assert (tmp_path / "pserver.log").read_text().count("\n") < 20


@pytest.mark.slow
def test_new_ids_past_a_control_group_get_no_rows(tmp_path: Path) -> None:
    with control_group(f"fleet_sparse-{os.getpid()}") as group:
        process = started(tmp_path)
        try:
            assert process.endpoint
            (group / "cgroup.procs").write_text(str(process.process.pid))
            check_new_ids_without_end(process, 50)
            assert int((group / "memory.max_usage_in_bytes").read_text()) <= LIMIT_BYTES
        finally:
            process.kill()
    assert (tmp_path / "pserver.log").read_text().count("\n") < 20
