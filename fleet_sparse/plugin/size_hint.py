"""The promise in a distributed embedding's `size`: how many distinct ids come. It is counted over all shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleet_sparse.worker.net.shard_link import TableState


class SizeHintMonitor:
    """Watches the numbers of rows that pservers report. One thread."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, int]] = {}  # table -> shard -> rows
        self._told: set[str] = set()

    def broken(
        self, shard: int, tables: Iterable[TableState], max_ids: Mapping[str, int | None]
    ) -> Iterable[tuple[str, int, int]]:
        """Takes in what a shard reports; each table that has more rows than promised, once.

        Args:
            shard: Whose report it is.
            tables: The report.
            max_ids: What each table was promised; None for nothing.

        Returns:
            Table, its rows on all shards, and the promise.
        """
        for table in tables:
            rows = self._rows.setdefault(table.name, {})
            rows[shard] = table.num_rows
            promise = max_ids.get(table.name)
            if promise is not None and sum(rows.values()) > promise and table.name not in self._told:
                self._told.add(table.name)
                yield table.name, sum(rows.values()), promise
