"""Geo training: a worker trains for k steps by itself, then the pservers add what changed (Paddle's `k_steps`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import AVG, GEO, Mode
from fleet_sparse.core.rules import delta, read_only
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.warm_up import warm_up
from fleet_sparse.wire.control import TableState

from ..net.client import Client
from ..rows.deduplicator import UniqueIds
from ..rows.look_ahead import EarlyRows
from .dense_replica import DenseValues, LocalDense, write_values
from .step import DenseUpdate, Lookup, Progress, QuiescePoint, RowsUpdate, StepClip, check_finite


class RowStore(Protocol):
    """Rows of a table and their optimizer state, as a pserver's store keeps them. One thread at a time uses it."""

    def pull(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> object:
        """Writes the row of each of the ids `(n,)` to `out` `(n, dim)`."""
        ...

    def has_rows(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of each of the ids `(n,)`, whether it was set or pushed."""
        ...

    def push(self, ids: NDArray[np.int64], grads: NDArray[np.float32], learning_rate: float, step: int) -> object:
        """Applies gradients `(n, dim)` of distinct ids with the table's rule."""
        ...

    def set_rows(self, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Sets rows `(n, dim)`. The state of those that are there stays; an id without a row gets one."""
        ...

    def close(self) -> None:
        """Gives the memory back; again does nothing."""
        ...


def table_on_pservers(spec: TableSpec) -> TableSpec:
    """The table that pservers hold where geo workers train `spec`: they add changes, and know nothing of its rule."""
    return replace(spec, rule=delta.name, hyperparameters=())


def dense_on_pservers(spec: DenseSpec) -> DenseSpec:
    """As `table_on_pservers`. Learning rates of segments are the workers' too: a change has them in it."""
    segments = tuple(Segment(segment.name, segment.offset, segment.size, 1.0) for segment in spec.segments)
    return replace(spec, rule=delta.name, hyperparameters=(), segments=segments)


class GeoTraining:
    """Implements `Training`: k steps with this worker's own rule and state, then its changes go to the pservers.

    A window is k updates. A row enters it with its first lookup, as it is on the pservers; until the window ends this
    worker alone changes the row that it sees. Then the change of every row is added on the pservers, over the number of
    workers or whole, as `mode.scale` says, and the next window begins without rows. Dense arrays are all in the window,
    and are read back when it ends.

    Optimizer state is the worker's own and stays, by id, from window to window. So with a rule that has state a worker
    keeps row and state of every id that ever was in a window; with one that has none, nothing but the window.

    Specs that arrive in calls are the pservers': `table_on_pservers`, `dense_on_pservers`. Tables with another rule,
    which this job only reads, are pulled each time.

    Args:
        client: To the pservers; who made it closes it.
        mode: Of kind `GEO`.
        num_workers: Of the job.
        tables: By name, each trained table with the rule that trains it. May grow.
        dense: By name, each trained dense array with the rule that trains it. May grow.
        local_rows: Makes an empty store of a table; called again in every window.
        local_dense: Makes the values of a dense array.

    Raises:
        ValueError: The mode is of another kind.
    """

    def __init__(
        self,
        client: Client,
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
        warm_up()  # here, not in the first step
        self._client = client  # constant after construction, as all down to the blank line
        self._k_steps = mode.k_steps
        self._weight = 1.0 / num_workers if mode.scale == AVG else 1.0
        self._table_specs = tables
        self._dense_specs = dense
        self._local_rows = local_rows
        self._local_dense = local_dense

        self._lock = threading.Lock()  # guards all below; held while rows and values travel into and out of the window
        self._tables: dict[str, _Table] = {}
        self._dense: dict[str, _Dense] = {}
        self._num_steps = 0  # of the window
        self._newest = Progress(0, None)
        self._exchanged = self._newest  # when a window ended last

    def note_states(self, states: Iterable[TableState]) -> None:
        """As `Training`: nothing is taken in. The rule's t counts with the state, which begins on this worker."""

    def pull(self, lookups: Sequence[Lookup]) -> None:
        """As `Training`: rows of the window as this worker trained them, all others from the pservers."""
        pulls: list[_Rows] = []
        outside: list[tuple[Lookup, NDArray[np.bool_], NDArray[np.float32]]] = []
        with self._lock:
            for lookup in lookups:
                table = self._tables.get(lookup.spec.name)
                if table is None or (is_outside := table.is_outside(lookup.unique.ids)).all():
                    pulls.append(_Rows(*lookup))
                    continue
                table.rows.pull(lookup.unique.ids, lookup.out)
                pulls.append(_empty_rows(lookup.spec, lookup.unique.at(np.flatnonzero(is_outside))))
                outside.append((lookup, is_outside, pulls[-1].rows))
        # The pservers have all that this worker did to these: a window has been pushed before its rows leave it.
        self._client.pull(pulls)
        for lookup, is_outside, rows in outside:
            lookup.out[is_outside] = rows

    def prefetch(
        self, lookups: Sequence[Lookup], ahead: EarlyRows | None = None, coming: EarlyRows | None = None
    ) -> None:
        """As `Training`. Rows that are not in the window enter it; none is pulled ahead, they would be trained late.

        Raises:
            ValueError: A table comes twice.
            FleetSparseError: As the client's `pull`; the window is as before.
        """
        _check_distinct("prefetch", [lookup.spec.name for lookup in lookups])
        trained = [lookup for lookup in lookups if lookup.spec.rule == delta.name]
        only_read = [_Rows(*lookup) for lookup in lookups if lookup.spec.rule != delta.name]
        with self._lock:
            self._enter([(lookup.spec, lookup.unique) for lookup in trained], only_read)
            for lookup in trained:
                self._tables[lookup.spec.name].rows.pull(lookup.unique.ids, lookup.out)

    def update(
        self,
        rows: Sequence[RowsUpdate],
        dense: Sequence[DenseUpdate],
        num_examples: float,
        clip: StepClip | None = None,
        position: str = "",
    ) -> None:
        """As `Training`. Changes are averaged over workers, not over examples, so `num_examples` does not count.

        Raises:
            ValueError: A table comes twice. Nothing changed.
            PushRefused: A gradient or learning rate is not finite. Nothing changed.
            FleetSparseError: Of the client. Rows that could not be pushed stay in the window, to be pushed at its next
                end; of a dense array it is not known on which shards its change was added, and the next update goes on
                with what the pservers have.
        """
        updates: list[RowsUpdate | DenseUpdate] = [*rows, *dense]
        _check_distinct("update", [update.spec.name for update in updates])
        check_finite(rows, dense)
        if clip is not None:
            rows, dense = clip.clipped(rows, dense)
        with self._lock:
            # Rows may have left the window since their lookup: another thread ended it.
            self._enter([(update.spec, update.unique) for update in rows])
            arrays = [self._begin(update.spec) for update in dense]
            for rows_update in rows:
                self._tables[rows_update.spec.name].apply(rows_update)
            for array, dense_update in zip(arrays, dense, strict=True):
                array.apply(dense_update)
            self._num_steps += 1
            self._newest = Progress(self._newest.num_steps + 1, position)
            if self._num_steps >= self._k_steps:
                self._end_window()
            for array, dense_update in zip(arrays, dense, strict=True):
                write_values(array.values, 0, dense_update.outs)

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

    @contextmanager
    def hold(self, timeout_s: float, *, asks: bool = False) -> Iterator[QuiescePoint]:
        """As `Training`. The window stays as it is; the steps are those of the windows that ended."""
        with self._lock:
            self._client.reach(timeout_s)
            yield QuiescePoint([self._exchanged], holds_back=True)

    def reload(self, states: Iterable[TableState]) -> None:
        """As `Training`. The state of rows and dense values, which is this worker's, begins anew with them."""
        with self._lock:
            for table in self._tables.values():
                table.close()
            self._tables.clear()
            self._dense.clear()
            self._num_steps = 0

    def settle(self) -> None:
        """As `Training`. The window ends here, whatever its number of steps."""
        with self._lock:
            self._end_window()
        self._client.flush()

    def rest(self) -> None:
        """As `settle`: nobody waits for the steps of a geo worker."""
        self.settle()

    def close(self) -> None:
        """As `Training`. What was not settled is lost."""
        with self._lock:
            for table in self._tables.values():
                table.close()

    # With the lock held

    def _enter(self, wanted: Iterable[tuple[TableSpec, UniqueIds]], only_read: Sequence[_Rows] = ()) -> None:
        """Brings those of the wanted rows that are not in the window into it; fills what is only read on the way."""
        entering = []
        for spec, unique in wanted:
            table = self._table(spec)
            entering.append((table, _empty_rows(spec, unique.at(np.flatnonzero(table.is_outside(unique.ids))))))
        self._client.pull([*(base for _, base in entering), *only_read])
        for table, base in entering:
            table.enter(base)

    def _table(self, spec: TableSpec) -> _Table:
        if spec.name not in self._tables:
            self._tables[spec.name] = _Table(spec, self._table_specs[spec.name], self._local_rows)
        return self._tables[spec.name]

    def _begin(self, spec: DenseSpec) -> _Dense:
        """The dense array, with values."""
        if spec.name not in self._dense:
            self._dense[spec.name] = _Dense(spec, self._local_dense(self._dense_specs[spec.name], 1)[0])
        array = self._dense[spec.name]
        if array.base is None:
            array.read(self._client)
        return array

    def _end_window(self) -> None:
        tables = list(self._tables.values())
        changes = [table.change() for table in tables]
        pushed = [(table, change) for table, change in zip(tables, changes, strict=True) if len(change.unique.ids)]
        self._client.push(
            [change for _, change in pushed],
            learning_rate=self._weight,
            optimizer_step=[table.num_updates for table, _ in pushed],
        )
        self._exchanged = self._newest
        for table in tables:
            table.leave()
        for array in self._dense.values():
            array.exchange(self._client, self._weight)
        self._num_steps = 0


class _Rows(NamedTuple):
    """Rows of distinct ids, as the client takes them."""

    spec: TableSpec
    unique: UniqueIds
    rows: NDArray[np.float32]


class _Table:
    """The rows of a table that this worker trains by itself: those in the window.

    If the rule has state, the rows of all earlier windows are kept too, for their state; else nothing of them is.

    Args:
        spec: That pservers have.
        local_spec: That trains it here.
        make_store: Of an empty store.

    Attributes:
        rows: Of the window, and of earlier ones if the rule has state; there only the state has a meaning.
        num_updates: By this worker: the rule's t.
    """

    def __init__(self, spec: TableSpec, local_spec: TableSpec, make_store: Callable[[TableSpec], RowStore]) -> None:
        self.num_updates = 0
        self._spec = spec
        self._bases: list[_Rows] = []  # of the window, as they entered it
        self._has_state = local_spec.update_rule.num_states > 0
        # The store whose ids are those of the window: the rows themselves, or only marks where rows outlive the window.
        marks = TableSpec(name=spec.name, dim=1, rule=read_only.name, initializer=constant(0.0))
        self._make_window = partial(make_store, marks if self._has_state else local_spec)
        self._window = self._make_window()
        self.rows = make_store(local_spec) if self._has_state else self._window

    def is_outside(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of each id, whether it is not in the window."""
        return ~self._window.has_rows(ids)

    def enter(self, base: _Rows) -> None:
        """Takes rows into the window, in which they are not, with the pservers' values."""
        ids = base.unique.ids
        if len(ids):
            self.rows.set_rows(ids, base.rows)
            if self._has_state:
                self._window.set_rows(ids, np.zeros((len(ids), 1), np.float32))
            self._bases.append(base)

    def apply(self, update: RowsUpdate) -> None:
        """Trains rows of the window."""
        self.num_updates += 1
        self.rows.push(update.unique.ids, update.grads, update.learning_rate, self.num_updates)

    def change(self) -> _Rows:
        """What became of the rows of the window since they entered it, of those that changed. Fresh arrays."""
        if not self._bases:
            return _empty_rows(self._spec, UniqueIds(np.empty(0, np.int64), np.zeros(0, np.int64)))
        uniques = [base.unique for base in self._bases]
        ids = np.concatenate([unique.ids for unique in uniques])
        shards = np.concatenate([_shards_of(unique) for unique in uniques])
        change = np.empty((len(ids), self._spec.dim), np.float32)
        self.rows.pull(ids, change)
        ends = np.cumsum([len(unique.ids) for unique in uniques])
        with np.errstate(over="ignore", invalid="ignore"):  # the pservers refuse what is not finite
            for part, base in zip(np.split(change, ends[:-1]), self._bases, strict=True):
                np.subtract(part, base.rows, out=part)
        changed = np.flatnonzero((change != 0).any(axis=1))
        changed = changed[np.argsort(shards[changed], kind="stable")]
        num_per_shard = np.bincount(shards[changed], minlength=len(uniques[0].num_per_shard))
        # Far faster than change[changed].
        return _Rows(self._spec, UniqueIds(ids[changed], num_per_shard), np.take(change, changed, axis=0))

    def leave(self) -> None:
        """Empties the window, and gives its memory back."""
        if not self._bases:
            return
        self._bases.clear()
        self._window.close()
        self._window = self._make_window()
        if not self._has_state:
            self.rows = self._window

    def close(self) -> None:
        """Gives the memory back."""
        self.rows.close()
        self._window.close()


class _Dense:
    """A dense array that this worker trains by itself.

    Attributes:
        base: What the pservers had when the window began; None while that is not known.
        is_changed: Whether an update came since.
    """

    def __init__(self, spec: DenseSpec, local: DenseValues) -> None:
        self.base: NDArray[np.float32] | None = None
        self.is_changed = False
        self._spec = spec
        self._local = local
        self._num_updates = 0  # the rule's t

    @property
    def values(self) -> NDArray[np.float32]:
        """`(num_values,)`, as this worker trained them; changed in place."""
        return self._local.values

    def read(self, client: Client) -> None:
        """Goes on with the pservers' values; not after an update in the window, which would be lost."""
        values = np.empty(self._spec.num_values, np.float32)
        client.pull_dense(self._spec, values)
        self._go_on_with(values)

    def apply(self, update: DenseUpdate) -> None:
        """Trains the values, once they are there."""
        self._num_updates += 1
        self._local.push(update.grads, update.learning_rate, self._num_updates)
        self.is_changed = True

    def exchange(self, client: Client, weight: float) -> None:
        """Has the change of the window added on the pservers, and goes on with the values that they have then."""
        if not self.is_changed:
            return
        assert self.base is not None, "values are read before they are trained"
        with np.errstate(over="ignore", invalid="ignore"):  # the pservers refuse what is not finite
            change = self.values - self.base
        values = np.empty_like(change)
        self.base, self.is_changed = None, False  # until it is known what was added
        client.exchange_dense(self._spec, change, values, learning_rate=weight, optimizer_step=self._num_updates)
        self._go_on_with(values)

    def _go_on_with(self, values: NDArray[np.float32]) -> None:
        self.values[:] = values
        self.base = values


def _empty_rows(spec: TableSpec, unique: UniqueIds) -> _Rows:
    return _Rows(spec, unique, np.empty((len(unique.ids), spec.dim), np.float32))


def _shards_of(unique: UniqueIds) -> NDArray[np.uint16]:
    """The shard of each id; of a type that is sorted without comparing, and large enough for any number of shards."""
    shards = np.arange(len(unique.num_per_shard), dtype=np.uint16)
    return np.repeat(shards, unique.num_per_shard)


def _check_distinct(caller: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"{caller}: a table comes twice among {names}; it should come once a step")
