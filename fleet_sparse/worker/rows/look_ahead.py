"""EarlyRows: the rows of a batch that is to come, pulled while the present one is computed, and exact all the same.

Rows that the present step does not touch are pulled early. The others come with the answer to its push; so do, in sync
training, the early ones that other workers' shares of the step have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_rows import scatter
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.row_dtype import from_frame

from ..modes.step import Lookup
from ..net.client import Client, Pending
from .deduplicator import Deduplicator, UniqueIds

# Of a frame. If the rows of a batch take more, all of them come with the push, in parts: rows that were pulled early
# and change come in one frame with its answer, which may be twice as large as any other.
_EARLY_SHARE = 1 / 2
_ID_BYTES = 8

Wanted = Mapping[str, tuple[TableSpec, UniqueIds]]
"""By name of a table: the table, and the distinct ids of a batch."""


class _Rows(NamedTuple):
    """Some rows of one table, as the client takes them."""

    spec: TableSpec
    unique: UniqueIds
    rows: NDArray[np.float32]


class _Table:
    """The coming rows of one table.

    Args:
        spec: The table.
        unique: Its ids in the coming batch.
        is_touched: Which of them the present step changes.
        deduplicator: Of the placement.
    """

    def __init__(
        self, spec: TableSpec, unique: UniqueIds, is_touched: NDArray[np.bool_], deduplicator: Deduplicator
    ) -> None:
        self._deduplicator = deduplicator
        self._early_places, self._late_places = np.flatnonzero(~is_touched), np.flatnonzero(is_touched)
        self.early = _empty_rows(spec, unique.at(self._early_places))
        self.late = _empty_rows(spec, unique.at(self._late_places))

    def change(self, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Replaces those of the early rows whose ids are here; of the other ids nobody wants to know any more."""
        spec, unique, early_rows = self.early
        places = self._deduplicator.places(ids, unique.ids, spec.salt)
        is_wanted = places >= 0
        early_rows[places[is_wanted]] = rows[is_wanted]

    def write(self, out: NDArray[np.float32]) -> None:
        """Writes all rows, in the order of the ids; raises `ValueError` where they cannot be."""
        if not out.flags.carray:
            raise ValueError(f"table {self.early.spec.name!r}: out is not contiguous and writable, rows go into it")
        for places, (spec, _, rows) in ((self._early_places, self.early), (self._late_places, self.late)):
            scatter(out.reshape(-1), spec.dim, 0, places, spec.dim, rows.reshape(-1))


class EarlyRows:
    """The rows of a batch that is to come.

    `begin` comes after the lookups of the step before it, `push` with that step's push, `finish` at its own lookups.
    One thread at a time uses it.

    Args:
        wanted: Ids of the batch.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._tables: dict[str, _Table] = {}
        self._early: Pending | None = None
        self._pushed: Pending | None = None

    def begin(
        self, client: Client, deduplicator: Deduplicator, present: Sequence[Lookup], *, step: int, merges: bool
    ) -> None:
        """Pulls the rows that the present step does not touch; does not wait.

        Args:
            client: To the shards.
            deduplicator: Of their placement.
            present: What the present step looked up.
            step: Of the pull: the coming one, or the present one if no other worker is waited for; 0 in a job that does
                not count steps.
            merges: Whether the shards merge the present step with other workers' shares.
        """
        wanted = self._wanted.values()
        float_bytes = client.rows_dtype.in_frames.itemsize
        num_bytes = sum(len(unique.ids) * (_ID_BYTES + float_bytes * spec.dim) for spec, unique in wanted)
        fits = not merges or num_bytes <= client.max_frame_bytes * _EARLY_SHARE
        touched = {lookup.spec.name: lookup.unique.ids for lookup in present}
        for name, (spec, unique) in self._wanted.items():
            others = touched.get(name, np.empty(0, np.int64))
            is_touched = deduplicator.places(unique.ids, others, spec.salt) >= 0
            self._tables[name] = _Table(spec, unique, is_touched if fits else np.ones_like(is_touched), deduplicator)
        early = [table.early for table in self._tables.values()]
        self._early = client.start_pull(early, step=step, ahead=merges)

    @property
    def late(self) -> list[tuple[TableSpec, UniqueIds, NDArray[np.float32]]]:
        """The other rows: what is to be pulled with the push of the present step."""
        return [table.late for table in self._tables.values()]

    def push(self, pushed: Pending) -> None:
        """The push of the present step is on its way, with `late`."""
        self._pushed = pushed

    @property
    def is_complete(self) -> bool:
        """Whether all rows are on their way."""
        return self._early is not None and self._pushed is not None

    def drop(self) -> None:
        """Instead of `finish`, where the rows are not wanted any more.

        Raises:
            FleetSparseError: As the client's `push`: of the present step's, whose answer nobody else waits for.
        """
        if self._pushed is not None:
            self._pushed.wait()

    def finish(self, lookups: Sequence[Lookup]) -> list[Lookup]:
        """Waits for all rows and writes them where they are wanted.

        Returns:
            The lookups of tables that are not among the `wanted`.

        Raises:
            FleetSparseError: As the client's `pull` and `push`.
        """
        assert self._early is not None, "is_complete"
        assert self._pushed is not None, "is_complete"
        answers = self._pushed.wait()
        self._early.wait()
        of_number = {spec.table_id: self._tables[name] for name, (spec, _) in self._wanted.items()}
        for _, block in answers:
            # What a step that failed half-way had begun to pull is told of too: perhaps of other tables and ids.
            if block.table_id in of_number and block.ids is not None and block.rows is not None:
                of_number[block.table_id].change(block.ids, from_frame(block.rows, block.dtype))
        others = []
        for lookup in lookups:
            if lookup.spec.name in self._tables:
                self._tables[lookup.spec.name].write(lookup.out)
            else:
                others.append(lookup)
        return others


def _empty_rows(spec: TableSpec, unique: UniqueIds) -> _Rows:
    return _Rows(spec, unique, np.empty((len(unique.ids), spec.dim), np.float32))
