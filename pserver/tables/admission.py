"""Admission: which ids of a table get a row, and what earlier pushes said of those without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import COUNTERS
from fleet_sparse.core.entries import CLICK, SHOW, SKETCH
from fleet_sparse.core.entries.sketch import ids_of_lines, lines_per_bucket
from fleet_sparse.core.ids import NUM_BUCKETS
from fleet_sparse.core.kernels_index import hash_each
from fleet_sparse.core.kernels_sketch import add_counts, find_lines, read_totals
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.snapshot.rows import Rows

from ..storage.table_store import TableStore
from .table import TableContext

_LINES_AT_ONCE = 1 << 18

Decide = Callable[[NDArray[np.int64], NDArray[np.float32]], NDArray[np.bool_]]
"""Function from hashes `(n,)` and totals `(n, width)` of ids to whether each is admitted, `(n,)`."""


class Decision(NamedTuple):
    """The decision about the ids of a push that have no row."""

    is_admitted: NDArray[np.bool_]
    """`(n,)`."""
    totals: NDArray[np.float32]
    """Totals of each id from earlier pushes, `(n, width)`."""


class Counters(Protocol):
    """Totals of what pushes said of ids. They lie in a store, so that they are saved and loaded as a table is."""

    @property
    def store(self) -> TableStore:
        """The store that they are in."""

    def totals(self, ids: NDArray[np.int64], hashes: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the totals of ids `(n,)`, `(n, width)`; 0 for an id of which no push said anything."""

    def count(
        self, ids: NDArray[np.int64], hashes: NDArray[np.int64], statistics: NDArray[np.float32], decide: Decide
    ) -> Decision:
        """Decides about distinct ids `(n,)` by their totals, and adds `statistics` `(n, width)` for those not admitted.

        Raises:
            MemoryError: There is no room for more of them. No total changed.
        """

    def forget(self, ids: NDArray[np.int64]) -> None:
        """Forgets the totals of ids whose rows were removed, as far as they are theirs alone."""


class ExactCounters:
    """Implements `Counters`: the totals of an id are its row in a store.

    Args:
        spec: The table of the totals.
        context: What it shares with the shard's other tables.
    """

    def __init__(self, spec: TableSpec, context: TableContext) -> None:
        self.store = TableStore(spec, max_pre_image_bytes=context.max_pre_image_bytes, huge_pages=context.huge_pages)

    def totals(self, ids: NDArray[np.int64], hashes: NDArray[np.int64]) -> NDArray[np.float32]:
        """As `Counters.totals`."""
        totals = np.empty((len(ids), self.store.spec.dim), np.float32)
        self.store.pull(ids, totals)
        return totals

    def count(
        self, ids: NDArray[np.int64], hashes: NDArray[np.int64], statistics: NDArray[np.float32], decide: Decide
    ) -> Decision:
        """As `Counters.count`."""
        totals = np.zeros_like(statistics)
        if not decide(hashes, totals).any():  # so that every id without totals is counted: one search is enough
            is_admitted = np.empty(0, np.bool_)

            def is_counted(found: NDArray[np.float32]) -> NDArray[np.bool_]:
                nonlocal is_admitted, totals
                totals, is_admitted = found, decide(hashes, found)
                return ~is_admitted

            self.store.push_where(ids, statistics, 1.0, 1, hashes, is_counted)
            return Decision(is_admitted, totals)
        totals = self.totals(ids, hashes)
        is_admitted = decide(hashes, totals)
        if not is_admitted.all():
            outside = ~is_admitted
            self.store.push(ids[outside], statistics[outside], 1.0, 1, hashes[outside])
        return Decision(is_admitted, totals)

    def forget(self, ids: NDArray[np.int64]) -> None:
        """As `Counters.forget`."""
        self.store.remove(ids)


