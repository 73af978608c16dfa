"""The call of the control plane by which clients register with one pserver."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import Mode, parse_mode
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, LogFailed, LogFull, ProtocolError, SettingError
from fleet_sparse.launch import Launch
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION, TableState

from ..endpoints import DataEndpoints
from ..engine.shard import Shard
from ..log.control_state import ControlState, RegisteredWorker
from ..log.shard_log import ShardLog
from ..refusal import Refusal
from .background import Signal, task_of
from .barrier_rpcs import BarrierService
from .load_rpcs import LoadService
from .log_appends import LogAppends
from .membership import Joined, Membership, Registrant
from .predecessor import Predecessor
from .resumed import ResumedJob
from .save_rpcs import SaveService

_log = logging.getLogger(__name__)

CLIENT_ID_BYTES: Final = 16
LOG_ANSWER_S = 5.0
"""Seconds after which a pserver whose log has no room answers a registration; the client repeats it."""
ADMISSION_S = 2.0
"""Seconds for which a registration waits for connections to end, whose ends may reach a pserver after it."""
TAKEOVER_S = 3.0
"""Seconds for which a registration waits for workers of the log, which ask for their pserver every 100 ms."""
SURVIVORS_S = 5.0
"""Seconds for which a restarted pserver that does not know its job waits for workers of it, which likewise ask."""
PLACE_SHARE = 0.8
"""A registration waits for its place at most this share of the time for which its client waits for the answer."""
_NUM_PARSED_SPECS: Final = 1024


class RegistrationService:
    """Answers the call for one pserver, in the event loop of its control plane.

    Args:
        shard: Used only by tasks on the data thread.
        on_data_thread: Runs a task in the thread that owns the shard.
        membership: Workers of the job.
        predecessor: What the pserver continues.
        departed: Sent when a connection of a worker ends, or workers are lost.
        registered: Sent when a worker has registered.
        appends: Appends to the log of the shard.
        saves: Saves, which a worker that is started again gives up.
        loads: Loads; likewise.
        barriers: Barriers, at which others wait for a worker that is refused.
        data_endpoints: Addresses of the data plane, for workers.
        settings: Durability and timeouts.
        is_supervised: True if the pserver is started again when it dies.
        on_job: Called when a worker has registered.
        resumed: The job of the snapshot that the shard loaded at its start; None without one.
        clock: Returns monotonic time in seconds.
    """

    def __init__(  # noqa: PLR0913  # the parts of a pserver that a registration needs
        self,
        shard: Shard,
        *,
        on_data_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        membership: Membership,
        predecessor: Predecessor,
        departed: Signal,
        registered: Signal,
        appends: LogAppends,
        saves: SaveService,
        loads: LoadService,
        barriers: BarrierService,
        data_endpoints: DataEndpoints,
        settings: Settings,
        is_supervised: bool,
        on_job: Callable[[], None],
        resumed: ResumedJob | None,
        clock: Callable[[], float],
    ) -> None:
        self._shard = shard
        self._on_data_thread = on_data_thread
        self._membership = membership
        self._predecessor = predecessor
        self._departed = departed
        self._registered = registered
        self._appends = appends
        self._saves = saves
        self._loads = loads
        self._barriers = barriers
        self._data_endpoints = data_endpoints
        self._is_supervised = is_supervised
        self._on_job = on_job
        self._clock = clock
        self._is_synced = settings.durability == "sync"
        self._max_staged_bytes = settings.max_staged_bytes
        self._failover_s = settings.failover_s
        self._place_s, self._log_answer_s = _times_until_answered(settings)
        self._resumed = resumed
        self._has_resumed = False  # the job continues from a snapshot that it loaded while it ran
        self._survivors_until = time.monotonic() + SURVIVORS_S
        self._joining = asyncio.Lock()
        self._joins: dict[tuple[bool, bytes], asyncio.Task[_JoinedShard]] = {}  # by request, those under way
        if shard.log is not None and predecessor.is_restart:
            self._continue_with_workers(shard.log.control)

    async def register(self, request: messages.RegisterRequest) -> messages.RegisterReply:
        """Answers Register once the client may go on: a worker of a job with a log, once the log has it durably."""
        who = f"worker {request.worker_index}" if request.role == messages.ROLE_WORKER else "client"
        check_client(who, request.protocol_version, request.client_id)
        if request.role == messages.ROLE_WORKER:
            return await self._register_worker(request, who)
        if request.role in (messages.ROLE_READER, messages.ROLE_TOOL):
            return await self._register_visitor(request, who)
        raise ProtocolError(f"{who}: it has role {request.role}, which is unknown", code=ErrorCode.MALFORMED)

    def resume(self, manifest: Manifest) -> None:
        """The job continues from a snapshot that it loaded while it ran."""
        self._resumed, self._has_resumed = ResumedJob(manifest), True

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
            request.log_has_content,
        )
        await self._take_over_from(request)
        await self._wait_for_survivors(request)
        resumption = request.resumption if request.HasField("resumption") and self._predecessor.is_restart else None
        if resumption is not None:
            self._membership.check_not_ended(who, request.client_id)
        must_know = self._shard.incarnation in request.incarnations or (
            resumption is not None and self._predecessor.continues_log
        )
        if must_know:
            await self._on_data_thread(partial(self._check_known, who, request.client_id))
        await self._wait_for_admission(registrant)
        try:
            self._membership.check_mode(registrant)
            specs = [_parse(who, text) for text in request.table_specs]
        except Exception as error:
            joining = self._register_in_job(registrant._replace(mode=None), must_know=must_know)
            await self._join_durably(request, joining)
            await self._refuse(registrant, error)
            raise
        joining = self._register_in_job(registrant, must_know=must_know)
        self._on_job()
        if resumption is not None:
            self._membership.keep_open(resumption.open_barriers)
            if not self._predecessor.continues_log:
                self._loads.resume(request.worker_index, resumption.num_loads, resumption.num_loads_before)
                openings = {each.barrier: each.number for each in resumption.openings}
                self._membership.resume_barriers(request.worker_index, openings)
                self._barriers.wake_all()
        self._registered.send()
        try:
            joined = await self._join_durably(request, joining, specs, resumption)
        except (LogFull, LogFailed, OSError):  # this worker registers again, with the next process if this one ends
            raise
        except Exception as error:
            await self._refuse(registrant, error)
            raise
        declared = f"{len(specs)} tables: {', '.join(spec.name for spec in specs)}" if specs else "no new tables"
        _log.info("%s of %d registered %s", who, request.num_workers, declared)
        resumed = "" if self._resumed is None else self._resumed.json_for(request.worker_index)
        reply = self._reply(joined.states, resumed, request.client_id)
        reply.is_restart |= resumption is not None
        reply.num_loads_before = self._loads.num_before[request.worker_index]
        reply.pushed_step, reply.log_has_content = joined.pushed_step, joined.log_has_content
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
        request: messages.RegisterRequest,
        joining: _Joining,
        specs: Sequence[TableSpec | DenseSpec] = (),
        resumption: messages.Resumption | None = None,
    ) -> _JoinedShard:
        """As `_join`; returns once the log has it durably, also if the caller does not wait so long.

        A request that is repeated meanwhile waits for the same.

        Raises:
            LogFull: The log has no room yet. The worker asks again, for `FLEET_SPARSE_FAILOVER_S`.
        """

        async def join() -> _JoinedShard:
            try:
                async with self._joining:  # in the order of registrations
                    # for longer than the worker asks: its later calls queue behind this one
                    task, patience_s = partial(self._join, joining, specs, resumption), 2 * self._failover_s
                    joined = await self._appends.append(task, patience_s)
                await self._appends.sync()
                return joined
            finally:
                del self._joins[key]

        key = joining.registrant.mode is None, request.SerializeToString(deterministic=True)
        joins = self._joins.get(key)
        if joins is None:
            joins = self._joins[key] = task_of(join())
        while True:
            await asyncio.wait({joins}, timeout=self._log_answer_s)
            if joins.done():
                return joins.result()
            if self._appends.no_room is not None:
                raise LogFull(str(self._appends.no_room))

    def _register_in_job(self, registrant: Registrant, *, must_know: bool) -> _Joining:
        joined = self._membership.register(registrant, self._clock())
        self._predecessor.may_take_over = False
        if joined.is_new:
            self._loads.num_before[registrant.worker_index] = self._loads.num_kept
            self._give_up_snapshots(registrant.worker_index)
        if joined.begins_job:
            self._barriers.wake_all()  # at which workers of the job before wait
        return _Joining(registrant, joined, self._loads.num_before[registrant.worker_index], must_know)

    async def _refuse(self, registrant: Registrant, error: Exception) -> None:
        """Fails what the other workers wait for, because the registration of this one was refused."""
        self._membership.refuse(registrant, str(error))
        reason = self._membership.why_lost(registrant.worker_index)
        await self._on_data_thread(partial(self._shard.evict_worker, registrant.worker_index, reason))
        self._barriers.wake_all()

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
            tables=table_messages(states),
            job_id=self._membership.job_id,
            copies_epoch=self._barriers.copies_epoch,
            resumed=resumed,
            is_supervised=self._is_supervised,
            is_restart=self._predecessor.is_restart and not self._has_resumed,
            restored_seq=self._predecessor.restored.get(client_id, 0),
            has_log=self._shard.log is not None,
            acks_precede_durability=self._shard.log is not None and not self._is_synced,
            open_barriers=sorted(self._membership.open_barriers),
            openings=[messages.Opening(barrier=each, number=n) for each, n in self._membership.num_openings.items()],
            log_job_id=0 if self._shard.log is None else self._shard.log.control.log_job_id,
            max_staged_bytes=self._max_staged_bytes,
        )

    def _continue_with_workers(self, state: ControlState) -> None:
        self._membership.restore(state, self._clock())
        self._loads.num_before = {worker: each.num_loads for worker, each in state.workers.items()}

    async def _take_over_from(self, request: messages.RegisterRequest) -> None:
        """Continues the job of the log if a worker that registers belongs to it.

        A worker that does not say so waits a moment for one that does: it may be one of the job that was started again,
        while others live.
        """
        deadline = time.monotonic() + TAKEOVER_S
        while self._predecessor.may_take_over:
            assert self._shard.log is not None, "without a log nobody takes over"
            state = self._shard.log.control
            returns = request.HasField("resumption") and any(
                worker.client_id == request.client_id for worker in state.workers.values()
            )
            if returns or request.job_id in {worker.job_id for worker in state.workers.values()}:
                _log.info("takes the shard over from the pserver that left its log")
                self._predecessor.take_over()
                self._continue_with_workers(state)
                return
            has_others = any(index != request.worker_index for index in state.workers)
            if not has_others or not await self._registered.wait(deadline):
                return

    async def _wait_for_survivors(self, request: messages.RegisterRequest) -> None:
        """Returns when a worker may begin a job, or join that of the workers that go on with this pserver.

        A restarted pserver without a log knows neither the job nor its open barriers before one of these has registered
        again: a worker that is new would begin another job, in which they are refused.
        """
        knows_job = request.job_id or request.HasField("resumption")
        if not self._predecessor.is_restart or knows_job or request.num_workers == 1:
            return
        while not self._membership.job_id and await self._registered.wait(self._survivors_until):
            pass

    # Posted to the data thread

    def _join(
        self,
        joining: _Joining,
        specs: Sequence[TableSpec | DenseSpec] = (),
        resumption: messages.Resumption | None = None,
    ) -> _JoinedShard:
        """Declares a worker's tables, and makes it a worker; without a mode if its tables are refused.

        After LogFull it may be called again, and does what it has not done.
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
        log = self._shard.log
        has_content = log is not None and (
            log.control.has_started or any(mark.watermark for mark in self._shard.ledger.watermarks())
        )
        if log is not None and not joining.is_noted:
            joining.note_in(log, mode, is_empty=not has_content)
            joining.is_noted = True
        if refusal is not None:
            raise refusal
        if resumption is not None:
            # Those of the log or snapshot count also if the shard has forgotten the client since.
            push_seq = max(resumption.push_seq, self._predecessor.restored.get(registrant.client_id, 0))
            try:
                self._shard.resume_worker(registrant.worker_index, registrant.client_id, push_seq, resumption.step)
            except Refusal as error:
                raise LogFull(str(error)) from error
        return _JoinedShard(self._shard.states(), self._shard.pushed_step(registrant.worker_index), has_content)

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


