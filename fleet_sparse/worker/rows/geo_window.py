"""GeoWindow: the rows that a geo worker trains itself until the window ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.rules import delta, read_only
from fleet_sparse.core.table_spec import TableSpec

from .deduplicator import UniqueIds
from .row_batch import RowBatch
from .row_source import RowSource


class RowStore(Protocol):
    """Rows of a table and their optimizer state, as a pserver stores them. One thread at a time uses it."""

    def pull(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> object:
        """Writes the row of each of the ids `(n,)` to `out` `(n, dim)`."""
        ...

    def has_rows(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns True for each of the ids `(n,)` that was set or pushed."""
        ...

    def push(self, ids: NDArray[np.int64], grads: NDArray[np.float32], learning_rate: float, step: int) -> object:
        """Applies gradients `(n, dim)` of distinct ids with the table's rule."""
        ...

    def set_rows(self, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Sets rows `(n, dim)`. The state of existing rows is kept; an id without a row gets one."""
        ...

    def close(self) -> None:
        """Releases the memory. A second call does nothing."""
        ...


class GeoWindow:
    """Implements `RowSource`: rows of the window as this worker trained them, all others from the source behind it.

    Tables whose rule on the pservers is not `delta` are only read, and never enter the window.

    Args:
        behind: Source of the rows that are not in the window.
        tables: By name, each trained table with the rule that trains it. May grow.
        make_store: Makes an empty store of a table; called again in every window.
    """

    def __init__(
        self, behind: RowSource, tables: Mapping[str, TableSpec], make_store: Callable[[TableSpec], RowStore]
    ) -> None:
        self._behind = behind
        self._specs = tables
        self._make_store = make_store
        self._lock = threading.RLock()  # guards the next one; held while rows enter and leave the window
        self._tables: dict[str, _Table] = {}

    def pull(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """As `RowSource`; no row enters the window."""
        pulls: list[RowBatch] = []
        outside: list[tuple[RowBatch, NDArray[np.bool_], RowBatch]] = []
        with self._lock:
            for batch in batches:
                table = self._tables.get(batch.spec.name)
                if table is None or (is_outside := table.is_outside(batch.unique.ids)).all():
                    pulls.append(batch)
                    continue
                table.rows.pull(batch.unique.ids, batch.values)
                pulls.append(RowBatch.empty(batch.spec, batch.unique.at(np.flatnonzero(is_outside))))
                outside.append((batch, is_outside, pulls[-1]))
        # The pservers have all changes of these rows: a window is pushed before its rows leave it.
        self._behind.pull(pulls, step=step)
        for batch, is_outside, pulled in outside:
            batch.values[is_outside] = pulled.values

    def enter(self, batches: Sequence[RowBatch], *, reads: bool) -> None:
        """Adds the rows of trained tables that are not in the window to it.

        Args:
            batches: Rows of the step.
            reads: True to fill the batches, those of tables that are only read included.

        Raises:
            FleetSparseError: As `RowSource.pull`; the window is as before.
        """
        entering, trained, pulls = [], [], []
        with self._lock:
            for batch in batches:
                if batch.spec.rule == delta.name:
                    table = self._table(batch.spec)
                    places = np.flatnonzero(table.is_outside(batch.unique.ids))
                    trained.append((table, batch))
                    if len(places):
                        pulls.append(RowBatch.empty(batch.spec, batch.unique.at(places)))
                        entering.append((table, pulls[-1]))
                elif reads:
                    pulls.append(batch)
            self._behind.pull(pulls)
            for table, base in entering:
                table.enter(base)
            for table, batch in trained if reads else ():
                table.rows.pull(batch.unique.ids, batch.values)

    def train(self, batches: Sequence[RowBatch]) -> None:
        """Applies gradients of rows that are in the window."""
        with self._lock:
            for batch in batches:
                self._tables[batch.spec.name].apply(batch)

    def changes(self, weight: float) -> list[RowBatch]:
        """The changes of the rows since they entered the window, of those that changed, to be pushed."""
        with self._lock:
            changes = [table.change() for table in self._tables.values()]
            return [
                change._replace(learning_rate=weight, optimizer_step=table.num_updates)
                for table, change in zip(self._tables.values(), changes, strict=True)
                if len(change.unique.ids)
            ]

    def end(self) -> None:
        """Ends the window, whose changes were sent: all rows leave it."""
        with self._lock:
            for table in self._tables.values():
                table.leave()

    def clear(self) -> None:
        """Forgets all rows and releases the memory, that of optimizer state included."""
        with self._lock:
            for table in self._tables.values():
                table.close()
            self._tables.clear()

    def _table(self, spec: TableSpec) -> _Table:
        if spec.name not in self._tables:
            self._tables[spec.name] = _Table(spec, self._specs[spec.name], self._make_store)
        return self._tables[spec.name]


class _Table:
    """The rows of one table that this worker trains: those in the window.

    If the rule has state, the rows of all earlier windows are kept too, for their state.

    Args:
        spec: The table on the pservers.
        local_spec: The table with the rule that trains it here.
        make_store: Makes an empty store.

    Attributes:
        rows: Rows of the window, and of earlier ones if the rule has state; of those only the state has a meaning.
        num_updates: Number of updates by this worker: the rule's t.
    """

    def __init__(self, spec: TableSpec, local_spec: TableSpec, make_store: Callable[[TableSpec], RowStore]) -> None:
        self.num_updates = 0
        self._spec = spec
        self._bases: list[RowBatch] = []  # rows of the window, as they entered it
        self._has_state = local_spec.update_rule.num_states > 0
        # The store whose ids are those of the window: the rows themselves, or only marks if rows outlive the window.
        marks = TableSpec(name=spec.name, dim=1, rule=read_only.name, initializer=constant(0.0))
        self._make_window = partial(make_store, marks if self._has_state else local_spec)
        self._window = self._make_window()
        self.rows = make_store(local_spec) if self._has_state else self._window

    def is_outside(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns True for each id that is not in the window."""
        return ~self._window.has_rows(ids)

    def enter(self, base: RowBatch) -> None:
        """Adds rows to the window, in which they are not, with the pservers' values."""
        ids = base.unique.ids
        self.rows.set_rows(ids, base.values)
        if self._has_state:
            self._window.set_rows(ids, np.zeros((len(ids), 1), np.float32))
        self._bases.append(base)

    def apply(self, batch: RowBatch) -> None:
        """Trains rows of the window."""
        self.num_updates += 1
        self.rows.push(batch.unique.ids, batch.values, batch.learning_rate, self.num_updates)

    def change(self) -> RowBatch:
        """The change of the rows of the window since they entered it, of those that changed. Fresh arrays."""
        if not self._bases:
            return RowBatch.empty(self._spec, UniqueIds(np.empty(0, np.int64), np.zeros(0, np.int64)))
        uniques = [base.unique for base in self._bases]
        ids = np.concatenate([unique.ids for unique in uniques])
        shards = np.concatenate([_shards_of(unique) for unique in uniques])
        change = np.empty((len(ids), self._spec.dim), np.float32)
        self.rows.pull(ids, change)
        ends = np.cumsum([len(unique.ids) for unique in uniques])
        with np.errstate(over="ignore", invalid="ignore"):  # the pservers refuse what is not finite
            for part, base in zip(np.split(change, ends[:-1]), self._bases, strict=True):
                np.subtract(part, base.values, out=part)
        changed = np.flatnonzero((change != 0).any(axis=1))
        changed = changed[np.argsort(shards[changed], kind="stable")]
        num_per_shard = np.bincount(shards[changed], minlength=len(uniques[0].num_per_shard))
        # Far faster than change[changed].
        return RowBatch(self._spec, UniqueIds(ids[changed], num_per_shard), np.take(change, changed, axis=0))

    def leave(self) -> None:
        """Empties the window and releases its memory."""
        if not self._bases:
            return
        self._bases.clear()
        self._window.close()
        self._window = self._make_window()
        if not self._has_state:
            self.rows = self._window

    def close(self) -> None:
        """Releases the memory."""
        self.rows.close()
        self._window.close()


def _shards_of(unique: UniqueIds) -> NDArray[np.uint16]:
    """The shard of each id; of a dtype that is sorted without comparing, and large enough for any number of shards."""
    shards = np.arange(len(unique.num_per_shard), dtype=np.uint16)
    return np.repeat(shards, unique.num_per_shard)
