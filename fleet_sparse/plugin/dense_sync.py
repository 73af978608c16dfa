"""DenseSync: keeps the dense parameters in a Paddle scope and those on the pservers equal."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.kernels_batch import all_finite
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.errors import PushRefused
from fleet_sparse.worker.net.deferred_interrupt import DeferredInterrupt
from fleet_sparse.worker.net.link_errors import HOW_TO_FIND_NAN
from fleet_sparse.worker.net.shard_link import TableState

from .catalog import Catalog
from .connection import JobConnection
from .static.dense_parameters import DenseParameters, has_value, restore
from .step_gate import StepGate


class DenseSync:
    """Shares first values, refreshes values that other workers train, restores values of a snapshot.

    The values of a local array, which Paddle's optimizer trains in the program, are those in the scope in which it was
    trained last; the pservers have them, with the optimizer's states, as of the last `uploaded`. An array keeps its
    scope, so that values stay when the caller drops it.

    Used by the threads that run programs, one at a time; `step` and `count_update` by any number at once.

    Args:
        catalog: The declared arrays.
        max_age_s: Age from which values that other workers train are read again before an evaluation.
        timeout_s: Longest time in seconds for which steps, saves and loads wait for each other.
    """

    def __init__(self, catalog: Catalog, max_age_s: float, timeout_s: float) -> None:
        self._catalog = catalog
        self._max_age_s = max_age_s
        self._scopes: dict[str, object] = {}  # of each array: in which it was trained last, or shared
        self._gate = StepGate(timeout_s)
        self._until_end: ExitStack | None = None  # of the step that runs on the main thread
        self._counting = threading.Lock()  # guards `_num_updates`
        self._num_updates: dict[str, int] = {}  # of local arrays; they continue with the scope on other pservers
        self.forget()

    def forget(self) -> None:
        """Forgets the pservers: all arrays are to be shared with the next ones."""
        self._shared: set[str] = set()
        self._found: list[DenseSpec] = []  # arrays on the pservers that no program of this process declares
        self._restored: set[str] = set()  # parameters that took their values from those
        self._read_at = -math.inf  # monotonic time of the last refresh; -inf: values may be stale
        self._num_mishaps = (0, 0)  # pushes that failed, and shards that were started again, at the last refresh
        self._missed_step = False  # a step ended without new values in the scope

    def invalidate(self) -> None:
        """Notes that the pservers' values may have changed."""
        self._read_at = -math.inf

    def miss_step(self) -> None:
        """Notes that a step changed the pservers' values, and not those in the scope: Paddle dropped them at an
        error, or other workers trained while this one sent what its row caches held.
        """
        self._missed_step = True

    def find(self, connection: JobConnection) -> None:
        """Looks for arrays that have values on the pservers and that no program of this process declares."""
        known = {dense.spec.name for dense in self._catalog.dense}
        states = {state.name: state for state in connection.states()}
        specs = [parse_spec(state.spec) for state in states.values() if state.assigned and state.name not in known]
        self._found = [spec for spec in specs if isinstance(spec, DenseSpec)]

    def share(self, connection: JobConnection, scope: object) -> None:
        """Shares every array whose parameters have values in `scope` and that is not shared yet.

        Afterwards all workers have the same values: those of worker 0, or of the snapshot that the pservers loaded.
        """
        if len(self._shared) < len(self._catalog.dense):
            for dense in self._catalog.dense:
                if dense.spec.name not in self._shared:
                    self._share(connection, dense, scope)
        self._restore_found(connection, scope)

    def _share(self, connection: JobConnection, dense: DenseParameters, scope: object) -> None:
        if not dense.has_values(scope):  # the startup program did not run yet
            return
        values = dense.read(scope)
        connection.register_late()
        connection.training.drain()
        is_assigned = any(state.assigned for state in _states_of(connection, dense))
        if connection.role.is_first:
            connection.client.assign_dense(dense.spec, values)
            connection.client.flush()
        connection.meet(f"share {dense.spec.name}", once=True)
        if dense.is_local:
            if is_assigned or not connection.role.is_first:
                self._download(connection, dense, scope)
        else:
            connection.client.pull_dense(dense.spec, values)
            dense.write(scope, values)
        self._scopes[dense.spec.name] = scope
        self._shared.add(dense.spec.name)

    # Local arrays

    def share_local(self, connection: JobConnection, scope: object, arrays: Iterable[DenseParameters]) -> None:
        """Shares the local ones of `arrays` that are not shared yet: they have values in `scope` alone."""
        for dense in arrays:
            if dense.is_local and dense.spec.name not in self._shared:
                self._share(connection, dense, scope)

    @contextmanager
    def step(self, scope: object, arrays: Iterable[DenseParameters]) -> Iterator[None]:
        """The block runs a program that has `arrays` and trains in `scope`; waits for an upload that is under way.

        After `defer_interrupt` Ctrl-C waits until the block ends.

        Raises:
            FleetSparseError: The upload did not end in time.
        """
        with self._gate.step():
            for dense in arrays:
                name = dense.spec.name
                if self._scopes.get(name) is not scope and dense.has_values(scope):  # not: the run will fail
                    self._scopes[name] = scope
            with ExitStack() as until_end:
                is_main = threading.current_thread() is threading.main_thread()
                if is_main:
                    self._until_end = until_end
                try:
                    yield
                finally:
                    if is_main:
                        self._until_end = None

    def defer_interrupt(self) -> None:
        """Ctrl-C waits from now on until the program that runs on the main thread ends, if this is that thread.

        Its push is sent next, and Paddle's ops train the dense parameters of the same step afterwards. On another
        thread this does nothing: the main thread waits in Paddle, and gets Ctrl-C when the program has ended.
        """
        if self._until_end is not None and threading.current_thread() is threading.main_thread():
            self._until_end.enter_context(DeferredInterrupt())

    def count_update(self, name: str) -> None:
        """Counts an update of the local array `name`, which the running program makes."""
        with self._counting:
            self._num_updates[name] = self._num_updates.get(name, 0) + 1

    @contextmanager
    def untrained(self) -> Iterator[None]:
        """No program trains during the block. Without local arrays it does nothing.

        Raises:
            FleetSparseError: A step did not end in time.
        """
        with self._gate.closed() if self._shared_local() else nullcontext():
            yield

    @contextmanager
    def uploaded(self, connection: JobConnection) -> Iterator[float]:
        """Uploads all local arrays; during the block the pservers have what the scopes have, because no program trains.

        Without local arrays it does nothing, and programs may train during the block.

        Yields:
            Seconds that the upload took.

        Raises:
            PushRefused: A value is NaN or infinite. The pservers keep the values that they have.
            FleetSparseError: A value is gone from its scope, likewise; or a step did not end in time.
        """
        arrays = self._shared_local()
        with self._gate.closed() if arrays else nullcontext():
            begun_at = time.monotonic()
            self._upload_all(connection, arrays)
            yield time.monotonic() - begun_at

    def meet(self, connection: JobConnection, name: str) -> int:
        """Waits for all workers at the barrier `name`; then the pservers have all local arrays, which worker 0 uploads.

        Returns:
            As `JobConnection.meet`.

        Raises:
            PushRefused, FleetSparseError: As `uploaded`.
            WorkerLost: Another worker did not come.
        """
        with self.untrained():
            return connection.meet(name, before_barrier=lambda: self._upload_all(connection, self._shared_local()))

    def upload_finite(self, connection: JobConnection) -> None:
        """Uploads the local arrays whose values are finite, on worker 0. Called while no program trains."""
        for dense in self._shared_local():
            if all_finite(dense.read(self._scopes[dense.spec.name])):
                self._upload(connection, dense)

    def replica_of(self, name: str) -> LocalReplica:
        """The replica of the local array `name` in the scope in which it was trained last."""
        return LocalReplica(self, next(dense for dense in self._catalog.dense if dense.spec.name == name))

    def read_replica(self, dense: DenseParameters) -> NDArray[np.float32]:
        """As `DenseReplica.read`."""
        name, scope = dense.spec.name, self._scopes[dense.spec.name]
        num_updates = dense.num_updates(scope, self._num_updates.get(name, 0))
        parts = [dense.read(scope), dense.read_states(scope).reshape(-1), np.array([num_updates]).view(np.float32)]
        return np.concatenate(parts)

    def write_replica(self, dense: DenseParameters, floats: NDArray[np.float32]) -> None:
        """As `DenseReplica.write`."""
        name, num_values = dense.spec.name, dense.spec.num_values
        values, states, count = np.split(floats, [num_values, len(floats) - 2])
        num_updates = int(count.view(np.int64)[0])
        dense.write(self._scopes[name], values)
        dense.write_states(self._scopes[name], states.reshape(-1, num_values), num_updates)
        with self._counting:
            self._num_updates[name] = num_updates

    def _upload_all(self, connection: JobConnection, arrays: Sequence[DenseParameters]) -> None:
        for dense in arrays:  # before the first upload: the pservers never have arrays of two steps
            self._check_finite(dense)
        for dense in arrays:
            self._upload(connection, dense)

    def _shared_local(self) -> list[DenseParameters]:
        return [dense for dense in self._catalog.dense if dense.is_local and dense.spec.name in self._shared]

    def _check_finite(self, dense: DenseParameters) -> None:
        values = dense.read(self._scopes[dense.spec.name])
        if not all_finite(values):
            raise PushRefused(
                f"dense parameters: {_not_finite(dense.spec, values)} are NaN or infinite. Load the last "
                f"snapshot with fleet.load_model(dirname, 0); {HOW_TO_FIND_NAN}"
            )

    def _upload(self, connection: JobConnection, dense: DenseParameters) -> None:
        if not connection.role.is_first:  # all workers have the same values, and find the same fault
            return
        scope = self._scopes[dense.spec.name]
        values = dense.read(scope)
        num_updates = dense.num_updates(scope, self._num_updates.get(dense.spec.name, 0))
        connection.client.replace_dense(dense.spec, values, list(dense.read_states(scope)), num_updates)

    def _download(self, connection: JobConnection, dense: DenseParameters, *scopes: object) -> None:
        num_updates = max(state.optimizer_step for state in _states_of(connection, dense))
        values = np.empty(dense.spec.num_values, np.float32)
        states = np.empty((dense.spec.update_rule.num_states, dense.spec.num_values), np.float32)
        connection.client.pull_dense(dense.spec, values, states=list(states))
        for scope in scopes:
            dense.write(scope, values)
            dense.write_states(scope, states, num_updates)
        with self._counting:
            self._num_updates[dense.spec.name] = num_updates

    # Values that the pservers train

    def refresh(self, connection: JobConnection, scope: object = None, *, trains: bool = False) -> None:
        """Reads the pservers' values of trained arrays into `scope`, if those in `scope` may be stale.

        With several workers: before an evaluation, always after an own step, a barrier or a save, and otherwise if the
        last reading is older than `max_age_s`; and before a step after a missed one. With one worker: after a push that
        failed, or after a pserver was started again, which may have lost pushes.

        Args:
            connection: The connection.
            scope: Scope of the run that follows; None for the scope of each array.
            trains: True if that run is a step, which returns new values by itself.
        """
        now, num_mishaps = time.monotonic(), (connection.client.num_failed_pushes, connection.client.num_rejoins)
        if connection.role.num_workers == 1:
            if num_mishaps == self._num_mishaps:
                return
        elif not self._missed_step and (trains or now - self._read_at < self._max_age_s):
            return
        for dense in self._catalog.dense:
            if not dense.is_trained or dense.is_local or dense.spec.name not in self._shared:
                continue
            target = self._scopes[dense.spec.name] if scope is None else scope
            if dense.has_values(target):
                values = np.empty(dense.spec.num_values, np.float32)
                connection.training.pull_dense(dense.spec, values)
                dense.write(target, values)
        self._read_at, self._num_mishaps, self._missed_step = now, num_mishaps, False

    def reload(self, connection: JobConnection, scope: object, *, has_local: bool = True) -> None:
        """Reads all values after the pservers loaded a snapshot: into the scope of each array, and into `scope`.

        A scope without values of an array gets none. A local array without values in either scope is shared again once
        a startup program ran; one that the snapshot does not have keeps its values, as all do without `has_local`.
        """
        self.find(connection)
        self._restored = set()
        for dense in self._catalog.dense:
            name = dense.spec.name
            if name not in self._shared or (dense.is_local and not has_local):
                continue
            own = self._scopes[name]
            scopes = [each for each in ([own] if own is scope else [own, scope]) if dense.has_values(each)]
            if scopes:
                self._scopes[name] = scopes[0]
            if not dense.is_local:
                values = np.empty(dense.spec.num_values, np.float32)
                connection.client.pull_dense(dense.spec, values)
                for each in scopes:
                    dense.write(each, values)
            elif not scopes:
                self._shared.discard(name)
            elif any(state.assigned for state in _states_of(connection, dense)):
                self._download(connection, dense, *scopes)
        self._restore_found(connection, scope)

    def push_frozen(self, connection: JobConnection) -> None:
        """Pushes this worker's values of the frozen arrays, as the statistics of batch normalisation.

        Raises:
            FleetSparseError: A value is gone from its scope.
        """
        for dense in self._catalog.dense:
            if not dense.is_trained and dense.spec.name in self._shared:
                values = dense.read(self._scopes[dense.spec.name])
                connection.client.exchange_dense(
                    dense.spec, values, np.empty_like(values), learning_rate=1.0, optimizer_step=1
                )

    def _restore_found(self, connection: JobConnection, scope: object) -> None:
        """Restores parameters that no program declares, as in a job that loads a snapshot and only evaluates."""
        for spec in self._found:
            known = self._catalog.dense_names() | self._restored
            wanted = {segment.name for segment in spec.segments if segment.name not in known}
            if any(has_value(scope, name) for name in wanted):
                values = np.empty(spec.num_values, np.float32)
                connection.client.pull_dense(spec, values)
                self._restored |= restore(spec, scope, values, wanted)


