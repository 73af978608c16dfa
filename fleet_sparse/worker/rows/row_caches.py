"""RowCaches: the row caches of all tables of a worker, between its steps and its client."""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.row_dtype import RowDtype, rounded

from ..net.requests import DenseUpdate
from ..net.table_client import ExtraBlock, TableCall, TableClient
from .cached_table import (
    NOTHING_SENT,
    Answer,
    Arrived,
    CachedTable,
    CacheJob,
    Changes,
    Counters,
    Outgoing,
    Plan,
    may_hold,
)
from .deduplicator import Deduplicator, UniqueIds
from .early_rows import EarlyRows
from .row_batch import RowBatch
from .row_exchange import RowAsk, RowChange, answer_of

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

NUM_LAG_CLASSES = 33
_MAX_READS = 64  # reads that may wait for their update: of threads that train, and of runs that failed
_MAX_ASKS = 8  # in one lookup, while pservers are started again or remove rows
_ID_BYTES, _FLOAT_BYTES, _VERSION_BYTES, _COUNT_BYTES, _SLACK_BYTES = 8, 4, 4, 4, 1


class CacheStats(NamedTuple):
    """What the cache of one table holds, and what it did since it was made."""

    rows: int
    """Number of copies."""
    bytes: int
    """Memory."""
    held: int
    """Number of rows with updates that the pservers do not have."""
    counters: Counters
    bytes_saved: int
    """Bytes of ids, rows, gradients and states that were not sent and received, against no cache; negative if more."""
    lags: tuple[tuple[int, ...], ...]
    """`NUM_LAG_CLASSES` numbers for each pserver: how many copies it refreshed that lagged as `lag_class` says."""


class _Read(NamedTuple):
    """A batch between its lookup and its update."""

    unique: UniqueIds
    plan: Plan
    arrived: Arrived


class _Lookup(NamedTuple):
    """The rows of one batch on their way."""

    batch: RowBatch
    table: CachedTable | None
    plan: Plan | None
    plain: RowBatch
    """Rows that are pulled as without a cache."""
    ask: RowAsk | None

    @property
    def has_late(self) -> bool:
        """True if there is more to ask when the batch is used."""
        return self.plan is not None and len(self.plan.late) > 0


class _Ahead(NamedTuple):
    """The rows of the next step, on their way with the answer to a push."""

    coming: EarlyRows
    lookups: list[_Lookup]
    call: TableCall


class _Arrivals(NamedTuple):
    """Lookups that were made ahead, and the answers to their asks."""

    lookups: list[_Lookup]
    extra: Sequence[ExtraBlock]


