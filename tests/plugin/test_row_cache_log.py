"""Workers log what their row caches did."""

from __future__ import annotations

import logging

import pytest

from fleet_sparse.plugin import row_cache_log
from fleet_sparse.plugin.row_cache_log import RowCacheLog
from fleet_sparse.worker.rows.cached_table import Counters
from fleet_sparse.worker.rows.table_exchange import CacheStats


def stats(num_reads: int, num_hits: int, bytes_saved: int, num_refreshed: int = 0) -> CacheStats:
    counters = Counters(read=num_reads, hit=num_hits, refreshed=num_refreshed)
    return CacheStats(0, 0, 0, counters, bytes_saved, 5_000_000, ())


CACHES = {"a": stats(60, 40, 2_000_000, 15), "b": stats(40, 20, 500_000)}
LOSING = {"a": stats(100, 90, -200_000, 70)}


def figures(caplog: pytest.LogCaptureFixture) -> list[tuple[object, ...]]:
    return [record.args for record in caplog.records if isinstance(record.args, tuple)]


def test_the_last_line_has_hits_and_bytes_of_all_tables(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, row_cache_log.__name__)
    RowCacheLog(3, lambda: CACHES).end()
    assert figures(caplog) == [(3, 60, 25, 2.5, 10.0, 25, "in all")]


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
    assert figures(caplog) == [(0, 60, 25, 2.5, 10.0, 25, "so far")] * 2


@pytest.mark.parametrize("caches", [{}, {"a": stats(0, 0, 0)}], ids=["no caches", "no reads"])
def test_without_reads_nothing_is_logged(caplog: pytest.LogCaptureFixture, caches: dict[str, CacheStats]) -> None:
    caplog.set_level(logging.INFO, row_cache_log.__name__)
    RowCacheLog(0, lambda: caches).end()
    assert caplog.records == []


def warnings_of(
    caplog: pytest.LogCaptureFixture, caches: dict[str, CacheStats], num_steps: int = row_cache_log.MIN_STEPS
) -> list[logging.LogRecord]:
    log = RowCacheLog(0, lambda: caches)
    for _ in range(num_steps):
        log.note_step()
    log.end()
    return [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_cache_that_saved_nothing_is_warned_of_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(caplog, LOSING)
    assert isinstance(warning.args, tuple)
    assert warning.args[:4] == (0, -4, row_cache_log.MIN_STEPS, 10)
    assert "max_row_lag" in warning.getMessage()


def test_a_cache_with_few_hits_is_warned_of_its_size(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(caplog, {"a": stats(100, 10, 100_000)})
    assert "RowCache.max_bytes" in warning.getMessage()


@pytest.mark.parametrize(
    ("caches", "num_steps"),
    [(LOSING, row_cache_log.MIN_STEPS - 1), (CACHES, row_cache_log.MIN_STEPS), ({}, row_cache_log.MIN_STEPS)],
    ids=["few steps", "enough saved", "no caches"],
)
def test_no_other_cache_is_warned_of(
    caplog: pytest.LogCaptureFixture, caches: dict[str, CacheStats], num_steps: int
) -> None:
    assert warnings_of(caplog, caches, num_steps) == []
