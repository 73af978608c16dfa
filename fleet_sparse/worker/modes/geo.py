"""Geo training: a worker trains for k steps by itself, then the pservers add what changed (Paddle's `k_steps`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.mode import AVG, GEO, Mode
from fleet_sparse.core.rules import delta
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.control import TableState

from ..net.deferred_interrupt import DeferredInterrupt
from ..net.requests import DenseUpdate
from ..net.table_client import TableClient
from ..rows.early_rows import EarlyRows
from ..rows.geo_window import GeoWindow, RowStore
from ..rows.row_batch import RowBatch, check_distinct
from .dense_values import DenseValues, LocalDense, write_values
from .step import Progress, QuiescePoint, StepClip, check_finite


def table_on_pservers(spec: TableSpec) -> TableSpec:
    """The table on the pservers if geo workers train `spec`: the pservers add changes and do not know its rule."""
    return replace(spec, rule=delta.name, hyperparameters=())


def dense_on_pservers(spec: DenseSpec) -> DenseSpec:
    """Returns the description of a dense array on pservers, which add changes, as `table_on_pservers` does for tables.

    Learning rates of segments are applied by workers as well: a change contains them.
    """
    segments = tuple(Segment(segment.name, segment.offset, segment.size, 1.0) for segment in spec.segments)
    return replace(spec, rule=delta.name, hyperparameters=(), segments=segments)


class GeoTraining:
    """Implements `Training`: k steps with this worker's own rule and state, then its changes are pushed.

    A window is k updates. A row enters it with its first lookup, with its value on the pservers; until the window ends
    only this worker changes the row that it reads. Then the change of every row is added on the pservers, divided by
    the number of workers or as it is, as `mode.scale` says, and the next window starts without rows. Dense arrays are
    always in the window, and are read again when it ends.

    Optimizer state is the worker's own and is kept, by id, from window to window. So with a rule that has state a
    worker keeps row and state of every id that was ever in a window; with one that has none, only the window.

    Specs in calls are the pservers': `table_on_pservers`, `dense_on_pservers`. Tables with another rule, which this job
    only reads, are pulled each time.

    Args:
        client: TableClient of the pservers; its creator closes it.
        mode: Mode of kind `GEO`.
        num_workers: Number of workers of the job.
        tables: By name, each trained table with the rule that trains it. May grow.
        dense: By name, each trained dense array with the rule that trains it. May grow.
        local_rows: Makes an empty store of a table; called again in every window.
        local_dense: Makes the values of a dense array.

    Raises:
        ValueError: The mode is of another kind.
    """

    def __init__(
        self,
        client: TableClient,
        mode: Mode,
        num_workers: int,
        *,
        tables: Mapping[str, TableSpec],
        dense: Mapping[str, DenseSpec],
        local_rows: Callable[[TableSpec], RowStore],
        local_dense: LocalDense,
    ) -> None:
        if mode.kind != GEO:
            raise ValueError(f"geo training: the mode is {mode}, should be of kind {GEO!r}")
        self._client = client  # constant after construction, as all down to the blank line
        self._k_steps = mode.k_steps
        self._weight = 1.0 / num_workers if mode.scale == AVG else 1.0
        self._dense_specs = dense
        self._local_dense = local_dense
        self._window = GeoWindow(client, tables, local_rows)

        self._lock = threading.Lock()  # guards all below; held while rows and values enter and leave the window
        self._dense: dict[str, _Dense] = {}
        self._num_steps = 0  # of the window
        self._newest = Progress(0, None)
        self._exchanged = self._newest  # position at the end of the last window

    def note_states(self, states: Iterable[TableState], *, are_replaced: bool = False) -> None:
        """As `Training`: state and t are this worker's own; they start again if the tables were replaced."""
        if are_replaced:
            with self._lock:
                self._window.clear()
                self._dense.clear()
                self._num_steps = 0

    def pull(self, batches: Sequence[RowBatch]) -> None:
        """As `Training`: rows of the window as this worker trained them, all others from the pservers."""
        self._window.pull(batches)

    def abandon_early(self, early: EarlyRows) -> None:
        """As `Training`: none were pulled."""

    def prefetch(
        self, batches: Sequence[RowBatch], early: EarlyRows | None = None, coming: EarlyRows | None = None
    ) -> None:
        """As `Training`. Rows that are not in the window enter it. No row is pulled early: it would be outdated.

        Raises:
            ValueError: A table occurs twice.
            FleetSparseError: As the client's `pull`; the window is as before.
        """
        check_distinct("prefetch", [batch.spec.name for batch in batches])
        with self._lock:
            self._window.enter(batches, reads=True)

    def update(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        num_examples: float,
        clip: StepClip | None = None,
        position: str = "",
    ) -> None:
        """As `Training`. Changes are averaged over workers, not over examples, so `num_examples` does not count.

        Raises:
            ValueError: A table occurs twice. Nothing changed.
            PushRefused: A gradient or learning rate is not finite. Nothing changed.
            FleetSparseError: Raised by the client. If it raises before the window's changes are sent, because of an
                earlier error, the rows stay in the window. Once they are sent the rows leave it, even if a shard
                rejects the push: the next lookup reads the pservers' values. If the exchange of a dense array fails, it
                is unknown on which shards its change was added; the next update continues with the pservers' values.
        """
        updates: list[RowBatch | DenseUpdate] = [*rows, *dense]
        check_distinct("update", [update.spec.name for update in updates])
        check_finite(rows, dense)
        if clip is not None:
            rows, dense = clip.clipped(rows, dense)
        with self._lock:
            # Rows may have left the window since their lookup: another thread ended it.
            self._window.enter(rows, reads=False)
            arrays = [self._begin(update.spec) for update in dense]
            self._window.train(rows)
            for array, dense_update in zip(arrays, dense, strict=True):
                array.apply(dense_update)
            self._num_steps += 1
            self._newest = Progress(self._newest.num_steps + 1, position)
            if self._num_steps >= self._k_steps:
                self._end_window()
            for array, dense_update in zip(arrays, dense, strict=True):
                write_values(array.values, 0, dense_update.outs or ())

    def pull_dense(self, spec: DenseSpec, out: NDArray[np.float32]) -> None:
        """As `Training`: as this worker trained them in the window; before its first update there, the pservers'."""
        with self._lock:
            array = self._dense.get(spec.name)
            if array is None:
                self._client.pull_dense(spec, out)
                return
            if not array.is_changed:
                array.read(self._client)
            out[:] = array.values

    def progress(self) -> Progress:
        """As `Training`: after the newest window that ended."""
        return self._exchanged

    @contextmanager
    def quiesce(self, timeout_s: float, *, is_coordinator: bool = False) -> Iterator[QuiescePoint]:
        """As `Training`. The window is kept; the steps are those of the windows that ended."""
        with self._lock:
            self._client.reach(timeout_s)
            yield QuiescePoint([self._exchanged], holds_back=True)

    def skip(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        clip: StepClip | None = None,
        position: str = "",
    ) -> None:
        """As `Training`; no other worker waits for a step."""

    @property
    def holds_back(self) -> bool:
        """As `Training`."""
        return False

    def send_held(self) -> bool:
        """As `Training`; there are no row caches."""
        return False

    @property
    def num_trained(self) -> int:
        """As `Training`; there are no row caches."""
        return 0

    def note_trained(self, num_trained: int) -> None:
        """As `Training`; there are no row caches."""

    def end_pass(self) -> None:
        """As `Training`; there are no row caches."""

    def drain(self, *, leaves: bool = False) -> None:
        """As `Training`. The window ends here, whatever its number of steps; no worker waits for a geo worker."""
        with self._lock:
            self._end_window()
        self._client.flush()

    def close(self) -> None:
        """As `Training`. Changes that were not drained are lost."""
        with self._lock:
            self._window.clear()

    # With the lock held

    def _begin(self, spec: DenseSpec) -> _Dense:
        """The dense array, with values."""
        if spec.name not in self._dense:
            self._dense[spec.name] = _Dense(spec, self._local_dense(self._dense_specs[spec.name], 1)[0])
        array = self._dense[spec.name]
        if array.base is None:
            array.read(self._client)
        return array

    def _end_window(self) -> None:
        changes = self._window.changes(self._weight)
        # Ctrl-C waits until rows whose changes were sent have left the window: they would be sent twice.
        with DeferredInterrupt():
            pending = self._client.start_push(changes)
            pending.wait_accepted()
            self._window.end()
            self._exchanged = self._newest
            self._num_steps = 0
        for array in self._dense.values():
            array.exchange(self._client, self._weight)


