"""Pservers that die, hang, restart or lose frames: real processes, real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.local_pservers import LocalPservers, local_pservers
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.proxies import CuttingProxy, LossyProxy, LossyStreamProxy
from support.pserver_job import PserverJob, connected

SPEC = TableSpec(name="table", dim=2, rule="sgd", initializer=constant(0.0))
IDS = np.arange(2000, dtype=np.int64)


class Counter:
    """Pushes gradient -1 with SGD and learning rate 1, so that every row counts its pushes."""

    def __init__(self, client: Client, num_shards: int, spec: TableSpec = SPEC) -> None:
        self._client = client
        self._spec = spec
        self._unique, _ = Deduplicator(Placement.even(num_shards)).unique([IDS], spec.salt)
        self._grads = np.full((len(IDS), spec.dim), -1.0, np.float32)

    def push(self, times: int = 1) -> None:
        for _ in range(times):
            self._client.push([RowBatch(self._spec, self._unique, self._grads, 1.0, 1)])

    def pull(self) -> NDArray[np.float32]:
        out = np.full((len(IDS), self._spec.dim), np.nan, np.float32)
        self._client.pull([RowBatch(self._spec, self._unique, out)])
        return out

    def values(self) -> set[float]:
        """Returns the distinct values of all rows."""
        return set(self.pull().flat)


class Own(NamedTuple):
    """The table and worker of one test on `pair`."""

    spec: TableSpec
    worker: int


NUM_WORKERS = 64
"""Number of workers on `pair`: more than there are tests."""


@contextmanager
def through(
    proxies: Sequence[LossyProxy | LossyStreamProxy | CuttingProxy],
    control: ControlClient,
    own: Own,
    settings: Settings,
) -> Iterator[Client]:
    """Connects a client through proxies."""
    endpoints = [proxy.endpoint for proxy in proxies]
    registrations = [
        each._replace(data_endpoint=endpoint, stream_endpoint=endpoint)
        for each, endpoint in zip(control.register([own.spec], own.worker, NUM_WORKERS), endpoints, strict=True)
    ]
    channel = open_channel(registrations, settings)
    client = Client(channel, control.identity, registrations, Placement.even(len(registrations)), settings)
    with client:
        yield client


def data_endpoints(control: ControlClient, own: Own, channel: str) -> list[str]:
    registrations = control.register([own.spec], own.worker, NUM_WORKERS)
    return [each.stream_endpoint if channel == "stream" else each.data_endpoint for each in registrations]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPservers]:
    """Two pservers that tests share: each test is another worker with its own table."""
    with local_pservers(2, root=tmp_path_factory.mktemp("pair")) as pservers:
        yield pservers


@pytest.fixture(scope="module")
def zmq_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPservers]:
    """Like `pair`, with ZeroMQ."""
    root = tmp_path_factory.mktemp("zmq_pair")
    with local_pservers(2, root=root, environment={"FLEET_SPARSE_CHANNEL": "zmq"}) as pservers:
        yield pservers


@pytest.fixture
def pair_of(request: pytest.FixtureRequest) -> Callable[[str], LocalPservers]:
    """Returns the two pservers of a channel."""
    return lambda channel: request.getfixturevalue("zmq_pair" if channel == "zmq" else "pair")


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return count()


@pytest.fixture
def own(numbers: Iterator[int]) -> Own:
    worker = next(numbers)
    return Own(replace(SPEC, name=f"table-{worker}"), worker)


def test_pserver_that_hangs_and_resumes_applies_each_push_once(pserver_job: PserverJob) -> None:
    pservers = pserver_job(2)
    with connected(pservers.endpoints, [SPEC], Settings(deadline_s=60.0, retry_s=0.2)) as (_, client):
        counter = Counter(client, 2)
        counter.push(5)
        pservers.processes[0].suspend()
        counter.push(20)
        resumed = threading.Timer(1.5, pservers.processes[0].resume)
        resumed.start()
        assert counter.values() == {25.0}
        counter.push(5)
        assert counter.values() == {30.0}
        resumed.join()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("channel", "proxy"), [("zmq", LossyProxy), ("stream", LossyStreamProxy)])
@pytest.mark.guarantee("E2", "E3", "A3")
def test_lost_and_doubled_frames_change_nothing(
    pair_of: Callable[[str], LocalPservers],
    own: Own,
    channel: str,
    proxy: type[LossyProxy] | type[LossyStreamProxy],
    seed: int,
) -> None:
    settings = Settings(deadline_s=60.0, retry_s=0.05, channel=channel)
    with ExitStack() as stack:
        control = stack.enter_context(ControlClient(pair_of(channel).endpoints, settings))
        proxies = [
            stack.enter_context(closing(proxy(endpoint, chance=0.1, seed=2 * seed + shard)))
            for shard, endpoint in enumerate(data_endpoints(control, own, channel))
        ]
        counter = Counter(stack.enter_context(through(proxies, control, own, settings)), 2, own.spec)
        for step in range(1, 16):
            counter.push(4)
            assert counter.values() == {4.0 * step}
        assert sum(each.num_dropped for each in proxies) > 10


@pytest.mark.parametrize("channel", ["zmq", "stream"])
def test_cut_connections_change_nothing(pair_of: Callable[[str], LocalPservers], own: Own, channel: str) -> None:
    settings = Settings(deadline_s=60.0, retry_s=0.1, channel=channel)
    with ExitStack() as stack:
        control = stack.enter_context(ControlClient(pair_of(channel).endpoints, settings))
        proxies = [stack.enter_context(closing(CuttingProxy(each))) for each in data_endpoints(control, own, channel)]
        counter = Counter(stack.enter_context(through(proxies, control, own, settings)), 2, own.spec)
        for step in range(1, 13):
            counter.push(5)
            for each in proxies:
                each.cut()
            assert counter.values() == {5.0 * step}
