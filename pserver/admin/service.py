"""The calls of the control plane, without gRPC: what each of them does to one pserver."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from fleet_sparse.errors import (
    PlanError,
)
from fleet_sparse.launch import Launch
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import WorkerProgress

from ..endpoints import DataEndpoints
from ..engine.shard import Shard
from ..log.control_state import ReportedProgress
from ..log.lineage import LineageChange, Lineages
from ..net.requests import Traffic
from .background import Signal
from .barrier_rpcs import BarrierService
from .checkpoints import Checkpoints
from .load_rpcs import LoadService
from .log_appends import LogAppends
from .membership import Membership
from .predecessor import Predecessor
from .registration_rpcs import RegistrationService, table_messages
from .resumed import ResumedJob
from .save_rpcs import SaveService
from .shrink_rpcs import ShrinkService
from .snapshot_loader import Loaded

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

Post = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a task in the thread that owns the shard."""

MAX_LOST_CHECK_S = 1.0


class Supervised(NamedTuple):
    """How a pserver was started that is started again when it dies."""

    is_restart: bool
    """True if workers had registered with the pserver before, whose place this one takes."""
    has_recovered: bool
    """True if the snapshot that was loaded is the newest of the job."""
    on_job: Callable[[], None]
    """Called when a worker has registered: a pserver that is started after that is a restarted one of its job."""
    on_snapshot: Callable[[str], None]
    """Called with the name of each snapshot that a restarted pserver would continue from."""
    on_written: Callable[[str, str], None] = lambda snapshot, save_id: None
    """Called with the name of each snapshot that it would continue from if it were committed, and its save id."""


