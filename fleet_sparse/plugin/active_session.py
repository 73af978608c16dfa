"""The one session of this process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fleet_sparse.custom_rules import add_rules
from fleet_sparse.settings import Settings

from .session import Session


@cache
def active() -> Session:
    """The session of this process, created by the first call from the settings of the environment.

    Raises:
        SettingError: A setting has no meaning, or the module of custom rules cannot be loaded.
    """
    settings = Settings.from_environment()
    add_rules(settings.rules)
    return Session(settings)


def forget() -> None:
    """Drops the session and closes its connection; the next `active` creates another session."""
    session = active()
    active.cache_clear()
    session.abandon()


def stats() -> dict[str, Any]:
    """Returns the size of the pservers and the traffic of this worker, when all its pushes so far are applied.

    Returns:
        `pservers`: one dict per pserver with `shard`, `rows`, `tables` (rows by name), `rejected_new_ids` (ids of
        pushes that got no row, for want of room; an id counts in every push), `resident_bytes`, `requests`,
        `torn_log_bytes` (what a pserver cut off the end of its log when it was started again after a crash);
        `bytes_pulled`, `bytes_pushed`, `rows_pulled`, `rows_pushed`: of this worker since `init_worker`;
        `row_cache`: of this worker's row caches, one dict per table with `rows` and `bytes` of its copies, `held` (rows
        with updates that the pservers do not have), and, counting rows, `reads`, `hits`, `checks` (hits that asked the
        pservers), `refreshed`, `entered`, `left`; `bytes_saved` against no cache, too large by those of the updates
        that are held now, which are sent later; `bytes_without`, what no cache would have sent and received; and
        `lags`: by pserver, how many copies lacked 0, 1, 2 to 3, 4 to 7 … updates of the others when they were
        refreshed, without the zeros at the end. With `max_row_drift` these are units of its 4096th part, in which own
        gradients that went as such count, too: the number at place 12, counted from 0, is of copies that lacked half
        of the bound or more, at place 13 all of it or more.

    Raises:
        FleetSparseError: Before `fleet.init_worker()`, or a push failed.
    """
    connection = active().connection("stats")
    client = connection.client
    client.flush()
    return {
        "pservers": [
            {
                "shard": reply.shard,
                "rows": sum(table.num_rows for table in reply.tables),
                "tables": {table.name: table.num_rows for table in reply.tables},
                "rejected_new_ids": sum(table.num_rejected_ids for table in reply.tables),
                "resident_bytes": reply.resident_bytes,
                "requests": reply.num_requests,
                "torn_log_bytes": reply.num_torn_bytes,
            }
            for reply in connection.control.stats()
        ],
        "bytes_pulled": client.bytes_received,
        "bytes_pushed": client.bytes_sent,
        "rows_pulled": client.num_pulled_rows,
        "rows_pushed": client.num_pushed_rows,
        "row_cache": {
            table: {
                "rows": cache.rows,
                "bytes": cache.bytes,
                "held": cache.held,
                "reads": cache.counters.read,
                "hits": cache.counters.hit,
                "checks": cache.counters.asked,
                "refreshed": cache.counters.refreshed,
                "entered": cache.counters.entered,
                "left": cache.counters.left,
                "bytes_saved": cache.bytes_saved,
                "bytes_without": cache.bytes_without,
                "lags": [_without_zeros_at_end(of_pserver) for of_pserver in cache.lags],
            }
            for table, cache in connection.cache_stats().items()
        },
    }


def _without_zeros_at_end(counts: Sequence[int]) -> list[int]:
    num = max((place for place, count in enumerate(counts, 1) if count), default=0)
    return list(counts[:num])
