"""Control client: the worker's side of the control plane."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.credentials import NO_KEYS, Credentials
from fleet_sparse.errors import FleetSparseError, SettingError, ShardUnavailable
from fleet_sparse.net_addresses import Address, as_reached, is_listening, is_local
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import MAX_MESSAGE_BYTES, ClientRole

from ..modes.step import Progress
from ..net.shard_link import ClientIdentity, Registration, Resumption
from .liveness import IncarnationWatcher, Liveness, ShardTables
from .registration import Known, Membership, Registrar
from .rpc import RETRY_S, GrpcTransport, Rpc, Transport, Unreachable
from .snapshot_rpcs import SnapshotRpcs

logger = logging.getLogger(__name__)

MAX_GATHERED_BYTES = MAX_MESSAGE_BYTES // 2
"""Largest sum of what all workers give to one `ControlClient.gather`."""


_LAST_CALL_S = 2.0


class Passed(NamedTuple):
    """Answer to a worker that has passed a barrier."""

    num_loads: int
    """Number of snapshots that were loaded into the running job since this worker registered first."""
    others_wait: bool
    """True if the barrier opened without workers that wait at another one."""
    num_trained: int = 0
    """Largest number of trained steps that a worker gave, of all that waited at a barrier."""


class ControlClient:
    """Talks to every pserver of a job: registration, barriers, snapshots, stats. Safe to use from several threads.

    Every call ends: while nobody listens it is repeated for `settings.deadline_s` (the first registration for
    `settings.connect_s`, that of a visitor not at all); a call without an answer ends after the timeout that its method
    states. Both raise `ShardUnavailable`.

    Args:
        endpoints: `host:port` of the control plane of each pserver, in the order of the shards; or another transport.
        settings: Timeouts, and the id of the job.
        credentials: Credentials of this process; None for those that the settings name.

    Attributes:
        credentials: As given or named; without keys for a transport that is given.
        identity: Identity under which this client registers and pushes; another one for each ControlClient.
        snapshots: Calls that save, load and shrink.
    """

    def __init__(
        self, endpoints: Sequence[str] | Transport, settings: Settings, credentials: Credentials | None = None
    ) -> None:
        self.credentials = NO_KEYS  # constant after construction
        if isinstance(endpoints, Sequence):
            self.credentials = Credentials.of(settings) if credentials is None else credentials
            may_be_exposed = self.credentials.keys is not None or settings.insecure

            def is_exposed(address: Address) -> bool:
                # Without either, whoever listens there first could pass for the pserver.
                return may_be_exposed and is_listening(address)

            endpoints = GrpcTransport(as_reached(endpoints, is_local=is_local, is_exposed=is_exposed), self.credentials)
        self._settings = settings
        self._rpc = Rpc(endpoints, settings)
        self._registrar = Registrar(self._rpc, settings)
        self._liveness = Liveness(self._rpc, self._registrar, settings, self._rejoin_alone)
        self.identity: ClientIdentity = self._registrar.identity  # constant after construction
        self.snapshots = SnapshotRpcs(
            self._rpc, settings, self.identity.client_id, lambda: self._membership.worker_index, self._note_load
        )
        # Guard the registrar: all of them for all shards, each for one that was started again.
        self._registering = [threading.Lock() for _ in range(self._rpc.num_shards)]
        self._lock = threading.Lock()  # guards all below
        self._membership = Membership()
        self._sequences: defaultdict[str, int] = defaultdict(int)
        self._open_barriers: set[str] = set()  # that it has passed and that stay open
        self._num_loads = 0  # since the first registration, as far as it knows
        self._openings: dict[str, int] = {}  # by barrier, the newest that it has passed
        self._copies_epoch = 0

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
        *,
        is_supervised: bool = False,
    ) -> list[Registration]:
        """Registers this process as a worker, with its tables; waits until all pservers are up.

        From the first call on the pservers know that this worker lives. It may be called again with further tables.

        Args:
            specs: Tables and dense arrays that this worker declares; a pserver compares those that it knows.
            worker_index: Index of this worker, from 0.
            num_workers: Number of workers of the job.
            mode: Mode in which this worker trains; None while it is not known.
            is_supervised: True if this process is started again if it dies, so that others may wait for it.

        Returns:
            One registration per shard, in order.

        Raises:
            ShardUnavailable: A pserver did not come up in time, or was started again since the first call.
            LogFull: The log of a pserver has had no room for `settings.failover_s`.
            TableMismatch: A pserver knows one of the tables with another spec.
            SettingError: The endpoints are not the pservers of one job, in the order of the shards; the pservers serve
                another job; another process is this worker; or another worker trains in another mode.
        """
        self._liveness.start()
        membership = Membership(worker_index, num_workers)
        with self._registering_everywhere():
            registrations = self._registrar.join(specs, membership, mode, is_supervised=is_supervised)
        with self._lock:
            self._membership = membership
        self._liveness.note_registered()
        return registrations

    def skip_to(self, step: int) -> None:
        """Has restarted pservers that lack steps of this worker count all up to `step`, before its first one.

        Raises:
            ShardUnavailable, FleetSparseError: As `rejoin`.
        """
        for registration in self._registrar.registrations:
            if registration.is_restart and registration.pushed_step < step:
                self.rejoin(registration.shard, Resumption(step=step))

    def stay_away(self) -> None:
        """Tells all pservers, as far as they answer at once, that this process is not started again when it ends."""
        self._registrar.stay_away(_LAST_CALL_S)  # without a lock: a registration that lasts must not hold up the end

    def visit(self, role: ClientRole) -> list[Registration]:
        """Registers this process as a reader or a tool, which do not belong to the job's workers.

        Returns:
            One registration per shard, in order; the states of all tables have their specs.

        Raises:
            ShardUnavailable: Nobody listens at an endpoint, which is not waited for, or a pserver did not answer in
                time.
            SettingError: The endpoints are not the pservers of one job, or they serve another job.
        """
        with self._registering_everywhere():
            return self._registrar.visit(role)

    @property
    def can_fail_over(self) -> bool:
        """True if this worker continues with a pserver that was started again."""
        return self._registrar.can_fail_over

    @property
    def is_sync(self) -> bool:
        """True if this worker trains in sync mode."""
        return self._registrar.is_sync

    def rejoin(self, shard: int, resumption: Resumption) -> Registration:
        """Registers this worker again with one pserver, which was started again.

        Raises:
            ShardUnavailable: It is gone again, or did not answer in time.
            FleetSparseError: It refused the worker.
        """
        known = self._known()
        with self._registering[shard]:
            return self._registrar.rejoin(shard, resumption, known, self._settings.deadline_s)

    def _known(self) -> Known:
        with self._lock:
            return Known(sorted(self._open_barriers), self._num_loads, dict(self._openings))

    def _rejoin_alone(self, shard: int) -> None:
        """Registers a worker again that has no data plane yet, and so has pushed nothing."""
        if not self.can_fail_over:
            return  # who opens the data plane hears of it
        known = self._known()
        with self._registering[shard]:
            if self._liveness.is_watched:
                return
            try:
                self._registrar.rejoin(shard, Resumption(), known, self._settings.deadline_s)
            except FleetSparseError as error:
                logger.info("shard %d: registering again: %s", shard, error)
                return
        logger.warning("shard %d was started again; this worker had pushed nothing yet", shard)

    def open_data_plane(self, connect: Callable[[Sequence[Registration]], IncarnationWatcher]) -> None:
        """Connects to the data planes of the pservers with which this worker is registered now.

        Until then this client itself registers again with a pserver that was started again.

        Args:
            connect: Gets one registration per shard, in order, and connects; it is called again if it raised
                `SettingError` because a pserver is gone that is being started again. Returns a watcher, which is called
                as one of `watch_incarnations` from then on.

        Raises:
            ShardUnavailable: A pserver is not back in time.
            FleetSparseError: From `connect`.
        """
        until = time.monotonic() + self._rpc.patience_s
        while True:
            try:
                with self._registering_everywhere():
                    self._liveness.watch_incarnations(connect(list(self._registrar.registrations)))
                return
            except SettingError as error:
                away = self._first_away()
                if away is None or not self.can_fail_over:
                    raise
                if self._rpc.closed.wait(RETRY_S) or time.monotonic() > until:
                    raise ShardUnavailable(
                        f"{self._rpc.where(away)}: the pserver is not back after {self._rpc.patience_s:g} s. See its "
                        "log, and start the job again",
                        shard=away,
                        endpoint=self._rpc.endpoint(away),
                    ) from error

    def _first_away(self) -> int | None:
        """Returns the first shard whose pserver is gone, or another one than that with which this worker registered."""
        registrations = self._registrar.registrations
        stats = self._rpc.try_all("Stats", messages.StatsRequest(), self._settings.deadline_s, patience_s=0.0)
        for each, reply in zip(registrations, stats, strict=True):
            if isinstance(reply, FleetSparseError) or reply.incarnation != each.incarnation:
                return each.shard
        return None

    @contextmanager
    def _registering_everywhere(self) -> Iterator[None]:
        with ExitStack() as stack:
            for lock in self._registering:
                stack.enter_context(lock)
            yield

    def watch_incarnations(self, watcher: IncarnationWatcher) -> None:
        """Calls `watcher` when a pserver was started again, from another thread, as `Liveness`."""
        self._liveness.watch_incarnations(watcher)

    def watch_tables(self, watcher: Callable[[ShardTables], None]) -> None:
        """Calls `watcher` with the tables of each shard every `settings.heartbeat_s`, from another thread."""
        self._liveness.watch_tables(watcher)

    def barrier(self, name: str, *, once: bool = False, alone: bool = False, num_trained: int = 0) -> Passed:
        """Returns when every worker has called it as often as this one, at most `settings.barrier_s` later.

        Args:
            name: Name of the barrier.
            once: True if the barrier stays open for the rest of the job once it has opened, as for a worker that is
                started again.
            alone: True if the barrier opens also once every worker that has not called it waits at another one.
            num_trained: Number of steps of the job that were trained, as far as this worker knows.

        Raises:
            WorkerLost: A worker is lost.
            ShardUnavailable: Shard 0 is gone, or the barrier took too long.
        """
        reply = self._meet(messages.BarrierRequest(name=name, once=once, alone=alone, num_trained=num_trained))
        with self._lock:
            self._num_loads = reply.num_loads
            if once:
                self._open_barriers.add(name)
        return Passed(reply.num_loads, reply.others_wait, reply.num_trained)

    def _note_load(self) -> None:
        """This worker loads: should shard 0 die before the next barrier, the others hear of it by the next process."""
        with self._lock:
            self._num_loads += 1

    def report_progress(self, progress: Progress) -> None:
        """Tells shard 0 how far this worker is.

        Raises:
            ShardUnavailable: Shard 0 is gone.
        """
        position = messages.WorkerPosition(
            worker_index=self._membership.worker_index,
            step=progress.num_steps,
            position=progress.position or "",
            pushed_step=progress.pushed_step,
        )
        request = messages.ReportProgressRequest(position=position, client_id=self.identity.client_id)
        self._rpc.call(0, "ReportProgress", request, self._settings.deadline_s)

    @property
    def copies_epoch(self) -> int:
        """Another number than behind the barrier or exchange before, if rows were loaded or removed since.

        Copies of rows have no meaning then. 0 before the first barrier.
        """
        with self._lock:
            return self._copies_epoch

    def gather(self, name: str, contribution: bytes) -> list[bytes]:
        """Returns the contributions of all workers, by their index, when every worker has called it like `barrier`.

        Args:
            name: Name of the barrier at which they are exchanged.
            contribution: Not empty; those of all workers together have at most `MAX_GATHERED_BYTES`.

        Raises:
            WorkerLost: A worker is lost.
            ShardUnavailable: Shard 0 is gone, or it took too long.
        """
        return list(self._meet(messages.BarrierRequest(name=name, contribution=contribution)).contributions)

    def _meet(self, request: messages.BarrierRequest) -> messages.BarrierReply:
        name = request.name
        with self._lock:
            self._sequences[name] += 1
            request.worker_index = self._membership.worker_index
            request.client_id = self.identity.client_id
            request.sequence = self._sequences[name]
        reply: messages.BarrierReply = self._rpc.call(
            0, "Barrier", request, self._settings.barrier_s, what=f"barrier {name!r}"
        )
        self._note_passed(name, reply)
        return reply

    def _note_passed(self, name: str, reply: messages.BarrierReply | messages.ExchangeReply) -> None:
        with self._lock:
            self._openings[name] = reply.opening
            self._copies_epoch = reply.copies_epoch

    def exchange(self, name: str, parts: Sequence[bytes]) -> list[bytes]:
        """Sends a part to each worker through shard 0, and returns the parts of all workers for this one, by index.

        Every worker calls it, as a barrier. Shard 0 keeps the parts until the next call with this name: end a series
        of calls with one of empty parts.

        Args:
            name: Name of the barrier.
            parts: A part for each worker, by index; together less than `MAX_MESSAGE_BYTES`, and so are the replies.

        Raises:
            WorkerLost: A worker is lost.
            ShardUnavailable: Shard 0 is gone, or the exchange took too long.
        """
        with self._lock:
            self._sequences[name] += 1
            request = messages.ExchangeRequest(
                name=name,
                worker_index=self._membership.worker_index,
                client_id=self.identity.client_id,
                sequence=self._sequences[name],
                parts=parts,
            )
        reply = self._rpc.call(0, "Exchange", request, self._settings.barrier_s, what=f"exchange {name!r}")
        self._note_passed(name, reply)
        return list(reply.parts)

    def stats(self) -> list[messages.StatsReply]:
        """Returns the counters of every pserver, in the order of the shards.

        Raises:
            ShardUnavailable: A pserver is gone.
        """
        return self._rpc.call_all("Stats", messages.StatsRequest(), self._settings.deadline_s)

    def stop(self) -> None:
        """Ends every pserver. One that is gone counts as ended, after `settings.deadline_s` if it may be started again.

        Raises:
            ShardUnavailable: A pserver did not answer in time.
        """
        deadline_s = self._settings.deadline_s
        until = time.monotonic() + deadline_s
        returns = {each.shard for each in self._registrar.registrations if each.is_supervised}
        for shard in range(self._rpc.num_shards):
            patience_s = max(until - time.monotonic(), 0.0) if shard in returns else 0.0
            try:
                self._rpc.call(shard, "Stop", messages.StopRequest(), deadline_s, patience_s=patience_s)
            except ShardUnavailable as error:
                if not isinstance(error.__cause__, Unreachable):
                    raise
                logger.warning("shard %d is gone and counts as ended; a log that it has stays", shard)

    def close(self) -> None:
        """Ends the connections; a worker that has not finished then counts as lost. A second call does nothing."""
        self._rpc.close()
        self._liveness.join()
