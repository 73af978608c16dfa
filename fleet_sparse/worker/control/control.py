"""The worker's side of the control plane: register, heartbeat, barrier, save, load, shrink, stats, stop."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import grpc
from google.protobuf.message import Message

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError, SettingError, ShardUnavailable
from fleet_sparse.net_addresses import as_reached, is_local
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import (
    ATTRIBUTES_KEY,
    ERROR_KEY,
    MAX_MESSAGE_BYTES,
    METHODS,
    SERVICE,
    TableState,
    from_status,
)
from fleet_sparse.wire.frame_format import PROTOCOL_VERSION

from ..modes.step import Progress
from ..net.shard_link import ClientIdentity, Registration

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_AWAIT_S = 60.0  # for a save to begin; longer than a pserver waits before it answers that none did
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # pservers are inside
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


class Unreachable(Exception):
    """Nobody listens at an endpoint, or the connection broke: the call may be made again."""


class OutOfTime(Exception):
    """A call was not answered within its timeout."""


class Pending(Protocol):
    """A call that was started."""

    def result(self) -> Message:
        """Waits for the reply; raises `Unreachable`, `OutOfTime` or an error of ours."""
        ...


class Calls(Protocol):
    """How calls reach the pservers."""

    @property
    def endpoints(self) -> Sequence[str]:
        """What each shard is called in messages, in order."""
        ...

    def start(self, shard: int, method: str, request: Message, timeout_s: float) -> Pending:
        """Starts a call of `wire.control.METHODS`."""
        ...

    def close(self) -> None:
        """Ends the connections."""
        ...


class GrpcCalls:
    """Implements `Calls` over gRPC. Endpoints are `host:port`."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = list(endpoints)
        self._channels = [grpc.insecure_channel(endpoint, options=_OPTIONS) for endpoint in endpoints]
        self._methods = [_methods_of(channel) for channel in self._channels]

    @property
    def endpoints(self) -> Sequence[str]:
        """As `Calls`."""
        return self._endpoints

    def start(self, shard: int, method: str, request: Message, timeout_s: float) -> Pending:
        """As `Calls`."""
        return _GrpcPending(self._methods[shard][method].future(request, timeout=timeout_s))

    def close(self) -> None:
        """As `Calls`."""
        for channel in self._channels:
            channel.close()


class _GrpcPending:
    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self) -> Message:
        try:
            reply: Message = self._future.result()
        except grpc.RpcError as error:
            raise _ours(error) from None
        except grpc.FutureCancelledError:
            raise Unreachable("the connection was closed") from None
        except BaseException:
            self._future.cancel()
            raise
        return reply


def _methods_of(channel: grpc.Channel) -> Mapping[str, Any]:
    return {
        name: channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )
        for name, (request, reply) in METHODS.items()
    }


