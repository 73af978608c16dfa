"""The training session of this process: which tables it knows, and its connection to the pservers.

There is one. Programs are built before it is connected and run after; op bodies find it by `active()`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules.loading import add_rules
from fleet_sparse.core.table import DenseSpec, TableSpec
from fleet_sparse.errors import FleetSparseError, PlanError
from fleet_sparse.settings import Settings
from fleet_sparse.transpiler.marker import SiteSpec
from fleet_sparse.worker.batch import Deduplicator, UniqueIds
from fleet_sparse.worker.client import Client
from fleet_sparse.worker.control import ControlClient, Heartbeat
from fleet_sparse.worker.session import Registration
from fleet_sparse.worker.zmq_channel import ZmqChannel

from .dense import DenseParameters
from .promise import Promises
from .reading import OptimizerReading

logger = logging.getLogger(__name__)

READ_ONLY = OptimizerReading("read_only", ())


class Role(NamedTuple):
    """Which worker this is, and where the pservers are."""

    worker_index: int
    num_workers: int
    pserver_endpoints: tuple[str, ...]
    """Control plane addresses, `host:port`, in the order of the shards; empty for a pserver inside this process."""


class Update(NamedTuple):
    """The gradients of one table in one step."""

    spec: TableSpec
    unique: UniqueIds
    grads: NDArray[np.float32]
    learning_rate: float


class _Connection(NamedTuple):
    role: Role
    control: ControlClient
    client: Client
    deduplicator: Deduplicator


class Session:
    """Tables by name, dense arrays in the order they were minimized, and the connection once `connect` was called.

    Op bodies of several threads may call `pull`, `push` and `exchange_dense` at once.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings  # constant after construction
        self.load_dirname: str | None = None  # set by init_server when the pserver is in this process
        self._lock = threading.Lock()  # guards all below
        self._tables: dict[str, TableSpec] = {}
        self._dense: list[DenseParameters] = []
        self._steps: dict[str, int] = {}  # updates of each table by this worker: Adam's t
        self._unregistered: list[TableSpec | DenseSpec] = []
        self._dense_pending: list[DenseParameters] = []  # not yet shared with the pservers
        self._dense_is_behind = False  # other workers may have pushed since the last read
        self._connection: _Connection | None = None

        self._promises = Promises()  # the heartbeat's thread only

    # Declaring, at the time a program is built

    def declare_table(self, site: SiteSpec, optimizer: OptimizerReading) -> TableSpec:
        """Makes a table known; one that was read-only so far gets the optimizer's update rule.

        Raises:
            PlanError: It is known with another dim, rule, initializer or seed.
        """
        spec = TableSpec(
            name=site.table,
            dim=site.dim,
            rule=optimizer.rule,
            hyperparameters=optimizer.of_table(site),
            initializer=site.initializer,
            seed=site.seed or self.settings.seed,
            max_ids=None if site.bounded else site.num_ids,
        )
        with self._lock:
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

    def declare_dense(self, dense: DenseParameters) -> None:
        """Makes the dense parameters of a minimized program known.

        Raises:
            PlanError: Another program trains one of them.
        """
        with self._lock:
            for other in self._dense:
                both = sorted(set(dense.names) & set(other.names))
                if both:
                    raise PlanError(f"minimize: parameter {both[0]!r} is trained by another program already")
            self._dense.append(dense)
            self._dense_pending.append(dense)
            self._unregistered.append(dense.spec)

    def num_dense(self) -> int:
        """How many dense arrays were declared."""
        return len(self._dense)

    # Connecting

    def connect(self, role: Role, scope: Any) -> None:
        """Registers with every pserver; afterwards programs run.

        Args:
            role: Of this worker.
            scope: Where the dense parameters are, or will be once the startup program ran.

        Raises:
            ShardUnavailable: A pserver did not come up within `settings.connect_s`.
            TableMismatch: Another worker described a table differently.
        """
        if self._connection is not None:
            raise FleetSparseError("init_worker: was called before; call stop_worker first")
        if role.pserver_endpoints:
            control, embedded = ControlClient(role.pserver_endpoints, self.settings), None
        else:
            from fleet_sparse.embedded import start_embedded

            control, embedded = start_embedded(self.settings, self.load_dirname)
        registrations = control.register(self._take_unregistered(), role.worker_index, role.num_workers)
        self._note_states(registrations)
        placement = Placement.even(len(registrations), registrations[0].placement_version)
        channel = embedded or ZmqChannel([r.data_endpoint for r in registrations], self.settings)
        client = Client(channel, control.identity, registrations, placement, self.settings)
        control.watch_heartbeats(lambda beat: client.observe_incarnation(beat.shard, beat.incarnation))
        control.watch_heartbeats(self._check_promises)
        self._connection = _Connection(role, control, client, Deduplicator(placement))
        logger.info("worker %d of %d: %d pservers", role.worker_index, role.num_workers, len(registrations))
        self.share_dense(scope)

    def stop(self) -> None:
        """Waits for all workers, then ends the pservers and this connection; without a connection nothing."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            connection.client.flush()
            connection.control.barrier("stop_worker")
            if connection.role.worker_index == 0:
                connection.control.stop()
        finally:
            connection.client.close()
            connection.control.close()

    def abandon(self) -> None:
        """Closes the connection, if there is one, without a word to anyone."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            connection.client.close()
        except FleetSparseError as error:
            logger.warning("the connection was dropped with a push that had failed: %s", error)
        finally:
            connection.control.close()

    def barrier(self, name: str) -> None:
        """Returns when every worker called it and all pushes of this one are applied."""
        connection = self._connected("barrier_worker")
        connection.client.flush()
        connection.control.barrier(name)

    def save(self, dirname: str) -> None:
        """Makes every pserver write its own shard under `dirname`; worker 0 asks for it, the others only flush.

        Raises:
            SnapshotError: A pserver could not write.
        """
        connection = self._connected("save_persistables")
        connection.client.flush()
        if connection.role.worker_index == 0:
            connection.control.save(dirname)
        else:
            logger.info("save_persistables(%r): worker 0 saves for all workers", dirname)

    # Dense parameters

    def share_dense(self, scope: Any) -> None:
        """Gives every dense array whose parameters got their first values to the pservers, once, from worker 0.

        Afterwards all workers have the same values: worker 0's, or those of the snapshot the pservers loaded.
        """
        if self._connection is None:
            return
        while self._dense_pending and (values := self._dense_pending[0].read(scope)) is not None:
            dense = self._dense_pending.pop(0)
            self._register_late()
            role, control, client = self._connection.role, self._connection.control, self._connection.client
            if role.worker_index == 0:
                client.assign_dense(dense.spec, values)
                client.flush()
            control.barrier(f"share {dense.spec.name}")
            client.pull_dense(dense.spec, values)
            dense.write(scope, values)

    def refresh_dense(self, scope: Any) -> None:
        """Reads the pservers' current dense values into `scope`, if other workers may have changed them."""
        if self._connection is None or self._connection.role.num_workers == 1 or not self._dense_is_behind:
            return
        self._dense_is_behind = False
        for dense in self._dense:
            values = np.empty(dense.spec.num_values, np.float32)
            if dense not in self._dense_pending and dense.is_trained:
                self._connection.client.pull_dense(dense.spec, values)
                dense.write(scope, values)

    def exchange_dense(self, spec: DenseSpec, grads: NDArray[np.float32], learning_rate: float) -> NDArray[np.float32]:
        """Pushes gradients of a dense array, `(spec.num_values,)`; returns its new values, of that shape."""
        values = np.empty(spec.num_values, np.float32)
        step = self._next_step(spec.name)
        self._connected("exe.run").client.exchange_dense(
            spec, grads, values, learning_rate=learning_rate, optimizer_step=step, step=step
        )
        self._dense_is_behind = True
        return values

    # Rows

    def spec_of(self, site: SiteSpec) -> TableSpec:
        """The table of a lookup; one that no program declared is read-only."""
        spec = self._tables.get(site.table)
        if spec is None:
            spec = self.declare_table(site, READ_ONLY)
        if self._unregistered:
            self._register_late()
        return spec

    def unique(self, table: str, ids: Sequence[NDArray[np.int64]]) -> tuple[UniqueIds, list[NDArray[np.int64]]]:
        """The distinct ids of several arrays, grouped by shard, and where each id of each array stands among them."""
        return self._connected("exe.run").deduplicator.unique(ids, table_salt(table))

    def pull(self, requests: Sequence[tuple[TableSpec, UniqueIds, NDArray[np.float32]]]) -> None:
        """Fills each array with the rows of its distinct ids."""
        self._connected("exe.run").client.pull(requests)

    def push(self, updates: Sequence[Update]) -> None:
        """Queues the gradients of one step of a worker; failures are raised by a later call."""
        self._connected("exe.run").client.push(
            [(update.spec, update.unique, update.grads) for update in updates],
            learning_rate=[update.learning_rate for update in updates],
            optimizer_step=[self._next_step(update.spec.name) for update in updates],
        )

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
        if self._connection is None:
            raise FleetSparseError(f"{caller}: this worker has no pservers yet. Call fleet.init_worker() first")
        return self._connection

    def _take_unregistered(self) -> list[TableSpec | DenseSpec]:
        with self._lock:
            specs, self._unregistered = self._unregistered, []
        return specs

    def _register_late(self) -> None:
        """Registers what was declared after `connect`."""
        connection = self._connection
        specs = self._take_unregistered()
        if connection is not None and specs:
            role = connection.role
            self._note_states(connection.control.register(specs, role.worker_index, role.num_workers))

    def _note_states(self, registrations: Sequence[Registration]) -> None:
        """Goes on counting updates where the pservers' tables stand."""
        with self._lock:
            for state in (state for registration in registrations for state in registration.tables):
                self._steps[state.name] = max(self._steps.get(state.name, 0), state.optimizer_step)

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

    def _next_step(self, name: str) -> int:
        with self._lock:
            self._steps[name] = self._steps.get(name, 0) + 1
            return self._steps[name]


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