class _Dense:
    """A dense array that this worker trains by itself.

    Attributes:
        base: The pservers' values when the window began; None while they are not known.
        is_changed: True if there was an update since.
    """

    def __init__(self, spec: DenseSpec, local: DenseValues) -> None:
        self.base: NDArray[np.float32] | None = None
        self.is_changed = False
        self._spec = spec
        self._local = local
        self._num_updates = 0  # the rule's t

    @property
    def values(self) -> NDArray[np.float32]:
        """Values `(num_values,)` as this worker trained them; changed in place."""
        return self._local.values

    def read(self, client: TableClient) -> None:
        """Continues with the pservers' values; not after an update in the window, which would be lost."""
        values = np.empty(self._spec.num_values, np.float32)
        client.pull_dense(self._spec, values)
        self._continue_with(values)

    def apply(self, update: DenseUpdate) -> None:
        """Trains the values."""
        self._num_updates += 1
        self._local.push(update.grads, update.learning_rate, self._num_updates)
        self.is_changed = True

    def exchange(self, client: TableClient, weight: float) -> None:
        """Adds the change of the window on the pservers, and continues with their values."""
        if not self.is_changed:
            return
        assert self.base is not None, "values are read before they are trained"
        with np.errstate(over="ignore", invalid="ignore"):  # the pservers refuse what is not finite
            change = self.values - self.base
        values = np.empty_like(change)
        self.base, self.is_changed = None, False  # until it is known that it was added
        client.exchange_dense(self._spec, change, values, learning_rate=weight, optimizer_step=self._num_updates)
        self._continue_with(values)

    def _continue_with(self, values: NDArray[np.float32]) -> None:
        self.values[:] = values
        self.base = values
