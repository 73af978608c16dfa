from __future__ import annotations

import gc
import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded import EmbeddedPservers, local_dense, start_embedded
from fleet_sparse.embedded_client import EmbeddedClient
from fleet_sparse.errors import (
    FleetSparseError,
    PlanError,
    ShardUnavailable,
    SnapshotError,
    TableMismatch,
)
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.liveness import ShardTables
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.pserver_job import save

SPEC = TableSpec(name="table", dim=2, rule="adagrad", initializer=constant(1.0))
DENSE = DenseSpec("dense", "sgd", (), (Segment("w", 0, 5, 1.0),))
IDS = np.arange(100, dtype=np.int64)


@contextmanager
def embedded(
    settings: Settings, load_dirname: str | None = None, num_shards: int = 1
) -> Iterator[tuple[ControlClient, EmbeddedClient]]:
    control, client = start_embedded(settings, load_dirname, num_shards=num_shards)
    with control:
        control.register([SPEC, DENSE], 0, 1)
        with client:
            yield control, client


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(root=str(tmp_path), heartbeat_s=0.05)


def push(client: EmbeddedClient, num_shards: int = 1) -> None:
    unique, _ = Deduplicator(Placement.even(num_shards)).unique([IDS], SPEC.salt)
    client.push([RowBatch(SPEC, unique, np.ones((100, 2), np.float32), 0.5, 1)])


def rows(client: EmbeddedClient, num_shards: int = 1) -> NDArray[np.float32]:
    unique, (inverse,) = Deduplicator(Placement.even(num_shards)).unique([IDS], SPEC.salt)
    out = np.empty((100, 2), np.float32)
    client.pull([RowBatch(SPEC, unique, out)])
    return out[inverse]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_rows_are_pulled_and_pushed(settings: Settings, num_shards: int) -> None:
    with embedded(settings, num_shards=num_shards) as (_, client):
        assert set(rows(client, num_shards).flat) == {1.0}
        push(client, num_shards)
        np.testing.assert_allclose(rows(client, num_shards), 0.5, atol=1e-5)


def test_root_may_be_a_url(tmp_path: Path) -> None:
    settings = Settings(root=f"memory://{tmp_path}")
    for name in ("000001-full", "000002-full"):
        with embedded(settings, num_shards=2) as (control, client):
            push(client, 2)
            saved = rows(client, 2)
            where = save(control, "model")
            assert where.endswith(f"{tmp_path}/model/{name}")
    with embedded(settings, where, 3) as (_, client):
        np.testing.assert_array_equal(rows(client, 3), saved)
    assert not list(tmp_path.iterdir())


def test_stop_before_close_is_no_error(settings: Settings) -> None:
    with embedded(settings) as (control, client):
        push(client)
        client.flush()
        control.stop()


@pytest.mark.parametrize("durability", ["log", "sync"])
def test_it_writes_no_log(settings: Settings, durability: str) -> None:
    with embedded(replace(settings, durability=durability)) as (_, client):
        push(client)
    assert os.listdir(settings.root) == []


def test_a_snapshot_that_is_not_there_is_named(settings: Settings) -> None:
    with pytest.raises(SnapshotError, match="nowhere"):
        start_embedded(settings, "nowhere")


def test_training_and_saving_may_overlap(settings: Settings) -> None:
    with embedded(settings) as (control, client):
        saved = threading.Event()

        def save_often() -> None:
            for number in range(5):
                save(control, f"model-{number}")
            saved.set()

        thread = threading.Thread(target=save_often)
        thread.start()
        while not saved.is_set():
            push(client)
            rows(client)
        thread.join()
        last = rows(client)
        save(control, "last")
    with embedded(settings, "last") as (_, client):
        np.testing.assert_array_equal(rows(client), last)


def test_client_of_a_closed_pserver_is_refused(settings: Settings) -> None:
    control, client = start_embedded(settings)
    control.register([SPEC, DENSE], 0, 1)
    control.close()
    control.close()
    with pytest.raises(FleetSparseError):
        rows(client)
    client.close()


