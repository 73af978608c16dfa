"""The training session of this process: which tables it knows, and its connection to the pservers.

There is one. Programs are built before it is connected and run after; op bodies find it by `active()`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.mode import GEO, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules import read_only
from fleet_sparse.core.rules.loading import add_rules
from fleet_sparse.core.table import DenseSpec, TableSpec, parse_spec
from fleet_sparse.core.warm_up import warm_up
from fleet_sparse.errors import FleetSparseError, PlanError, ShardUnavailable, WorkerLost
from fleet_sparse.settings import Settings
from fleet_sparse.transpiler.placeholder import SiteSpec
from fleet_sparse.worker.control.control import ControlClient, Heartbeat
from fleet_sparse.worker.control.position_reporter import PositionReporter
from fleet_sparse.worker.control.resumed import Position, Resumed, parse_resumed
from fleet_sparse.worker.control.save import FULL, Save
from fleet_sparse.worker.modes.geo import GeoTraining, dense_on_pservers, table_on_pservers
from fleet_sparse.worker.modes.step import StepClip, Training
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.net.shard_link import Registration, TableState
from fleet_sparse.worker.rows.deduplicator import Deduplicator, UniqueIds
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.row_batch import RowBatch

from .optimizer_config import OptimizerConfig
from .save_queue import SaveQueue
from .schedule import Schedule
from .size_hint import SizeHintMonitor
from .static.dense_parameters import DenseParameters, has_value, restore
from .static.prefetch_queue import PrefetchQueue

logger = logging.getLogger(__name__)

READ_ONLY = OptimizerConfig(read_only.name, ())


class Role(NamedTuple):
    """Which worker this is, and where the pservers are."""

    worker_index: int
    num_workers: int
    pserver_endpoints: tuple[str, ...]
    """Control plane addresses, `host:port`, in the order of the shards; empty for a pserver inside this process."""


class Loader(Protocol):
    """A loader that says where it stands."""

    def position_after_step(self) -> Position:
        """Where it stands once the step that runs now has ended."""
        ...


class _Connection(NamedTuple):
    role: Role
    control: ControlClient
    client: Client
    deduplicator: Deduplicator
    mode: Mode | None
    training: Training
    resumed: Resumed


class Session:
    """Tables by name, dense arrays in the order they were minimized, and the connection once `connect` was called.

    Op bodies of several threads may call `pull`, `prefetch` and `update` at once.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings  # constant after construction
        self._load_dirname: str | None = None  # when the pserver is in this process
        self.expectations = PrefetchQueue()  # `look_ahead` writes, prefetch ops read
        self._saves = SaveQueue()
        self._registering = threading.Lock()  # held while pservers are told of tables
        self._lock = threading.Lock()  # guards all below
        self._tables: dict[str, TableSpec] = {}
        self._dense: list[DenseParameters] = []
        self._mode: Mode | None = None  # of the programs that train; None before the first
        self._local_tables: dict[str, TableSpec] = {}  # geo: with the rules that this worker trains them with
        self._local_dense: dict[str, DenseSpec] = {}
        self._unregistered: list[TableSpec | DenseSpec] = []
        self._dense_pending: list[DenseParameters] = []  # not yet shared with the pservers
        self._dense_found: list[DenseSpec] = []  # on the pservers, of programs that this job does not have
        self._dense_restored: set[str] = set()  # parameters that got their values from those
        self._num_failed_pushes = 0  # when they were read last
        self._dense_read_at = -math.inf  # when the trained arrays were read last, monotonic; -inf: read them again
        self._scope: Any = None  # that the dense parameters were last written to
        self._connection: _Connection | None = None
        self._marker: PositionReporter | None = None
        self._was_stopped = False
        self._loader: Loader | None = None

        self._promises = SizeHintMonitor()  # the heartbeat's thread only

    # Declaring, at the time a program is built

    def declare_mode(self, mode: Mode) -> None:
        """Makes known how programs train.

        Raises:
            PlanError: Another program trains in another mode.
        """
        with self._lock:
            has_trained = any(spec.rule != read_only.name for spec in self._tables.values()) or self._dense
            if self._mode not in (None, mode) and has_trained:
                raise PlanError(
                    f"minimize: another program trains in mode {self._mode}, this one in {mode}; "
                    "give all of them one DistributedStrategy"
                )
            self._mode = mode

    def declare_table(self, site: SiteSpec, optimizer: OptimizerConfig) -> TableSpec:
        """Makes a table known; one that was read-only so far gets the optimizer's update rule.

        Raises:
            PlanError: It is known with another dim, rule, initializer or seed.
        """
        try:
            spec = TableSpec(
                name=site.table,
                dim=site.dim,
                rule=optimizer.rule,
                hyperparameters=optimizer.of_table(site),
                initializer=site.initializer,
                seed=site.seed or self.settings.seed,
                max_ids=None if site.bounded else site.num_ids,
            )
        except ValueError as error:  # a name or size that no pserver takes
            raise PlanError(str(error)) from None
        with self._lock:
            spec = self._on_pservers(spec)
            known = self._tables.get(spec.name)
            if known is not None:
                differences = known.differences(spec)
                if differences:
                    raise PlanError(f"table {spec.name!r}: another program has it with {'; '.join(differences)}")
                if known.rule != READ_ONLY.rule or spec.rule == READ_ONLY.rule:
                    return known
            self._tables[spec.name] = spec
            self._unregistered.append(spec)
        return spec

    def _on_pservers(self, spec: TableSpec) -> TableSpec:
        """The table as pservers are to have it; geo keeps the rule here."""
        if not self._is_geo or spec.rule == read_only.name:
            return spec
        known = self._local_tables.setdefault(spec.name, spec)
        if differences := known.differences(spec):
            raise PlanError(f"table {spec.name!r}: another program has it with {'; '.join(differences)}")
        return table_on_pservers(spec)

    @property
    def _is_geo(self) -> bool:
        return self._mode is not None and self._mode.kind == GEO

    def check_dense(self, names: Iterable[str]) -> None:
        """Refuses to train parameters that another program trains.

        Raises:
            PlanError: Names the first one.
        """
        with self._lock:
            taken = {name for dense in self._dense if dense.is_trained for name in dense.names}
        both = sorted(taken.intersection(names))
        if both:
            raise PlanError(f"minimize: parameter {both[0]!r} is trained by another program already")

    def dense_names(self) -> set[str]:
        """The dense parameters that are known, trained or kept."""
        with self._lock:
            return {name for dense in self._dense for name in dense.names}

    def trained_names(self) -> set[str]:
        """The tables and dense parameters that programs train."""
        with self._lock:
            tables = {spec.name for spec in self._tables.values() if spec.rule != read_only.name}
            return tables | {name for dense in self._dense if dense.is_trained for name in dense.names}

    def declare_dense(self, dense: DenseParameters) -> DenseParameters:
        """Makes dense parameters of a minimized program known, `check_dense` came before; returns them as pservers
        have them.
        """
        with self._lock:
            if self._is_geo and dense.is_trained:
                self._local_dense[dense.spec.name] = dense.spec
                dense = dense._replace(spec=dense_on_pservers(dense.spec))
            self._dense.append(dense)
            self._dense_pending.append(dense)
            self._unregistered.append(dense.spec)
        return dense

    def num_dense(self) -> int:
        """How many dense arrays were declared."""
        return len(self._dense)

    # Connecting

    def begin_with(self, dirname: str | None) -> None:
        """Says what the pserver in this process is to begin with; None for nothing.

        Raises:
            PlanError: It has begun.
        """
        if self._connection is not None:
            raise PlanError(
                "init_server: the pserver in this process has begun. Call it before init_worker; what runs takes a "
                "snapshot over with fleet.load_model(dirname, 0)"
            )
        self._load_dirname = dirname

    def connect(self, role: Role, scope: Any) -> None:
        """Registers with every pserver; afterwards programs run.

        Args:
            role: Of this worker.
            scope: Where the dense parameters are, or will be once the startup program ran.

        Raises:
            ShardUnavailable: A pserver did not come up within `settings.connect_s`.
            TableMismatch: Another worker described a table differently.
            SettingError: Another worker trains in another mode.
        """
        if self._connection is not None:
            raise FleetSparseError("init_worker: was called before; call stop_worker first")
        with ExitStack() as undo:
            if role.pserver_endpoints:
                control, embedded = ControlClient(role.pserver_endpoints, self.settings), None
            else:
                from fleet_sparse.embedded import start_embedded

                control, embedded = start_embedded(self.settings, self._load_dirname)
            undo.callback(control.close)
            registrations = self._register(control, role)
            placement = Placement.even(len(registrations), registrations[0].placement_version)
            channel = embedded or open_channel(registrations, self.settings)
            warm_up()  # here, not in the first step
            client = Client(channel, control.identity, registrations, placement, self.settings)
            undo.callback(client.close)
            control.watch_heartbeats(lambda beat: client.observe_incarnation(beat.shard, beat.incarnation))
            control.watch_heartbeats(self._check_promises)
            self._find_dense(registrations)
            deduplicator = Deduplicator(placement)
            training = self._make_training(client, deduplicator, role, registrations)
            in_step = self._mode is not None and self._mode.kind == SYNC
            resumed = parse_resumed(registrations[0].resumed, role.worker_index, role.num_workers, in_step=in_step)
            for warning in resumed.warnings(self._tables) if role.worker_index == 0 else ():
                logger.warning(warning)
            self._connection = _Connection(role, control, client, deduplicator, self._mode, training, resumed)
            undo.callback(self._forget_connection)
            if role.worker_index > 0:
                self._marker = PositionReporter(
                    control, lambda: self._connected("save").training, resumed.plus, self.settings
                )
                undo.callback(control.close)  # ends the call that the marker waits in, before it is joined
            if self._mode is not None and self._mode.is_step_synchronized:
                # A step waits for a worker that is slow, and would wait for one that never comes.
                control.barrier("init_worker")
            self.share_dense(scope)
            undo.pop_all()
        logger.info(
            "worker %d of %d is connected, pservers: %d", role.worker_index, role.num_workers, len(registrations)
        )

    def stop(self) -> None:
        """Waits for all workers, then ends the pservers and this connection; without a connection nothing."""
        connection = self._connection
        if connection is None:
            return
        with ExitStack() as end:
            end.callback(self._forget_job)
            end.callback(self._forget_connection)
            end.callback(connection.control.close)
            end.callback(connection.client.close)
            end.callback(self._stop_marker)
            self._meet("stop_worker")
            with self._saves.none_under_way():
                if connection.role.worker_index == 0:
                    connection.control.stop()

    def abandon(self) -> None:
        """Closes the connection, if there is one, without a word to anyone."""
        connection = self._connection
        if connection is None:
            return
        with ExitStack() as end:
            end.callback(self._forget_job)
            end.callback(self._forget_connection)
            end.callback(connection.control.close)
            self._stop_marker()
            try:
                connection.client.close()
            except FleetSparseError as error:
                logger.warning("the connection was dropped with a push that had failed: %s", error)

    def _stop_marker(self) -> None:
        if self._marker is not None:
            self._marker.stop()

    def _forget_job(self) -> None:
        """What a job had besides its connection: the next one begins without."""
        self._loader = self._saves.schedule = None

    def _forget_connection(self) -> None:
        """Back to before `connect`: all that was declared is to be registered and shared again."""
        marker, self._marker = self._marker, None
        if marker is not None:
            marker.stop()
            marker.join()
        with self._lock:
            if self._connection is not None:
                self._connection.training.close()
            self._connection = None
            self._was_stopped = True
            self._unregistered = [*self._tables.values(), *(dense.spec for dense in self._dense)]
            self._dense_pending = list(self._dense)
            self._dense_restored = set()

    def barrier(self) -> None:
        """Returns when every worker called it and all pushes of this one are applied.

        Dense parameters are then what all workers made of them.
        """
        self._connected("barrier_worker")
        self._meet("barrier_worker")
        self._dense_read_at = -math.inf
        if self._scope is not None:
            self.refresh_dense(self._scope)

    def _meet(self, name: str) -> None:
        """Waits until every worker is there; meanwhile the others' steps do without this one."""
        connection = self._connected(name)
        connection.training.drain(leaves=True)
        connection.control.barrier(name)

    # Saving, loading, resuming

    def save(
        self,
        dirname: str,
        kind: str = FULL,
        *,
        keep_last: int | None = 1,
        tables: Sequence[str] = (),
        ends_day: bool = False,
        wait: bool = True,
        caller: str,
    ) -> None:
        """Makes every pserver write its own shard under `dirname`; worker 0 asks for it, the others only settle.

        What worker 0 computed itself, as the statistics of batch normalisation, is brought to the pservers first.

        Args:
            dirname: Of the series.
            kind: As of `worker.save.Save`, as all below but the last two.
            keep_last: How many full snapshots stay; None for all.
            tables: Names of those to save; empty for all.
            ends_day: Whether a day of the tables ends.
            wait: Whether to return when there is a snapshot; if not, when its moment is fixed, and what fails after
                that is logged.
            caller: For messages.

        Raises:
            SnapshotError: A pserver could not write.
            ShardUnavailable: A pserver is gone.
            ValueError: An argument has no meaning.
        """
        connection = self._connected(caller)
        save = Save(connection.control, dirname, kind, keep_last=keep_last, tables=tables, ends_day=ends_day)
        if connection.role.worker_index == 0:
            self._saves.make(save, self._settle, self._begin, wait=wait)
        else:
            self._settle()
            logger.info("%s(%r): worker 0 saves for all workers", caller, dirname)

    def _settle(self) -> None:
        """All that this worker did is on the pservers."""
        connection = self._connected("save")
        connection.training.drain()
        self._dense_read_at = -math.inf
        if connection.role.worker_index == 0:
            self._bring_kept()

    def _begin(self, save: Save) -> None:
        connection = self._connected("save")
        with connection.training.quiesce(self.settings.barrier_s, is_coordinator=True) as held:
            save.begin(connection.resumed.plus(held.passed[-1]))

    def schedule(self, schedule: Schedule) -> None:
        """Has worker 0 save by itself from now on."""
        self._saves.schedule = schedule

    def keep_last_of(self, dirname: str) -> int | None:
        """How many full snapshots a save there keeps if its caller does not say: as the schedule for it, else 1."""
        schedule = self._saves.schedule
        return schedule.keep_last if schedule is not None and schedule.dirname == dirname else 1

    def note_run(self) -> None:
        """A run of a program that trains has ended: saves if that is due.

        Raises:
            FleetSparseError: Of an earlier push that failed. What fails of a save is logged.
        """
        connection = self._connection
        if connection is not None and connection.role.worker_index == 0:
            self._saves.step(connection.control, self._settle, self._begin)

    def load(self, dirname: str, scope: Any, *, tables: Sequence[str] = (), caller: str) -> None:
        """What pservers hold becomes what a snapshot has. Called by all workers, of which worker 0 asks for it.

        Args:
            dirname: Of a series, for its newest snapshot; or of one snapshot.
            scope: Where the dense parameters are.
            tables: Names of those to load; empty for all, and the dense parameters.
            caller: For messages.

        Raises:
            SnapshotError: It cannot be read. Pservers hold what they held; it is raised by worker 0 alone.
            TableMismatch: It has a table otherwise than this job. Likewise.
        """
        connection = self._connected(caller)

        def ask() -> None:
            load_id = uuid.uuid4().hex
            try:
                num_rows = connection.control.load_draft(dirname, load_id, tables)
                connection.control.finish_load(load_id, kept=True)
            except FleetSparseError:
                with suppress(FleetSparseError):  # of a pserver that is gone
                    connection.control.finish_load(load_id, kept=False)
                raise
            logger.info("%s: loaded %d rows of %s", caller, num_rows, dirname)

        self._between_steps(caller, ask)
        registrations = self._register(connection.control, connection.role)
        connection.training.note_states(_states(registrations), are_replaced=True)
        self._find_dense(registrations)
        self._dense_restored = set()
        self._read_dense(scope)
        self._restore_found(connection, scope)

    def shrink(self, max_unseen_days: int) -> None:
        """Removes rows that no push touched in the last so many ended days. Called by all workers; worker 0 asks."""
        control = self._connected("shrink").control
        self._between_steps("shrink", lambda: logger.info("shrink: removed %d rows", control.shrink(max_unseen_days)))

    def _between_steps(self, name: str, ask: Callable[[], None]) -> None:
        """Has worker 0 do something while all workers stand still; what it raises, the others do not hear of."""
        connection = self._connected(name)
        self._meet(name)
        if connection.role.worker_index != 0:
            connection.control.barrier(f"{name} ends")
            return
        try:
            with self._saves.none_under_way():
                ask()
        except (ShardUnavailable, WorkerLost):
            raise  # the others find out by themselves
        except Exception:
            connection.control.barrier(f"{name} ends")
            raise
        connection.control.barrier(f"{name} ends")

    def name_of_table(self, table: int | str) -> str:
        """The table of this name, or with this number in the order in which tables were declared.

        Raises:
            PlanError: There is none.
        """
        names = list(self._tables)
        if isinstance(table, str) and table in names:
            return table
        if isinstance(table, int) and not isinstance(table, bool) and 0 <= table < len(names):
            return names[table]
        known = ", ".join(f"{number} {name!r}" for number, name in enumerate(names))
        raise PlanError(f"table {table!r}: there is none; there are {known or 'no tables yet'}")

    @property
    def resumed(self) -> Resumed:
        """Where this worker stood in the snapshot that the pservers began with."""
        return self._connected("resume").resumed

    def take_loader(self, loader: Loader) -> None:
        """From now on snapshots say where this loader stands.

        Raises:
            PlanError: There is another one.
        """
        if self._loader is not None:
            raise PlanError(
                "resumable: this worker has a resumable loader already, and a snapshot has one position of a worker. "
                "Make it once, before the loop over epochs"
            )
        self._loader = loader

    # Dense parameters

    def share_dense(self, scope: Any) -> None:
        """Gives every dense array whose parameters got their first values to the pservers, once, from worker 0.

        Afterwards all workers have the same values: worker 0's, or those of the snapshot the pservers loaded.
        """
        connection = self._connection
        if connection is None:
            return
        for dense in list(self._dense_pending):
            values = dense.read(scope)
            if values is None:
                continue
            self._register_late()
            connection = self._connected("exe.run")
            connection.training.drain()
            if connection.role.worker_index == 0:
                connection.client.assign_dense(dense.spec, values)
                connection.client.flush()
            self._meet(f"share {dense.spec.name}")
            connection.client.pull_dense(dense.spec, values)
            dense.write(scope, values)
            self._scope = scope
            self._dense_pending.remove(dense)
        self._restore_found(connection, scope)

    def refresh_dense(self, scope: Any, *, trains: bool = False) -> None:
        """Reads the pservers' current dense values into `scope`, if those there may be others.

        Where other workers change them, before an evaluation: after an own step, a barrier or a save always, else when
        the last reading is older than a heartbeat. For a worker that is alone, after a push that came to nothing.

        Args:
            scope: Of the run that follows.
            trains: Whether that run is a step, which brings values by itself.
        """
        connection = self._connection
        if connection is None:
            return
        now, num_failed = time.monotonic(), connection.client.num_failed_pushes
        if connection.role.num_workers == 1:
            if num_failed == self._num_failed_pushes:
                return
        elif trains or now - self._dense_read_at < self.settings.heartbeat_s:
            return
        for dense in self._dense:
            if dense.is_trained and dense not in self._dense_pending:
                values = np.empty(dense.spec.num_values, np.float32)
                connection.training.pull_dense(dense.spec, values)
                dense.write(scope, values)
        self._dense_read_at, self._num_failed_pushes = now, num_failed

    def _read_dense(self, scope: Any) -> None:
        """Reads the values of all arrays that are shared into `scope`."""
        client = self._connected("load_model").client
        for dense in self._dense:
            if dense not in self._dense_pending:
                values = np.empty(dense.spec.num_values, np.float32)
                client.pull_dense(dense.spec, values)
                dense.write(scope, values)

    def _find_dense(self, registrations: Sequence[Registration]) -> None:
        """Notes the dense arrays that the pservers hold values of and no program of this job declared."""
        with self._lock:
            known = {dense.spec.name for dense in self._dense}
        states = {state.name: state for registration in registrations for state in registration.tables}
        specs = [parse_spec(state.spec) for state in states.values() if state.assigned and state.name not in known]
        self._dense_found = [spec for spec in specs if isinstance(spec, DenseSpec)]

    def _restore_found(self, connection: _Connection, scope: Any) -> None:
        """Gives parameters that only the pservers know, as in a job that loads and evaluates, their values."""
        for spec in self._dense_found:
            known = self.dense_names() | self._dense_restored
            wanted = {segment.name for segment in spec.segments if segment.name not in known}
            if any(has_value(scope, name) for name in wanted):
                values = np.empty(spec.num_values, np.float32)
                connection.client.pull_dense(spec, values)
                self._dense_restored |= restore(spec, scope, values, wanted)

    def _bring_kept(self) -> None:
        """Brings this worker's values of the kept arrays to the pservers."""
        client = self._connected("save_persistables").client
        for dense in self._dense:
            values = None if dense.is_trained or dense in self._dense_pending else dense.read(self._scope)
            if values is not None:
                client.exchange_dense(dense.spec, values, np.empty_like(values), learning_rate=1.0, optimizer_step=1)

    # Steps

    @property
    def num_workers(self) -> int:
        """Of the job."""
        return self._connected("exe.run").role.num_workers

    def spec_of(self, site: SiteSpec) -> TableSpec:
        """The table of a lookup; one that no program declared is read-only."""
        spec = self._tables.get(site.table)
        if spec is None:
            spec = self.declare_table(site, READ_ONLY)
        self._register_late()
        return spec

    def unique(self, table: str, ids: Sequence[NDArray[np.int64]]) -> tuple[UniqueIds, list[NDArray[np.int64]]]:
        """The distinct ids of several arrays, grouped by shard, and where each id of each array stands among them."""
        return self._connected("exe.run").deduplicator.unique(ids, table_salt(table))

    def pull(self, lookups: Sequence[RowBatch]) -> None:
        """Fills each array with the rows of its distinct ids, outside of a training step."""
        self._connected("exe.run").training.pull(lookups)

    def prefetch(
        self, lookups: Sequence[RowBatch], ahead: EarlyRows | None = None, coming: EarlyRows | None = None
    ) -> None:
        """Fills each array with the rows of its distinct ids, for the training step that begins. As `Training`."""
        self._connected("exe.run").training.prefetch(lookups, ahead, coming)

    def update(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        num_examples: float,
        clip: StepClip | None,
    ) -> None:
        """Ends a training step: hands its gradients on, and writes the new values of each dense array.

        What fails after that is raised by a later call.
        """
        training, loader = self._connected("exe.run").training, self._loader
        position = "" if loader is None else loader.position_after_step().to_json()
        training.update(rows, dense, num_examples, clip, position)
        self._dense_read_at = -math.inf

    def stats(self) -> dict[str, Any]:
        """See `fleet_sparse.stats`."""
        connection = self._connected("stats")
        client = connection.client
        return {
            "pservers": [
                {
                    "shard": reply.shard,
                    "rows": sum(table.num_rows for table in reply.tables),
                    "tables": {table.name: table.num_rows for table in reply.tables},
                    "resident_bytes": reply.resident_bytes,
                    "requests": reply.num_requests,
                }
                for reply in connection.control.stats()
            ],
            "bytes_pulled": client.bytes_received,
            "bytes_pushed": client.bytes_sent,
            "rows_pulled": client.num_pulled_rows,
            "rows_pushed": client.num_pushed_rows,
        }

    # Inside

    def _connected(self, caller: str) -> _Connection:
        connection = self._connection
        if connection is None:
            if self._was_stopped:
                raise FleetSparseError(
                    f"{caller}: this worker has stopped, and the pservers' rows went with it. Come to "
                    "fleet.stop_worker() last, or begin another job from a save: fleet.init_server(dirname), "
                    "fleet.init_worker()"
                )
            raise FleetSparseError(f"{caller}: this worker has no pservers yet. Call fleet.init_worker() first")
        return connection

    def _register(self, control: ControlClient, role: Role) -> list[Registration]:
        """Registers what was declared and not registered; what fails stays to be registered."""
        with self._registering:
            specs = list(self._unregistered)
            registrations = control.register(specs, role.worker_index, role.num_workers, self._mode)
            if self._connection is not None:
                self._connection.training.note_states(_states(registrations))
            with self._lock:
                self._unregistered = [spec for spec in self._unregistered if spec not in specs]
        return registrations

    def _register_late(self) -> None:
        """Registers what was declared after `connect`; returns when it is, whoever does it."""
        connection = self._connection
        if connection is None or not (self._unregistered or self._registering.locked()):
            return
        with self._registering:
            pass  # another thread was at it
        if self._unregistered:
            registrations = self._register(connection.control, connection.role)
            if connection.mode != self._mode:  # the first program that trains came after init_worker
                connection.training.close()
                training = self._make_training(
                    connection.client, connection.deduplicator, connection.role, registrations
                )
                self._connection = connection._replace(mode=self._mode, training=training)
                connection.control.barrier("train")

    def _make_training(
        self, client: Client, deduplicator: Deduplicator, role: Role, registrations: Sequence[Registration]
    ) -> Training:
        """How this worker's steps reach the pservers."""
        from fleet_sparse.embedded import local_dense, local_rows

        mode = self._mode or Mode()
        if mode.kind == GEO:
            return GeoTraining(
                client,
                mode,
                role.num_workers,
                tables=self._local_tables,
                dense=self._local_dense,
                local_rows=local_rows,
                local_dense=local_dense,
            )
        training = PserverTraining(client, deduplicator, mode, role.num_workers, local_dense)
        training.note_states(_states(registrations))
        return training

    def _check_promises(self, beat: Heartbeat) -> None:
        """Warns, from worker 0 and once a table, when there are more distinct ids than its size promises."""
        connection = self._connection
        if connection is None or connection.role.worker_index != 0:
            return
        with self._lock:
            max_ids = {spec.name: spec.max_ids for spec in self._tables.values()}
        for table, num_rows, promise in self._promises.broken(beat.shard, beat.tables, max_ids):
            logger.warning(
                "table %r: it has %d rows, its size promises at most %d ids; training goes on. Give it a larger size",
                table,
                num_rows,
                promise,
            )


def _states(registrations: Sequence[Registration]) -> list[TableState]:
    return [state for registration in registrations for state in registration.tables]


@cache
def active() -> Session:
    """The session of this process; made at the first call, from the environment's settings and the rules they name."""
    settings = Settings.from_environment()
    add_rules(settings.rules)
    return Session(settings)


def forget() -> None:
    """Drops the session, with its connection if it has one; the next `active` begins anew."""
    session = active()
    active.cache_clear()
    session.abandon()


def stats() -> dict[str, Any]:
    """What the pservers hold and what this worker moved.

    Returns:
        `pservers`: one dict a pserver with `shard`, `rows`, `tables` (rows by name), `resident_bytes`, `requests`;
        `bytes_pulled`, `bytes_pushed`, `rows_pulled`, `rows_pushed`: by this worker since `init_worker`.

    Raises:
        FleetSparseError: Before `fleet.init_worker()`.
    """
    return active().stats()
