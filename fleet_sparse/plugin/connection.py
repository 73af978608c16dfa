"""JobConnection: this worker's connection to the pservers of its job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from fleet_sparse.core.mode import GEO, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import FleetSparseError, PlanError, SnapshotError, TableMismatch
from fleet_sparse.settings import Settings
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.control.control import ControlClient, Passed
from fleet_sparse.worker.control.failover import Failover
from fleet_sparse.worker.control.liveness import IncarnationWatcher
from fleet_sparse.worker.control.position_reporter import PositionReporter
from fleet_sparse.worker.control.progress_reporter import ProgressReporter
from fleet_sparse.worker.control.resumed import Resumed, begun_behind, parse_resumed, resumed_in_place
from fleet_sparse.worker.modes.all_reduce import AllReduceTraining, DenseReplica
from fleet_sparse.worker.modes.geo import GeoTraining
from fleet_sparse.worker.modes.step import Progress, Training
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.shard_link import Registration, TableState
from fleet_sparse.worker.net.table_client import TableClient
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_caches import RowCaches
from fleet_sparse.worker.rows.table_exchange import CacheStats

from .all_reduce import PaddleGroup
from .catalog import Catalog
from .row_cache import cache_job
from .size_hint import SizeHintMonitor
from .size_limit import SizeLimit
from .supervised_script import call_at_exception, is_supervised

logger = logging.getLogger(__name__)

ALLOWANCE_AGE_S = 1.0
"""Seconds for which a worker of several counts on the room that it found in a table of limited size."""
_RESUME = "resume"
"""The barrier that has opened in a job that has resumed."""


class Role(NamedTuple):
    """Index of this worker, and the addresses of the pservers."""

    worker_index: int
    num_workers: int
    pserver_endpoints: tuple[str, ...]
    """Control plane addresses, `host:port`, in the order of the shards; empty for a pserver inside this process."""
    worker_endpoints: tuple[str, ...] = ()
    """Addresses of the workers, `host:port`, as their launcher named them; used by an all-reduce only."""

    @property
    def is_first(self) -> bool:
        """True for worker 0, which saves, loads and initializes dense parameters for all workers."""
        return self.worker_index == 0


def open_control(role: Role, settings: Settings) -> ControlClient:
    """A client of the control planes of the job's pservers, which this process has not registered with yet."""
    return ControlClient(role.pserver_endpoints, settings)