class RowCaches:
    """Copies of the rows of a worker's tables, which its steps read and train. Thread-safe.

    Tables with an entry or with shows and clicks, whose pushes carry statistics of each id, are not cached; nor are
    tables that are only read, and those that are declared after the first step.

    Args:
        client: This worker's client.
        deduplicator: Deduplicator with the shards' placement.
        job: What the caches of the tables share.
        tables: Tables of the job by name; those that are there at the first step are cached.
        max_bytes: Memory of all caches, divided evenly; what a table cannot use goes to the others.
        max_rows: Largest number of copies of a table; None for what fits into the memory.
        max_staged_bytes: Largest total size of the pushes of a step in sync.
    """

    def __init__(
        self,
        client: TableClient,
        deduplicator: Deduplicator,
        job: CacheJob,
        tables: Mapping[str, TableSpec],
        *,
        max_bytes: int,
        max_rows: int | None = None,
        max_staged_bytes: int = Settings.max_staged_bytes,
    ) -> None:
        self._client = client  # constant after construction, as all down to `_max_rows`
        self._deduplicator = deduplicator
        self._job = job
        self._specs = tables
        self._max_bytes, self._max_rows = max_bytes, max_rows
        # Each worker may flush its share of half a step: others may train in it, with one push each.
        self._max_part_bytes = max(max_staged_bytes // (2 * job.num_workers), 1)
        # A save pauses workers for which a pull may wait, and needs the caches meanwhile.
        self._waits_unlocked = (job.steps_off_lease or 0) > 0 and job.num_workers > 1
        self._lock = threading.Lock()  # guards all below; held from a plan to the end of its pull, but for such waits
        self._tables: dict[str, CachedTable] | None = None
        self._reads: OrderedDict[int, _Read] = OrderedDict()  # by identity of their ids
        self._num_batches = 0
        self._saved: dict[str, int] = {}
        self._lags: dict[str, NDArray[np.int64]] = {}
        self._coming: EarlyRows | None = None  # the next step, until the push of this one
        self._ahead: _Ahead | None = None
        self._prepared: Sequence[RowBatch] = ()  # gradients of a step, until it is committed
        self._noted = 0, 0  # failed pushes and rejoins of the client that the caches know of
        self._num_changes = 0  # of copies or what they hold, apart from those of a pull: a plan before it is void
        self._epochs: dict[tuple[int, int], int] = {}  # clock epochs by table and shard, of the last answers

    def pull(
        self,
        batches: Sequence[RowBatch],
        early: EarlyRows | None = None,
        coming: EarlyRows | None = None,
        *,
        step: int = 0,
    ) -> bool:
        """Fills batches that a step trains on with rows. Rows enter the caches when the batches are updated.

        Args:
            batches: As of `RowSource.pull`.
            early: Rows of this step: `coming` of the step before; None if there are none.
            coming: Rows of the next step; they are asked for with the push of this one.
            step: As of `RowSource.pull`.

        Returns:
            False if the copies were changed while this call waited for other workers, as by a save: call it again,
            without `early`, because that was a step.

        Raises:
            FleetSparseError: As `TableClient.pull`.
        """
        with self._lock:
            self._num_batches += 1
            self._coming = coming
            num_changes = self._num_changes
            ahead = self._arrived(early)
            for _ in range(_MAX_ASKS):
                if self._num_changes == num_changes and self._filled(batches, ahead, step):
                    return True
                if self._num_changes != num_changes:
                    return False
                ahead = None
        raise FleetSparseError(
            f"row caches: pservers were started again, or removed rows, in {_MAX_ASKS} lookups of one step. Look at "
            "their logs"
        )

    def as_sent(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns rows or gradients as the other side of a frame reads them: the same array if they are not rounded."""
        return rounded(values, self._client.rows_dtype)

    def abandon(self, early: EarlyRows) -> None:
        """Drops the rows of a step that is not run."""
        with self._lock:
            if self._ahead is not None and self._ahead.coming is early:
                self._drop_ahead()
            if self._coming is early:
                self._coming = None

    def read(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """Fills batches for an evaluation: with the rows of the pservers, and this worker's held updates.

        Arguments and errors are those of `pull`. No cache changes.
        """
        with self._lock:
            pull, num_changes = partial(self._client.pull, batches, step=step), self._num_changes
            self._waited(pull)
            if self._num_changes != num_changes:
                pull()  # what was held may have been sent meanwhile; other workers have made their steps
            for batch in batches:
                table = self._table(batch.spec)
                if table is not None:
                    table.add_held(batch.unique.ids, batch.values)

    def start_update(
        self,
        batches: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] | None = None,
        *,
        weight: float = 1.0,
        step: int = 0,
    ) -> TableCall:
        """Trains the copies of a step and sends what is due of it, as `TableClient.start_update`.

        Gradients should be finite. If it raises, the caches hold the updates of their rows.
        """
        with self._trained(batches) as (pushes, changes, trained):
            coming, self._coming = self._coming, None
            if coming is None:
                return self._client.start_update(pushes, dense, pulls, weight=weight, step=step, changes=changes)
            self._num_batches += 1
            next_step = step + 1 if step else self._num_batches
            sending = {table.spec.name: outgoing for table, outgoing in trained}
            lookups = [
                self._looked_up(batch, next_step, sending.get(batch.spec.name, NOTHING_SENT))
                for batch in coming.batches.values()
            ]
            plain = [lookup.plain for lookup in lookups if len(lookup.plain.unique.ids)]
            asks = [lookup.ask for lookup in lookups if lookup.ask is not None]
            # Where steps are counted the answer says that this one is complete.
            late = plain if plain or asks or step else pulls
            call = self._client.start_update(pushes, dense, late, weight=weight, step=step, changes=changes, asks=asks)
            self._ahead = _Ahead(coming, lookups, call)
            return call

    def start_prepare(
        self, batches: Sequence[RowBatch], dense: Sequence[DenseUpdate], *, weight: float, step: int
    ) -> TableCall:
        """As `TableClient.start_prepare`, of a job in which no updates are held back. The copies stay as they are."""
        with self._lock:
            self._drop_ahead()
            self._prepared = batches
            weighted = [self._weighted(batch) for batch in batches]
            return self._client.start_prepare(weighted, dense, weight=weight, step=step)

    def start_commit(
        self,
        factors: Sequence[tuple[TableSpec | DenseSpec, NDArray[np.float32]]],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] = (),
        *,
        step: int,
    ) -> TableCall:
        """Trains the copies of the step that was prepared, by its clipped gradients, and commits it.

        Arguments and errors are those of `TableClient.start_commit`.
        """
        prepared, self._prepared = self._prepared, ()
        with self._trained(prepared, {spec.name: values for spec, values in factors}) as (_, changes, _):
            assert not changes, "no updates are held back"
            return self._client.start_commit(factors, dense, pulls, step=step)

    def start_flush(self, num_updates: Mapping[str, int], *, step: int = 0, in_parts: bool = False) -> TableCall:
        """Sends all updates that the caches hold. Raises as `TableClient.start_update`; they are held then.

        Args:
            num_updates: By table, number of updates of this worker: the rule's t.
            step: As of `TableClient.start_update`.
            in_parts: True to send this worker's part of a step alone; after `num_flushes` calls all is sent.
        """
        changes, sent = [], []
        with self._lock:
            self._num_changes += 1
            self._drop_ahead()
            self._note_failures()
            num_bytes = self._max_part_bytes
            for name, table in (self._tables or {}).items():
                change_bytes = _most_change_bytes(table.spec)
                outgoing = table.flush(max(-(-num_bytes // change_bytes), 0) if in_parts else None)
                changes += self._changes(table, outgoing, num_updates.get(name, 0))
                self._count_update(table, 0, outgoing)
                num_bytes -= change_bytes * sum(len(each.ids) for each in outgoing.changes)
                sent.append((table, outgoing))
            call = self._client.start_update([], [], step=step, changes=changes)
            for table, outgoing in sent:
                table.sent(outgoing)
        return call

    @property
    def num_flushes(self) -> int:
        """Largest number of parts of a flush: the same for all workers, whatever they hold."""
        with self._lock:
            tables = self._tables
            capacities = self._capacities() if tables is None else {name: tables[name].capacity for name in tables}
        of_holding = [(self._specs[name], rows) for name, rows in capacities.items()]
        num_bytes = sum(_most_change_bytes(spec) * rows for spec, rows in of_holding if may_hold(spec, self._job))
        return max(1, -(-num_bytes // self._max_part_bytes))

    @property
    def may_hold(self) -> bool:
        """True if updates may be held back."""
        tables = self._tables
        names = self._specs if tables is None else tables
        return any(may_hold(self._specs[name], self._job) for name in names if is_cached(self._specs[name]))

    @property
    def num_held(self) -> int:
        """Number of rows with updates that the pservers do not have."""
        with self._lock:
            return sum(table.num_held for table in (self._tables or {}).values())

    def can_flush(self) -> bool:
        """Returns whether updates are held, and no push failed whose error a step has to raise first."""
        return self._noted[0] == self._client.num_failed_pushes and self.num_held > 0

    def clear(self) -> None:
        """Forgets all copies and what they hold: the tables on the pservers were replaced."""
        with self._lock:
            self._num_changes += 1
            self._drop_ahead()
            self._reads.clear()
            self._epochs.clear()
            for table in (self._tables or {}).values():
                table.forget()

    def stats(self) -> dict[str, CacheStats]:
        """Returns what the caches hold and did, by table."""
        with self._lock:
            return {
                name: CacheStats(
                    *(table.num_rows, table.num_bytes, table.num_held, table.counters, self._saved[name]),
                    tuple(map(tuple, self._lags[name].tolist())),
                )
                for name, table in (self._tables or {}).items()
            }

    @contextmanager
    def _trained(
        self, batches: Sequence[RowBatch], factors: Mapping[str, NDArray[np.float32]] | None = None
    ) -> Iterator[tuple[list[RowBatch], list[RowChange], list[tuple[CachedTable, Outgoing]]]]:
        """Yields the gradients and changes that a step pushes, and what it has of each table.

        If the block ends well, they count as sent.

        With `factors`, by table, the pservers multiply the gradients before they apply them.
        """
        pushes, changes, trained = [], [], []
        with self._lock:
            self._num_changes += 1
            self._drop_ahead()
            for batch in map(self._weighted, batches):
                table = self._table(batch.spec)
                if table is None:
                    pushes.append(batch)
                    continue
                plan, arrived = self._taken(batch, table)
                grads = self.as_sent(batch.values)
                if factors is not None:
                    grads = grads * factors[batch.spec.name]
                outgoing = table.apply(plan, arrived, grads, batch.learning_rate, batch.optimizer_step)
                as_gradients = outgoing.as_gradients
                is_whole = len(as_gradients) == len(batch.unique.ids)
                pushes.append(batch if is_whole else batch.at(as_gradients))
                changes += self._changes(table, outgoing, batch.optimizer_step)
                self._count_update(table, len(batch.unique.ids), outgoing)
                trained.append((table, outgoing))
            yield pushes, changes, trained
            for table, outgoing in trained:
                table.sent(outgoing)

    # With the lock held

    def _arrived(self, early: EarlyRows | None) -> _Arrivals | None:
        """Returns the lookups that were made ahead for this step, and their answers; None if there are none."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if ahead.coming is not early or self._has_failures():
            ahead.call.abandon()
            return None
        extra = self._waited(ahead.call.wait)
        return None if self._has_failures() else _Arrivals(ahead.lookups, extra)

    def _waited(self, wait: Callable[[], _T]) -> _T:
        """Returns what `wait` returns; without the lock meanwhile, if it may wait for other workers in a step lag."""
        if not self._waits_unlocked:
            return wait()
        self._lock.release()
        try:
            return wait()
        finally:
            self._lock.acquire()

    def _filled(self, batches: Sequence[RowBatch], ahead: _Arrivals | None, step: int) -> bool:
        """Fills batches with rows; returns False if the answers are not about what the copies are now.

        The copies were changed meanwhile; or clocks began at 0, on a pserver that was started again, or of rows that
        were removed and made anew.
        """
        num_changes = self._num_changes
        if self._note_failures():
            ahead = None
        of_ahead = [] if ahead is None else ahead.lookups
        names = {lookup.batch.spec.name for lookup in of_ahead}
        lookups = [
            self._looked_up(batch, step or self._num_batches) for batch in batches if batch.spec.name not in names
        ]
        late = [_late(each, each.table) for each in of_ahead if each.table is not None and each.has_late]
        extra: Sequence[ExtraBlock] = ()
        if ahead is None or lookups or late:
            plain = [lookup.plain for lookup in lookups if len(lookup.plain.unique.ids)]
            asks = [lookup.ask for lookup in (*lookups, *late) if lookup.ask is not None]
            if step or plain or asks:
                call = self._client.start_pull(plain, step=step, asks=asks, owns_memory=True)
                extra = self._waited(call.wait)
            if self._num_changes != num_changes or self._client.num_rejoins != self._noted[1]:
                return False
        if self._note_epochs([*(() if ahead is None else ahead.extra), *extra]):
            return False
        for lookup in late:
            if lookup.table is not None and lookup.plan is not None:
                lookup.table.refresh(lookup.plan, self._answer(lookup, lookup.table, lookup.plan, extra))
        if ahead is not None:
            self._finish_all(ahead.lookups, ahead.extra)
        self._finish_all(lookups, extra)
        return True

    def _drop_ahead(self) -> None:
        """Drops rows that were asked for ahead: what the caches hold, or who uses them, has changed since."""
        if self._ahead is not None:
            self._ahead.call.abandon()
            self._ahead = None

    def _finish_all(self, lookups: Sequence[_Lookup], extra: Sequence[ExtraBlock]) -> None:
        for lookup in lookups:
            if lookup.table is not None:
                self._finish(lookup, lookup.table, extra)

    def _table(self, spec: TableSpec) -> CachedTable | None:
        if self._tables is None:
            capacities = self._capacities()
            self._tables = {name: CachedTable(self._specs[name], rows, self._job) for name, rows in capacities.items()}
            self._saved = dict.fromkeys(self._tables, 0)
            shape = self._client.num_shards, NUM_LAG_CLASSES
            self._lags = {name: np.zeros(shape, np.int64) for name in self._tables}
            _log.info("row cache: %s", ", ".join(f"{name!r} {rows} rows" for name, rows in capacities.items()))
        table = self._tables.get(spec.name)
        return table if table is not None and (table.spec is spec or table.spec == spec) else None

    def _has_failures(self) -> bool:
        return self._noted != (self._client.num_failed_pushes, self._client.num_rejoins)

    def _capacities(self) -> dict[str, int]:
        specs = [each for each in self._specs.values() if is_cached(each)]
        return capacities_of(specs, self._job, self._max_bytes, self._max_rows)

    def _note_failures(self) -> bool:
        """Returns whether a push has failed, or a pserver was started again, since the last call."""
        if not self._has_failures():
            return False
        self._noted = self._client.num_failed_pushes, self._client.num_rejoins
        self._epochs.clear()
        for table in (self._tables or {}).values():
            table.forget_versions()
        return True

    def _note_epochs(self, answers: Iterable[ExtraBlock]) -> bool:
        """Returns whether a pserver has removed rows of a cached table since its answers before.

        The clocks that it had do not tell about rows that are made anew: all versions of the table's copies are unknown
        then.
        """
        if self._job.num_workers == 1:  # nobody else changes its rows: its copies have no versions
            return False
        changed = set()
        for answer in answers:
            block = answer.block
            if "slack" in block.copies:
                of_shard = block.table_id, answer.shard
                if self._epochs.get(of_shard, block.optimizer_step) != block.optimizer_step:
                    changed.add(block.table_id)
                self._epochs[of_shard] = block.optimizer_step
        for table in (self._tables or {}).values():
            if table.spec.table_id in changed:
                table.forget_versions()
        return bool(changed)

    def _looked_up(self, batch: RowBatch, step: int, sending: Outgoing | None = None) -> _Lookup:
        table = self._table(batch.spec)
        if table is None:
            return _Lookup(batch, None, None, batch, None)
        plan = table.plan(batch.unique.ids, step, sending)
        plain = batch
        if len(plan.plain) < len(plan.ids):
            plain = RowBatch.empty(batch.spec, batch.unique.at(plan.plain))
        ask = RowAsk(batch.spec, batch.unique.at(plan.asked), plan.versions) if len(plan.asked) else None
        return _Lookup(batch, table, plan, plain, ask)

    def _finish(self, lookup: _Lookup, table: CachedTable, extra: Sequence[ExtraBlock]) -> None:
        batch, plan = lookup.batch, lookup.plan
        assert plan is not None, "the table is cached"
        if lookup.plain is not batch and len(plan.plain):
            batch.values[plan.plain] = lookup.plain.values
        arrived = table.take(plan, self._answer(lookup, table, plan, extra), batch.values)
        if self._client.rows_dtype is not RowDtype.FLOAT32:
            batch.values[:] = self.as_sent(batch.values)  # as without a cache
        self._reads[id(batch.unique)] = _Read(batch.unique, plan, arrived)
        if len(self._reads) > _MAX_READS:
            self._reads.popitem(last=False)
        plain_bytes = self._client.rows_dtype.in_frames.itemsize * batch.spec.dim
        self._saved[batch.spec.name] += (len(plan.ids) - len(plan.plain)) * (_ID_BYTES + plain_bytes)

    def _answer(self, lookup: _Lookup, table: CachedTable, plan: Plan, extra: Sequence[ExtraBlock]) -> Answer:
        """Returns the answer to the ask of a lookup, and counts its bytes and the lags of copies."""
        if lookup.ask is None:
            return table.no_answer
        spec = table.spec
        own = [each for each in extra if each.block.table_id == spec.table_id and each.block.copies]
        own.sort(key=lambda each: (each.shard, each.part))
        answer = answer_of(lookup.ask, [each.block for each in own])
        table.count_lags(plan, answer, lookup.batch.unique.num_per_shard, self._lags[spec.name])
        num_bytes = len(plan.asked) * (_ID_BYTES + _VERSION_BYTES + _SLACK_BYTES) + answer.states.nbytes
        self._saved[spec.name] -= num_bytes + len(answer.rows) * (_VERSION_BYTES + _FLOAT_BYTES * spec.dim)
        return answer

    def _taken(self, batch: RowBatch, table: CachedTable) -> tuple[Plan, Arrived]:
        """Returns the plan of a batch; one without entering rows if it was not looked up for training."""
        read = self._reads.pop(id(batch.unique), None)
        if read is not None and read.unique is batch.unique:
            return read.plan, read.arrived
        return table.unplanned(batch.unique.ids)

    def _weighted(self, batch: RowBatch) -> RowBatch:
        """Returns the gradients of a batch as this worker weighs them."""
        weight = self._job.weights.of_worker
        if weight == 1.0 or self._table(batch.spec) is None:
            return batch
        return batch._replace(values=batch.values * np.float32(weight))

    def _changes(self, table: CachedTable, outgoing: Outgoing, optimizer_step: int) -> list[RowChange]:
        return [self._change(table.spec, changes, optimizer_step) for changes in outgoing.changes]

    def _change(self, spec: TableSpec, changes: Changes, optimizer_step: int) -> RowChange:
        unique, order = self._deduplicator.grouped(changes.ids, spec.salt)
        if order is not None:
            rows, amounts, states, num_updates = changes[1:5]
            changes = Changes(unique.ids, rows[order], amounts[order], states[order], num_updates[order], changes.slots)
        has_states = changes.states.shape[1] > 0
        return RowChange(
            spec,
            unique,
            changes.rows,
            changes.amounts,
            changes.states if has_states else None,
            changes.num_updates,
            1.0,
            optimizer_step,
            self._job.num_workers == 1,
        )

    def _count_update(self, table: CachedTable, num_updated: int, outgoing: Outgoing) -> None:
        row_bytes = _FLOAT_BYTES * table.spec.dim
        plain_bytes = self._client.rows_dtype.in_frames.itemsize * table.spec.dim
        saved = (num_updated - len(outgoing.as_gradients)) * (_ID_BYTES + plain_bytes)
        for changes in outgoing.changes:
            saved -= len(changes.ids) * (_ID_BYTES + row_bytes + _COUNT_BYTES) + changes.states.nbytes
            saved -= len(changes.ids) * _VERSION_BYTES if changes.states.shape[1] else 0
        self._saved[table.spec.name] += saved


def _late(lookup: _Lookup, table: CachedTable) -> _Lookup:
    """Returns what is left to ask about a batch that was looked up ahead."""
    assert lookup.plan is not None, "the table is cached"
    plan = table.late_plan(lookup.plan)
    return lookup._replace(plan=plan, ask=RowAsk(table.spec, lookup.batch.unique.at(plan.asked), plan.versions))


def is_cached(spec: TableSpec) -> bool:
    """Returns whether the rows of a table are cached."""
    rule = spec.update_rule
    # With an entry policy the pservers alone know which ids have a row.
    return rule.kernel is not None and rule.trains and not rule.is_summed and not spec.statistics and spec.entry is None


def _most_change_bytes(spec: TableSpec) -> int:
    """Returns the size of the change of a row with its states."""
    num_floats = spec.dim * (1 + spec.update_rule.num_states)
    return _ID_BYTES + _COUNT_BYTES + _VERSION_BYTES + _FLOAT_BYTES * num_floats


def capacities_of(
    specs: Sequence[TableSpec], job: CacheJob, max_bytes: int, max_rows: int | None = None
) -> dict[str, int]:
    """Divides the memory of the caches.

    Args:
        specs: The cached tables.
        job: What the caches share.
        max_bytes: Memory of all of them.
        max_rows: Largest number of copies of a table; None for any.

    Returns:
        For each table the number of its copies, at least 1.
    """
    row_bytes = {spec.name: CachedTable.bytes_per_row(spec, job) for spec in specs}
    most = {spec.name: min(spec.max_ids or math.inf, max_rows or math.inf) for spec in specs}
    capacities, left = {}, max_bytes
    by_need = sorted(specs, key=lambda spec: most[spec.name] * row_bytes[spec.name])
    for num_left, spec in zip(range(len(specs), 0, -1), by_need, strict=True):
        fitting = left // num_left // row_bytes[spec.name]
        capacities[spec.name] = capacity = max(1, int(min(fitting, most[spec.name])))
        left -= capacity * row_bytes[spec.name]
    return {spec.name: capacities[spec.name] for spec in specs}
