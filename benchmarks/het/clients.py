"""Jobs of real clients without Paddle: all workers in this process, one pserver process, async mode, one table."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.cache_sizes import bytes_per_row
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from fleet_sparse.worker.rows.row_caches import RowCaches

RULE, RATE = "adagrad", 0.03
"""Update rule and learning rate."""


class Worker:
    """A worker of such a job.

    Args:
        client: Its client.
        spec: The table.
        num_workers: Number of workers of the job.
        bound: Bound of the job; None for no cache.
        capacity: Copies of a worker.
    """

    def __init__(
        self, client: Client, spec: TableSpec, num_workers: int, bound: RowBound | None, capacity: int
    ) -> None:
        self.client, self._spec = client, spec
        self._deduplicator = Deduplicator(Placement.even(1))
        caches = None
        if bound is not None:
            job = CacheJob(bound, num_workers, None)
            max_bytes, tables = 2 * capacity * bytes_per_row(spec, job), {spec.name: spec}
            caches = RowCaches(client, self._deduplicator, job, tables, max_bytes=max_bytes, max_rows=capacity)
        mode = Mode(row_bound=bound)
        self._training = PserverTraining(client, self._deduplicator, mode, num_workers, caches=caches)

    def batch(self, ids: NDArray[np.int64]) -> RowBatch:
        """Returns a batch of these ids, `(n,)`, whose rows are not there yet."""
        unique, _ = self._deduplicator.unique([ids], self._spec.salt)
        return RowBatch(self._spec, unique, np.empty((len(unique.ids), self._spec.dim), np.float32))

    def read(self, batch: RowBatch) -> None:
        """Looks up the rows of a step."""
        self._training.prefetch([batch])

    def update(self, batch: RowBatch, grads: NDArray[np.float32]) -> None:
        """Trains them with gradients `(n, dim)`."""
        self._training.update([batch._replace(values=grads, learning_rate=RATE)], [], 1.0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames."""
        return self.client.bytes_sent + self.client.bytes_received


class OneProcessJob(NamedTuple):
    """The workers of a job, which are in this process."""

    workers: list[Worker]
    pserver_pid: int


@contextmanager
def one_process_job(num_workers: int, dim: int, bound: RowBound | None, capacity: int) -> Iterator[OneProcessJob]:
    """Runs a pserver process and yields the workers. Arguments are those of `Worker`, and the dim of the rows."""
    spec = TableSpec(name="rows", dim=dim, rule=RULE, initializer=constant(0.0))
    settings = Settings(channel="stream")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pservers = stack.enter_context(local_pservers(1, root=root, log=subprocess.DEVNULL))
        controls = [stack.enter_context(ControlClient(pservers.endpoints, settings)) for _ in range(num_workers)]
        workers = []
        for index, control in enumerate(controls):
            registrations = control.register([spec], index, num_workers, Mode(row_bound=bound))
            channel, placement = open_channel(registrations, settings), Placement.even(1)
            client = stack.enter_context(Client(channel, control.identity, registrations, placement, settings))
            workers.append(Worker(client, spec, num_workers, bound, capacity))
        yield OneProcessJob(workers, pservers.processes[0].process.pid)
