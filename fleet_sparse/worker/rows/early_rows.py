"""EarlyRows: the rows of the next batch, pulled while the present one is computed, with exact results.

Rows that the present step does not touch are pulled early. The others arrive with the answer to its push; so do, in
sync training, the early-pulled rows that other workers' contributions to the step have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.wire.row_dtype import from_frame

from ..net.table_client import TableCall, TableClient
from .deduplicator import Deduplicator, SuccessiveIds
from .row_batch import RowBatch

# Largest share of a frame for early rows. If the rows of a batch need more, all of them are pulled with the push, in
# parts: early-pulled rows that change arrive in one frame with its answer, which may be twice as large as any other.
_EARLY_SHARE = 1 / 2
_ID_BYTES = 8


class SuccessiveBatch(NamedTuple):
    """The lookup of the next batch on one table."""

    rows: RowBatch
    """All its rows; `rows.unique` is `ids.unique`."""
    ids: SuccessiveIds


def fit_early(batches: Iterable[RowBatch], client: TableClient) -> bool:
    """Returns whether all rows of batches can arrive with the answer to a push, if they have changed since."""
    float_bytes = client.rows_dtype.in_frames.itemsize
    num_bytes = 0
    for rows in batches:
        num_bytes += len(rows.unique.ids) * (_ID_BYTES + float_bytes * rows.spec.dim)
    return num_bytes <= client.max_frame_bytes * _EARLY_SHARE


class EarlyRows:
    """Implements `RowSource` for one step: the rows of the next batch.

    `begin` is called after the lookups of the step before it, `push` with that step's push, `pull` at its own lookups.
    One thread at a time uses it. Rows are received into the memory of the batches at any time between `begin` and
    `pull` or `drain`.

    Args:
        batches: Lookups of the batch.
    """

    def __init__(self, batches: Sequence[SuccessiveBatch]) -> None:
        self.batches = {batch.rows.spec.name: batch.rows for batch in batches}
        self.late: list[RowBatch] = []
        self._ids = {batch.rows.spec.name: batch.ids for batch in batches}
        self._deduplicator: Deduplicator | None = None
        self._client: TableClient | None = None
        self._num_rejoins = 0
        self._early: TableCall | None = None
        self._pushed: TableCall | None = None

    def begin(
        self,
        client: TableClient,
        deduplicator: Deduplicator,
        present: Sequence[RowBatch],
        *,
        step: int,
        merges: bool,
    ) -> None:
        """Starts to pull the rows that the present step does not touch.

        Args:
            client: Client of the shards.
            deduplicator: Deduplicator with their placement.
            present: Lookups of the present step.
            step: Step of the pull: the next one, or the present one if no other worker is waited for; 0 in a job that
                does not count steps.
            merges: True if the shards merge the present step with other workers' contributions.
        """
        self._deduplicator = deduplicator
        self._client, self._num_rejoins = client, client.num_rejoins
        untouched = self.untouched(present) if not merges or fit_early(self.batches.values(), client) else {}
        early = []
        for name, rows in self.batches.items():
            if name in untouched:
                early.append(rows._replace(unique=untouched[name].early))
                self.late.append(rows._replace(unique=untouched[name].late))
            else:
                self.late.append(rows)
        self._early = client.start_pull(early, step=step, early=merges, owns_memory=True)

    def untouched(self, present: Sequence[RowBatch]) -> dict[str, SuccessiveIds]:
        """Returns the ids of each table that are told apart from those of the present step, by its lookups."""
        touched = {batch.spec.name: batch.unique for batch in present}
        return {
            name: ids
            for name, ids in self._ids.items()
            if ids.before is not None and ids.before is touched.get(name)  # the batch that the present step runs
        }

    def push(self, pushed: TableCall) -> None:
        """Takes note of the push of the present step, which pulls `late`."""
        self._pushed = pushed

    @property
    def is_complete(self) -> bool:
        """True if all rows were asked for."""
        return self._early is not None and self._pushed is not None

    def pull(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """As `RowSource`: waits for all rows of the batch. Its lookups on the tables of `batches` are those themselves.

        Raises:
            FleetSparseError: As the client's `pull` and `push`.
        """
        assert self._client is not None, "is_complete"
        assert self._early is not None, "is_complete"
        assert self._pushed is not None, "is_complete"
        answers = self._pushed.wait()
        self._early.wait()
        if answers:
            tables = {rows.spec.table_id: rows for rows in self.batches.values()}
            for _, block, _ in answers:
                # Early pulls of a step that failed half-way are answered too: perhaps with other tables and ids.
                if block.table_id in tables and block.ids is not None and block.rows is not None:
                    self._change(tables[block.table_id], block.ids, from_frame(block.rows, block.dtype))
        others = [batch for batch in batches if self.batches.get(batch.spec.name) is not batch]
        if self._client.num_rejoins != self._num_rejoins:
            # Rows of the former process: the new one may lack pushes, and does not know what it should send again.
            others = list(batches)
        if others:
            self._client.pull(others, step=step)

    def _change(self, batch: RowBatch, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Replaces the early rows of these ids; other ids are ignored."""
        assert self._deduplicator is not None, "is_complete"
        places = self._deduplicator.places(ids, batch.unique.ids, batch.spec.salt)
        is_wanted = places >= 0
        batch.values[places[is_wanted]] = rows[is_wanted]

    def clear(self) -> None:
        """Takes note that the rows are not wanted any more.

        Raises:
            FleetSparseError: The present step's push failed; nothing else waits for its answer.
        """
        if self._pushed is not None:
            self._pushed.wait()

    def abandon(self) -> None:
        """Releases the rows of a batch that is not run; a later call raises an error of the present step's push."""
        for call in (self._early, self._pushed):
            if call is not None:
                call.abandon()
        self._early = self._pushed = None
        self.batches, self.late = {}, []

    def drain(self) -> None:
        """Drops rows that are not wanted; returns when nothing more is received into their memory.

        Raises:
            FleetSparseError: The early pull failed; its memory cannot be used.
        """
        if self._early is not None:
            self._early.wait()
