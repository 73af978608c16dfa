"""SizeHintMonitor: compares the rows of a table with the number of distinct ids that its `size` promises."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.worker.net.shard_link import TableState

logger = logging.getLogger(__name__)


class SizeHintMonitor:
    """Adds up the rows that the shards report, and warns once per table that has more than its size. One thread."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, int]] = {}  # table -> shard -> rows
        self._warned: set[str] = set()

    def observe(self, shard: int, states: Iterable[TableState], tables: Mapping[str, TableSpec]) -> None:
        """Takes the report of one shard, and warns.

        Args:
            shard: The shard that reports.
            states: Its tables.
            tables: The declared tables by name.
        """
        for state in states:
            rows = self._rows.setdefault(state.name, {})
            rows[shard] = state.num_rows
            size = tables[state.name].max_ids if state.name in tables else None
            if size is not None and sum(rows.values()) > size and state.name not in self._warned:
                self._warned.add(state.name)
                logger.warning(
                    "table %r: has %d rows, its size promises at most %d ids; training continues. Give it a larger "
                    "size",
                    state.name,
                    sum(rows.values()),
                    size,
                )
