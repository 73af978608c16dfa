"""RowCaches: the row caches of all tables of a worker, between its steps and its client."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.row_dtype import rounded

from ..net.deferred_interrupt import DeferredInterrupt
from ..net.requests import DenseUpdate
from ..net.table_client import ExtraBlock, TableCall, TableClient
from .cache_job import CacheJob, may_hold
from .cache_sizes import capacities_of, is_cached, most_change_bytes, num_flushes_of, rows_in_part
from .cache_step import NOTHING_SENT, NOWHERE, Answer, Outgoing
from .cached_table import CachedTable
from .deduplicator import Deduplicator
from .early_rows import EarlyRows, fit_early
from .pulled_early import EarlyTable, PulledEarly
from .row_batch import RowBatch
from .row_exchange import RowAsk, RowChange
from .table_exchange import CacheStats, Lookup, TableExchange

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAX_ASKS = 8  # in one lookup, while pservers are started again or remove rows


class _Lookups(NamedTuple):
    """Batches on their way."""

    cached: list[tuple[TableExchange, Lookup]]
    uncached: list[RowBatch]
    """Rows of other tables, without those that were pulled early."""
    early: list[tuple[RowBatch, EarlyTable]]
    """Batches some of whose rows were pulled early."""

    @property
    def names(self) -> set[str]:
        """Names of their tables."""
        return {exchange.spec.name for exchange, _ in self.cached} | {batch.spec.name for batch in self.uncached}

    @property
    def plain(self) -> list[RowBatch]:
        """The rows that are pulled as without a cache."""
        batches = [*self.uncached, *(lookup.plain for _, lookup in self.cached)]
        return [batch for batch in batches if len(batch.unique.ids)]

    @property
    def asks(self) -> list[RowAsk]:
        """The questions to the pservers about copies of these rows."""
        return [lookup.ask for _, lookup in self.cached if lookup.ask is not None]

    def answers(self, extra: Sequence[ExtraBlock]) -> list[Answer]:
        """Returns the answers to the lookups of `cached`. Raises as `TableExchange.answer`, before a copy changes."""
        return [exchange.answer(lookup, extra) for exchange, lookup in self.cached]

    def finish(self, answers: Sequence[Answer], extra: Sequence[ExtraBlock], deduplicator: Deduplicator) -> None:
        """Fills the batches, whose plain rows and answers have arrived."""
        for batch, table in self.early:
            table.fill(batch, extra, deduplicator)
        for (exchange, lookup), answer in zip(self.cached, answers, strict=True):
            exchange.finish(lookup, answer)


class _Ahead(NamedTuple):
    """The rows of the next step: on their way with the answer to a push, and before it."""

    coming: EarlyRows
    lookups: _Lookups
    call: TableCall
    """The push."""
    has_values: bool
    """True if its answer also has dense values, for which the thread that made it waits."""
    pulled_early: PulledEarly | None

    def wait(self) -> Sequence[ExtraBlock]:
        """Waits for all of them; returns the other blocks of the answer to the push. Raises as `TableCall.wait`."""
        extra = self.call.wait()
        if self.pulled_early is not None:
            self.pulled_early.call.wait()
        return extra

    def abandon(self) -> None:
        """Drops the rows. They do not enter."""
        for exchange, lookup in self.lookups.cached:
            exchange.table.drop(lookup.plan)
        if not self.has_values:  # else they have arrived before their memory is used again
            self.call.abandon()
        if self.pulled_early is not None:
            self.pulled_early.call.abandon()


class _SentPushes(NamedTuple):
    """Pushes that had rows that left the caches of the only worker."""

    are_done: Callable[[], bool]
    """Tells whether they were applied, refused or lost."""
    num_pushes: list[tuple[CachedTable, int]]
    """How many of `num_unacked` of each table they are."""


class _Arrivals(NamedTuple):
    """Lookups that were made ahead, and the answers to their asks."""

    lookups: _Lookups
    extra: Sequence[ExtraBlock]


class RowCaches:
    """Copies of the rows of a worker's tables, which its steps read and train. Thread-safe.

    Tables with an entry or with shows and clicks, whose pushes carry statistics of each id, are not cached; nor are
    tables of a smaller dim than `min_dim`, tables that are only read, and those that are declared after the first step.

    Args:
        client: This worker's client.
        deduplicator: Deduplicator with the shards' placement.
        job: What the caches of the tables share.
        tables: Tables of the job by name; those that are there at the first step are cached.
        max_bytes: Memory of all caches, divided evenly; what a table cannot use goes to the others.
        max_rows: Largest number of copies of a table; None for what fits into the memory.
        min_dim: Smallest dim of a table that is cached.
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
        min_dim: int = 1,
        max_staged_bytes: int = Settings.max_staged_bytes,
    ) -> None:
        self._client = client  # constant after construction, as all down to `_min_dim`
        self._deduplicator = deduplicator
        self._job = job
        self._specs = tables
        self._max_bytes, self._max_rows, self._min_dim = max_bytes, max_rows, min_dim
        # Each worker may flush its share of half a step: others may train in it, with one push each.
        self._max_part_bytes = max(max_staged_bytes // (2 * job.num_workers), 1)
        # A save pauses workers for which a pull may wait, and needs the caches meanwhile.
        self._waits_unlocked = (job.steps_off_lease or 0) > 0 and job.num_workers > 1
        self._abandoned: deque[EarlyRows] = deque()  # rows of steps that are not run; dropped with the lock held
        # Guards all below; held from a plan to the end of its pull, but for such waits.
        self._lock = threading.RLock()  # one that only its owner can release, whatever Ctrl-C has skipped
        self._tables: dict[str, TableExchange] | None = None
        self._num_batches = 0
        self._coming: EarlyRows | None = None  # the next step, until the push of this one
        self._pulled_early: PulledEarly | None = None  # its rows that are pulled before that push
        self._ahead: _Ahead | None = None
        self._prepared: Sequence[RowBatch] = ()  # gradients of a step, until it is committed
        self._has_two_phases = False  # once a step was prepared: such steps ask for nothing ahead
        self._sent_pushes: _SentPushes | None = None
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
            coming: Rows of the next step; they are asked for with the push of this one, but for those that it does not
                touch and that no copy is made of, which are pulled now.
            step: As of `RowSource.pull`.

        Returns:
            False if the copies were changed while this call waited for other workers, as by a save: call it again,
            without `early`, because that was a step.

        Raises:
            FleetSparseError: As `TableClient.pull`.
        """
        with self._lock:
            self._drop_abandoned()
            self._num_batches += 1
            self._coming = coming
            self._drop_pulled_early()
            num_changes = self._num_changes
            ahead = self._arrived(early)
            for _ in range(_MAX_ASKS):
                if self._num_changes == num_changes and self._filled(batches, ahead, step):
                    self._drop_abandoned()
                    if coming is not None and self._coming is coming:  # it was not abandoned during a wait
                        self._pulled_early = self._started_early(coming, batches, step)
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
        """Drops the rows of a step that is not run, as soon as the next call has the lock.

        It takes no lock: the garbage collector may end a `look_ahead` in a thread that has it.
        """
        self._abandoned.append(early)

    def drop_ahead(self) -> None:
        """Drops the rows that came ahead of the next step: others may make steps before it."""
        with self._lock:
            self._drop_abandoned()
            self._drop_ahead()
            self._drop_pulled_early()

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
                exchange = self._cached(batch.spec)
                if exchange is not None:
                    exchange.table.add_held(batch.unique.ids, batch.values)

    def weighted(self, batch: RowBatch) -> RowBatch:
        """Returns the gradients of a batch as this worker weighs them, before it clips, trains or sends them.

        What a gradient weighs does not depend on `min_dim`, in which workers may differ.
        """
        weight = self._job.weights.of_worker
        if weight == 1.0 or not is_cached(batch.spec):
            return batch
        return batch._replace(values=batch.values * np.float32(weight))

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

        Gradients are weighted, and should be finite. It returns once the push is accepted. If it raises because an
        earlier push failed, no copy has changed; if the window was full until the deadline, the caches hold the updates
        of their rows.
        """
        with self._trained(batches) as (pushes, changes, trained):
            self._drop_abandoned()
            coming, self._coming = self._coming, None
            if self._pulled_early is not None and not self._pulled_early.is_untouched_by(batches):
                self._drop_pulled_early()
            if coming is None:
                call = self._client.start_update(
                    *(pushes, dense, pulls), weight=weight, step=step, changes=changes, raises_earlier=False
                )
                call.wait_accepted()
                return call
            self._num_batches += 1
            next_step = step + 1 if step else self._num_batches
            sending = {table.spec.name: outgoing for table, outgoing in trained}
            lookups = self._looked_up(coming.batches.values(), next_step, sending, self._pulled_early)
            plain, asks = lookups.plain, lookups.asks
            # Where steps are counted the answer says that this one is complete, and has early rows that it changed.
            late = plain if plain or asks or step else pulls
            call = self._client.start_update(
                *(pushes, dense, late), weight=weight, step=step, changes=changes, asks=asks, raises_earlier=False
            )
            call.wait_accepted()
            has_values = any(update.outs is not None for update in dense)
            self._ahead, self._pulled_early = _Ahead(coming, lookups, call, has_values, self._pulled_early), None
            return call

    def start_prepare(
        self, batches: Sequence[RowBatch], dense: Sequence[DenseUpdate], *, weight: float, step: int
    ) -> TableCall:
        """As `TableClient.start_prepare`, of a job in which no updates are held back. The copies stay as they are."""
        with self._lock:
            self._has_two_phases = True
            self._drop_ahead()
            self._drop_pulled_early()
            self._prepared = batches
            return self._client.start_prepare(batches, dense, weight=weight, step=step)

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
        with self._lock:
            prepared, self._prepared = self._prepared, ()
        with self._trained(prepared, {spec.name: values for spec, values in factors}) as (_, changes, _):
            assert not changes, "no updates are held back"
            call = self._client.start_commit(factors, dense, pulls, step=step, raises_earlier=False)
            call.wait_accepted()
            return call

    def start_flush(self, num_updates: Mapping[str, int], *, step: int = 0, in_parts: bool = False) -> TableCall:
        """Sends all updates that the caches hold; returns once the push is accepted.

        Raises as `TableClient.start_changes`; they are held then.

        Args:
            num_updates: By table, number of updates of this worker: the rule's t.
            step: As of `TableClient.start_update`.
            in_parts: True to send this worker's part of a step alone; after `num_flushes` calls all is sent.
        """
        changes, sent = [], []
        with self._lock:
            self._num_changes += 1
            self._drop_ahead()
            self._drop_pulled_early()
            self._note_failures()
            num_bytes = self._max_part_bytes
            for name, exchange in (self._tables or {}).items():
                spec, table = exchange.spec, exchange.table
                outgoing = table.flush(rows_in_part(spec, num_bytes) if in_parts else None)
                # 0 if the one step that trained the table was not sent, which counts no update
                changes += exchange.changes(outgoing, max(num_updates.get(name, 0), 1))
                num_copies = sum(int((each.slots >= 0).sum()) for each in outgoing.changes)  # not rows that left
                num_bytes -= most_change_bytes(spec) * num_copies
                sent.append((table, outgoing))
            call = self._client.start_changes(changes, step=step)
            call.wait_accepted()
            for table, outgoing in sent:
                table.sent(outgoing)
            self._note_acked()
        return call

    @property
    def num_flushes(self) -> int:
        """Largest number of parts of a flush: the same for all workers, whatever they hold."""
        with self._lock:
            specs = [self._specs[name] for name in (self._specs if self._tables is None else self._tables)]
        cached = [spec for spec in specs if is_cached(spec, self._min_dim)]
        return num_flushes_of(cached, self._job, self._max_bytes, self._max_rows, self._max_part_bytes)

    @property
    def may_hold(self) -> bool:
        """True if updates may be held back."""
        tables = self._tables
        specs = [self._specs[name] for name in (self._specs if tables is None else tables)]
        return any(is_cached(spec, self._min_dim) and may_hold(spec, self._job) for spec in specs)

    @property
    def num_held(self) -> int:
        """Number of rows with updates that the pservers do not have."""
        with self._lock:
            if self._note_failures():  # the only worker of a job holds again what a refused push had
                self._num_changes += 1
            return sum(exchange.table.num_held for exchange in (self._tables or {}).values())

    def clear(self) -> None:
        """Forgets all copies and what they hold: the tables on the pservers were replaced."""
        with self._lock:
            self._num_changes += 1
            self._drop_ahead()
            self._drop_pulled_early()
            self._epochs.clear()
            self._sent_pushes = None
            for exchange in (self._tables or {}).values():
                exchange.forget()

    def stats(self) -> dict[str, CacheStats]:
        """Returns what the caches hold and did, by table.

        It waits for no pull. Beside a step the counts are of moments shortly after each other.
        """
        tables = self._tables  # without the lock: a pull holds it while it waits for the network
        return {name: exchange.stats() for name, exchange in (tables or {}).items()}

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
            # Errors of earlier pushes are raised before the copies are trained, for the script may repeat the step, and
            # not after it: those that come meanwhile are left for the next call.
            self._client.check_usable()
            self._num_changes += 1
            self._drop_ahead()
            for batch in batches:
                exchange = self._exchange(batch.spec)
                if exchange is None:
                    pushes.append(batch)
                    continue
                table, (plan, arrived) = exchange.table, exchange.taken(batch)
                grads = self.as_sent(batch.values)
                if factors is not None:
                    grads = grads * factors[batch.spec.name]
                outgoing = table.apply(plan, arrived, grads, batch.learning_rate, batch.optimizer_step)
                as_gradients = outgoing.as_gradients
                is_whole = len(as_gradients) == len(batch.unique.ids)
                pushes.append(batch if is_whole else batch.at(as_gradients))
                changes += exchange.changes(outgoing, batch.optimizer_step, len(batch.unique.ids))
                trained.append((table, outgoing))
            yield pushes, changes, trained
            for table, outgoing in trained:
                table.sent(outgoing)
            self._note_acked()

    # With the lock held

    def _note_acked(self) -> None:
        """Takes note of applied pushes that had rows that left, and tracks those that are on their way."""
        if self._sent_pushes is not None and self._sent_pushes.are_done() and not self._has_failures():
            for table, num_pushes in self._sent_pushes.num_pushes:
                table.note_acked(num_pushes)
            self._sent_pushes = None
        if self._sent_pushes is None:
            tables = [exchange.table for exchange in (self._tables or {}).values() if exchange.table.num_unacked]
            if tables:
                with suppress(FleetSparseError):  # the next call raises why none works any more
                    are_done = self._client.track_pushes()
                    self._sent_pushes = _SentPushes(are_done, [(table, table.num_unacked) for table in tables])

    def _arrived(self, early: EarlyRows | None) -> _Arrivals | None:
        """Returns the lookups that were made ahead for this step, and their answers; None if there are none."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if ahead.coming is not early or self._has_failures():
            ahead.abandon()
            return None
        try:
            extra = self._waited(ahead.wait)
        except BaseException:
            ahead.abandon()
            raise
        return None if self._has_failures() else _Arrivals(ahead.lookups, extra)

    def _waited(self, wait: Callable[[], _T]) -> _T:
        """Returns what `wait` returns; without the lock meanwhile, if it may wait for other workers in a step lag."""
        if not self._waits_unlocked:
            return wait()
        is_released = False
        try:
            with DeferredInterrupt():
                self._lock.release()
                is_released = True
            return wait()
        finally:
            if is_released:
                with DeferredInterrupt():
                    self._lock.acquire()

    def _filled(self, batches: Sequence[RowBatch], ahead: _Arrivals | None, step: int) -> bool:
        """Fills batches with rows; returns False if the answers are not about what the copies are now.

        The copies were changed meanwhile; or clocks began at 0, on a pserver that was started again, or of rows that
        were removed and made anew.
        """
        num_changes = self._num_changes
        if self._note_failures():
            ahead = None
        names = set() if ahead is None else ahead.lookups.names
        others = [batch for batch in batches if batch.spec.name not in names]
        lookups = self._looked_up(others, step or self._num_batches)
        of_ahead = [] if ahead is None else ahead.lookups.cached
        late = [(exchange, left) for exchange, each in of_ahead if (left := exchange.late(each)) is not None]
        extra: Sequence[ExtraBlock] = ()
        if ahead is None or others or late:
            plain, asks = lookups.plain, [*lookups.asks, *(left.ask for _, left in late if left.ask is not None)]
            if step or plain or asks:
                call = self._client.start_pull(plain, step=step, asks=asks, owns_memory=True)
                extra = self._waited(call.wait)
            if self._num_changes != num_changes or self._client.num_rejoins != self._noted[1]:
                return False
            if self._sent_pushes is not None and self._has_failures():
                return False  # a row of these may be one whose updates were refused
        # All answers are read before the first copy changes: one that is malformed changes none.
        of_late = [exchange.answer(left, extra) for exchange, left in late]
        ahead_answers = [] if ahead is None else ahead.lookups.answers(ahead.extra)
        answers = lookups.answers(extra)
        with DeferredInterrupt():  # a copy and its version belong together
            if self._note_epochs([*(() if ahead is None else ahead.extra), *extra]):
                return False
            for (exchange, left), answer in zip(late, of_late, strict=True):
                exchange.refresh(left, answer)
            if ahead is not None:
                ahead.lookups.finish(ahead_answers, ahead.extra, self._deduplicator)
            lookups.finish(answers, extra, self._deduplicator)
        return True

    def _drop_abandoned(self) -> None:
        """Drops rows of steps that are not run."""
        while self._abandoned:
            early = self._abandoned.popleft()
            if self._ahead is not None and self._ahead.coming is early:
                self._drop_ahead()
            if self._coming is early:
                self._coming = None
                self._drop_pulled_early()

    def _drop_ahead(self) -> None:
        """Drops rows that were asked for ahead: what the caches hold, or who uses them, has changed since."""
        if self._ahead is not None:
            self._ahead.abandon()
            self._ahead = None

    def _drop_pulled_early(self) -> None:
        """Drops rows that were pulled for a step whose other rows nobody will ask for."""
        if self._pulled_early is not None:
            self._pulled_early.call.abandon()
            self._pulled_early = None

    def _started_early(self, coming: EarlyRows, present: Sequence[RowBatch], step: int) -> PulledEarly | None:
        """Starts to pull rows of the next step that the present one does not touch and that no copy is made of."""
        if self._has_two_phases:
            return None
        tables = {}
        for name, ids in coming.untouched(present).items():
            spec, unique, places = coming.batches[name].spec, ids.unique, ids.early.places
            exchange = self._exchange(spec)
            if exchange is not None:
                places = places[exchange.table.plain_ahead(unique.ids[places])]
            if len(places):
                tables[name] = EarlyTable(ids, places, RowBatch.empty(spec, unique.at(places)))
        rows, is_merged = [table.rows for table in tables.values()], self._job.is_merged
        if not rows or (is_merged and not fit_early(rows, self._client)):
            return None
        # A worker that is alone need not even wait for its own push.
        of_pull = step if not step or self._job.num_workers == 1 else step + 1
        return PulledEarly(tables, self._client.start_pull(rows, step=of_pull, early=is_merged, owns_memory=True))

    def _looked_up(
        self,
        batches: Iterable[RowBatch],
        step: int,
        sending: Mapping[str, Outgoing] | None = None,
        pulled_early: PulledEarly | None = None,
    ) -> _Lookups:
        """Looks batches up.

        Args:
            batches: The batches.
            step: Their step, as of `CachedTable.plan`.
            sending: What a push that was not sent yet has of each table.
            pulled_early: Rows of them that were pulled early.
        """
        lookups = _Lookups([], [], [])
        for batch in batches:
            table = None if pulled_early is None else pulled_early.tables.get(batch.spec.name)
            if table is not None:
                lookups.early.append((batch, table))
            exchange = self._exchange(batch.spec)
            if exchange is None:
                lookups.uncached.append(batch if table is None else batch._replace(unique=table.ids.late))
                continue
            outgoing = None if sending is None else sending.get(batch.spec.name, NOTHING_SENT)
            places = NOWHERE if table is None else table.places
            lookups.cached.append((exchange, exchange.look_up(batch, step, outgoing, places)))
        return lookups

    def _exchange(self, spec: TableSpec) -> TableExchange | None:
        if self._tables is None:
            capacities = self._capacities()
            self._tables = {
                name: TableExchange(
                    self._client,
                    self._deduplicator,
                    CachedTable(self._specs[name], num_rows, self._job),
                    is_alone=self._job.num_workers == 1,
                )
                for name, num_rows in capacities.items()
            }
            if capacities:
                _log.info("row cache: %s", ", ".join(f"{name!r} {rows} rows" for name, rows in capacities.items()))
            else:
                _log.warning(
                    "row cache: none of the %d tables is cached: a cached one is trained, has no entry policy and no "
                    "shows and clicks, and has at least the dim RowCache.min_dim, which is %d; the largest dim is %d. "
                    "Lower RowCache.min_dim, or leave the bound and the row cache out",
                    len(self._specs),
                    self._min_dim,
                    max((each.dim for each in self._specs.values()), default=0),
                )
        return self._cached(spec)

    def _cached(self, spec: TableSpec) -> TableExchange | None:
        """As `_exchange`, but makes no cache: there is none before the first step."""
        exchange = (self._tables or {}).get(spec.name)
        return exchange if exchange is not None and (exchange.spec is spec or exchange.spec == spec) else None

    def _has_failures(self) -> bool:
        return self._noted != (self._client.num_failed_pushes, self._client.num_rejoins)

    def _capacities(self) -> dict[str, int]:
        return capacities_of(self._specs.values(), self._job, self._max_bytes, self._max_rows, self._min_dim)

    def _note_failures(self) -> bool:
        """Returns whether a push has failed, or a pserver was started again, since the last call."""
        if not self._has_failures():
            return False
        self._drop_ahead()
        self._drop_pulled_early()
        num_failed = self._noted[0]
        self._noted = self._client.num_failed_pushes, self._client.num_rejoins
        self._epochs.clear()
        for exchange in (self._tables or {}).values():
            if self._noted[0] != num_failed:
                self._sent_pushes = None
                exchange.table.forget_versions()
            else:  # every push is there, but nothing may be known about the rows that a pserver removed
                exchange.table.note_removals()
        return True

    def _note_epochs(self, answers: Iterable[ExtraBlock]) -> bool:
        """Returns whether a pserver has removed rows of a cached table since its answers before.

        The clocks that it had do not tell about rows that are made anew: all versions of the table's copies are unknown
        then. What the only worker holds stays.
        """
        changed = set()
        for answer in answers:
            block = answer.block
            if "slack" in block.copies:
                of_shard = block.table_id, answer.shard
                if self._epochs.get(of_shard, block.optimizer_step) != block.optimizer_step:
                    changed.add(block.table_id)
                self._epochs[of_shard] = block.optimizer_step
        for exchange in (self._tables or {}).values():
            if exchange.spec.table_id in changed:
                exchange.table.note_removals()
        return bool(changed)
