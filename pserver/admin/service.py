"""The calls of the control plane, without gRPC: what each of them does to one pserver."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from google.protobuf.message import Message

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import Mode, parse_mode
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import (
    ErrorCode,
    LogFailed,
    LogFull,
    PlanError,
    ProtocolError,
    SettingError,
    ShardUnavailable,
)
from fleet_sparse.launch import Launch
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION, TableState, WorkerProgress

from ..endpoints import DataEndpoints
from ..engine.shard import Shard
from ..log.control_state import BarrierOpening, ControlState, RegisteredWorker, ReportedProgress, encoded_change
from ..log.lineage import LineageChange, Lineages
from ..log.shard_log import ShardLog
from ..net.requests import Traffic
from ..refusal import Refusal
from .background import Signal, task_of
from .barriers import Contribution
from .checkpoints import Checkpoints
from .load_rpcs import LoadService
from .log_appends import LogAppends
from .membership import Joined, Membership, Registrant
from .resumed import ResumedJob
from .save_rpcs import SaveService
from .shrink_rpcs import ShrinkService
from .snapshot_loader import Loaded

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

Post = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a task in the thread that owns the shard."""

CLIENT_ID_BYTES = 16
MAX_LOST_CHECK_S = 1.0
# Of what workers have for each other at a barrier: a global shuffle exchanges its examples there, too many for a log.
MAX_RECORDED_BYTES = 1 << 20
LOG_ANSWER_S = 5.0
"""Seconds after which a registration for which the log has no room is answered; the client repeats it."""
# The ends of connections and a registration that follows them may reach a pserver in another order.
ADMISSION_S = 2.0
# Workers of a log ask every 100 ms whether their pserver is back.
TAKEOVER_S = 3.0
PLACE_SHARE = 0.8
"""Of the time for which a client waits until its registration is answered."""
_NUM_PARSED_SPECS = 1024
_EPOCHS = 1 << 64


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
        self._data_endpoints = data_endpoints
        self._stop = stop
        self._finish = stop if finish is None else finish
        self._clock = clock
        self._lost_check_s = min(MAX_LOST_CHECK_S, settings.worker_lost_s / 4)
        self._orphaned_s, self._max_staged_bytes = settings.orphaned_s, settings.max_staged_bytes
        self._failover_s = settings.failover_s
        self._place_s, self._log_answer_s = _times_until_answered(settings)
        self._membership = Membership(
            lost_after_s=settings.worker_lost_s,
            unseen_after_s=settings.connect_s,
            returns_after_s=settings.failover_s,
            launch=Launch.of_process(settings.job_id),
        )
        lineages = Lineages({} if shard.log is None else shard.log.control.lineages, self._note)
        self._is_supervised = supervised is not None
        self._is_restart = supervised is not None and supervised.is_restart
        self._has_log = shard.log is not None
        has_workers = shard.log is not None and bool(shard.log.control.workers)
        self._continues_log = self._is_restart and has_workers
        # Another pserver left its log, as one on a machine that is gone: its workers may still run.
        self._may_take_over = not self._is_restart and has_workers
        self._is_synced = settings.durability == "sync"
        self._on_job: Callable[[], None] = _ignore if supervised is None else supervised.on_job
        on_snapshot = _ignore if supervised is None else supervised.on_snapshot
        if loaded is not None and supervised is not None and supervised.has_recovered:
            lineages.add(LineageChange(loaded.series, saved=loaded.manifest.number))
            loaded, restored = None, shard.ledger.watermarks()
        else:
            restored = shard.ledger.watermarks() if self._continues_log or self._may_take_over else []
        self._restored = {mark.client_id: mark.watermark for mark in restored}
        if loaded is not None:
            lineages.add(LineageChange(loaded.series, loaded=loaded.manifest.number))
        self._checkpoints = Checkpoints(
            shard, post=post, on_data_thread=self._on_data_thread, max_bytes=settings.checkpoint_bytes
        )
        self._appends = LogAppends(shard.log, on_data_thread=self._on_data_thread, failover_s=settings.failover_s)
        self._saves = SaveService(
            shard,
            post=post,
            on_data_thread=self._on_data_thread,
            appends=self._appends,
            membership=self._membership,
            root=settings.root,
            positions_s=settings.positions_s,
            lineages=lineages,
            on_snapshot=on_snapshot,
            checkpoints=self._checkpoints,
        )
        self._loads = LoadService(
            shard,
            on_data_thread=self._on_data_thread,
            appends=self._appends,
            wait_for_no_save=self._saves.wait_for_none,
            root=settings.root,
            lineages=lineages,
            on_snapshot=on_snapshot,
            checkpoints=self._checkpoints,
            on_resumed=self._resume,
        )
        self._shrinks = ShrinkService(
            shard, appends=self._appends, wait_for_no_save=self._saves.wait_for_none, checkpoints=self._checkpoints
        )
        self._resumed = None if loaded is None else ResumedJob(loaded.manifest)
        self._has_resumed = False  # the job continues from a snapshot that it loaded while it ran
        self._num_loads_before: dict[int, int] = {}  # by worker: loads when its client registered first
        self._joining = asyncio.Lock()
        self._recorded: dict[str, asyncio.Task[None]] = {}  # by barrier: ends when its newest opening is durable
        if shard.log is not None and self._is_restart:
            self._continue_with_workers(shard.log.control)
        # When a worker was present last; None before the first. Those of a restarted pserver may be gone.
        self._alive_at = clock() if self._is_restart else None
        self._departed = Signal()  # sent when a connection of a worker ends, or workers are lost
        self._registered = Signal()  # sent when a worker has registered
        self._opened: dict[str, Signal] = {}  # by barrier: sent when it opens or fails
        self._stopping = Signal()
        self._calls: dict[str, Callable[[Any], Coroutine[Any, Any, Message]]] = {
            "Register": self._register,
            "Attend": self._attend,
            "Barrier": self._barrier,
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
            "Shrink": self._shrinks.shrink,
            "Stats": self._stats,
            "Stop": self._stop_call,
            "Exchange": self._exchange,
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
        """Looks for lost workers periodically, until it is cancelled."""
        while True:
            self.find_lost_workers()
            if not self._saves.is_saving:
                self._checkpoints.begin_if_due()
            await asyncio.sleep(self._lost_check_s)

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
            self._give_up_snapshots(worker_index)
        unseen = self._membership.find_unseen(now)
        for worker_index in unseen:
            _log.warning("worker %d never registered, and others wait for it", worker_index)
        if lost:
            self._departed.send()
        if lost or unseen:
            self._wake_barriers()
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

    def _continue_with_workers(self, state: ControlState) -> None:
        self._membership.restore(state, self._clock())
        self._num_loads_before = {worker: each.num_loads for worker, each in state.workers.items()}

    async def _take_over_from(self, request: messages.RegisterRequest) -> None:
        """Continues the job of the log if a worker that registers belongs to it.

        A worker that does not say so waits a moment for one that does: it may be one of the job that was started again,
        while others live.
        """
        deadline = time.monotonic() + TAKEOVER_S
        while self._may_take_over:
            assert self._shard.log is not None, "without a log nobody takes over"
            state = self._shard.log.control
            returns = request.HasField("resumption") and any(
                worker.client_id == request.client_id for worker in state.workers.values()
            )
            if returns or request.job_id in {worker.job_id for worker in state.workers.values()}:
                _log.info("takes the shard over from the pserver that left its log")
                self._is_restart, self._continues_log, self._may_take_over = True, True, False
                self._continue_with_workers(state)
                return
            has_others = any(index != request.worker_index for index in state.workers)
            if not has_others or not await self._registered.wait(deadline):
                return

    # Registration

    async def _register(self, request: messages.RegisterRequest) -> messages.RegisterReply:
        who = f"worker {request.worker_index}" if request.role == messages.ROLE_WORKER else "client"
        if request.protocol_version != CONTROL_VERSION:
            raise ProtocolError(
                f"{who}: it uses version {request.protocol_version} of the control plane, this pserver "
                f"{CONTROL_VERSION}. Install the same fleet_sparse everywhere",
                code=ErrorCode.VERSION,
            )
        if len(request.client_id) != CLIENT_ID_BYTES:
            raise ProtocolError(
                f"{who}: its client id has {len(request.client_id)} bytes, it should have {CLIENT_ID_BYTES}",
                code=ErrorCode.MALFORMED,
            )
        if request.role == messages.ROLE_WORKER:
            return await self._register_worker(request, who)
        if request.role in (messages.ROLE_READER, messages.ROLE_TOOL):
            return await self._register_visitor(request, who)
        raise ProtocolError(f"{who}: it has role {request.role}, which is unknown", code=ErrorCode.MALFORMED)

    async def _register_visitor(self, request: messages.RegisterRequest, who: str) -> messages.RegisterReply:
        if request.table_specs or request.mode:
            raise ProtocolError(f"{who}: only a worker declares tables and a mode", code=ErrorCode.MALFORMED)
        if request.launch.job_id:
            self._membership.check_launch(who, _launch_of(request))
        return self._reply(await self._on_data_thread(lambda: self._visit(request.client_id)), "", request.client_id)

    async def _register_worker(self, request: messages.RegisterRequest, who: str) -> messages.RegisterReply:
        registrant = Registrant(
            request.worker_index,
            request.num_workers,
            request.client_id,
            request.client_epoch,
            _parse_mode(who, request.mode),
            request.job_id,
            _launch_of(request),
            request.is_supervised,
            request.log_job_id,
        )
        await self._take_over_from(request)
        resumption = request.resumption if request.HasField("resumption") and self._is_restart else None
        if resumption is not None:
            self._membership.check_not_ended(who, request.client_id)
        must_know = self._shard.incarnation in request.incarnations or (resumption is not None and self._continues_log)
        if must_know:
            await self._on_data_thread(partial(self._check_known, who, request.client_id))
        await self._wait_for_admission(registrant)
        try:
            self._membership.check_mode(registrant)
            specs = [_parse(who, text) for text in request.table_specs]
        except Exception as error:
            joins = self._register_in_job(registrant._replace(mode=None), must_know=must_know)
            await self._join_durably(joins)
            await self._refuse(registrant, error)
            raise
        joins = self._register_in_job(registrant, must_know=must_know)
        self._on_job()
        if resumption is not None:
            self._membership.keep_open(resumption.open_barriers)
        self._registered.send()
        try:
            states, pushed_step = await self._join_durably(joins, specs, resumption)
        except (LogFull, LogFailed, OSError):  # this worker registers again, with the next process if this one ends
            raise
        except Exception as error:
            await self._refuse(registrant, error)
            raise
        declared = f"{len(specs)} tables: {', '.join(spec.name for spec in specs)}" if specs else "no new tables"
        _log.info("%s of %d registered %s", who, request.num_workers, declared)
        resumed = "" if self._resumed is None else self._resumed.json_for(request.worker_index)
        reply = self._reply(states, resumed, request.client_id)
        reply.is_restart |= resumption is not None
        reply.pushed_step = pushed_step
        progress = self._membership.progress_of(request.worker_index)
        if progress is not None:
            reply.progress.CopyFrom(messages.WorkerPosition(worker_index=request.worker_index, **progress._asdict()))
        return reply

    async def _wait_for_admission(self, registrant: Registrant) -> None:
        """Returns when a worker may register. It waits a moment for connections of an earlier process to end.

        It waits longer for the place of a worker that may have died without a sign: until its connection has ended,
        because it left heartbeats unanswered, but not for as long as the client waits for the answer.
        """
        begun_at = time.monotonic()
        is_said = False
        while True:
            try:
                self._membership.check(registrant)
                return
            except SettingError:
                is_taken = self._membership.is_taken(registrant)
                if is_taken and not is_said:
                    is_said = True
                    _log.info("%s: another process has its place; it waits for %g s", registrant.where, self._place_s)
                if not await self._departed.wait(begun_at + (self._place_s if is_taken else ADMISSION_S)):
                    raise

    async def _join_durably(
        self,
        joining: _Joining,
        specs: Sequence[TableSpec | DenseSpec] = (),
        resumption: messages.Resumption | None = None,
    ) -> tuple[list[TableState], int]:
        """As `_join`; returns once the log has it durably, also if the caller does not wait so long.

        Raises:
            LogFull: The log has no room yet. The worker asks again, for `FLEET_SPARSE_FAILOVER_S`.
        """

        async def join() -> tuple[list[TableState], int]:
            async with self._joining:  # in the order of registrations
                # for longer than the worker asks: a later call of it only waits for this one
                task, patience_s = partial(self._join, joining, specs, resumption), 2 * self._failover_s
                joined = await self._appends.append(task, patience_s)
            await self._appends.sync()
            return joined

        joins = task_of(join())
        while True:
            await asyncio.wait({joins}, timeout=self._log_answer_s)
            if joins.done():
                return joins.result()
            if self._appends.no_room is not None:
                raise LogFull(str(self._appends.no_room))

    def _register_in_job(self, registrant: Registrant, *, must_know: bool) -> _Joining:
        joined = self._membership.register(registrant, self._clock())
        self._may_take_over = False
        if joined.is_new:
            self._num_loads_before[registrant.worker_index] = self._loads.num_kept
            self._give_up_snapshots(registrant.worker_index)
        if joined.begins_job:
            self._wake_barriers()  # at which workers of the job before wait
        return _Joining(registrant, joined, self._num_loads_before[registrant.worker_index], must_know)

    async def _refuse(self, registrant: Registrant, error: Exception) -> None:
        """Fails what the other workers wait for, because the registration of this one was refused."""
        self._membership.refuse(registrant, str(error))
        reason = self._membership.why_lost(registrant.worker_index)
        await self._on_data_thread(partial(self._shard.evict_worker, registrant.worker_index, reason))
        self._wake_barriers()

    def _give_up_snapshots(self, worker_index: int) -> None:
        self._saves.lose(worker_index)
        self._loads.give_up()

    def _reply(self, states: list[TableState], resumed: str, client_id: bytes) -> messages.RegisterReply:
        return messages.RegisterReply(
            cluster_id=self._shard.cluster_id,
            shard=self._shard.shard_index,
            num_shards=self._shard.num_shards,
            incarnation=self._shard.incarnation,
            placement_version=self._shard.placement.version,
            data_endpoint=self._data_endpoints.zmq,
            stream_endpoint=self._data_endpoints.stream,
            tables=_messages_of(states),
            job_id=self._membership.job_id,
            resumed=resumed,
            is_supervised=self._is_supervised,
            is_restart=self._is_restart and not self._has_resumed,
            restored_seq=self._restored.get(client_id, 0),
            has_log=self._has_log,
            acks_precede_durability=self._has_log and not self._is_synced,
            open_barriers=sorted(self._membership.open_barriers),
            log_job_id=0 if self._shard.log is None else self._shard.log.control.log_job_id,
            max_staged_bytes=self._max_staged_bytes,
        )

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

    # Barriers

    async def _barrier(self, request: messages.BarrierRequest) -> messages.BarrierReply:
        name, sequence, worker_index = request.name, request.sequence, request.worker_index
        await self._pass(request, (request.contribution,) if request.contribution else ())
        contributions = self._membership.contributions(name, worker_index, sequence)
        if request.contribution and not contributions:
            raise ProtocolError(
                f"barrier {name!r}: worker {worker_index} asks for round {sequence}, whose contributions are dropped. "
                "Pserver 0 was started again, and its log keeps up to 1 MiB of them. Start the job again from its last "
                "snapshot",
                code=ErrorCode.MALFORMED,
            )
        return messages.BarrierReply(
            contributions=[b"".join(each) for each in contributions],
            num_loads=self._loads.num_kept - self._num_loads_before[worker_index],
            others_wait=self._membership.passed_alone(name, worker_index),
            copies_epoch=(self._shard.incarnation + self._loads.num_kept + self._shrinks.num_done) % _EPOCHS,
        )

    async def _exchange(self, request: messages.ExchangeRequest) -> messages.ExchangeReply:
        """A barrier at which every worker has a part for each worker."""
        name, sequence, worker_index = request.name, request.sequence, request.worker_index
        if len(request.parts) != self._membership.num_workers:
            raise ProtocolError(
                f"exchange {name!r}: worker {worker_index} has {len(request.parts)} parts, should have "
                f"{self._membership.num_workers}, one for each worker",
                code=ErrorCode.MALFORMED,
            )
        barrier = messages.BarrierRequest(
            name=name, sequence=sequence, worker_index=worker_index, client_id=request.client_id
        )
        await self._pass(barrier, tuple(request.parts))
        contributions = self._membership.contributions(name, worker_index, sequence)
        parts = [each[worker_index] for each in contributions if worker_index < len(each)]
        if len(parts) != self._membership.num_workers:
            raise ProtocolError(
                f"exchange {name!r}: worker {worker_index} asks for round {sequence}, whose parts are dropped",
                code=ErrorCode.MALFORMED,
            )
        return messages.ExchangeReply(parts=parts)

    async def _pass(self, request: messages.BarrierRequest, contribution: Contribution) -> None:
        """Returns when a worker has passed a barrier."""
        name = request.name
        await self._wait_until_registered(request)
        try:
            while not self._arrive(request, contribution):
                await self._opened.setdefault(name, Signal()).wait()
        except asyncio.CancelledError:
            self._membership.withdraw(name, request.sequence, request.worker_index)
            self._wake(name)  # another call of this worker for the same barrier, if there is one, arrives again
            raise
        if name in self._recorded:
            await asyncio.shield(self._recorded[name])

    async def _wait_until_registered(self, request: messages.BarrierRequest) -> None:
        """Returns when the worker of a barrier has registered, or another process has its place.

        A worker of a restarted pserver may be at a barrier before it has registered again.
        """
        name, worker_index = request.name, request.worker_index
        deadline = time.monotonic() + self._failover_s
        while (self._is_restart or self._may_take_over) and not self._membership.is_worker(
            worker_index, request.client_id
        ):
            self._membership.check_not_ended(f"barrier {name!r}", request.client_id)
            if worker_index in self._membership.present():
                return
            if not await self._registered.wait(deadline):
                raise ShardUnavailable(
                    f"barrier {name!r}: shard {self._shard.shard_index} was started again, and worker {worker_index} "
                    f"has not registered again in {self._failover_s:g} s (FLEET_SPARSE_FAILOVER_S). Start the job "
                    "again from its last snapshot",
                    shard=self._shard.shard_index,
                    endpoint=self._data_endpoints.stream or self._data_endpoints.zmq,
                )

    def _arrive(self, request: messages.BarrierRequest, contribution: Contribution) -> bool:
        """Returns whether a worker has passed a barrier; wakes the others if it opened the barrier."""
        has_passed = self._membership.arrive(
            request.name,
            request.sequence,
            request.worker_index,
            request.client_id,
            self._clock(),
            once=request.once,
            alone=request.alone,
            contribution=contribution,
        )
        opening = self._membership.take_opening()
        if opening is not None:
            if self._has_log:
                self._recorded[opening.name] = task_of(self._record(opening))
            self._wake(request.name)
            if not has_passed:  # it opened another barrier
                self._wake_barriers()
        return has_passed

    async def _record(self, opening: BarrierOpening) -> None:
        """Returns when the log has the opening of a barrier durably: no worker is answered before.

        Raises:
            LogFull: The log has had no room for `FLEET_SPARSE_FAILOVER_S`, for which pushes wait as well.
        """
        assert self._shard.log is not None, "checked by the caller"
        if opening.num_bytes > MAX_RECORDED_BYTES:
            opening = msgspec.structs.replace(opening, contributions=())
        await self._appends.append(partial(self._shard.log.note, opening, encoded_change(opening)))
        await self._appends.sync()

    def _wake(self, name: str) -> None:
        opened = self._opened.pop(name, None)
        if opened is not None:
            opened.send()

    def _wake_barriers(self) -> None:
        for name in list(self._opened):
            self._wake(name)

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
        self._resumed, self._has_resumed = ResumedJob(manifest), True

    # Posted to the data thread

    def _join(
        self,
        joining: _Joining,
        specs: Sequence[TableSpec | DenseSpec] = (),
        resumption: messages.Resumption | None = None,
    ) -> tuple[list[TableState], int]:
        """Declares a worker's tables, and makes it a worker; without a mode if its tables are refused.

        After LogFull it may be called again, and does what it has not done.

        Returns:
            The states of all tables, and the newest step that the worker has pushed.
        """
        registrant, mode = joining.registrant, joining.registrant.mode
        refusal: Exception | None = None
        if joining.must_know:  # saves may have been committed since that was checked first
            self._check_known(registrant.where, registrant.client_id)
        try:
            self._shard.add_tables(specs, declared_by=registrant.where)
        except (LogFull, LogFailed, OSError):
            raise
        except Exception as error:
            mode, refusal = None, error
        if not joining.has_joined:
            self._shard.join(
                registrant.worker_index,
                registrant.num_workers,
                registrant.client_id,
                mode,
                # the shard continues the job if it has a log
                begins_job=joining.joined.begins_job and resumption is None,
            )
            joining.has_joined = True
        if self._shard.log is not None and not joining.is_noted:
            is_empty = not any(mark.watermark for mark in self._shard.ledger.watermarks())
            joining.note_in(self._shard.log, mode, is_empty=is_empty)
            joining.is_noted = True
        if refusal is not None:
            raise refusal
        if resumption is not None:
            # Those of the log or snapshot count also if the shard has forgotten the client since.
            push_seq = max(resumption.push_seq, self._restored.get(registrant.client_id, 0))
            try:
                self._shard.resume_worker(registrant.worker_index, registrant.client_id, push_seq, resumption.step)
            except Refusal as error:
                raise LogFull(str(error)) from error
        return self._shard.states(), self._shard.pushed_step(registrant.worker_index)

    def _check_known(self, who: str, client_id: bytes) -> None:
        """Checks that pushes of a client that registered here before are not forgotten: they might be applied twice."""
        if not self._shard.knows(client_id):
            raise ProtocolError(
                f"{who}: another process has taken its place, and two snapshots were saved since. Start it again",
                code=ErrorCode.STALE_EPOCH,
            )

    def _visit(self, client_id: bytes) -> list[TableState]:
        self._shard.visit(client_id)
        return [entry.table.state._replace(spec=entry.spec.to_json()) for entry in self._shard.tables.values()]

    def _measure(self) -> messages.StatsReply:
        shard, counters = self._shard, self._shard.counters
        return messages.StatsReply(
            shard=shard.shard_index,
            incarnation=shard.incarnation,
            num_requests=counters.num_requests,
            bytes_received=self._traffic.bytes_received,
            bytes_sent=self._traffic.bytes_sent,
            resident_bytes=resident_bytes(),
            tables=_messages_of(shard.states()),
            num_pulled_rows=counters.num_pulled_rows,
            num_pushed_rows=counters.num_pushed_rows,
        )

    def _on_data_thread(self, task: Callable[[], _Result]) -> Awaitable[_Result]:
        return _unless_stopped(self._post(task))


@dataclass(slots=True)
class _Joining:
    """A worker that the membership registered, and that is to join the shard."""

    registrant: Registrant
    joined: Joined
    num_loads: int
    must_know: bool
    """True if the shard has applied pushes of this client, unless it has forgotten it."""
    has_joined: bool = False
    is_noted: bool = False
    """True once the log has the registration."""

    def note_in(self, log: ShardLog, mode: Mode | None, *, is_empty: bool) -> None:
        """Appends the registration to the log. `is_empty` is True if no push was applied."""
        who, joined = self.registrant, self.joined
        log_job_id = log.control.log_job_id_with(joined.job_id, who.log_job_id, is_empty=is_empty)
        log.note(
            RegisteredWorker(
                who.worker_index,
                who.num_workers,
                who.client_id,
                who.client_epoch,
                None if mode is None else mode.to_json(),
                joined.job_id,
                who.launch,
                joined.begins_job,
                self.num_loads,
                who.is_supervised,
                log_job_id,
            )
        )


def _times_until_answered(settings: Settings) -> tuple[float, float]:
    """Returns the seconds that a registration may wait for its place, and for room in the log, until it is answered."""
    return (
        min(settings.worker_lost_s + ADMISSION_S, PLACE_SHARE * settings.connect_s),
        min(LOG_ANSWER_S, PLACE_SHARE * settings.deadline_s),
    )


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


def _launch_of(request: messages.RegisterRequest) -> Launch:
    return Launch(request.launch.job_id, request.launch.machine, request.launch.launcher)


_parsed = lru_cache(_NUM_PARSED_SPECS)(parse_spec)
"""All workers of a job declare the same specs."""


def _parse(who: str, text: str) -> TableSpec | DenseSpec:
    try:
        return _parsed(text)
    except ValueError as error:
        raise ProtocolError(f"{who}: {error}", code=ErrorCode.MALFORMED) from error


def _parse_mode(who: str, text: str) -> Mode | None:
    try:
        return parse_mode(text) if text else None
    except ValueError as error:
        raise ProtocolError(f"{who}: {error}", code=ErrorCode.MALFORMED) from error


def _messages_of(states: list[TableState]) -> list[messages.TableState]:
    return [messages.TableState(**state._asdict()) for state in states]


def resident_bytes() -> int:
    """Returns the memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
