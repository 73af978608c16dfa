"""Snapshots of several workers that train without pause: each has one cut on all pservers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, GEO, SUM, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded import local_dense, local_rows
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.position_reporter import PositionReporter
from fleet_sparse.worker.control.resumed import Resumed
from fleet_sparse.worker.control.save import Save
from fleet_sparse.worker.modes.geo import GeoTraining, table_on_pservers
from fleet_sparse.worker.modes.step import Training
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.pserver_job import connected
from support.saves import saved_rows
from support.threads import in_threads

NUM_WORKERS = 3
NUM_SHARDS = 2
TABLE = TableSpec(name="columns", dim=NUM_WORKERS, rule="sgd", initializer=constant(0.0))
IDS = np.arange(400, dtype=np.int64)
QUICK = Settings(heartbeat_s=0.1, worker_lost_s=1.0, positions_s=10.0)
ASYNC_MODE = Mode(ASYNC)
EVERY_MODE = pytest.mark.parametrize(
    "mode", [ASYNC_MODE, Mode(ASYNC, max_step_lag=0), Mode(GEO, SUM, k_steps=3)], ids=str
)


class Worker:
    """A worker whose step adds 1 to its own column of all rows, so that the column counts its steps."""

    def __init__(self, control: ControlClient, client: Client, index: int, mode: Mode) -> None:
        deduplicator = Deduplicator(Placement.even(NUM_SHARDS))
        self.control = control
        self.training = _training(client, deduplicator, mode)
        self.num_steps = 0
        self._table = table_of(mode)
        self._unique, _ = deduplicator.unique([IDS], TABLE.salt)
        self._grads = np.zeros((len(IDS), NUM_WORKERS), np.float32)
        self._grads[:, index] = -1.0

    def step(self) -> None:
        out = np.empty_like(self._grads)
        self.training.prefetch([RowBatch(self._table, self._unique, out)])
        self.training.update([RowBatch(self._table, self._unique, self._grads, 1.0)], [], 1.0)
        self.num_steps += 1

    def begin(self, dirname: str, kind: str = "full") -> Save:
        """Begins a save and fixes its cut."""
        save = Save(self.control, dirname, kind)
        self.training.drain()
        with self.training.quiesce(10.0, is_coordinator=True) as quiesced:
            save.begin(quiesced.passed[-1])
        return save

    def save(self, dirname: str) -> None:
        self.begin(dirname).finish()

    @contextmanager
    def reporting(self, settings: Settings) -> Iterator[None]:
        """Reports its position to saves."""
        reporter = PositionReporter(self.control, lambda: self.training, Resumed().plus, settings)
        try:
            yield
        finally:
            reporter.stop()
            self.control.close()
            reporter.join()


def table_of(mode: Mode) -> TableSpec:
    """Returns the spec of the table on the pservers."""
    return table_on_pservers(TABLE) if mode.kind == GEO else TABLE


def _training(client: Client, deduplicator: Deduplicator, mode: Mode) -> Training:
    if mode.kind != GEO:
        return PserverTraining(client, deduplicator, mode, NUM_WORKERS)
    tables = {TABLE.name: TABLE}
    return GeoTraining(
        client, mode, NUM_WORKERS, tables=tables, dense={}, local_rows=local_rows, local_dense=local_dense
    )


@contextmanager
def job(root: Path, mode: Mode = ASYNC_MODE, settings: Settings = QUICK) -> Iterator[list[Worker]]:
    """Starts three workers; none of them reports its position yet."""
    variables = {
        "FLEET_SPARSE_POSITIONS_S": str(settings.positions_s),
        "FLEET_SPARSE_WORKER_LOST_S": str(settings.worker_lost_s),
        "FLEET_SPARSE_HEARTBEAT_S": str(settings.heartbeat_s),
    }
    with local_pservers(NUM_SHARDS, root=root, environment=variables) as pservers, ExitStack() as stack:
        workers = []
        for index in range(NUM_WORKERS):
            connection = connected(pservers.endpoints, [table_of(mode)], settings, index, NUM_WORKERS, mode)
            workers.append(Worker(*stack.enter_context(connection), index, mode))
        yield workers


def columns(root: Path, dirname: str, mode: Mode = ASYNC_MODE) -> set[tuple[float, ...]]:
    """The distinct rows of a snapshot, as one pserver loads it."""
    return set(map(tuple, saved_rows(root / dirname, table_of(mode), IDS).tolist()))


def positions(root: Path, snapshot: str) -> dict[int, int]:
    """Returns the number of steps of each worker in the manifest."""
    workers: list[dict[str, Any]] = json.loads((root / snapshot / "MANIFEST.json").read_text())["workers"]
    return {each["worker"]: each["step"] for each in workers}


@EVERY_MODE
@pytest.mark.guarantee("V2")
def test_snapshot_has_each_worker_up_to_its_position(tmp_path: Path, mode: Mode) -> None:
    ended = threading.Event()
    num_saves, num_steps = 3, 40
    snapshots = []

    def saves(coordinator: Worker) -> None:
        try:
            for number in range(num_saves):
                for _ in range(num_steps - 10):
                    coordinator.step()
                save = coordinator.begin("model", "delta" if number else "full")
                for _ in range(10):  # while it is written
                    coordinator.step()
                snapshots.append(save.finish())
        finally:
            ended.set()

    def trains(one: Worker) -> None:
        # With a bound all make equally many steps, because a worker that has stopped would block the others.
        while not ended.is_set() if mode.max_step_lag is None else one.num_steps < num_saves * num_steps:
            one.step()

    with job(tmp_path, mode) as (coordinator, *others), others[0].reporting(QUICK), others[1].reporting(QUICK):
        in_threads(lambda: saves(coordinator), *(lambda one=one: trains(one) for one in others))
    names = ("000001-full", "000002-delta", "000003-delta")
    assert snapshots == [str(tmp_path / "model" / name) for name in names]
    for number, snapshot in enumerate(snapshots, 1):
        trained = positions(tmp_path, snapshot)
        assert trained[0] == num_steps * number - 10
        assert min(trained.values()) > 0
        assert columns(tmp_path, snapshot, mode) == {tuple(float(trained[i]) for i in range(NUM_WORKERS))}


def test_save_stops_waiting_for_a_worker_that_is_lost(tmp_path: Path) -> None:
    with job(tmp_path) as (coordinator, other, lost), other.reporting(QUICK):
        for worker in (coordinator, other, lost):
            worker.step()
            worker.training.drain()
        saving = threading.Thread(target=coordinator.save, args=("model",), daemon=True)
        saving.start()
        saving.join(0.5)
        assert saving.is_alive()
        lost.control.close()
        saving.join(30)
        assert not saving.is_alive()
    assert positions(tmp_path, "model/000001-full") == {0: 1, 1: 1}
    assert columns(tmp_path, "model") == {(1.0, 1.0, 1.0)}
