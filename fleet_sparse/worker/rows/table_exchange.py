"""TableExchange: one cached table of a worker, and what it asks the pservers and sends them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.wire.row_dtype import RowDtype, rounded

from ..net.table_client import ExtraBlock, TableClient
from .cache_step import NOWHERE, Answer, Arrived, Changes, Outgoing, Plan
from .cached_table import CachedTable, Counters
from .deduplicator import Deduplicator, UniqueIds
from .row_batch import RowBatch
from .row_exchange import COUNT_BYTES, FLOAT_BYTES, ID_BYTES, SLACK_BYTES, VERSION_BYTES, RowAsk, RowChange, answer_of

NUM_LAG_CLASSES = 33
_MAX_READS = 64  # reads that may wait for their update: of threads that train, and of runs that failed


class CacheStats(NamedTuple):
    """The present size of the cache of one table, and what it has counted since it was made."""

    rows: int
    """Number of copies."""
    bytes: int
    """Memory."""
    held: int
    """Number of rows with updates that the pservers do not have."""
    counters: Counters
    bytes_saved: int
    """Bytes of ids, rows, gradients and states that were not sent and received, against no cache; negative if more.

    Those of the updates of a held row count as saved until they are sent, so that it is too large while rows are held.
    """
    bytes_without: int
    """Bytes of ids, rows and gradients that no cache would have sent and received.

    16 + 8 dim for each distinct row of a step, less with `FLEET_SPARSE_ROWS_DTYPE`.
    """
    lags: tuple[tuple[int, ...], ...]
    """`NUM_LAG_CLASSES` numbers for each pserver: how many copies it refreshed, by what they lacked (`lag_class`).

    Class 0 lacked nothing, class `i` at least `2 ** (i - 1)` and less than `2 ** i`: updates of the other workers or,
    with a bound in distance D, units of `D / 4096`: class 12 is then from half of D on, and class 13 from D on.
    """


class Lookup(NamedTuple):
    """The rows of one batch of a cached table on their way."""

    batch: RowBatch
    plan: Plan
    plain: RowBatch
    """Rows that are pulled as without a cache."""
    ask: RowAsk | None
    places: NDArray[np.int64]
    """Places of the plain rows in the batch: those of the plan, without rows that were pulled early."""
    num_early: int = 0
    """Number of rows that were pulled early."""


class _Read(NamedTuple):
    """A batch between its lookup and its update."""

    unique: UniqueIds
    plan: Plan
    arrived: Arrived


class TableExchange:
    """A cached table, its lookups that are on their way, and the bytes that it has saved. Its owner holds a lock.

    Args:
        client: This worker's client.
        deduplicator: Deduplicator with the shards' placement.
        table: The copies.
        is_alone: True if the job has one worker.

    Attributes:
        table: As given.
        spec: Spec of the table.
    """

    def __init__(self, client: TableClient, deduplicator: Deduplicator, table: CachedTable, *, is_alone: bool) -> None:
        self.table = table
        self.spec = table.spec
        self._client = client
        self._deduplicator = deduplicator
        self._is_alone = is_alone
        self._reads: OrderedDict[int, _Read] = OrderedDict()  # by identity of their ids, in their order
        self._num_saved_bytes = self._num_plain_bytes = 0
        # Of an id and a row as without a cache.
        self._plain_bytes = ID_BYTES + client.rows_dtype.in_frames.itemsize * table.spec.dim
        self._lags = np.zeros((client.num_shards, NUM_LAG_CLASSES), np.int64)

    def stats(self) -> CacheStats:
        """Returns what the cache holds and did."""
        table = self.table
        return CacheStats(
            *(table.num_rows, table.num_bytes, table.num_held, table.counters),
            *(self._num_saved_bytes, self._num_plain_bytes),
            tuple(map(tuple, self._lags.tolist())),
        )

    def forget(self) -> None:
        """Forgets all copies and what they hold."""
        self._reads.clear()
        self.table.forget()

    # Lookups

    def look_up(
        self,
        batch: RowBatch,
        step: int,
        sending: Outgoing | None = None,
        early_places: NDArray[np.int64] = NOWHERE,
    ) -> Lookup:
        """Plans a lookup. Arguments are those of `CachedTable.plan`, and the places of rows that were pulled early."""
        plan = self.table.plan(batch.unique.ids, step, sending)
        places = np.setdiff1d(plan.plain, early_places, assume_unique=True) if len(early_places) else plan.plain
        plain = batch
        if len(places) < len(plan.ids):
            plain = RowBatch.empty(batch.spec, batch.unique.at(places))
        ask = RowAsk(batch.spec, batch.unique.at(plan.asked), plan.versions) if len(plan.asked) else None
        return Lookup(batch, plan, plain, ask, places, len(early_places))

    def late(self, lookup: Lookup) -> Lookup | None:
        """Returns what is left to ask about a batch that was looked up ahead; None for nothing."""
        if not len(lookup.plan.late):
            return None
        plan = self.table.late_plan(lookup.plan)
        return lookup._replace(plan=plan, ask=RowAsk(self.spec, lookup.batch.unique.at(plan.asked), plan.versions))

    def answer(self, lookup: Lookup, extra: Sequence[ExtraBlock]) -> Answer:
        """Returns the answer to the ask of a lookup, for `refresh` or `finish`. Changes nothing.

        Raises:
            ProtocolError: The blocks do not answer the ask.
        """
        if lookup.ask is None:
            return self.table.no_answer
        own = [each for each in extra if each.block.table_id == self.spec.table_id and each.block.copies]
        own.sort(key=lambda each: (each.shard, each.part))
        return answer_of(lookup.ask, [(each.shard, each.block) for each in own])

    def refresh(self, lookup: Lookup, answer: Answer) -> None:
        """Ends what `late` returned: copies are those of the answer."""
        self._count(lookup, answer)
        self.table.refresh(lookup.plan, answer)

    def finish(self, lookup: Lookup, answer: Answer) -> None:
        """Fills the batch of a lookup, whose plain rows and answer have arrived; early rows are in the batch."""
        batch, plan = lookup.batch, lookup.plan
        self._count(lookup, answer)
        if lookup.plain is not batch and len(lookup.places):
            batch.values[lookup.places] = lookup.plain.values
        arrived = self.table.take(plan, answer, batch.values)
        if self._client.rows_dtype is not RowDtype.FLOAT32:
            batch.values[:] = rounded(batch.values, self._client.rows_dtype)  # as without a cache
        self._reads[id(batch.unique)] = _Read(batch.unique, plan, arrived)
        if len(self._reads) > _MAX_READS:
            self._reads.popitem(last=False)
        num_pulled = len(lookup.places) + lookup.num_early
        self._num_plain_bytes += len(plan.ids) * self._plain_bytes
        self._num_saved_bytes += (len(plan.ids) - num_pulled) * self._plain_bytes

    def _count(self, lookup: Lookup, answer: Answer) -> None:
        """Counts the bytes of an answer, and the lags of the copies that it refreshes."""
        if lookup.ask is None:
            return
        plan = lookup.plan
        self.table.count_lags(plan, answer, lookup.batch.unique.num_per_shard, self._lags)
        num_bytes = len(plan.asked) * (ID_BYTES + VERSION_BYTES + SLACK_BYTES) + answer.states.nbytes
        self._num_saved_bytes -= num_bytes + len(answer.rows) * (VERSION_BYTES + FLOAT_BYTES * self.spec.dim)

    # Updates

    def taken(self, batch: RowBatch) -> tuple[Plan, Arrived]:
        """Returns the plan of a batch; one without entering rows if it was not looked up for training."""
        read = self._reads.pop(id(batch.unique), None)
        if read is not None and read.unique is batch.unique:
            return read.plan, read.arrived
        parts = self._parts_of(batch.unique.ids)
        if not parts:
            return self.table.unplanned(batch.unique.ids)
        largest = max(parts, key=lambda part: len(part.plan.entering))  # after one has entered, the others may not
        for part in parts:
            if part is not largest:
                self.table.drop(part.plan)
        return self.table.plan_of_parts(largest.plan, largest.arrived, batch.unique.ids)

    def _parts_of(self, ids: NDArray[np.int64]) -> list[_Read]:
        """Removes and returns the reads of parts of a batch, as several calls of a layer look them up.

        Reads before them were of an evaluation, or of a run that failed: they are removed as well.
        """
        parts, others = [], []
        for key, read in list(self._reads.items()):
            others.append(key)
            if np.isin(read.plan.ids, ids).all():
                parts.append(read)
                for each in others:
                    removed = self._reads.pop(each)
                    if removed is not read:
                        self.table.drop(removed.plan)
                others.clear()
        return parts

    def changes(self, outgoing: Outgoing, optimizer_step: int, num_updated: int = 0) -> list[RowChange]:
        """Returns what is sent of held updates, and counts its bytes.

        Args:
            outgoing: As the table returned it.
            optimizer_step: The update rule's t.
            num_updated: Number of rows of which this step has gradients.
        """
        self._num_plain_bytes += num_updated * self._plain_bytes
        self._num_saved_bytes += (num_updated - len(outgoing.as_gradients)) * self._plain_bytes
        for changes in outgoing.changes:
            row_bytes = ID_BYTES + FLOAT_BYTES * self.spec.dim + COUNT_BYTES
            self._num_saved_bytes -= len(changes.ids) * row_bytes + changes.states.nbytes
            self._num_saved_bytes -= len(changes.ids) * VERSION_BYTES if changes.states.shape[1] else 0
        return [self._change(changes, optimizer_step) for changes in outgoing.changes]

    def _change(self, changes: Changes, optimizer_step: int) -> RowChange:
        unique, order = self._deduplicator.grouped(changes.ids, self.spec.salt)
        if order is not None:
            rows, amounts, states, num_updates = changes[1:5]
            changes = Changes(unique.ids, rows[order], amounts[order], states[order], num_updates[order], changes.slots)
        has_states = changes.states.shape[1] > 0
        return RowChange(
            self.spec,
            unique,
            changes.rows,
            changes.amounts,
            changes.states if has_states else None,
            changes.num_updates,
            self.table.update_weight,
            optimizer_step,
            self._is_alone,
        )