class SketchCounters:
    """Implements `Counters`: a count-min sketch, whose lines are rows of a store. All lines exist from the beginning.

    Each line has an id whose hash is in its bucket, so that it is owned, saved and loaded with the ids of that bucket,
    by any number of shards.

    Args:
        spec: The table of the lines.
        context: What it shares with the shard's other tables.
    """

    def __init__(self, spec: TableSpec, context: TableContext) -> None:
        assert spec.entry is not None, "of counters"
        self.store = TableStore(spec, max_pre_image_bytes=context.max_pre_image_bytes, huge_pages=context.huge_pages)
        owned = np.flatnonzero(context.placement.shard_of_bucket == context.shard)
        self._lines_per_bucket = lines_per_bucket(spec.entry.num_ids)
        self._first_lines = np.zeros(NUM_BUCKETS, np.int64)
        self._first_lines[owned] = np.arange(len(owned)) * self._lines_per_bucket
        num_buckets = max(_LINES_AT_ONCE // self._lines_per_bucket, 1)
        for begin in range(0, len(owned), num_buckets):
            ids = ids_of_lines(owned[begin : begin + num_buckets], self._lines_per_bucket, spec.salt)
            nothing = np.zeros((len(ids), 1), np.float32)
            self.store.load(Rows.of(ids, nothing, np.empty((len(ids), 0, 1), np.float32)))

    def totals(self, ids: NDArray[np.int64], hashes: NDArray[np.int64]) -> NDArray[np.float32]:
        """As `Counters.totals`; a total may be too large."""
        totals = np.empty(len(ids), np.float32)
        read_totals(self.store.bytes_of(COUNTERS.name), hashes, self._lines(hashes), totals)
        return totals.reshape(-1, 1)

    def count(
        self, ids: NDArray[np.int64], hashes: NDArray[np.int64], statistics: NDArray[np.float32], decide: Decide
    ) -> Decision:
        """As `Counters.count`. All totals are read before the first is changed."""
        totals = self.totals(ids, hashes)
        is_admitted = decide(hashes, totals)
        if is_admitted.any():
            hashes, statistics = hashes[~is_admitted], statistics[~is_admitted]
        lines = self._lines(hashes)
        add_counts(self.store.bytes_to_change(COUNTERS.name, lines), hashes, lines, statistics.reshape(-1))
        return Decision(is_admitted, totals)

    def forget(self, ids: NDArray[np.int64]) -> None:
        """Does nothing: other ids have the same counters."""

    def _lines(self, hashes: NDArray[np.int64]) -> NDArray[np.int64]:
        lines = np.empty(len(hashes), np.int64)
        find_lines(hashes, self._first_lines, self._lines_per_bucket, lines)
        return lines


class Admission:
    """Decides by a table's entry policy.

    Args:
        spec: The table; it has an entry.
        context: What it shares with the shard's other tables.

    Attributes:
        statistics: Names of the statistics that the policy reads.
        counters: Totals of ids without a row; None if the policy reads none.
    """

    def __init__(self, spec: TableSpec, context: TableContext) -> None:
        policy, entry = spec.entry_policy, spec.entry
        assert policy is not None, "the caller checks"
        assert entry is not None, "the caller checks"
        self._kernel, self._scalars = policy.kernel, policy.scalars(dict(entry.settings))
        self.statistics = policy.statistics
        self._width = len(policy.statistics)
        self._salt = np.uint64(spec.salt)
        self._counters_spec = spec.counters
        self.counters: Counters | None = None
        if spec.counters is not None:
            make = SketchCounters if entry.counter == SKETCH else ExactCounters
            self.counters = make(spec.counters, context)

    @property
    def num_bytes(self) -> int:
        """Memory of the counters."""
        return 0 if self.counters is None else self.counters.store.num_bytes

    def admits(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns for each id `(n,)` of this shard whether earlier pushes said enough of it to give it a row."""
        hashes = self.hashes_of(ids)
        return self._decide(hashes, self._totals(ids, hashes))

    def take_counters(self, former: Admission) -> bool:
        """Takes the counters of the policy that the table had before, if both read the same and count exactly.

        Returns:
            True if it took them; otherwise nothing changed.
        """
        ours, theirs, spec = self.counters, former.counters, self._counters_spec
        if not isinstance(ours, ExactCounters) or not isinstance(theirs, ExactCounters) or spec is None:
            return False
        if former.statistics != self.statistics:
            return False
        theirs.store.adopt(spec)
        ours.store.close()
        self.counters = theirs
        return True

    def count(
        self, ids: NDArray[np.int64], hashes: NDArray[np.int64], statistics: NDArray[np.float32] | None
    ) -> Decision:
        """Decides about the distinct ids of a push that have no row, and adds what it says of those not admitted.

        Args:
            ids: `(n,)`.
            hashes: Their hashes, `(n,)`.
            statistics: What the push says of each, `(n, width)`; None if the policy reads nothing.

        Raises:
            MemoryError: As `Counters.count`.
        """
        if self.counters is not None and statistics is not None:
            return self.counters.count(ids, hashes, statistics, self._decide)
        totals = self._totals(ids, hashes)
        return Decision(self._decide(hashes, totals), totals)

    def decay(self, decay: float) -> None:
        """Multiplies the shows and clicks that were counted of ids without a row; counts stay.

        Raises:
            ValueError: As `TableStore.decay`. Nothing changed.
        """
        indices = [index for index, name in enumerate(self.statistics) if name in {SHOW, CLICK}]
        if self.counters is not None and indices:  # which a sketch does not count
            self.counters.store.decay_values(decay, indices)

    def hashes_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the hashes of ids `(n,)`."""
        hashes = np.empty(len(ids), np.int64)
        hash_each(ids, self._salt, hashes)
        return hashes

    def _totals(self, ids: NDArray[np.int64], hashes: NDArray[np.int64]) -> NDArray[np.float32]:
        if self.counters is None:
            return np.zeros((len(ids), self._width), np.float32)
        return self.counters.totals(ids, hashes)

    def _decide(self, hashes: NDArray[np.int64], totals: NDArray[np.float32]) -> NDArray[np.bool_]:
        admitted = np.empty(len(hashes), np.uint8)
        self._kernel(hashes, totals.reshape(-1), self._width, self._scalars, admitted)
        return admitted.view(np.bool_)

    def close(self) -> None:
        """Frees the memory."""
        if self.counters is not None:
            self.counters.store.close()


def statistics_of(columns: Mapping[str, NDArray[np.generic] | None], names: tuple[str, ...]) -> NDArray[np.float32]:
    """Returns the columns of these names side by side, `(n, len(names))` float32."""
    return np.stack([np.asarray(columns[name], np.float32) for name in names], axis=1)
