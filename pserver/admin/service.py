"""The calls of the control plane, without gRPC: what each of them does to one pserver."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from fleet_sparse.core.mode import Mode, parse_mode
from fleet_sparse.core.table import DenseSpec, TableSpec, parse_spec
from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frames import PROTOCOL_VERSION

from ..endpoints import DataEndpoints
from ..engine.shard import Shard
from ..net.requests import Traffic
from .lineage import Lineage, Lineages
from .load_rpcs import LoadCalls
from .membership import Membership
from .save_rpcs import SaveCalls
from .snapshot_loader import Loaded
from .snapshot_rpcs import SnapshotCalls, resumed_json

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

Post = Callable[[Callable[[], Any]], "Future[Any]"]
"""Has the thread that owns the shard run a task."""

CLIENT_ID_BYTES = 16
# A heartbeat is answered while the data thread is busy, with what it last said of the tables.
STATES_TIMEOUT_S = 0.5
MAX_LOST_CHECK_S = 1.0

TAKEN_FOR_S = 5.0
"""For so long after a worker's sign of life no other process may be that worker: several heartbeats."""


class Control:
    """Answers the calls of the control plane for one pserver. All of it runs in one event loop.

    Args:
        shard: Touched by posted tasks alone.
        post: Runs a task in the thread that owns the shard.
        traffic: Of the data plane, for `Stats`.
        data_endpoints: That workers are told.
        settings: Root of the snapshots, and how long is waited for whom.
        stop: Called once, when the pserver is to end.
        began_with: The snapshot that the shard began with; None without one.
        clock: Monotonic time in seconds.
    """

    def __init__(  # what a pserver is made of
        self,
        shard: Shard,
        *,
        post: Post,
        traffic: Traffic,
        data_endpoints: DataEndpoints,
        settings: Settings,
        stop: Callable[[], None],
        began_with: Loaded | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard = shard
        self._post = post
        self._traffic = traffic
        self._data_endpoints = data_endpoints
        self._stop = stop
        self._clock = clock
        self._lost_check_s = min(MAX_LOST_CHECK_S, settings.worker_lost_s / 4)
        self._membership = Membership(
            lost_after_s=settings.worker_lost_s, unseen_after_s=settings.connect_s, taken_for_s=TAKEN_FOR_S
        )
        lineages = Lineages(Lineage)
        if began_with is not None:
            lineages[began_with.series].begin_with(began_with.manifest.number)
        saves = SaveCalls(
            shard,
            post=post,
            on_data_thread=self._on_data_thread,
            membership=self._membership,
            root=settings.root,
            marks_s=settings.marks_s,
            lineages=lineages,
        )
        loads = LoadCalls(
            shard,
            on_data_thread=self._on_data_thread,
            wait_for_no_save=saves.wait_for_none,
            root=settings.root,
            lineages=lineages,
        )
        self._snapshots = SnapshotCalls(shard, saves, loads, self._on_data_thread)
        self._resumed = "" if began_with is None else resumed_json(began_with.manifest)
        self._states: list[TableState] = []  # as the data thread last said
        self._changed = asyncio.Event()  # set, and replaced, when those that wait at barriers should ask again
        self._calls: dict[str, Callable[[Any], Coroutine[Any, Any, Message]]] = {
            "Register": self._register,
            "Heartbeat": self._heartbeat,
            "Barrier": self._barrier,
            "Stats": self._stats,
            "Stop": self._stop_call,
            **self._snapshots.calls,
        }

    async def call(self, method: str, request: Message) -> Message:
        """The reply to a call of `wire.control.METHODS`.

        Raises:
            FleetSparseError: One of ours, for the caller.
        """
        return await self._calls[method](request)

    async def watch_workers(self) -> None:
        """Finds workers whose heartbeat stopped, and wakes those that wait for them; until it is cancelled."""
        while True:
            for worker_index in self.find_lost_workers():
                self._snapshots.lose(worker_index)
            await asyncio.sleep(self._lost_check_s)

    def close(self) -> None:
        """What other threads do for the calls ends soon. From any thread."""
        self._snapshots.close()

    def find_lost_workers(self) -> list[int]:
        """Looks once; returns those that are lost since the last time."""
        now = self._clock()
        lost = self._membership.find_lost(now)
        for worker_index in lost:
            _log.warning("worker %d is lost: its heartbeat stopped", worker_index)
            self._post(partial(self._shard.evict_worker, worker_index, self._membership.why_lost(worker_index)))
        unseen = self._membership.find_unseen(now)
        for worker_index in unseen:
            _log.warning("worker %d never registered, and others wait for it", worker_index)
        if lost or unseen:
            self._wake_waiting()
        return lost

    async def _register(self, request: messages.RegisterRequest) -> messages.RegisterReply:
        who = f"worker {request.worker_index}"
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{who}: it speaks protocol version {request.protocol_version}, this pserver {PROTOCOL_VERSION}. "
                "Install the same fleet_sparse everywhere",
                code=ErrorCode.VERSION,
            )
        if len(request.client_id) != CLIENT_ID_BYTES:
            raise ProtocolError(
                f"{who}: its client id has {len(request.client_id)} bytes, it should have {CLIENT_ID_BYTES}",
                code=ErrorCode.MALFORMED,
            )
        mode = _parse_mode(who, request.mode)
        self._membership.check(request.worker_index, request.num_workers)
        self._membership.check_free(request.worker_index, request.client_id, self._clock())
        try:
            self._membership.check_mode(request.worker_index, mode)
            specs = [_parse(who, text) for text in request.table_specs]
            states = await self._on_data_thread(lambda: self._add_tables(specs, who))
        except Exception as error:
            # It is known all the same: others may wait for it.
            await self._join(request, None)
            self._membership.refuse(request.worker_index, request.client_id, str(error))
            await self._on_data_thread(
                partial(self._shard.evict_worker, request.worker_index, self._membership.why_lost(request.worker_index))
            )
            self._wake_waiting()
            raise
        await self._join(request, mode)
        _log.info(
            "%s of %d registered %d tables: %s",
            who,
            request.num_workers,
            len(specs),
            ", ".join(spec.name for spec in specs) or "none",
        )
        return messages.RegisterReply(
            cluster_id=self._shard.cluster_id,
            shard=self._shard.shard_index,
            num_shards=self._shard.num_shards,
            incarnation=self._shard.incarnation,
            placement_version=self._shard.placement.version,
            data_endpoint=self._data_endpoints.zmq,
            stream_endpoint=self._data_endpoints.stream,
            tables=_messages_of(states),
            resumed=self._resumed,
        )

    async def _join(self, request: messages.RegisterRequest, mode: Mode | None) -> None:
        joined = self._membership.register(
            request.worker_index, request.num_workers, request.client_id, request.client_epoch, self._clock(), mode
        )
        if joined.is_new:
            self._snapshots.lose(request.worker_index)
            self._wake_waiting()
        await self._on_data_thread(
            lambda: self._shard.join(
                request.worker_index, request.num_workers, request.client_id, mode, begins_job=joined.begins_job
            )
        )

    async def _heartbeat(self, request: messages.HeartbeatRequest) -> messages.HeartbeatReply:
        self._membership.hear(request.worker_index, request.client_id, self._clock())
        task = asyncio.wrap_future(self._post(self._shard.states))
        await asyncio.wait({task}, timeout=STATES_TIMEOUT_S)
        if task.done() and not task.cancelled():
            self._states = task.result()
        return messages.HeartbeatReply(incarnation=self._shard.incarnation, tables=_messages_of(self._states))

    async def _barrier(self, request: messages.BarrierRequest) -> messages.BarrierReply:
        name, sequence, worker_index = request.name, request.sequence, request.worker_index
        self._membership.hear(worker_index, None, self._clock())
        try:
            while not self._membership.arrive(name, sequence, worker_index, request.num_workers, self._clock()):
                await self._changed.wait()
        except asyncio.CancelledError:
            # Another call of this worker for the same barrier, if there is one, asks again and counts.
            if self._membership.withdraw(name, sequence, worker_index):
                self._wake_waiting()
            raise
        self._wake_waiting()
        return messages.BarrierReply()

    async def _stats(self, request: messages.StatsRequest) -> messages.StatsReply:
        return await self._on_data_thread(self._measure)

    async def _stop_call(self, request: messages.StopRequest) -> messages.StopReply:
        _log.info("asked to stop")
        self._stop()
        return messages.StopReply()

    # Posted to the data thread

    def _add_tables(self, specs: list[TableSpec | DenseSpec], declared_by: str) -> list[TableState]:
        for spec in specs:
            self._shard.add_table(spec, declared_by=declared_by)
        return self._shard.states()

    def _measure(self) -> messages.StatsReply:
        shard, counters = self._shard, self._shard.counters
        return messages.StatsReply(
            shard=shard.shard_index,
            incarnation=shard.incarnation,
            num_requests=counters.num_requests,
            bytes_received=self._traffic.bytes_received,
            bytes_sent=self._traffic.bytes_sent,
            resident_bytes=_resident_bytes(),
            tables=_messages_of(shard.states()),
            num_pulled_rows=counters.num_pulled_rows,
            num_pushed_rows=counters.num_pushed_rows,
        )

    def _on_data_thread(self, task: Callable[[], _Result]) -> Awaitable[_Result]:
        return _unless_stopped(asyncio.wrap_future(self._post(task)))

    def _wake_waiting(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._snapshots.note_change()


async def _unless_stopped(task: asyncio.Future[_Result]) -> _Result:
    """The result of a task, or an error if the data plane stopped before it ran."""
    await asyncio.wait({task})
    if task.cancelled():
        raise FleetSparseError("the pserver is stopping")
    return task.result()


def _parse(who: str, text: str) -> TableSpec | DenseSpec:
    try:
        return parse_spec(text)
    except ValueError as error:
        raise ProtocolError(f"{who}: {error}", code=ErrorCode.MALFORMED) from error


def _parse_mode(who: str, text: str) -> Mode | None:
    try:
        return parse_mode(text) if text else None
    except ValueError as error:
        raise ProtocolError(f"{who}: {error}", code=ErrorCode.MALFORMED) from error


def _messages_of(states: list[TableState]) -> list[messages.TableState]:
    return [messages.TableState(**state._asdict()) for state in states]


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