class JobConnection:
    """A worker that is registered with every pserver, and how its steps reach them.

    Args:
        role: Role of this worker.
        catalog: The declared tables and dense arrays; those declared later are registered by `register_late`.
        settings: Timeouts and limits.
        load_dirname: Snapshot that a pserver inside this process begins with, or None.
        replica_of: Returns this worker's replica of the local array of a name.

    Attributes:
        role: As given.
        control: Client of the control plane.
        client: Client of the data plane.
        deduplicator: Finds the distinct ids of a batch, grouped by shard.
        resumed: Position of this worker in the snapshot that the pservers began with.
        size_limit: Refuses ids past the size of a table.
        training: How steps reach the pservers in the mode of the job.
        registrations: Answers of the pservers to the newest registration, in the order of the shards.

    Raises:
        ShardUnavailable: A pserver did not come up within `settings.connect_s`.
        TableMismatch: Another worker describes a table differently.
        SettingError: Another worker trains in another mode.
    """

    def __init__(
        self,
        role: Role,
        catalog: Catalog,
        settings: Settings,
        load_dirname: str | None,
        replica_of: Callable[[str], DenseReplica],
        control: ControlClient | None = None,
    ) -> None:
        self.role = role
        self._replica_of = replica_of
        self._catalog = catalog
        self._settings = settings
        self._reporters: list[PositionReporter | ProgressReporter] = []
        self._has_left = False  # the step group, and did not pass the barrier after that
        self._others_wait = False  # at another barrier than the one that this worker passed last
        self._registering = threading.Lock()  # held while pservers are sent tables
        self._caches: RowCaches | None = None
        with ExitStack() as undo:
            if role.pserver_endpoints:
                self.control, embedded = control or open_control(role, settings), None
                call_at_exception(self.control.stay_away)
            else:
                from fleet_sparse.embedded import start_embedded

                self.control, embedded = start_embedded(settings, load_dirname)
            undo.callback(self.control.close)
            registrations = self.registrations = self._register()
            self._copies_epoch = registrations[0].copies_epoch  # then of the newest barrier or exchange
            placement = Placement.even(len(registrations), registrations[0].placement_version)
            warm_up()  # here, not in the first step
            self.client: TableClient
            if embedded is None:
                self.control.open_data_plane(partial(self._connect, placement))
            else:
                self.client = embedded
            undo.callback(self.client.close)
            if role.is_first:
                monitor = SizeHintMonitor()
                self.control.watch_tables(lambda shard: monitor.observe(shard.shard, shard.tables, catalog.tables))
            self.deduplicator = Deduplicator(placement)
            self.size_limit = SizeLimit(self.control, self.client, role.num_workers, ALLOWANCE_AGE_S)
            self._mode = catalog.mode
            self.training = self._make_training(self._mode)
            undo.callback(self.training.close)
            self.resumed = self._parse_resumed()
            if registrations[0].progress is not None:
                self.resumed = resumed_in_place(registrations[0].progress, role.num_workers)
                logger.info("worker %d takes its place again, after %d steps", role.worker_index, self.resumed.step)
            self._has_resumed = _RESUME in registrations[0].open_barriers
            undo.pop_all()

    def _connect(self, placement: Placement, registrations: Sequence[Registration]) -> IncarnationWatcher:
        channel = open_channel(registrations, self._settings, self.control.credentials)
        self.client = client = Client(channel, self.control.identity, registrations, placement, self._settings)
        return Failover(self.control, client, self._values_on_pservers).observe

    def join(self, uploaded: Callable[[], AbstractContextManager[float]]) -> None:
        """Begins to report positions to saves and, if steps wait for each other, waits for all workers.

        Args:
            uploaded: As of a `ProgressReporter`.

        Raises:
            WorkerLost: A worker did not register in time.
        """
        if self.role.is_first:
            for warning in self.resumed.warnings(self._catalog.tables):
                logger.warning(warning)
        else:
            self._reporters.append(
                PositionReporter(self.control, lambda: self.training, self._since_beginning, self._settings)
            )
        if self._mode is not None and self._mode.is_step_synchronized:
            # A step waits for a worker that is slow, and would wait for one that never registers.
            self.control.barrier("init_worker", once=True)
            self._copies_epoch = self.control.copies_epoch
        if self.role.pserver_endpoints and (self._mode is None or self._mode.can_replace_workers):
            self._reporters.append(
                ProgressReporter(
                    self.control,
                    lambda: self._since_beginning(self.training.progress()),
                    self._reach_step,
                    self.role.num_workers,
                    uploaded,
                    self._send_held if self.role.num_workers == 1 else None,
                )
            )
        self.training = self._connected_for_all_reduce(self.training, self._mode)
        logger.info(
            "worker %d of %d is connected, pservers: %d",
            self.role.worker_index,
            self.role.num_workers,
            len(self.registrations),
        )

    def meet(
        self,
        name: str,
        *,
        once: bool = False,
        alone: bool = False,
        before_barrier: Callable[[], None] | None = None,
    ) -> int:
        """Waits for all workers at the barrier `name`; meanwhile the others' steps run without this worker.

        With `once`, a worker that is started again does not wait at a barrier that the job has passed, nor leaves the
        steps, for which the others wait. With `alone`, workers that wait at another barrier are not waited for.
        `before_barrier` is called when this worker has left the steps; no worker passes the barrier before it returns.

        Returns:
            Number of snapshots that were loaded into the running job since this worker registered first.
        """
        if once and name in self.registrations[0].open_barriers:
            self.training.drain()
        else:
            self.leave_steps()
        if before_barrier is not None:
            before_barrier()
        passed = self.pass_barrier(name, once=once, alone=alone)
        self._others_wait = passed.others_wait
        self._has_left = False
        return passed.num_loads

    def pass_barrier(self, name: str, *, once: bool = False, alone: bool = False) -> Passed:
        """Waits at a barrier as `ControlClient.barrier`, outside of the steps; drops copies of replaced rows.

        Where workers count the trained steps of the job, they agree on their number.
        """
        passed = self.control.barrier(name, once=once, alone=alone, num_trained=self.training.num_trained)
        self.training.note_trained(passed.num_trained)
        self._drop_replaced_copies()
        return passed

    def _drop_replaced_copies(self) -> None:
        """Drops copies if rows were loaded or removed since all workers met before; called when they have met."""
        epoch = self.control.copies_epoch
        if self._caches is not None and epoch != self._copies_epoch:
            self._caches.clear()
        self._copies_epoch = epoch

    def leave_steps(self) -> None:
        """Returns when the pservers have this worker's pushes; the others' steps then run without this worker."""
        # Workers that wait at a barrier have left the step group, and do not leave it a second time: at another barrier
        # than this one, or at this one if Ctrl-C ended this worker's last wait at it.
        self.training.drain(leaves=not self._others_wait and not self._has_left)
        self._has_left = True
        if self._has_lag:
            # The next step does not have the number after the last one: what was reported before does not lead to it.
            for reporter in self._reporters:
                if isinstance(reporter, ProgressReporter):
                    reporter.report()

    def leave_steps_together(self) -> None:
        """As `leave_steps`; where workers count the trained steps of the job, also waits for all, as at a barrier."""
        if self.training.holds_back:
            self.meet("leave steps")
        else:
            self.leave_steps()

    def check_step(self) -> None:
        """Refuses a step for which no other worker would push, because all wait at a barrier.

        Called before each step of this worker.

        Raises:
            PlanError: This worker passed a barrier alone; a job in which steps wait for each other.
        """
        self._has_left = False
        if self._others_wait and self._mode is not None and self._mode.is_step_synchronized:
            raise PlanError(
                "exe.run: this worker called fleet.load_model or fleet.shrink while the others wait at a barrier, and "
                "a step needs all workers. Call fleet.barrier_worker() before the next step"
            )

    def gather(self, contribution: bytes) -> list[bytes]:
        """Returns the contributions of all workers, by index; meanwhile the others' steps run without this worker."""
        self.leave_steps_together()
        contributions = self.control.gather("gather", contribution)
        self._drop_replaced_copies()
        self._has_left = False
        return contributions

    def exchange(self, name: str, parts: Sequence[bytes]) -> list[bytes]:
        """Sends a part to each worker, and returns those of all workers for this one, as `ControlClient.exchange`.

        Called after `leave_steps_together`, once for a series of exchanges.
        """
        received = self.control.exchange(name, parts)
        self._drop_replaced_copies()
        self._has_left = False
        return received

    def register(self) -> Sequence[Registration]:
        """Registers the tables and arrays that the pservers do not know yet; returns all shards' answers."""
        with self._registering:
            self.registrations = self._register()
            self.training.note_states(self.states())
        return self.registrations

    def note_resumed(self) -> None:
        """Continues from the snapshot that the pservers loaded before the newest registration."""
        self.resumed = self._parse_resumed()

    @contextmanager
    def resuming(self) -> Iterator[bool]:
        """Runs the block in which all workers resume; ends when all have ended it.

        Yields:
            False for a worker that takes its place in a job that has resumed: no other worker waits for it.
        """
        try:
            yield not self._has_resumed
        except (SnapshotError, TableMismatch):  # of worker 0 alone
            self.control.barrier(_RESUME, once=True)
            raise
        self.control.barrier(_RESUME, once=True)

    @property
    def _has_lag(self) -> bool:
        return self._mode is not None and self._mode.max_step_lag is not None

    def _reach_step(self) -> None:
        """With a bounded step lag, returns when all pushes so far are applied: a report never runs ahead of a shard."""
        if self._has_lag:
            self.client.reach(self._settings.failover_s)

    def _send_held(self) -> float:
        """Sends what the caches of this worker hold, in an async job that it is alone in.

        What was sent before, as by the end of a pass, is applied then, too.

        Returns:
            Seconds until it was applied; 0 if nothing was held.

        Raises:
            FleetSparseError: Something was not applied: this worker holds it again.
        """
        caches = self._caches
        if caches is None or (self._mode is not None and self._mode.is_step_synchronized):
            return 0.0
        num_failed = self.client.num_failed_pushes
        self.client.reach(self._settings.failover_s)
        begun_s, is_holding = time.monotonic(), caches.num_held > 0
        if is_holding:
            self.training.end_pass()
            self.client.reach(self._settings.failover_s)
        if self.client.num_failed_pushes != num_failed:
            raise FleetSparseError("a pserver refused a push of what row caches hold; the next run has its error")
        return time.monotonic() - begun_s if is_holding else 0.0

    def _since_beginning(self, progress: Progress) -> Progress:
        return self.resumed.plus(progress)

    def register_late(self) -> None:
        """Registers what was declared after this worker connected; returns once the pservers know it."""
        is_late = self._catalog.has_unregistered or self._mode is not self._catalog.mode
        if not (is_late or self._registering.locked()):
            return
        with self._registering:  # until it trains in its mode: no step of another thread trains in the mode before
            if self._catalog.has_unregistered:  # otherwise another thread did it, or a call that failed afterwards
                self.registrations = self._register()
                self.training.note_states(self.states())
            mode = self._catalog.mode
            if self._mode != mode:
                # The first program that trains was minimized after init_worker.
                training = self._make_training(mode)
                self.control.barrier("train", once=True)
                training = self._connected_for_all_reduce(training, mode)
                self.training.close()
                self.training = training
            self._mode = mode

    def states(self) -> list[TableState]:
        """States of the tables that the pservers reported at the newest registration."""
        return [state for registration in self.registrations for state in registration.tables]

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """What this worker's row caches hold and did, by table; empty without caches."""
        return {} if self._caches is None else self._caches.stats()

    def close(self) -> None:
        """Ends the connection, not the pservers.

        Raises:
            FleetSparseError: A push failed; the connection is closed all the same.
        """
        with ExitStack() as end:
            end.callback(self.training.close)
            for reporter in self._reporters:
                end.callback(reporter.join)
                reporter.stop()
            end.callback(self.control.close)  # ends the call in which the reporter of positions waits
            end.callback(self.client.close)
            for reporter in self._reporters:
                if isinstance(reporter, ProgressReporter):
                    end.callback(reporter.join)  # its upload uses the client

    def _parse_resumed(self) -> Resumed:
        in_step = self._mode is not None and self._mode.kind == SYNC
        resumed = next((each.resumed for each in self.registrations if each.resumed or not each.is_restart), "")
        return parse_resumed(resumed, self.role.num_workers, in_step=in_step)

    def _register(self) -> list[Registration]:
        """Registers; a table whose registration fails stays to be registered."""
        specs = self._catalog.unregistered()
        role, mode = self.role, self._catalog.mode
        registrations = self.control.register(
            specs, role.worker_index, role.num_workers, mode, is_supervised=is_supervised()
        )
        self._catalog.mark_registered(specs)
        return registrations

    def _values_on_pservers(self) -> set[str]:
        """Names of the dense arrays that workers do not upload before a save."""
        return {dense.spec.name for dense in self._catalog.dense if not dense.is_local}

    def _make_training(self, mode: Mode | None) -> Training:
        # Imported late: a process that becomes a pserver needs no pserver inside.
        from fleet_sparse.embedded import local_dense, local_rows

        mode = mode or Mode()
        if mode.kind == GEO:
            return GeoTraining(
                self.client,
                mode,
                self.role.num_workers,
                tables=self._catalog.local_tables,
                dense=self._catalog.local_dense,
                local_rows=local_rows,
                local_dense=local_dense,
            )
        self._caches = self._row_caches(mode)
        step = begun_behind(self.registrations) if mode.is_step_synchronized and mode.can_replace_workers else 0
        if step:
            self.control.skip_to(step)
        training = PserverTraining(
            self.client, self.deduplicator, mode, self.role.num_workers, caches=self._caches, begun_behind=step
        )
        training.note_states(self.states())
        return training

    def _row_caches(self, mode: Mode) -> RowCaches | None:
        """The caches of this worker's rows; None if it caches none."""
        options = self._catalog.row_cache
        if mode.row_bound is None or options is None:
            return None
        return RowCaches(
            self.client,
            self.deduplicator,
            cache_job(options, mode, self.role.num_workers),
            self._catalog.tables,
            max_bytes=options.max_bytes,
            max_rows=options.max_rows,
            min_dim=options.min_dim,
            max_staged_bytes=min(each.max_staged_bytes for each in self.registrations),
        )

    def _connected_for_all_reduce(self, training: Training, mode: Mode | None) -> Training:
        """Connects the workers with each other if they merge dense gradients. All workers do it at once.

        Returns:
            How steps reach the pservers then; `training` if the workers do not merge dense gradients.
        """
        role, program = self.role, self._catalog.reduced
        if program is None:
            return training
        assert mode is not None, "a program trains"
        assert isinstance(training, PserverTraining), "the mode is sync"
        group = PaddleGroup(
            role.worker_endpoints,
            role.worker_index,
            role.num_workers,
            self._settings.connect_s,
            insecure=self._settings.insecure,
        )
        return AllReduceTraining(
            training,
            group,
            role.worker_index,
            role.num_workers,
            mode.scale,
            program,
            self._replica_of(program.dense.name),
        )
