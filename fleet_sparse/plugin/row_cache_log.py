"""RowCacheLog: tells in the log how often row caches hit, and how many bytes they save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fleet_sparse.worker.rows.table_exchange import CacheStats

logger = logging.getLogger(__name__)

EVERY_S = 60.0
MIN_STEPS = 1000
"""Steps after which a cache is judged. Rows have few updates at first, and a bound by share lets a copy lack a share of
these alone: by the model of `fleet-sparse plan`, Adam with 8 workers and a lag of 100 saves nothing until step 100, a
fifth of the bytes in step 500 and a third in step 1000."""
LEAST_SAVED = 0.1
"""Share of the bytes below which the CPU of a cache is not worth it, however slow the network is."""
_FEW_HITS = 0.5


class _Totals(NamedTuple):
    """The hits and bytes of the caches of all tables together."""

    hits: float
    """Share of the rows that were read."""
    refreshed: float
    """Share of the hits."""
    bytes_saved: int
    bytes_without: int

    @property
    def saved(self) -> float:
        """Share of the bytes; negative if the caches sent more."""
        return self.bytes_saved / max(self.bytes_without, 1)


class RowCacheLog:
    """Logs a line a minute while a worker trains, and one at the end; none without caches.

    At the end it warns of caches that saved next to nothing.

    Args:
        worker_index: Index of this worker.
        stats: Returns what the caches did since they were made, by table.
    """

    def __init__(self, worker_index: int, stats: Callable[[], Mapping[str, CacheStats]]) -> None:
        self._worker_index = worker_index
        self._stats = stats
        self._due_s = time.monotonic() + EVERY_S
        self._num_steps = 0

    def note_step(self) -> None:
        """Counts a step, and logs the line if it is due."""
        self._num_steps += 1
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self._log("so far")

    def end(self) -> None:
        """Logs the last line, and the warning."""
        totals = self._log("in all")
        if totals is None or self._num_steps < MIN_STEPS or totals.saved >= LEAST_SAVED:
            return
        looser = "a looser bound (a larger max_row_lag, max_row_lag_share or max_row_drift)"
        more = "more copies (a larger RowCache.max_bytes or max_rows)"
        logger.warning(
            "row cache of worker %d: saved %d %% of the bytes in %d steps, should be at least %d %%, for it costs CPU. "
            "Write %s, or train without a cache: leave the bound and row_cache out",
            *(self._worker_index, round(100 * totals.saved), self._num_steps, round(100 * LEAST_SAVED)),
            more if totals.hits < _FEW_HITS else looser,
        )

    def _log(self, when: str) -> _Totals | None:
        """Logs a line and returns its figures; None if nothing was read."""
        caches = self._stats().values()
        reads, hits, refreshed = (
            sum(getattr(cache.counters, name) for cache in caches) for name in ("read", "hit", "refreshed")
        )
        if not reads:
            return None
        saved, without = (sum(getattr(cache, name) for cache in caches) for name in ("bytes_saved", "bytes_without"))
        totals = _Totals(hits / reads, refreshed / max(hits, 1), saved, without)
        logger.info(
            "row cache of worker %d: %d %% hits, %d %% of them refreshed; %.1f of %.1f MB saved (%d %%) %s",
            *(self._worker_index, round(100 * totals.hits), round(100 * totals.refreshed)),
            *(saved / 1e6, without / 1e6, round(100 * totals.saved), when),
        )
        return totals