class ControlService:
    """Answers the calls of the control plane for one pserver, in one event loop.

    Args:
        shard: Used only by posted tasks.
        post: Runs a task in the thread that owns the shard.
        traffic: Bytes of the data plane, for `Stats`.
        data_endpoints: Addresses of the data plane, for workers.
        settings: Root of the snapshots, timeouts, and the id of the job.
        stop: Ends the pserver; called when all workers died.
        finish: Ends the pserver, whose job has ended; called at most once by each `Stop`.
        loaded: The snapshot that the shard loaded at its start; None without one.
        supervised: How this pserver was started; None if nobody starts it again.
        clock: Returns monotonic time in seconds.
    """

    def __init__(  # noqa: PLR0913  # the parts of a pserver
        self,
        shard: Shard,
        *,
        post: Post,
        traffic: Traffic,
        data_endpoints: DataEndpoints,
        settings: Settings,
        stop: Callable[[], None],
        finish: Callable[[], None] | None = None,
        loaded: Loaded | None = None,
        supervised: Supervised | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard = shard
        self._post = post
        self._traffic = traffic
        self._stop = stop
        self._finish = stop if finish is None else finish
        self._clock = clock
        self._lost_check_s = min(MAX_LOST_CHECK_S, settings.worker_lost_s / 4)
        self._orphaned_s = settings.orphaned_s
        self._membership = Membership(
            lost_after_s=settings.worker_lost_s,
            unseen_after_s=settings.connect_s,
            returns_after_s=settings.failover_s,
            launch=Launch.of_process(settings.job_id),
        )
        lineages = Lineages({} if shard.log is None else shard.log.control.lineages, self._note)
        on_snapshot = _ignore if supervised is None else supervised.on_snapshot
        has_recovered = loaded is not None and supervised is not None and supervised.has_recovered
        is_restart = supervised is not None and supervised.is_restart
        predecessor = Predecessor.of(shard, is_restart=is_restart, has_recovered=has_recovered)
        if loaded is not None:
            number = loaded.manifest.number
            lineages.add(
                LineageChange(loaded.series, saved=number)
                if has_recovered
                else LineageChange(loaded.series, loaded=number)
            )
        self._checkpoints = Checkpoints(
            shard, post=post, on_data_thread=self._on_data_thread, max_bytes=settings.checkpoint_bytes
        )
        appends = LogAppends(shard.log, on_data_thread=self._on_data_thread, failover_s=settings.failover_s)
        self._saves = SaveService(
            shard,
            post=post,
            on_data_thread=self._on_data_thread,
            appends=appends,
            membership=self._membership,
            root=settings.root,
            positions_s=settings.positions_s,
            # A shard that has written its file hears nothing until all have, and the manifest is written.
            abandoned_after_s=2 * (settings.barrier_s + max(settings.deadline_s, settings.failover_s)),
            lineages=lineages,
            on_written=_ignore if supervised is None else supervised.on_written,
            on_snapshot=on_snapshot,
            checkpoints=self._checkpoints,
        )
        self._loads = LoadService(
            shard,
            on_data_thread=self._on_data_thread,
            appends=appends,
            hold_saves=self._saves.held,
            root=settings.root,
            lineages=lineages,
            on_snapshot=on_snapshot,
            checkpoints=self._checkpoints,
            on_resumed=self._resume,
        )
        shrinks = ShrinkService(shard, appends=appends, hold_saves=self._saves.held, checkpoints=self._checkpoints)
        self._departed = Signal()  # sent when a connection of a worker ends, or workers are lost
        registered = Signal()
        self._barriers = BarrierService(
            shard,
            membership=self._membership,
            predecessor=predecessor,
            registered=registered,
            appends=appends,
            loads=self._loads,
            shrinks=shrinks,
            failover_s=settings.failover_s,
            endpoint=data_endpoints.stream or data_endpoints.zmq,
            clock=clock,
        )
        self._registrations = RegistrationService(
            shard,
            on_data_thread=self._on_data_thread,
            membership=self._membership,
            predecessor=predecessor,
            departed=self._departed,
            registered=registered,
            appends=appends,
            saves=self._saves,
            loads=self._loads,
            barriers=self._barriers,
            data_endpoints=data_endpoints,
            settings=settings,
            is_supervised=supervised is not None,
            on_job=_ignore if supervised is None else supervised.on_job,
            resumed=None if loaded is None or has_recovered else ResumedJob(loaded.manifest),
            clock=clock,
        )
        # When a worker was present last; None before the first. Those of a restarted pserver may be gone.
        self._alive_at = clock() if is_restart else None
        self._stopping = Signal()
        self._calls: dict[str, Callable[[Any], Coroutine[Any, Any, Message]]] = {
            "Register": self._registrations.register,
            "Attend": self._attend,
            "Barrier": self._barriers.barrier,
            "PlanSave": self._saves.plan,
            "AwaitSave": self._saves.await_save,
            "BeginSave": self._saves.begin,
            "ReportPosition": self._saves.report_position,
            "ReportProgress": self._report_progress,
            "WriteSave": self._saves.write,
            "FinishSave": self._saves.finish,
            "EndSave": self._saves.end,
            "StageLoad": self._loads.stage,
            "FinishLoad": self._loads.finish,
            "Shrink": shrinks.shrink,
            "Stats": self._stats,
            "Stop": self._stop_call,
            "Exchange": self._barriers.exchange,
            "Attach": self._refuse_reader,
            "AwaitVersion": self._refuse_reader,
        }

    async def call(self, method: str, request: Message) -> Message:
        """Returns the reply to a call of `wire.control.METHODS`.

        Raises:
            FleetSparseError: An error of ours, for the caller.
            ConnectionAbortedError: The pserver is stopping, and did nothing.
        """
        return await self._calls[method](request)

    async def watch_workers(self) -> None:
        """Looks for lost workers and abandoned saves periodically, until it is cancelled."""
        while True:
            self.find_lost_workers()
            self._saves.end_abandoned(self._clock())
            if not self._saves.is_saving:
                self._checkpoints.begin_if_due()
            slept_at = self._clock()
            await asyncio.sleep(self._lost_check_s)
            self._membership.excuse(max(self._clock() - slept_at - self._lost_check_s, 0.0))

    def close(self) -> None:
        """Ends the work of other threads soon. Any thread may call it."""
        self._saves.close()
        self._loads.close()
        self._checkpoints.close()

    def release_waiting(self) -> None:
        """Answers the calls that only wait for an event, so that the server can stop at once."""
        self._stopping.send()
        self._saves.release_waiting()

    def find_lost_workers(self) -> None:
        """Looks once for workers that are lost, and wakes the calls that wait for them."""
        now = self._clock()
        lost = self._membership.find_lost(now)
        for worker_index in lost:
            reason = self._membership.why_lost(worker_index)
            _log.warning("worker %d is lost: %s", worker_index, reason)
            self._post(partial(self._shard.evict_worker, worker_index, reason))
            self._saves.lose(worker_index)
            self._loads.give_up()
        unseen = self._membership.find_unseen(now)
        for worker_index in unseen:
            _log.warning("worker %d never registered, and others wait for it", worker_index)
        if lost:
            self._departed.send()
        if lost or unseen:
            self._barriers.wake_all()
        self._end_if_orphaned(now)

    def _end_if_orphaned(self, now: float) -> None:
        if self._membership.present():
            self._alive_at = now
        elif self._alive_at is not None and now - self._alive_at > self._orphaned_s:
            _log.warning(
                "no worker has been connected for %g s (FLEET_SPARSE_ORPHANED_S): the pserver ends with its rows",
                self._orphaned_s,
            )
            self._alive_at = None
            self._stop()

    def _note(self, change: LineageChange) -> None:
        """Appends a change to the log, if there is one. Without it a snapshot is not removed, and stays."""
        if self._shard.log is not None:
            self._post(partial(self._shard.log.note, change))

    async def _report_progress(self, request: messages.ReportProgressRequest) -> messages.ReportProgressReply:
        position = request.position
        progress = WorkerProgress(position.step, position.position, position.pushed_step)
        if self._membership.report_progress(position.worker_index, request.client_id, progress):
            log = self._shard.log
            if log is not None and not log.is_full:  # the rest of a full disk is for registrations and barriers
                await self._on_data_thread(partial(log.note, ReportedProgress(position.worker_index, *progress)))
        return messages.ReportProgressReply()

    # Liveness

    async def _attend(self, request: messages.AttendRequest) -> messages.AttendReply:
        """Lasts as long as the connection of the worker: its end is the end of the call."""
        if request.incarnation in (0, self._shard.incarnation):
            self._membership.attend(request.client_id)
            try:
                await self._stopping.wait()
            finally:
                worker_index = self._membership.leave(request.client_id, self._clock())
                self._departed.send()
                if worker_index is not None:
                    _log.info("worker %d: its connection ended", worker_index)
        return messages.AttendReply(incarnation=self._shard.incarnation)

    # The other calls

    async def _stats(self, request: messages.StatsRequest) -> messages.StatsReply:
        return await self._on_data_thread(self._measure)

    async def _refuse_reader(self, request: Message) -> Message:
        raise PlanError(
            "attach: this pserver trains, so its rows are those of no version. Give the client the addresses of "
            "pservers that were started with --read-only"
        )

    async def _stop_call(self, request: messages.StopRequest) -> messages.StopReply:
        _log.info("worker 0 ends the job")
        self._finish()
        return messages.StopReply()

    def _resume(self, manifest: Manifest) -> None:
        self._registrations.resume(manifest)

    def _measure(self) -> messages.StatsReply:
        shard, counters = self._shard, self._shard.counters
        return messages.StatsReply(
            shard=shard.shard_index,
            incarnation=shard.incarnation,
            num_requests=counters.num_requests,
            bytes_received=self._traffic.bytes_received,
            bytes_sent=self._traffic.bytes_sent,
            resident_bytes=resident_bytes(),
            tables=table_messages(shard.states()),
            num_pulled_rows=counters.num_pulled_rows,
            num_pushed_rows=counters.num_pushed_rows,
            num_torn_bytes=0 if shard.log is None else shard.log.num_torn_bytes,
        )

    def _on_data_thread(self, task: Callable[[], _Result]) -> Awaitable[_Result]:
        return _unless_stopped(self._post(task))


async def _unless_stopped(task: Future[_Result]) -> _Result:
    """Returns the result of a posted task, which runs also if the caller is cancelled.

    Raises:
        ConnectionAbortedError: The data plane stopped before the task ran.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def notify(_: Future[_Result]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(_finish, ended)

    task.add_done_callback(notify)
    await ended
    if task.cancelled():
        raise ConnectionAbortedError("the pserver is stopping")
    return task.result()


def _ignore(*_: object) -> None:
    """Nobody starts this pserver again."""


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def resident_bytes() -> int:
    """Returns the memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