def _ours(error: Any) -> Exception:
    """What a failed call means: the pserver's error, or that it was not reached."""
    metadata = dict(error.trailing_metadata() or ())
    if ERROR_KEY in metadata:
        return from_status(error.details() or "", metadata[ERROR_KEY], metadata.get(ATTRIBUTES_KEY, "{}"))
    details = f"{error.code().name}: {error.details()}"
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unreachable(details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return OutOfTime(details)
    return FleetSparseError(f"control plane: {details}")


def _states(tables: Iterable[messages.TableState]) -> tuple[TableState, ...]:
    return tuple(TableState(t.name, t.optimizer_step, t.num_rows, t.assigned, t.spec) for t in tables)


class Heartbeat(NamedTuple):
    """What a pserver answered to a heartbeat."""

    shard: int
    incarnation: int
    tables: tuple[TableState, ...]


class _Worker(NamedTuple):
    worker_index: int
    num_workers: int


class ControlClient:
    """Speaks to every pserver of a job. Safe to call from several threads.

    Every call ends: one that finds nobody listening is made again for `settings.deadline_s` (the first ones for
    `settings.connect_s`), one that is not answered ends after the timeout that its method states. Both raise
    `ShardUnavailable`.

    Args:
        endpoints: `host:port` of the control plane of each pserver, in the order of the shards; or another way to
            reach them.
        settings: Timeouts.

    Attributes:
        identity: Under which this worker registers and pushes; drawn anew for each ControlClient.
    """

    def __init__(self, endpoints: Sequence[str] | Calls, settings: Settings) -> None:
        self.identity = ClientIdentity(os.urandom(16), 1)  # constant after construction
        self._calls: Calls = (
            GrpcCalls(as_reached(endpoints, is_local=is_local)) if isinstance(endpoints, Sequence) else endpoints
        )
        self._settings = settings
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards all below
        self._registrations: list[Registration] = []
        self._worker = _Worker(0, 1)
        self._sequences: defaultdict[str, int] = defaultdict(int)
        self._watchers: list[Callable[[Heartbeat], None]] = []
        self._heartbeat: threading.Thread | None = None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(
        self,
        specs: Sequence[TableSpec | DenseSpec],
        worker_index: int,
        num_workers: int,
        mode: Mode | None = None,
    ) -> list[Registration]:
        """Registers this worker and its tables with every pserver; waits until all are up. Starts the heartbeat.

        May be called again with further tables.

        Args:
            specs: That this worker brings; a pserver that knows one compares.
            worker_index: From 0.
            num_workers: Of the job.
            mode: In which this worker trains; None while it is not known.

        Returns:
            One registration a shard, in order.

        Raises:
            ShardUnavailable: A pserver did not come up in time, or is another one than at the first call.
            TableMismatch: A pserver knows one of the tables otherwise.
            SettingError: The endpoints are not the pservers of one job, in the order of the shards, or another worker
                trains in another mode.
        """
        request = messages.RegisterRequest(
            protocol_version=PROTOCOL_VERSION,
            worker_index=worker_index,
            num_workers=num_workers,
            client_id=self.identity.client_id,
            client_epoch=self.identity.client_epoch,
            table_specs=[spec.to_json() for spec in specs],
            mode="" if mode is None else mode.to_json(),
        )
        timeout_s = self._settings.deadline_s if self._registrations else self._settings.connect_s
        replies = self._call_all("Register", request, timeout_s, patience_s=timeout_s)
        registrations = [
            Registration(
                reply.cluster_id,
                reply.shard,
                reply.num_shards,
                reply.incarnation,
                reply.placement_version,
                reply.data_endpoint,
                _states(reply.tables),
                reply.resumed,
                reply.stream_endpoint,
            )
            for reply in replies
        ]
        self._check(registrations)
        with self._lock:
            self._worker = _Worker(worker_index, num_workers)
            self._registrations = registrations
            if self._heartbeat is None:
                self._heartbeat = threading.Thread(target=self._beat, name="fleet_sparse heartbeat", daemon=True)
                self._heartbeat.start()
        return registrations

    def watch_heartbeats(self, watcher: Callable[[Heartbeat], None]) -> None:
        """Has `watcher` called with every answer to a heartbeat, by the heartbeat's thread."""
        with self._lock:
            self._watchers.append(watcher)

    def barrier(self, name: str) -> None:
        """Returns when every worker called it as often as this one, at most `settings.barrier_s` later.

        Raises:
            WorkerLost: One of them is gone.
            ShardUnavailable: Shard 0 is gone, or it took too long.
        """
        with self._lock:
            self._sequences[name] += 1
            request = messages.BarrierRequest(
                name=name,
                worker_index=self._worker.worker_index,
                num_workers=self._worker.num_workers,
                sequence=self._sequences[name],
            )
        self._call(0, "Barrier", request, self._settings.barrier_s, what=f"barrier {name!r}")

    # Saving. A pserver resolves a relative name of a directory under its root.

    def plan_save(self, dirname: str, save_id: str, kind: str) -> messages.SavePlan:
        """What shard 0 says that a save will be: its number, and what a delta is on top of.

        Args:
            dirname: Of the series.
            save_id: Under which the save is known, used once.
            kind: "full" or "delta"; that of the plan is full if there is nothing that a delta could be on top of.

        Raises:
            SnapshotError: The directory cannot be read or made.
            ShardUnavailable: Shard 0 is gone, or it took longer than `settings.barrier_s`.
        """
        request = messages.PlanSaveRequest(dirname=dirname, save_id=save_id, kind=kind)
        plan: messages.SavePlan = self._call(0, "PlanSave", request, self._settings.barrier_s)
        return plan

    def begin_save(
        self, plan: messages.SavePlan, tables: Sequence[str], mark: Progress, *, ends_day: bool = False
    ) -> bool:
        """Has every shard fix what it will write; returns when all have, or one cannot write such a delta.

        Args:
            plan: Of the save.
            tables: Names of those to save; empty for all of them and the dense arrays.
            mark: Of this worker, which pushes nothing until this returns.
            ends_day: Whether a day of the tables ends with it.

        Returns:
            Whether all have. If not the save is to be ended, and a full one will do.

        Raises:
            SnapshotError: A worker did not bring its mark in time, or a pserver has nothing that should be saved.
            ShardUnavailable: A pserver is gone, or did not answer in time.
        """
        request = messages.BeginSaveRequest(plan=plan, tables=tables, mark=self._mark_of(mark), ends_day=ends_day)
        replies = self._call_all("BeginSave", request, self._settings.marks_s + self._settings.deadline_s)
        return not any(reply.needs_full for reply in replies)

    def write_save(self, save_id: str) -> list[messages.ShardFile]:
        """Has every pserver write its file; returns when all are durable. Each has `settings.barrier_s` for that.

        Raises:
            SnapshotError: A pserver could not write.
            ShardUnavailable: A pserver is gone, or it took too long.
        """
        return self._call_all("WriteSave", messages.WriteSaveRequest(save_id=save_id), self._settings.barrier_s)

    def finish_save(
        self, plan: messages.SavePlan, files: Sequence[messages.ShardFile], keep_last: int | None
    ) -> messages.FinishSaveReply:
        """Has shard 0 write the manifest, with which the files are a snapshot, and remove older snapshots.

        Args:
            plan: Of the save.
            files: Of all shards.
            keep_last: How many full snapshots stay, with all deltas on top of them; None for all.

        Returns:
            Path or URL of the snapshot, as shard 0 has it, and the checksum of its manifest.

        Raises:
            SnapshotError: A file is not there as it was written, or the manifest could not be written.
            ShardUnavailable: Shard 0 is gone, or it took longer than `settings.barrier_s`; perhaps there is a snapshot.
        """
        request = messages.FinishSaveRequest(plan=plan, files=files, keep_last=keep_last or 0)
        reply: messages.FinishSaveReply = self._call(0, "FinishSave", request, self._settings.barrier_s)
        return reply

    def end_save(self, save_id: str, *, committed: bool, checksum: int = 0) -> None:
        """Tells every shard that a save has ended. One that cannot be told is left out: it finds out at the next save.

        Args:
            save_id: Of the save.
            committed: Whether there is a snapshot.
            checksum: Of its manifest.
        """
        request = messages.EndSaveRequest(save_id=save_id, committed=committed, checksum=checksum)
        if self._closed.is_set():
            return
        timeout_s = self._settings.deadline_s
        shards = range(len(self._calls.endpoints))
        pending = [self._calls.start(shard, "EndSave", request, timeout_s) for shard in shards]
        for shard in shards:
            try:
                self._finish(shard, "EndSave", request, timeout_s, pending[shard], patience_s=self._settings.retry_s)
            except FleetSparseError as error:
                logger.warning("save %s: %s was not told that it ended: %s", save_id, self._where(shard), error)

    def await_save(self, last_save_id: str) -> str:
        """The id of a save that has begun, once it is another one than `last_save_id`; empty after a while without.

        Raises:
            ShardUnavailable: Shard 0 is not there, or did not answer.
        """
        request = messages.AwaitSaveRequest(worker_index=self._worker.worker_index, last_save_id=last_save_id)
        save_id: str = self._call(0, "AwaitSave", request, _AWAIT_S, patience_s=0.0).save_id
        return save_id

    def mark(self, save_id: str, marks: Sequence[Progress]) -> None:
        """Says on every shard that this worker's pushes so far belong to a save, and no later ones.

        Args:
            save_id: Of the save.
            marks: Where this worker is; in sync training with several workers, after each of its last steps.

        Raises:
            ShardUnavailable: A pserver is gone, or did not answer within `settings.marks_s`.
        """
        request = messages.MarkRequest(save_id=save_id, marks=map(self._mark_of, marks))
        self._call_all("Mark", request, self._settings.marks_s, patience_s=self._settings.marks_s)

    def _mark_of(self, progress: Progress) -> messages.WorkerMark:
        return messages.WorkerMark(
            worker_index=self._worker.worker_index, step=progress.num_steps, position=progress.position or ""
        )

    # Loading and shrinking

    def load_draft(self, dirname: str, load_id: str, tables: Sequence[str]) -> int:
        """Has every pserver load its part of a snapshot beside what it holds. Each has `settings.barrier_s` for that.

        Args:
            dirname: Of a series, for its newest snapshot; or of one snapshot.
            load_id: Under which the load is known, used once.
            tables: Names of those to load; empty for all of them and the dense arrays.

        Returns:
            Rows of all shards.

        Raises:
            SnapshotError: It cannot be read.
            TableMismatch: It has a table otherwise than the job.
            ShardUnavailable: A pserver is gone, or it took too long.
        """
        request = messages.LoadDraftRequest(dirname=dirname, load_id=load_id, tables=tables)
        return sum(reply.num_rows for reply in self._call_all("LoadDraft", request, self._settings.barrier_s))

    def finish_load(self, load_id: str, *, kept: bool) -> None:
        """What was loaded takes the place of what pservers hold; if it is not `kept` it is thrown away.

        Raises:
            SnapshotError: A pserver has not loaded it, or saves.
            ShardUnavailable: A pserver is gone, or did not answer in time.
        """
        request = messages.FinishLoadRequest(load_id=load_id, kept=kept)
        # What is thrown away, a pserver that is gone has thrown away.
        self._call_all("FinishLoad", request, self._settings.barrier_s, patience_s=None if kept else 0.0)

    def shrink(self, max_unseen_days: int) -> int:
        """Removes the rows that no push touched in the last so many ended days; returns how many there were.

        Raises:
            SnapshotError: A pserver saves.
            ShardUnavailable: A pserver is gone, or it took longer than `settings.barrier_s`.
        """
        request = messages.ShrinkRequest(max_unseen_days=max_unseen_days)
        return sum(reply.num_removed for reply in self._call_all("Shrink", request, self._settings.barrier_s))

    # The whole

    def stats(self) -> list[messages.StatsReply]:
        """The counters of every pserver, in the order of the shards.

        Raises:
            ShardUnavailable: A pserver is gone.
        """
        return self._call_all("Stats", messages.StatsRequest(), self._settings.deadline_s)

    def stop(self) -> None:
        """Ends every pserver; one that is gone already counts as ended.

        Raises:
            ShardUnavailable: A pserver did not answer in time.
        """
        for shard in range(len(self._calls.endpoints)):
            try:
                self._call(shard, "Stop", messages.StopRequest(), self._settings.deadline_s, patience_s=0.0)
            except ShardUnavailable as error:
                if not isinstance(error.__cause__, Unreachable):
                    raise

    def close(self) -> None:
        """Ends heartbeat and connections; the pservers then count this worker as lost. A second call does nothing."""
        self._closed.set()
        heartbeat = self._heartbeat
        if heartbeat is not None and heartbeat is not threading.current_thread():
            heartbeat.join(self._heartbeat_timeout_s())
        self._calls.close()

    # Calling

    def _call_all(
        self, method: str, request: Message, timeout_s: float, *, patience_s: float | None = None
    ) -> list[Any]:
        """Makes one call to every shard at once; their replies in order."""
        self._check_open()
        shards = range(len(self._calls.endpoints))
        pending = [self._calls.start(shard, method, request, timeout_s) for shard in shards]
        return [
            self._finish(shard, method, request, timeout_s, pending[shard], patience_s=patience_s) for shard in shards
        ]

    def _call(
        self,
        shard: int,
        method: str,
        request: Message,
        timeout_s: float,
        *,
        patience_s: float | None = None,
        what: str | None = None,
    ) -> Any:
        self._check_open()
        pending = self._calls.start(shard, method, request, timeout_s)
        return self._finish(shard, method, request, timeout_s, pending, patience_s=patience_s, what=what)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("control client: it is closed")

    def _finish(
        self,
        shard: int,
        method: str,
        request: Message,
        timeout_s: float,
        pending: Pending,
        *,
        patience_s: float | None = None,
        what: str | None = None,
    ) -> Any:
        """Waits for a call; makes it again while nobody listens, for `patience_s` since the first time it did not.

        Any call may be made again: each has the same effect a second time.
        """
        patience_s = self._settings.deadline_s if patience_s is None else patience_s
        begun_at = time.monotonic()
        unreachable_since: float | None = None
        while True:
            try:
                return pending.result()
            except OutOfTime as error:
                waited_s = time.monotonic() - begun_at
                raise self._unavailable(shard, what or method, f"no answer in {waited_s:.1f} s", error) from error
            except Unreachable as error:
                now = time.monotonic()
                if unreachable_since is None:
                    unreachable_since = now
                    if patience_s > 0:
                        logger.info("%s is not up yet, waiting for up to %g s", self._where(shard), patience_s)
                if now >= unreachable_since + patience_s or self._closed.wait(_RETRY_S):
                    text = f"not reached in {now - unreachable_since:.1f} s"
                    raise self._unavailable(shard, what or method, text, error) from error
            pending = self._calls.start(shard, method, request, timeout_s)

    def _where(self, shard: int) -> str:
        return f"shard {shard} at {self._calls.endpoints[shard]}"

    def _unavailable(self, shard: int, what: str, text: str, error: Exception) -> ShardUnavailable:
        return ShardUnavailable(
            f"{self._where(shard)}: {what}: {text}; last error: {error}. See the log of pserver {shard}",
            shard=shard,
            endpoint=self._calls.endpoints[shard],
        )

    def _check(self, registrations: Sequence[Registration]) -> None:
        first, num_shards = registrations[0], len(registrations)
        for shard, registration in enumerate(registrations):
            where = self._where(shard)
            if (registration.shard, registration.num_shards) != (shard, num_shards):
                raise SettingError(
                    f"{where}: it is shard {registration.shard} of {registration.num_shards}, it should be shard "
                    f"{shard} of {num_shards}. List all pservers of the job, in the order of their shards"
                )
            if registration.cluster_id != first.cluster_id:
                raise SettingError(
                    f"{where}: it belongs to cluster {registration.cluster_id:016x}, shard 0 to "
                    f"{first.cluster_id:016x}. List the pservers of one job"
                )
            if registration.placement_version != first.placement_version:
                raise SettingError(
                    f"{where}: it has placement version {registration.placement_version}, shard 0 has "
                    f"{first.placement_version}. List the pservers of one job"
                )
            if registration.resumed != first.resumed:
                raise SettingError(
                    f"{where}: it began with another snapshot than shard 0. Start all pservers with one, by its name: "
                    'fleet.init_server("model/000002-full")'
                )
        for known, registration in zip(self._registrations, registrations, strict=False):
            if known.incarnation != registration.incarnation:
                raise ShardUnavailable(
                    f"{self._where(known.shard)}: the pserver was started again (incarnation "
                    f"{registration.incarnation:016x}, before {known.incarnation:016x}); the rows that it held are "
                    "gone. Load the last snapshot and start the workers again",
                    shard=known.shard,
                    endpoint=self._calls.endpoints[known.shard],
                )

    # The heartbeat's thread

    def _heartbeat_timeout_s(self) -> float:
        """Short enough that one pserver that hangs does not make the others believe that this worker is lost."""
        return min(5 * self._settings.heartbeat_s, self._settings.worker_lost_s / 3)

    def _beat(self) -> None:
        while not self._closed.wait(self._settings.heartbeat_s):
            with self._lock:
                worker, watchers = self._worker, list(self._watchers)
            request = messages.HeartbeatRequest(worker_index=worker.worker_index, client_id=self.identity.client_id)
            try:
                self._beat_once(request, watchers)
            except Exception:
                if not self._closed.is_set():
                    logger.exception("a heartbeat failed")

    def _beat_once(self, request: messages.HeartbeatRequest, watchers: Sequence[Callable[[Heartbeat], None]]) -> None:
        timeout_s = self._heartbeat_timeout_s()
        shards = range(len(self._calls.endpoints))
        pending = [self._calls.start(shard, "Heartbeat", request, timeout_s) for shard in shards]
        for shard in shards:
            try:
                reply: Any = pending[shard].result()
            except (Unreachable, OutOfTime, FleetSparseError) as error:
                # Who needs the pserver finds out by its own call; this one is not to end the heartbeat of the others.
                logger.debug("%s: heartbeat: %s", self._where(shard), error)
                continue
            for watcher in watchers:
                watcher(Heartbeat(shard, reply.incarnation, _states(reply.tables)))
