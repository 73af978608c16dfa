"""RowCacheLog: tells in the log how often row caches hit, and the bytes that they save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from fleet_sparse.worker.rows.table_exchange import CacheStats

logger = logging.getLogger(__name__)

EVERY_S = 60.0


class RowCacheLog:
    """Logs a line a minute while a worker trains, and one at the end; none without caches.

    Args:
        worker_index: Index of this worker.
        stats: Returns what the caches did since they were made, by table.
    """

    def __init__(self, worker_index: int, stats: Callable[[], Mapping[str, CacheStats]]) -> None:
        self._worker_index = worker_index
        self._stats = stats
        self._due_s = time.monotonic() + EVERY_S

    def note_step(self) -> None:
        """Logs the line if it is due."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self._log("so far")

    def end(self) -> None:
        """Logs the last line."""
        self._log("in all")

    def _log(self, when: str) -> None:
        caches = self._stats().values()
        num_reads = sum(cache.counters.read for cache in caches)
        if not num_reads:
            return
        num_hits = sum(cache.counters.hit for cache in caches)
        saved_mb = sum(cache.bytes_saved for cache in caches) / 1e6
        logger.info(
            "row cache of worker %d: %.1f %% hits, %.1f MB saved %s",
            *(self._worker_index, 100 * num_hits / num_reads, saved_mb, when),
        )
