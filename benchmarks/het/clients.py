"""Jobs of real clients without Paddle: all workers in this process, one pserver process, async mode."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.het.training import RATES
from benchmarks.keys import ELSEWHERE, HOST
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

RULE = "adagrad"
RATE = RATES[RULE]


class Worker:
    """A worker of such a job.

    Args:
        client: Its client.
        specs: The tables.
        num_workers: Number of workers of the job.
        bound: Bound of the job; None for no cache.
        capacity: Copies of a table.
    """

    def __init__(
        self, client: Client, specs: Sequence[TableSpec], num_workers: int, bound: RowBound | None, capacity: int
    ) -> None:
        self.client, self._specs = client, specs
        self._deduplicator = Deduplicator(Placement.even(1))
        caches = None
        if bound is not None:
            job = CacheJob(bound, num_workers, None)
            tables = {spec.name: spec for spec in specs}
            max_bytes = 2 * capacity * sum(bytes_per_row(spec, job) for spec in specs)
            caches = RowCaches(client, self._deduplicator, job, tables, max_bytes=max_bytes, max_rows=capacity)
        mode = Mode(row_bound=bound)
        self._training = PserverTraining(client, self._deduplicator, mode, num_workers, caches=caches)

    def batches(self, ids: NDArray[np.int64]) -> list[RowBatch]:
        """Returns a batch for each table that has some of these ids, `(n,)`, whose rows are not there yet."""
        found = []
        for number, spec in enumerate(self._specs):
            of_table = ids[ids % len(self._specs) == number]
            if len(of_table):
                unique, _ = self._deduplicator.unique([of_table], spec.salt)
                found.append(RowBatch(spec, unique, np.empty((len(unique.ids), spec.dim), np.float32)))
        return found

    def read(self, batches: Sequence[RowBatch]) -> None:
        """Looks up the rows of a step."""
        self._training.prefetch(batches)

    def update(self, batches: Sequence[RowBatch], grads: Sequence[NDArray[np.float32]]) -> None:
        """Trains them with gradients, `(n, dim)` for each batch."""
        trained = [
            batch._replace(values=of_batch, learning_rate=RATE) for batch, of_batch in zip(batches, grads, strict=True)
        ]
        self._training.update(trained, [], 1.0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames."""
        return self.client.bytes_sent + self.client.bytes_received


class OneProcessJob(NamedTuple):
    """The workers of a job, which are in this process."""

    workers: list[Worker]
    pserver_pid: int


@contextmanager
def one_process_job(
    num_workers: int, dim: int, bound: RowBound | None, capacity: int, num_tables: int = 1, *, has_tcp: bool = False
) -> Iterator[OneProcessJob]:
    """Runs a pserver process and yields the workers.

    Args:
        num_workers: As of `Worker`, and the next three.
        dim: Of the rows.
        bound: As above.
        capacity: As above.
        num_tables: Number of tables; they share the ids evenly.
        has_tcp: True for plain TCP on the loopback interface, False for Unix sockets.
    """
    specs = [
        TableSpec(name=f"rows{number}", dim=dim, rule=RULE, initializer=constant(0.0)) for number in range(num_tables)
    ]
    settings = Settings(channel="stream", insecure=has_tcp)
    arguments = ["--control", f"{HOST}:0", "--servers", ELSEWHERE] if has_tcp else []
    variables = {"FLEET_SPARSE_INSECURE": "1"} if has_tcp else {}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = local_pservers(1, root=root, arguments=arguments, environment=variables, log=subprocess.DEVNULL)
        pservers = stack.enter_context(started)
        controls = [stack.enter_context(ControlClient(pservers.endpoints, settings)) for _ in range(num_workers)]
        workers = []
        for index, control in enumerate(controls):
            registrations = control.register(specs, index, num_workers, Mode(row_bound=bound))
            channel, placement = open_channel(registrations, settings), Placement.even(1)
            client = stack.enter_context(Client(channel, control.identity, registrations, placement, settings))
            workers.append(Worker(client, specs, num_workers, bound, capacity))
        yield OneProcessJob(workers, pservers.processes[0].process.pid)
