"""EarlyRows: the rows of the next batch, pulled while the present one is computed, with exact results.

Rows that the present step does not touch are pulled early. The others arrive with the answer to its push; so do, in
sync training, the early-pulled rows that other workers' contributions to the step have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_rows import scatter
from fleet_sparse.core.reused_memory import ReusedMemory
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.row_dtype import from_frame

from ..net.table_client import TableCall, TableClient
from .deduplicator import Deduplicator, UniqueIds
from .row_batch import RowBatch
from .row_source import RowSource

# Largest share of a frame for early rows. If the rows of a batch need more, all of them are pulled with the push, in
# parts: early-pulled rows that change arrive in one frame with its answer, which may be twice as large as any other.
_EARLY_SHARE = 1 / 2
_ID_BYTES = 8
_NO_IDS = np.empty(0, np.int64)

IdsByTable = Mapping[str, tuple[TableSpec, UniqueIds]]
"""By table name: the table, and the distinct ids of a batch."""


class _Table:
    """The next batch's rows of one table.

    Args:
        spec: The table.
        unique: Its ids in the next batch.
        touched: Ids that the present step changes.
        deduplicator: Deduplicator with the job's placement.
        memory: Memory for the rows.
    """

    def __init__(
        self,
        spec: TableSpec,
        unique: UniqueIds,
        touched: NDArray[np.int64],
        deduplicator: Deduplicator,
        memory: ReusedMemory,
    ) -> None:
        self._deduplicator = deduplicator
        early, late = deduplicator.split(unique, touched, spec.salt)
        self._early_places, self._late_places = early.places, late.places
        num_early, num_values = len(early.places), len(unique.ids) * spec.dim
        rows = memory.lend(max(num_values, 1))[:num_values].reshape(-1, spec.dim)
        self.early = RowBatch(spec, early.unique, rows[:num_early])
        self.late = RowBatch(spec, late.unique, rows[num_early:])

    def change(self, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Replaces the early rows of these ids; other ids are ignored."""
        places = self._deduplicator.places(ids, self.early.unique.ids, self.early.spec.salt)
        is_wanted = places >= 0
        self.early.values[places[is_wanted]] = rows[is_wanted]

    def write(self, out: NDArray[np.float32]) -> None:
        """Writes all rows, in the order of the ids. Raises `ValueError` if `out` cannot be written to."""
        if not out.flags.carray:
            raise ValueError(f"table {self.early.spec.name!r}: out is not contiguous and writable, rows go into it")
        for places, batch in ((self._early_places, self.early), (self._late_places, self.late)):
            scatter(out.reshape(-1), batch.spec.dim, 0, places, batch.spec.dim, batch.values.reshape(-1))


class EarlyRows:
    """Implements `RowSource` for one step: the rows of the next batch.

    `begin` is called after the lookups of the step before it, `push` with that step's push, `pull` at its own lookups.
    One thread at a time uses it.

    Args:
        wanted: Ids of the batch.
    """

    def __init__(self, wanted: IdsByTable) -> None:
        self._wanted = wanted
        self._tables: dict[str, _Table] = {}
        self._behind: RowSource | None = None
        self._early: TableCall | None = None
        self._pushed: TableCall | None = None

    def begin(
        self,
        client: TableClient,
        deduplicator: Deduplicator,
        memory: ReusedMemory,
        behind: RowSource,
        present: Sequence[RowBatch],
        *,
        step: int,
        merges: bool,
    ) -> None:
        """Starts to pull the rows that the present step does not touch.

        Args:
            client: TableClient of the shards.
            deduplicator: Deduplicator with their placement.
            memory: Memory for float32 values.
            behind: Source of the rows of other tables.
            present: Lookups of the present step.
            step: Step of the pull: the next one, or the present one if no other worker is waited for; 0 in a job that
                does not count steps.
            merges: True if the shards merge the present step with other workers' contributions.
        """
        self._behind = behind
        wanted = self._wanted.values()
        float_bytes = client.rows_dtype.in_frames.itemsize
        num_bytes = sum(len(unique.ids) * (_ID_BYTES + float_bytes * spec.dim) for spec, unique in wanted)
        fits = not merges or num_bytes <= client.max_frame_bytes * _EARLY_SHARE
        touched = {batch.spec.name: batch.unique.ids for batch in present}
        for name, (spec, unique) in self._wanted.items():
            others = touched.get(name, _NO_IDS) if fits else unique.ids
            self._tables[name] = _Table(spec, unique, others, deduplicator, memory)
        self._early = client.start_pull([table.early for table in self._tables.values()], step=step, early=merges)

    @property
    def late(self) -> list[RowBatch]:
        """The other rows, to be pulled with the push of the present step."""
        return [table.late for table in self._tables.values()]

    def push(self, pushed: TableCall) -> None:
        """Takes note of the push of the present step, which pulls `late`."""
        self._pushed = pushed

    @property
    def is_complete(self) -> bool:
        """True if all rows were asked for."""
        return self._early is not None and self._pushed is not None

    def pull(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """As `RowSource`: waits for all rows and writes them to the lookups of the batch.

        Raises:
            FleetSparseError: As the client's `pull` and `push`.
        """
        assert self._behind is not None, "is_complete"
        assert self._early is not None, "is_complete"
        assert self._pushed is not None, "is_complete"
        answers = self._pushed.wait()
        self._early.wait()
        by_id = {spec.table_id: self._tables[name] for name, (spec, _) in self._wanted.items()}
        for _, block in answers:
            # Early pulls of a step that failed half-way are answered too: perhaps with other tables and ids.
            if block.table_id in by_id and block.ids is not None and block.rows is not None:
                by_id[block.table_id].change(block.ids, from_frame(block.rows, block.dtype))
        others = []
        for batch in batches:
            if batch.spec.name in self._tables:
                self._tables[batch.spec.name].write(batch.values)
            else:
                others.append(batch)
        if others:
            self._behind.pull(others, step=step)

    def note_pushed(self, batches: Sequence[RowBatch]) -> None:
        """As `RowSource`: the answer to the push contains the rows that it changed."""

    def clear(self) -> None:
        """As `RowSource`, and where the rows are not wanted any more.

        Raises:
            FleetSparseError: The present step's push failed; nothing else waits for its answer.
        """
        if self._pushed is not None:
            self._pushed.wait()
