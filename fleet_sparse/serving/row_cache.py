"""RowCache: rows of one version that were read before, a limited number for each table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_serving_cache import WAYS, drop_rows, insert_rows, look_up_rows
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import NO_VERSION, Version


class _TableRows:
    """Rows of one table."""

    def __init__(self, spec: TableSpec, capacity_rows: int) -> None:
        self.dim, self.salt = spec.dim, np.uint64(spec.salt)
        num_places = max(capacity_rows // WAYS, 1) * WAYS
        self.held = np.zeros(num_places, np.int64)
        self.stamps = np.zeros(num_places, np.int64)
        self.rows = np.empty(num_places * spec.dim, np.float32)


class RowCache:
    """Rows of one version. One thread at a time uses it.

    It holds at most `capacity_rows` rows of each table, rounded down to a multiple of 8 and at least 8. An id has 8
    places, of which the one that was used least recently makes room for it.

    Args:
        tables: The tables.
        capacity_rows: Number of rows of each.

    Attributes:
        version: The version that all rows are of.
        num_hits: Number of ids whose row was held.
        num_misses: Number of those whose row was not.
    """

    def __init__(self, tables: Iterable[TableSpec], capacity_rows: int) -> None:
        self._tables = {spec.name: _TableRows(spec, capacity_rows) for spec in tables}
        self._now = 0
        self.version = NO_VERSION
        self.num_hits = self.num_misses = 0

    def look_up(
        self, ids: Mapping[str, NDArray[np.int64]]
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.int64]]]:
        """Returns rows of `version`.

        Args:
            ids: By name of the table, `(n,)`.

        Returns:
            By name of the table: rows `(n, dim)`, those of missing ids undefined; and the indices of missing ids.
        """
        self._now += 1
        rows: dict[str, NDArray[np.float32]] = {}
        missing: dict[str, NDArray[np.int64]] = {}
        for name, its_ids in ids.items():
            table = self._tables[name]
            out, absent = np.empty(len(its_ids) * table.dim, np.float32), np.empty(len(its_ids), np.int64)
            num_missing = look_up_rows(
                its_ids, table.salt, self._now, table.held, table.stamps, table.rows, table.dim, out, absent
            )
            rows[name], missing[name] = out.reshape(-1, table.dim), absent[:num_missing]
            self.num_misses += num_missing
            self.num_hits += len(its_ids) - num_missing
        return rows, missing

    def insert(self, version: Version, table: str, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Holds rows `(n, dim)` of a version; does nothing if that is not the version of the cache."""
        if version == self.version:
            its = self._tables[table]
            insert_rows(ids, rows.reshape(-1), its.salt, self._now, its.held, its.stamps, its.rows, its.dim)

    def switch(self, version: Version, changed: Mapping[str, NDArray[np.int64]] | None) -> None:
        """Makes the rows those of another version.

        Args:
            version: The version.
            changed: By name of the table, ids whose rows may differ between both versions; None drops all rows.
        """
        self.version = version
        for name, table in self._tables.items():
            if changed is None:
                table.stamps.fill(0)
            elif name in changed:
                drop_rows(changed[name], table.salt, table.held, table.stamps)
