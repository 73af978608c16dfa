"""Two versions of a table, or of a range of dense values, at once: the newest one, and what it replaced.

A newer version is adopted in steps: `begin` drops the older of the two versions, each `apply` changes some rows, and
`commit` makes the result the newest version. Between any two of these calls the version that was the newest at `begin`
can be read. `abandon` in place of `commit` returns to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.snapshot.rows import Rows

from ..storage.table_store import TableStore

_RESTORED_AT_ONCE = 1 << 16


class VersionedRows:
    """The rows of one table in two versions. One thread owns it.

    Args:
        spec: The table, with the rule `read_only`.
        huge_pages: As of a `TableStore`.

    Attributes:
        spec: As given.
        newest: The rows of the version that `begin` began, or that is the newest one. Only `load` of another module
            writes to it, before the first `begin`.
    """

    def __init__(self, spec: TableSpec, *, huge_pages: bool = True) -> None:
        self.spec = spec
        self.newest = TableStore(spec, huge_pages=huge_pages)
        self._replaced: TableStore | None = None  # the rows of the other version that differ; made when one does

    @property
    def num_bytes(self) -> int:
        """Memory of both versions."""
        return self.newest.num_bytes + (0 if self._replaced is None else self._replaced.num_bytes)

    def room(self, num_rows: int) -> TableStore:
        """Returns an empty store for `begin`, prepared for about `num_rows`. Any thread may call it."""
        store = TableStore(self.spec, huge_pages=False)
        store.reserve(num_rows)
        return store

    def begin(self, room: TableStore | None = None) -> TableStore | None:
        """Drops the older version; the newest one becomes the older one.

        Args:
            room: An empty store for the rows that are replaced, made by `room`; None to make one when a row is.

        Returns:
            The store of the dropped version, for the caller to close; None if there is none.
        """
        dropped, self._replaced = self._replaced, room
        return dropped

    def apply(self, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> int:
        """Sets rows of the version that is adopted; returns the number of those that changed.

        Args:
            ids: `(n,)`, distinct. A removed id has the row that it would begin with.
            rows: `(n, dim)`.

        Raises:
            MemoryError: There is no room for more rows. `abandon` is still possible.
        """
        before = np.empty((len(ids), self.spec.dim), np.float32)
        self.newest.pull(ids, before)
        changed = np.flatnonzero((before.view(np.uint32) != rows.view(np.uint32)).any(axis=1))
        if not changed.size:
            return 0
        if len(changed) < len(ids):
            ids, rows, before = ids[changed], rows[changed], before[changed]
        if self._replaced is None:
            self._replaced = TableStore(self.spec, huge_pages=False)
        is_first = ~self._replaced.has_rows(ids)
        set_rows(self._replaced, ids[is_first], before[is_first])
        set_rows(self.newest, ids, rows)
        return len(ids)

    def abandon(self) -> None:
        """Restores the version of `begin`, which is the only one then."""
        replaced, ids = self._replaced, self.changed_ids()
        if replaced is None:
            return
        for begin in range(0, len(ids), _RESTORED_AT_ONCE):
            part = ids[begin : begin + _RESTORED_AT_ONCE]
            rows = np.empty((len(part), self.spec.dim), np.float32)
            replaced.pull(part, rows)
            set_rows(self.newest, part, rows)
        self._drop()

    def pull(
        self,
        ids: NDArray[np.int64],
        out: NDArray[np.float32],
        *,
        is_older: bool,
        shard_of_bucket: NDArray[np.int32] | None = None,
        shard: int = 0,
    ) -> int:
        """Writes rows of one version to `out`, as `TableStore.pull`; returns the number of misrouted ids.

        Args:
            ids: `(n,)`, repeats allowed.
            out: `(n, dim)`, contiguous.
            is_older: True for the version of `begin`, False for the one that is adopted or was adopted last.
            shard_of_bucket: As of `TableStore.pull`.
            shard: As of `TableStore.pull`.
        """
        num_misrouted = self.newest.pull(ids, out, shard_of_bucket, shard)
        if is_older and self._replaced is not None and num_misrouted == 0:
            replaced = np.flatnonzero(self._replaced.has_rows(ids))
            if replaced.size:
                rows = np.empty((len(replaced), self.spec.dim), np.float32)
                self._replaced.pull(ids[replaced], rows)
                out[replaced] = rows
        return num_misrouted

    @property
    def num_changed(self) -> int:
        """Number of rows in which the two versions differ."""
        return 0 if self._replaced is None else self._replaced.num_rows

    def changed_ids(self) -> NDArray[np.int64]:
        """Returns the ids of these rows, `(num_changed,)`, unordered.

        An id that was changed and changed back while a version was adopted is among them.
        """
        if self._replaced is None:
            return np.empty(0, np.int64)
        return self._replaced.ids_of(np.ones(self._replaced.num_rows, np.bool_))

    def close(self) -> None:
        """Frees the memory of both versions."""
        self._drop()
        self.newest.close()

    def _drop(self) -> None:
        if (dropped := self.begin()) is not None:
            dropped.close()


class VersionedValues:
    """A range of a dense array in two versions. The arrays never change, so replies may refer to them.

    Args:
        values: Those of the first version, `(size,)`; None if it has none.

    Attributes:
        newest: Values of the newest version.
        older: Values of the older one.
    """

    def __init__(self, values: NDArray[np.float32] | None = None) -> None:
        self.newest = self.older = values

    def commit(self, values: NDArray[np.float32] | None) -> None:
        """Adopts the values of a newer version."""
        self.newest, self.older = values, self.newest


def set_rows(store: TableStore, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
    """Sets rows `(n, dim)` of a store with the rule `read_only`, which has no states."""
    store.load(Rows.of(ids, rows, np.empty((len(ids), 0, store.spec.dim), np.float32)))
