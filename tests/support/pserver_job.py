"""The pservers of a job as real processes, and workers connected to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.local_pservers import LocalPservers, local_pservers
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.failover import Failover
from fleet_sparse.worker.control.liveness import IncarnationWatcher
from fleet_sparse.worker.control.save import Save
from fleet_sparse.worker.modes.step import Progress
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.shard_link import Registration

PserverJob = Callable[[int], LocalPservers]


@pytest.fixture
def pserver_job(tmp_path: Path) -> Iterator[PserverJob]:
    """Starts pservers, `pserver_job(2)`; they end with the test."""
    with ExitStack() as stack:
        yield lambda num_shards: stack.enter_context(local_pservers(num_shards, root=tmp_path))


@contextmanager
def connected(
    endpoints: Sequence[str],
    specs: Sequence[TableSpec | DenseSpec],
    settings: Settings,
    worker_index: int = 0,
    num_workers: int = 1,
    mode: Mode | None = None,
) -> Iterator[tuple[ControlClient, Client]]:
    """Connects a worker to pservers."""
    with ControlClient(endpoints, settings) as control:
        registrations = control.register(specs, worker_index, num_workers, mode)
        placement = Placement.even(len(registrations), registrations[0].placement_version)
        with ExitStack() as stack:
            clients: list[Client] = []

            def connect(newest: Sequence[Registration]) -> IncarnationWatcher:
                channel = open_channel(newest, settings, control.credentials)
                clients.append(stack.enter_context(Client(channel, control.identity, newest, placement, settings)))
                return Failover(control, clients[0], set).observe

            control.open_data_plane(connect)
            yield control, clients[0]


def save(control: ControlClient, dirname: str) -> str:
    """Saves as the only worker; returns the path or URL of the snapshot."""
    made = Save(control, dirname)
    made.begin(Progress(0, ""))
    return made.finish()
