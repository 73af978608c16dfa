"""A worker of a sync job without a model: `python -m support.sync_worker` trains over sockets until it is ended."""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import SUM, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.client import Client, Pending
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch

from .pserver_job import connected

MODE = Mode(SYNC, SUM)
TABLE = TableSpec(name="steps", dim=2, rule="sgd", initializer=constant(0.0))
IDS = np.arange(20, dtype=np.int64)


class SyncWorker:
    """Its step adds 1 to all rows of `IDS`; so a row is the number of steps times the number of workers.

    Args:
        client: Of this worker.
        num_shards: Of its job.
    """

    def __init__(self, client: Client, num_shards: int) -> None:
        self.client = client
        self._unique, _ = Deduplicator(Placement.even(num_shards)).unique([IDS], TABLE.salt)
        self._step = 0

    def start_pull(self) -> tuple[Pending, NDArray[np.float32]]:
        """Starts the pull of its next step."""
        out = np.empty((len(IDS), TABLE.dim), np.float32)
        return self.client.start_pull([RowBatch(TABLE, self._unique, out)], step=self._step + 1), out

    def pull(self) -> float:
        """Returns the value of all rows before its next step."""
        pending, out = self.start_pull()
        pending.wait()
        (value,) = set(out.flat)
        return float(value)

    def push(self) -> None:
        """Pushes its next step."""
        self._step += 1
        grads = np.full((len(IDS), TABLE.dim), -1.0, np.float32)
        self.client.start_update([RowBatch(TABLE, self._unique, grads, 1.0, self._step)], [], step=self._step)


def hold_gil(about_s: float) -> float:
    """Computes in one call that does not release the GIL; returns how many seconds it took."""
    trial = 10_000_000
    begun_s = time.perf_counter()
    sum(range(trial))
    per_second = trial / (time.perf_counter() - begun_s)
    begun_s = time.perf_counter()
    sum(range(int(about_s * per_second)))
    return time.perf_counter() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoints", nargs="+", required=True)
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--hold-gil-s", type=float, default=0.0, help="before its first step, in one call")
    options = parser.parse_args()
    settings = Settings.from_environment()
    with connected(options.endpoints, [TABLE], settings, options.worker, options.num_workers, MODE) as (_, client):
        worker = SyncWorker(client, len(options.endpoints))
        if options.hold_gil_s:
            print(f"held the GIL for {hold_gil(options.hold_gil_s):g}", flush=True)
        while True:
            print(f"saw {worker.pull():g}", flush=True)
            worker.push()


if __name__ == "__main__":
    main()