def test_it_leaves_no_thread_behind(settings: Settings) -> None:
    before = threading.active_count()
    with embedded(settings) as (_, client):
        push(client)
    assert threading.active_count() == before


# Several workers


SYNC_MODE = Mode(SYNC)


class Job:
    """Pservers in this process and workers of one job."""

    def __init__(self, settings: Settings, num_shards: int) -> None:
        self.pservers = EmbeddedPservers(settings, num_shards=num_shards)
        self._end = ExitStack()
        self._end.callback(self.pservers.close)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def worker(self, index: int, num_workers: int, mode: Mode = SYNC_MODE) -> tuple[ControlClient, EmbeddedClient]:
        control, client = self.pservers.connect()
        self._end.callback(control.close)
        control.register([SPEC, DENSE], index, num_workers, mode)
        self._end.callback(client.close)
        return control, client


def test_pservers_outlive_a_worker_that_closes(settings: Settings) -> None:
    with Job(settings, 2) as job:
        control, first = job.worker(0, 2, Mode(ASYNC))
        _, second = job.worker(1, 2, Mode(ASYNC))
        push(first, 2)
        first.close()
        control.close()
        np.testing.assert_allclose(rows(second, 2), 0.5, atol=1e-5)


def test_closing_worker_ends_its_waiting_calls_silently(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with Job(settings, 1) as job:
        control, _ = job.worker(1, 2)
        ended = threading.Event()

        def wait() -> None:
            with pytest.raises((ShardUnavailable, RuntimeError)):
                while True:
                    control.snapshots.await_save("")
            ended.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(0.2)
        control.close()
        assert ended.wait(10)
    gc.collect()  # of a task whose error nobody took, asyncio speaks then
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_reply_after_its_client_closed_is_ignored(settings: Settings) -> None:
    with Job(settings, 1) as job:
        _, first = job.worker(0, 2)
        control, _ = job.worker(1, 2)
        unique, _ = Deduplicator(Placement.even(1)).unique([IDS], SPEC.salt)
        waits = first.start_pull([RowBatch(SPEC, unique, np.empty((100, 2), np.float32))], step=2)
        first.close()
        with pytest.raises(FleetSparseError):
            waits.wait()
        with pytest.raises(TableMismatch):  # and for the other worker this one is lost
            control.register([replace(SPEC, dim=3)], 1, 2, SYNC_MODE)


def test_calls_after_the_end_of_the_pservers_are_refused(settings: Settings) -> None:
    with Job(settings, 2) as job:
        workers = [job.worker(index, 2, Mode(ASYNC)) for index in range(2)]
        job.pservers.close()
        for control, client in workers:
            with pytest.raises(FleetSparseError):
                rows(client, 2)
            with pytest.raises(FleetSparseError):
                control.stats()


def test_end_of_the_pservers_ends_waiting_barriers(settings: Settings) -> None:
    with Job(settings, 2) as job:
        first, _ = job.worker(0, 2)
        second, _ = job.worker(1, 2)
        ended = threading.Event()

        def meet() -> None:
            with pytest.raises(FleetSparseError):
                first.barrier("a")
            ended.set()

        thread = threading.Thread(target=meet)
        thread.start()
        second.stats()  # answered after the barrier has begun, or before: either way it ends
        job.pservers.close()
        thread.join(20)
        assert ended.is_set()


def test_end_of_the_pservers_closes_connections_silently(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with Job(settings, 2) as job:
        control, _ = job.worker(0, 2)
        reports: queue.SimpleQueue[ShardTables] = queue.SimpleQueue()
        control.watch_tables(reports.put)
        assert reports.get(timeout=20).shard == 0
        job.pservers.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# What a worker of geo training trains by itself


def test_local_dense_values_without_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.machine_memory.available_bytes", lambda: 1)
    with pytest.raises(PlanError, match="dense 'dense'"):
        local_dense(DENSE, 2)
