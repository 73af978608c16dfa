"""Embedded mode: pservers in the process of their workers, without sockets.

Workers and pservers are those of a distributed job, with the same control messages; workers call the shards by an
`EmbeddedClient` instead of frames. This module imports both sides, so it also makes the stores of geo workers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from google.protobuf.message import Message

from fleet_sparse import machine_memory
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded_client import ENDPOINT, EmbeddedClient
from fleet_sparse.errors import FleetSparseError, PlanError
from fleet_sparse.net_addresses import LOOPBACK, Address
from fleet_sparse.pserver.admin.service import ControlService
from fleet_sparse.pserver.endpoints import DataEndpoints
from fleet_sparse.pserver.engine.reply import DeferredReply
from fleet_sparse.pserver.server import Options, make_shard
from fleet_sparse.pserver.shared_shard import SharedShard
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables.dense import DenseRange
from fleet_sparse.settings import Settings
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.rpc import Unreachable


def start_embedded(
    settings: Settings, load_dirname: str | None = None, *, num_shards: int = 1
) -> tuple[ControlClient, EmbeddedClient]:
    """Starts pservers in this process. Returns a worker's clients of them; closing the control client ends them.

    Args:
        settings: Settings of pservers and worker.
        load_dirname: Snapshot to start from, or None.
        num_shards: Number of pservers; more than one is useful only in tests.

    Raises:
        SnapshotError: The snapshot cannot be read.
    """
    pservers = EmbeddedPservers(settings, load_dirname, num_shards=num_shards)
    return pservers.connect(and_end=True)


def local_rows(spec: TableSpec) -> TableStore:
    """Returns an empty store of rows that a geo worker trains itself; to be closed."""
    return TableStore(spec, huge_pages=False)


def local_dense(spec: DenseSpec, num_shards: int) -> list[DenseRange]:
    """Returns the ranges of a dense array for a number of shards, without values, for a worker that trains it itself.

    Raises:
        PlanError: There is not enough memory for values, states and the buffers to read them.
    """
    needed = 2 * 4 * spec.num_values * (1 + spec.update_rule.num_states)
    available = machine_memory.available_bytes()
    if needed > available:
        raise PlanError(
            f"dense {spec.name!r}: a worker's own copy with its states takes {needed / 2**30:.1f} GiB, this machine "
            f"has {available / 2**30:.1f} GiB left"
        )
    return [DenseRange(spec, shard, num_shards) for shard in range(num_shards)]


class EmbeddedPservers:
    """Pservers in this process, for any number of its workers. An event loop in a thread runs their control planes.

    Args:
        settings: Settings of pservers and workers.
        load_dirname: Snapshot to start from, or None.
        num_shards: Number of pservers.

    Raises:
        SnapshotError: The snapshot cannot be read.
    """

    def __init__(self, settings: Settings, load_dirname: str | None = None, *, num_shards: int = 1) -> None:
        self._settings = settings
        self._pservers: list[_EmbeddedPserver] = []
        self._clients: dict[bytes, EmbeddedClient] = {}  # by client id
        try:
            for shard in range(num_shards):
                self._pservers.append(_EmbeddedPserver(shard, num_shards, settings, load_dirname, self._deliver))
        except BaseException:
            for pserver in self._pservers:
                pserver.close()
            raise
        self._lock = threading.Lock()  # guards the next one
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="embedded control plane", daemon=True)
        self._thread.start()

    @property
    def num_shards(self) -> int:
        """Number of pservers."""
        return len(self._pservers)

    def connect(self, *, and_end: bool = False) -> tuple[ControlClient, EmbeddedClient]:
        """Returns the clients of one worker; with `and_end` closing the control client ends the pservers."""
        control = ControlClient(_EmbeddedTransport(self, and_end=and_end), self._settings)
        shards = [pserver.shard for pserver in self._pservers]
        client = self._clients[control.identity.client_id] = EmbeddedClient(shards, control.identity, self._settings)
        return control, client

    def start_call(self, shard: int, method: str, request: Message) -> Future[Message]:
        """Starts a call of `wire.control.METHODS`. It fails with `FleetSparseError` once the pservers are closed."""
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(self._pservers[shard].control.call(method, request), self._loop)
        refused: Future[Message] = Future()
        refused.set_exception(_closed())
        return refused

    def close(self) -> None:
        """Ends the pservers and running calls. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for client in self._clients.values():
            client.end(_closed())
        for pserver in self._pservers:
            pserver.control.close()
        asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for pserver in self._pservers:
            pserver.close()

    @staticmethod
    async def _end_calls() -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _deliver(self, reply: DeferredReply) -> None:
        self._clients[reply.header.client_id].deliver(reply)


def _closed() -> FleetSparseError:
    return FleetSparseError("embedded pservers: they are closed")


class _EmbeddedPserver:
    """A shard and its control plane.

    Attributes:
        shard: The shard.
        control: The control plane.
    """

    def __init__(
        self,
        index: int,
        num_shards: int,
        settings: Settings,
        load_dirname: str | None,
        deliver: Callable[[DeferredReply], None],
    ) -> None:
        address = Address(LOOPBACK, 0)
        options = Options(index, num_shards, address, (address,) * num_shards, load_dirname, cluster_id=0)
        warm_up()
        # Its rows end with the script, which nobody starts again in the middle of a job.
        settings = dataclasses.replace(settings, durability="none")
        shard, loaded = make_shard(options, settings)
        self.shard = SharedShard(shard, deliver)
        self.control = ControlService(
            shard,
            post=self._post,
            traffic=self.shard.traffic,
            data_endpoints=DataEndpoints(ENDPOINT),
            settings=settings,
            stop=lambda: None,  # it ends with its process, or when it is closed
            loaded=loaded,
        )

    def close(self) -> None:
        """Releases the shard's memory. A second call does nothing."""
        self.shard.close()

    def _post(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self.shard.run(task))
        except Exception as error:
            future.set_exception(error)
        return future


class _EmbeddedTransport:
    """Implements `Transport` for one worker."""

    def __init__(self, pservers: EmbeddedPservers, *, and_end: bool) -> None:
        self._pservers = pservers
        self._and_end = and_end
        self._lock = threading.Lock()  # guards the next one
        self._started: set[Future[Message]] = set()  # calls without an answer

    @property
    def endpoints(self) -> Sequence[str]:
        """As `Transport`."""
        return [ENDPOINT] * self._pservers.num_shards

    def start(self, shard: int, method: str, request: Message, timeout_s: float | None) -> _EmbeddedCall:
        """As `Transport`. A call ends when the work is done; there is no other process to lose."""
        future = self._pservers.start_call(shard, method, request)
        with self._lock:
            self._started.add(future)
        future.add_done_callback(self._forget)
        return _EmbeddedCall(future)

    def close(self) -> None:
        """As `Transport`; calls that wait end. A second call does nothing."""
        with self._lock:
            started = list(self._started)
        for future in started:
            future.cancel()
        if self._and_end:
            self._pservers.close()

    def _forget(self, future: Future[Message]) -> None:
        with self._lock:
            self._started.discard(future)


class _EmbeddedCall:
    def __init__(self, future: Future[Message]) -> None:
        self._future = future

    def result(self) -> Message:
        try:
            return self._future.result()
        except CancelledError:
            raise Unreachable("the connection was closed") from None
        except BaseException:
            self._future.cancel()
            raise

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._future.add_done_callback(callback)