class LocalReplica:
    """Implements `DenseReplica` for a local array.

    Args:
        sync: The dense parameters of this process.
        dense: The array.
    """

    def __init__(self, sync: DenseSync, dense: DenseParameters) -> None:
        self._sync = sync
        self._dense = dense

    @property
    def num_floats(self) -> int:
        """As `DenseReplica`."""
        spec = self._dense.spec
        return (1 + spec.update_rule.num_states) * spec.num_values + 2

    def read(self) -> NDArray[np.float32]:
        """As `DenseReplica`."""
        return self._sync.read_replica(self._dense)

    def write(self, floats: NDArray[np.float32]) -> None:
        """As `DenseReplica`."""
        self._sync.write_replica(self._dense, floats)


def _not_finite(spec: DenseSpec, values: NDArray[np.float32]) -> str:
    """The parameters with values that are not finite, as `3 of 8 values of 'w', 1 of 1 values of 'b'`."""
    ends = np.cumsum([segment.size for segment in spec.segments])
    counts = [np.count_nonzero(~np.isfinite(part)) for part in np.split(values, ends[:-1])]
    pairs = zip(spec.segments, counts, strict=True)
    return ", ".join(f"{count} of {each.size} values of {each.name!r}" for each, count in pairs if count)


def _states_of(connection: JobConnection, dense: DenseParameters) -> list[TableState]:
    """States of the array that the pservers with a part of it reported."""
    return [state for state in connection.states() if state.name == dense.spec.name]
