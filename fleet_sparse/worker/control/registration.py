"""Registration: a client says who it is to every pserver, and checks that their answers are those of one job."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import LogFull, SettingError, ShardUnavailable
from fleet_sparse.launch import Launch
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION, ClientRole, TableState, WorkerProgress

from ..net.shard_link import ClientIdentity, Registration, Resumption, is_older
from .rpc import RETRY_S, Rpc

logger = logging.getLogger(__name__)


class Membership(NamedTuple):
    """The place of a client in its job."""

    worker_index: int = 0
    num_workers: int = 1


class Known(NamedTuple):
    """What a worker knows of its job that shard 0 needs if it was started again."""

    open_barriers: Sequence[str] = ()
    """Barriers that the worker has passed and that stay open."""
    num_loads: int = 0
    """Number of snapshots that were loaded into the running job since the worker registered first."""
    openings: Mapping[str, int] = MappingProxyType({})
    """By barrier, the newest opening of those that the worker has passed."""


class Registrar:
    """Registers one client with every pserver of a job.

    One thread at a time may use it, except that several may `rejoin` different shards.

    Shard 0 names the job, so that all shards agree on its workers; the others take the id from the registration.

    Args:
        rpc: Calls the pservers.
        settings: Timeouts, and the id of the job.

    Attributes:
        identity: Identity of the client, drawn at random.
        can_fail_over: True if this client continues with a pserver that was started again.
        is_sync: True if this worker trains in sync mode.
        registrations: Newest registration of each shard; empty before the first.
    """

    def __init__(self, rpc: Rpc, settings: Settings) -> None:
        self._rpc = rpc
        self._settings = settings
        self._launch = Launch.of_process(settings.job_id)
        self._job_id = 0
        self.identity = ClientIdentity(os.urandom(16), 1)  # constant after construction
        self.can_fail_over = False
        self.is_sync = False
        self._is_waited_for = False  # the others wait for it if it dies, because it is started again
        self.registrations: list[Registration] = []
        self._num_loads_before = 0  # before the first registration, as the next one
        self._openings_before: dict[str, int] = {}
        self._joined = messages.RegisterRequest()  # with all tables so far

    def join(
        self,
        specs: Sequence[TableSpec | DenseSpec],
        membership: Membership,
        mode: Mode | None,
        *,
        is_supervised: bool = False,
    ) -> list[Registration]:
        """Registers a worker. As `ControlClient.register`."""
        request = messages.RegisterRequest(
            role=messages.ROLE_WORKER,
            worker_index=membership.worker_index,
            num_workers=membership.num_workers,
            table_specs=[spec.to_json() for spec in specs],
            mode="" if mode is None else mode.to_json(),
            is_supervised=is_supervised,
        )
        self.is_sync = mode is not None and mode.kind == SYNC
        waits_for_workers = mode is not None and mode.is_step_synchronized and mode.can_replace_workers
        self._is_waited_for = is_supervised and waits_for_workers
        registrations = self._register(request)
        request.table_specs[:0] = self._joined.table_specs
        self._joined = request
        return registrations

    def rejoin(self, shard: int, resumption: Resumption, known: Known, timeout_s: float) -> Registration:
        """Registers a worker again with one pserver, which was started again.

        Raises:
            ShardUnavailable: It is gone again, did not answer within `timeout_s`, or an older process of it answered.
            LogFull: Its log has had no room for `failover_s`.
            FleetSparseError: It refused the worker.
        """
        request = messages.RegisterRequest()
        request.CopyFrom(self._joined)
        request.job_id = self._job_id
        self._set_incarnations(request)
        openings = {**self._openings_before, **known.openings}
        request.resumption.CopyFrom(
            messages.Resumption(
                **resumption._asdict(),
                open_barriers=known.open_barriers,
                num_loads=self._num_loads_before + known.num_loads,
                num_loads_before=self._num_loads_before,
                openings=[messages.Opening(barrier=each, number=n) for each, n in openings.items()],
            )
        )
        (reply,) = self._answers(request, timeout_s, 0.0, [shard])
        registration, former = _registration_of(reply), self.registrations[shard]
        if is_older(registration.incarnation, former.incarnation):
            raise ShardUnavailable(
                f"{self._rpc.where(shard)}: an older process of the pserver answered (incarnation "
                f"{registration.incarnation:016x}, before {former.incarnation:016x}). End it",
                shard=shard,
                endpoint=self._rpc.endpoint(shard),
            )
        self.registrations[shard] = registration
        return registration

    def stay_away(self, timeout_s: float) -> None:
        """Registers a worker for which others would wait a last time, as one that is not started again.

        Errors are ignored. In other jobs nothing is sent: a pserver that was started again would take the process that
        ends for one that is there.
        """
        if not self._is_waited_for:
            return
        self._is_waited_for = self._joined.is_supervised = False
        self._joined.job_id = self._job_id
        self._rpc.try_all("Register", self._joined, timeout_s, patience_s=0.0)

    def visit(self, role: ClientRole) -> list[Registration]:
        """Registers a reader or a tool. As `ControlClient.visit`."""
        return self._register(messages.RegisterRequest(role=messages.Role.Name(role)), patience_s=0.0)

    def _register(self, request: messages.RegisterRequest, patience_s: float | None = None) -> list[Registration]:
        request.protocol_version = CONTROL_VERSION
        request.client_id = self.identity.client_id
        request.client_epoch = self.identity.client_epoch
        request.launch.CopyFrom(messages.Launch(**self._launch._asdict()))
        request.job_id = self._job_id
        self._set_incarnations(request)
        timeout_s = self._settings.deadline_s if self.registrations else self._settings.connect_s
        patience_s = timeout_s if patience_s is None else patience_s
        (first,) = self._answers(request, timeout_s, patience_s, [0])
        request.job_id = first.job_id
        request.log_job_id, request.log_has_content = first.log_job_id, first.log_has_content
        others = self._answers(request, timeout_s, patience_s, range(1, self._rpc.num_shards))
        registrations = [_registration_of(reply) for reply in (first, *others)]
        self.can_fail_over = all(each.is_supervised and (each.has_log or not self.is_sync) for each in registrations)
        self._check(registrations)
        self._job_id = first.job_id
        if any(each.is_supervised for each in registrations):
            self._rpc.patience_s = max(self._settings.deadline_s, self._settings.failover_s)
        if not self.registrations:
            self._num_loads_before = first.num_loads_before
            self._openings_before = {each.barrier: each.number for each in first.openings}
        # A pserver that was started again stays to be rejoined.
        known = self.registrations or registrations
        pairs = zip(known, registrations, strict=True)
        self.registrations = [new if new.incarnation == old.incarnation else old for old, new in pairs]
        return registrations

    def _answers(
        self, request: messages.RegisterRequest, timeout_s: float, patience_s: float, shards: Iterable[int]
    ) -> list[messages.RegisterReply]:
        """Returns the replies of these shards; asks again while one has no room in its log, for `failover_s`."""
        full_since: float | None = None
        while True:
            try:
                return self._rpc.call_all("Register", request, timeout_s, patience_s=patience_s, shards=shards)
            except LogFull as error:
                now = time.monotonic()
                if full_since is None:
                    full_since = now
                    logger.warning("this worker waits for up to %g s: %s", self._settings.failover_s, error)
                if now >= full_since + self._settings.failover_s or self._rpc.closed.wait(RETRY_S):
                    raise

    def _set_incarnations(self, request: messages.RegisterRequest) -> None:
        """Says which pservers have applied pushes of this client: one that has forgotten them refuses it."""
        request.incarnations[:] = [each.incarnation for each in self.registrations]

    def _check(self, registrations: Sequence[Registration]) -> None:
        first, num_shards = registrations[0], len(registrations)
        resumed = next((each.resumed for each in registrations if not each.is_restart), "")
        for shard, registration in enumerate(registrations):
            where = self._rpc.where(shard)
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
            if registration.resumed != resumed and not registration.is_restart:
                raise SettingError(
                    f"{where}: it loaded another snapshot than shard 0. Start all pservers with one, by its name: "
                    'fleet.init_server("model/000002-full")'
                )
        self._check_logs(registrations)
        for known, registration in zip(self.registrations, registrations, strict=False):
            if known.incarnation != registration.incarnation and not self.can_fail_over:
                raise ShardUnavailable(
                    f"{self._rpc.where(known.shard)}: the pserver was started again (incarnation "
                    f"{registration.incarnation:016x}, before {known.incarnation:016x}); the rows that it held are "
                    "gone. Load the last snapshot and start the workers again",
                    shard=known.shard,
                    endpoint=self._rpc.endpoint(known.shard),
                )

    def _check_logs(self, registrations: Sequence[Registration]) -> None:
        """Refuses pservers of which some continue the rows of another job than the others."""
        logged = [each for each in registrations if each.log_job_id]
        for each in logged:
            if each.log_job_id != logged[0].log_job_id:
                raise SettingError(
                    f"{self._rpc.where(each.shard)}: its log begins with job {each.log_job_id:016x}, that of shard "
                    f"{logged[0].shard} with {logged[0].log_job_id:016x}: one of them has rows of a job that the other "
                    "does not have. Start the job with another FLEET_SPARSE_JOB_ID; the logs are then set aside"
                )


def _registration_of(reply: messages.RegisterReply) -> Registration:
    return Registration(
        reply.cluster_id,
        reply.shard,
        reply.num_shards,
        reply.incarnation,
        reply.placement_version,
        reply.data_endpoint,
        table_states(reply.tables),
        reply.resumed,
        reply.stream_endpoint,
        reply.is_supervised,
        reply.is_restart,
        reply.restored_seq,
        reply.has_log,
        tuple(reply.open_barriers),
        _progress_of(reply.progress) if reply.HasField("progress") else None,
        reply.acks_precede_durability,
        reply.pushed_step,
        reply.max_staged_bytes,
        reply.log_job_id,
        reply.copies_epoch,
        reply.num_loads_before,
    )


def _progress_of(position: messages.WorkerPosition) -> WorkerProgress:
    return WorkerProgress(position.step, position.position, position.pushed_step)


def table_states(tables: Sequence[messages.TableState]) -> tuple[TableState, ...]:
    """Returns the states that a pserver reported."""
    return tuple(TableState(t.name, t.optimizer_step, t.num_rows, t.assigned, t.spec) for t in tables)
