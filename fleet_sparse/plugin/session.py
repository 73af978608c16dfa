"""Session: the training session of this process, from its first program to `stop_worker`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from fleet_sparse.errors import FleetSparseError, PlanError, PushRefused
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.resumed import Position, Resumed
from fleet_sparse.worker.modes.step import StepClip
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.row_batch import RowBatch

from .catalog import Catalog
from .connection import JobConnection, Role, open_control
from .dense_sync import DenseSync
from .row_cache_log import RowCacheLog
from .snapshots import Snapshots
from .static.dense_parameters import DenseParameters
from .static.prefetch_queue import PrefetchQueue
from .static.step_ids import StepIds

logger = logging.getLogger(__name__)

DENSE_AGE_S = 1.0
"""Seconds after which an evaluation reads dense values that other workers train again."""


class Loader(Protocol):
    """A loader that knows its position."""

    def position_after_step(self) -> Position:
        """Position of the loader once the step that runs now has ended."""
        ...


class Session:
    """Ties together the catalog, the connection, dense parameters and snapshots of one process.

    Programs are built before `connect` and run after it. Op callbacks of several threads may call `update` at once.

    Args:
        settings: The job's settings.

    Attributes:
        settings: As given.
        catalog: The declared tables and dense arrays.
        dense: Keeps dense parameters equal to those on the pservers.
        snapshots: Saves and loads.
        prefetch_queue: The batches that `look_ahead` announced.
        step_ids: The ids of the steps that run.
        last_feed: Feed of the last run of a program with lookups; None before the first one.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.catalog = Catalog(settings.seed)
        self._sizes = self.catalog.sizes
        self.dense = DenseSync(self.catalog, DENSE_AGE_S, settings.barrier_s)
        self.snapshots = Snapshots(self.dense, settings.barrier_s)
        self.prefetch_queue = PrefetchQueue()
        self.step_ids = StepIds()
        self.last_feed: Any = None
        self._load_dirname: str | None = None
        self._loader: Loader | None = None
        self._connection: JobConnection | None = None
        self._row_cache_log: RowCacheLog | None = None  # of the connection
        self._was_stopped = False
        self._early_control: ControlClient | None = None
        self._optimizer_outside_fleet = ""  # one that was not given to fleet
        self._has_minimized = False

    def note_outside_fleet(self, optimizer: str) -> None:
        """Notes that an optimizer of this class trains a program and was not given to fleet."""
        self._optimizer_outside_fleet = optimizer

    def note_minimized(self) -> None:
        """Notes that a program was given to fleet."""
        self._has_minimized = True

    def check_minimized(self, caller: str) -> None:
        """Refuses a job that would train without its pservers and save nothing.

        Raises:
            PlanError: An optimizer trains a program, and none was given to fleet.
        """
        if self._optimizer_outside_fleet and not self._has_minimized:
            raise PlanError(
                f"{caller}: {self._optimizer_outside_fleet}.minimize(loss) was called without fleet, so that every "
                "worker would train alone and pservers would save nothing. Write "
                "fleet.distributed_optimizer(optimizer, strategy).minimize(loss), before this line"
            )

    def load_at_start(self, dirname: str | None) -> None:
        """Names the snapshot that a pserver in this process begins with; None for none.

        Raises:
            PlanError: The pserver runs already.
        """
        if self._connection is not None:
            raise PlanError(
                "init_server: the pserver in this process runs already. Call init_server before init_worker, or "
                "fleet.load_model(dirname, 0) to load a snapshot into running pservers"
            )
        self._load_dirname = dirname

    def connect(self, role: Role, scope: Any) -> None:
        """Registers with every pserver; afterwards programs run.

        Args:
            role: Role of this worker.
            scope: Scope of the dense parameters; they are shared now, or once the startup program ran.

        Raises:
            ShardUnavailable: A pserver did not come up within `settings.connect_s`.
            TableMismatch: Another worker describes a table differently.
            SettingError: Another worker trains in another mode.
            WorkerLost: Another worker did not register in time.
        """
        if self._connection is not None:
            raise FleetSparseError("init_worker: this worker is connected already. Call fleet.stop_worker() first")
        control, self._early_control = self._early_control, None
        replica_of = self.dense.replica_of
        connection = JobConnection(role, self.catalog, self.settings, self._load_dirname, replica_of, control)
        with ExitStack() as undo:
            undo.callback(self._disconnect, connection)
            self._connection = connection
            self.snapshots.check_schedule(connection)
            self.dense.find(connection)
            connection.join(lambda: self.dense.uploaded(connection))
            self.dense.share(connection, scope)
            self._row_cache_log = RowCacheLog(role.worker_index, connection.cache_stats)
            undo.pop_all()

    def stop(self) -> None:
        """Waits for all workers, then ends the pservers and this connection; does nothing without a connection."""
        connection = self._connection
        if connection is None:
            return
        with ExitStack() as end:
            end.callback(self._forget_job)
            end.callback(self._disconnect, connection)
            connection.meet("stop_worker")
            if self._row_cache_log is not None:
                self._row_cache_log.end()
            self.snapshots.stop_job(connection)

    def abandon(self) -> None:
        """Closes the connection, if there is one, without notice to pservers and other workers."""
        connection = self._connection
        if self._early_control is not None:
            self._early_control.close()
        if connection is None:
            return
        try:
            self._disconnect(connection)
        except FleetSparseError as error:
            logger.warning("the connection was closed with a failed push: %s", error)
        finally:
            self._forget_job()

    def barrier_before_connecting(self, role: Role) -> bool:
        """Waits for all workers if this one is not connected yet; returns False, at once, if it is or was.

        The worker registers without tables, and `connect` continues with the same registration.
        """
        if self._connection is not None or self._was_stopped:
            return False
        if role.num_workers > 1:
            if self._early_control is None:
                self._early_control = open_control(role, self.settings)
                self._early_control.register([], role.worker_index, role.num_workers)
            self._early_control.barrier("barrier_worker before init_worker")
        return True

    def barrier(self, scope: Any) -> None:
        """Returns when every worker called it and all pushes of this one are applied.

        Dense parameters in `scope` then have the values that all workers trained, or that worker 0 loaded.
        """
        connection = self.connection("barrier_worker")
        num_loads = self.dense.meet(connection, "barrier_worker")
        self.snapshots.note_barrier(connection)
        if self.snapshots.follow_loads(connection, scope, num_loads):
            return
        self.dense.invalidate()
        self.dense.refresh(connection)

    @property
    def is_connected(self) -> bool:
        """True between `connect` and `stop`."""
        return self._connection is not None

    def connection(self, caller: str) -> JobConnection:
        """The connection.

        Raises:
            FleetSparseError: There is none; the message names `caller`.
        """
        if self._connection is not None:
            return self._connection
        if self._was_stopped:
            raise FleetSparseError(
                f"{caller}: called after fleet.stop_worker(), which also stops the pservers. Call stop_worker() last, "
                "or start another job from a snapshot: fleet.init_server(dirname), fleet.init_worker()"
            )
        raise FleetSparseError(f"{caller}: this worker has no pservers yet. Call fleet.init_worker() first")

    def undeclared_tables(self) -> set[str]:
        """Names of the tables that the pservers have and no program of this process declares."""
        if self._connection is None:
            return set()
        return {state.name for state in self._connection.states()} - set(self.catalog.tables)

    # Around a run of a program

    def before_run(self, scope: Any, *, trains: bool) -> None:
        """Prepares a run of a program with lookups: late tables are registered, dense values refreshed."""
        if self._connection is not None:
            self._connection.register_late()
            self.dense.refresh(self._connection, scope, trains=trains)

    def before_training(self, scope: Any, dense: Sequence[DenseParameters]) -> None:
        """Prepares a run of a program that trains: its local dense arrays are shared, if they are not yet.

        Raises:
            PlanError: All other workers wait at a barrier, and a step needs them; or as `Snapshots.check_schedule`,
                for a program may be minimized after `init_worker`.
        """
        if self._connection is not None:
            self._connection.check_step()
            self.snapshots.check_schedule(self._connection)
            self.dense.share_local(self._connection, scope, dense)

    def after_run(self, scope: Any, *, has_lookups: bool, trains: bool) -> None:
        """Notes that a run ended: first values of dense parameters are shared, what is due is saved and logged."""
        if self._connection is None:
            return
        if not has_lookups:
            self.dense.share(self._connection, scope)
        if trains:
            self.snapshots.note_step(self._connection)
            if self._row_cache_log is not None:
                self._row_cache_log.note_step()

    # Steps

    @property
    def num_workers(self) -> int:
        """Number of workers of the job."""
        return self.connection("exe.run").role.num_workers

    def update(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        num_examples: float,
        clip: StepClip | None,
        *,
        local_array: str | None = None,
    ) -> None:
        """Ends a training step: pushes its gradients, and writes the new values of each dense array.

        With a `local_array`, which Paddle's ops train after the push, Ctrl-C waits from the push until the run ends.
        A push that fails later is raised by a later call.

        Raises:
            PushRefused: A table would have more rows than its size, where that is refused. Nothing of the step is
                pushed; in sync training with several workers it is a step of the others.
        """
        connection = self.connection("exe.run")
        position = "" if self._loader is None else self._loader.position_after_step().to_json()
        try:
            if self._sizes:
                connection.size_limit.check(rows, self._sizes)
        except PushRefused:
            connection.training.skip(rows, dense, clip, position)
            self.dense.miss_step()
            raise
        if local_array is not None:
            self.dense.defer_interrupt()
        connection.training.update(rows, dense, num_examples, clip, position)
        if local_array is not None:
            self.dense.count_update(local_array)
        self.dense.invalidate()

    def end_pass(self) -> None:
        """Ends a pass over the data: sends what the row caches of this worker hold, unless that takes steps of all.

        Raises:
            FleetSparseError: A pserver was given up. The next step raises the error of a push that a pserver refused.
        """
        if self._connection is not None:
            self._connection.training.end_pass()

    # Resuming

    def resume(self, dirname: str, scope: Any) -> int:
        """As `save_calls.resume`; `scope` is that of the dense parameters."""
        connection = self.connection("resume")
        with connection.training.quiesce(self.settings.barrier_s) as point:
            if point.passed[-1].position is not None:
                raise PlanError(
                    "resume: this worker has trained already, and would train the same batches again. Call it before "
                    "the first step, right after fleet.init_worker()"
                )
        with connection.resuming() as is_with_others:
            if is_with_others and self.snapshots.load(connection, dirname, scope, resumes=True, caller="resume"):
                connection.note_resumed()
            elif is_with_others:
                self.snapshots.save(connection, dirname, caller="resume")
        return connection.resumed.step

    @property
    def resumed(self) -> Resumed:
        """Position of this worker in the snapshot that the pservers began with."""
        return self.connection("resumable or resume_step").resumed

    @property
    def loader(self) -> Loader | None:
        """The loader whose position is recorded in snapshots, if there is one."""
        return self._loader

    def use_loader(self, loader: Loader) -> None:
        """Records the position of `loader` in snapshots from now on.

        Raises:
            PlanError: The session has a loader.
        """
        if self._loader is not None:
            raise PlanError(
                "resumable: this worker has a resumable loader already, and a snapshot has one position per worker. "
                "Call resumable once, before the loop over epochs"
            )
        self._loader = loader

    def _disconnect(self, connection: JobConnection) -> None:
        """Closes the connection; whatever was declared is to be registered and shared again."""
        try:
            connection.close()
        finally:
            self._connection = self._row_cache_log = None
            self._was_stopped = True
            self.catalog.mark_all_unregistered()
            self.dense.forget()

    def _forget_job(self) -> None:
        """Forgets the loader and the schedule, which belong to one job."""
        self._loader = self.snapshots.queue.schedule = None
        self.snapshots.forget_loads()