class _JoinedShard(NamedTuple):
    """The answer of a shard to a worker that has joined it."""

    states: list[TableState]
    """States of all tables."""
    pushed_step: int
    """The newest step that the worker has pushed."""
    log_has_content: bool
    """True if the log has a push, or the opening of a barrier."""


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
        """Appends the registration to the log. `is_empty` is True if that has no content."""
        who, joined = self.registrant, self.joined
        log_job_id = log.control.log_job_id_with(
            joined.job_id, who.log_job_id, first_is_empty=not who.log_has_content, is_empty=is_empty
        )
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


def check_client(who: str, protocol_version: int, client_id: bytes) -> None:
    """Checks how a client presents itself.

    Args:
        who: The client, as messages name it.
        protocol_version: Version of the control plane that it uses.
        client_id: Its id.

    Raises:
        ProtocolError: It uses another version than this pserver, or its id has a wrong length.
    """
    if protocol_version != CONTROL_VERSION:
        raise ProtocolError(
            f"{who}: it uses version {protocol_version} of the control plane, this pserver {CONTROL_VERSION}. Install "
            "the same fleet_sparse everywhere",
            code=ErrorCode.VERSION,
        )
    if len(client_id) != CLIENT_ID_BYTES:
        raise ProtocolError(
            f"{who}: its client id has {len(client_id)} bytes, it should have {CLIENT_ID_BYTES}",
            code=ErrorCode.MALFORMED,
        )


def table_messages(states: Sequence[TableState]) -> list[messages.TableState]:
    """Returns the states of tables as replies have them."""
    return [messages.TableState(**state._asdict()) for state in states]
