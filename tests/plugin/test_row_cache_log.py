"""Workers log what their row caches did."""

from __future__ import annotations

import logging

import pytest

from fleet_sparse.plugin import row_cache_log
from fleet_sparse.plugin.row_cache_log import RowCacheLog
from fleet_sparse.worker.rows.cached_table import Counters
from fleet_sparse.worker.rows.table_exchange import CacheStats


def stats(num_reads: int, num_hits: int, bytes_saved: int) -> CacheStats:
    return CacheStats(0, 0, 0, Counters(read=num_reads, hit=num_hits), bytes_saved, ())


CACHES = {"a": stats(60, 40, 2_000_000), "b": stats(40, 20, 500_000)}


def figures(caplog: pytest.LogCaptureFixture) -> list[tuple[object, ...]]:
    return [record.args for record in caplog.records if isinstance(record.args, tuple)]


def test_the_last_line_has_hits_and_bytes_of_all_tables(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, row_cache_log.__name__)
    RowCacheLog(3, lambda: CACHES).end()
    assert figures(caplog) == [(3, 60.0, 2.5, "in all")]


def test_a_line_is_due_once_in_its_time(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, row_cache_log.__name__)
    monkeypatch.setattr(row_cache_log, "EVERY_S", 1e6)
    log = RowCacheLog(0, lambda: CACHES)
    log.note_step()
    assert figures(caplog) == []
    monkeypatch.setattr(row_cache_log, "EVERY_S", 0.0)
    log = RowCacheLog(0, lambda: CACHES)
    log.note_step()
    log.note_step()
    assert figures(caplog) == [(0, 60.0, 2.5, "so far")] * 2


@pytest.mark.parametrize("caches", [{}, {"a": stats(0, 0, 0)}], ids=["no caches", "no reads"])
def test_without_reads_nothing_is_logged(caplog: pytest.LogCaptureFixture, caches: dict[str, CacheStats]) -> None:
    caplog.set_level(logging.INFO, row_cache_log.__name__)
    RowCacheLog(0, lambda: caches).end()
    assert caplog.records == []
