"""Embedded mode: pservers inside a worker's process, for one worker alone. Nothing listens, nothing is sent.

Worker and pservers are the ones of a distributed job, with their frames and control messages; only what carries these
is replaced. This is the one module that imports both sides.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from google.protobuf.message import Message

from fleet_sparse.endpoints import LOOPBACK, Address
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.pserver.control import Control
from fleet_sparse.pserver.data_plane import Traffic
from fleet_sparse.pserver.requests import answer
from fleet_sparse.pserver.server import Options, make_shard
from fleet_sparse.settings import Settings
from fleet_sparse.worker.channel import Buffer
from fleet_sparse.worker.control import ControlClient
from fleet_sparse.worker.in_process_channel import InProcessChannel

ENDPOINT = "this process"


def start_embedded(
    settings: Settings, load_dirname: str | None = None, *, num_shards: int = 1
) -> tuple[ControlClient, InProcessChannel]:
    """Pservers in this process, and what a worker needs to reach them. Closing the control client ends them.

    Args:
        settings: Of pservers and worker alike.
        load_dirname: Snapshot to begin with, or None.
        num_shards: More than one only shows how the distributed job would behave.

    Raises:
        SnapshotError: The snapshot cannot be read.
    """
    pservers: list[_EmbeddedPserver] = []
    try:
        for shard in range(num_shards):
            pservers.append(_EmbeddedPserver(shard, num_shards, settings, load_dirname))
    except BaseException:
        for pserver in pservers:
            pserver.close()
        raise
    channel = InProcessChannel(num_shards, lambda shard, parts: pservers[shard].answer(parts))
    return ControlClient(_EmbeddedCalls(pservers), settings), channel


class _EmbeddedPserver:
    """A shard and its control plane. Whoever holds the lock is the thread that owns the shard."""

    def __init__(self, shard: int, num_shards: int, settings: Settings, load_dirname: str | None) -> None:
        address = Address(LOOPBACK, 0)
        options = Options(shard, num_shards, address, (address,) * num_shards, load_dirname, cluster_id=0)
        self._max_frame_bytes = settings.max_frame_bytes
        self._traffic = Traffic()
        self._lock = threading.Lock()  # guards all below
        self._is_closed = False
        self._shard = make_shard(options, settings)
        self.control = Control(
            self._shard,
            post=self._post,
            traffic=self._traffic,
            data_endpoint=ENDPOINT,
            root=settings.root,
            worker_lost_s=settings.worker_lost_s,
            stop=lambda: None,  # it ends with its process, or when it is closed
        )

    def answer(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """The reply to a request."""
        with self._lock:
            self._check_open()
            reply = answer(self._shard, parts, self._max_frame_bytes)
            self._traffic.bytes_received += sum(map(len, parts))
            self._traffic.bytes_sent += sum(map(len, reply))
        return reply

    def close(self) -> None:
        """Gives the shard's memory back. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._shard.close()

    def _post(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            with self._lock:
                self._check_open()
                future.set_result(task())
        except Exception as error:
            future.set_exception(error)
        return future

    def _check_open(self) -> None:
        if self._is_closed:
            raise FleetSparseError("embedded pserver: it is closed")


class _EmbeddedCalls:
    """Implements `Calls`: an event loop in a thread of its own runs the control planes."""

    def __init__(self, pservers: Sequence[_EmbeddedPserver]) -> None:
        self._pservers = pservers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="embedded control plane", daemon=True)
        self._thread.start()

    @property
    def endpoints(self) -> Sequence[str]:
        """As `Calls`."""
        return [ENDPOINT] * len(self._pservers)

    def start(self, shard: int, method: str, request: Message, timeout_s: float) -> Future[Message]:
        """As `Calls`. A call ends when the work is done; there is no other process to lose."""
        return asyncio.run_coroutine_threadsafe(self._pservers[shard].control.call(method, request), self._loop)

    def close(self) -> None:
        """As `Calls`; ends the pservers. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for pserver in self._pservers:
            pserver.close()
