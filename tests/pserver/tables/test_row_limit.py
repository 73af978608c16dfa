"""Tables that are as large as they may be: rows that exist train on, other ids read their initial values."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.tables import row_limit
from fleet_sparse.pserver.tables.row_limit import NO_LIMITS, UNCHECKED_ROWS, MemoryUse, RowLimit, RowLimits
from support.shards import SGD, FrameClient, floats, ids_of, make_shard, push


def rejected(shard: Shard) -> int:
    return shard.states()[0].num_rejected_ids


def client_with(limits: RowLimits) -> FrameClient[Shard]:
    return FrameClient(make_shard(SGD, row_limits=limits))


def test_ids_past_the_limit_get_no_row() -> None:
    client = client_with(RowLimits(2, 0))
    before = client.rows(SGD, 1, 2, 3)
    client.push(push(SGD, ids_of(1, 2, 3), floats([1, 1], [1, 1], [1, 1])))
    after = client.rows(SGD, 1, 2, 3)
    assert client.shard.states()[0].num_rows == 2
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, False, True]


def test_rows_of_a_full_table_are_trained() -> None:
    client = client_with(RowLimits(1, 0))
    for _ in range(3):
        before = client.rows(SGD, 1)
        client.push(push(SGD, ids_of(1, 2), floats([1, 1], [1, 1])))
        assert client.rows(SGD, 1) != before


def test_rejected_ids_are_counted_in_each_push() -> None:
    client = client_with(RowLimits(1, 0))
    for _ in range(3):
        client.push(push(SGD, ids_of(1, 2, 3), floats([1, 1], [1, 1], [1, 1])))
    assert rejected(client.shard) == 6


def test_rows_that_were_removed_make_room() -> None:
    client = client_with(RowLimits(1, 0))
    client.push(push(SGD, ids_of(1), floats([1, 1])))
    client.shard.tables[SGD.table_id].table.store.remove(ids_of(1))  # type: ignore[attr-defined]
    client.push(push(SGD, ids_of(2), floats([1, 1])))
    assert (client.shard.states()[0].num_rows, rejected(client.shard)) == (1, 0)


def test_bytes_bound_rows() -> None:
    row_bytes = 4 * SGD.dim + row_limit.INDEX_BYTES
    client = client_with(RowLimits(0, 3 * row_bytes))
    client.push(push(SGD, ids_of(*range(5)), np.ones((5, SGD.dim), np.float32)))
    assert client.shard.states()[0].num_rows == 3


def limit_of(
    used: list[float], limits: RowLimits = NO_LIMITS, times: list[float] | None = None, num_bytes: int = 1 << 50
) -> RowLimit:
    """A limit that reads the use of memory, and the time, from the ends of lists."""

    def clock() -> float:
        return (times or [0.0])[-1]

    memory = MemoryUse(lambda: used[-1], clock, lambda: num_bytes)
    return RowLimit(limits, 100, "table 'C1'", memory, clock)


def test_no_row_is_added_while_memory_is_short() -> None:
    used, times = [0.95], [0.0]
    limit = limit_of(used, times=times)
    assert limit.num_free(10) == 0
    used.append(0.5)
    assert limit.num_free(10) == 0  # it was short a moment ago
    times.append(2.0)
    assert limit.num_free(10) > UNCHECKED_ROWS


def test_memory_is_read_again_after_many_new_rows() -> None:
    limit = limit_of([0.5])
    limit.num_free(1000)
    assert limit.unchecked_rows == 1000 + UNCHECKED_ROWS


def test_memory_is_read_again_after_a_share_of_what_is_left() -> None:
    row_bytes = 100 + row_limit.INDEX_BYTES
    limit = limit_of([0.5], num_bytes=row_bytes * 80_000)
    limit.num_free(1000)
    assert limit.unchecked_rows == pytest.approx(1000 + 0.4 * 80_000 / 32, abs=1)


def test_a_full_table_leaves_nothing_unchecked() -> None:
    limit = limit_of([0.5], RowLimits(1000, 0))
    limit.num_free(990)
    assert limit.unchecked_rows == 1000
    limit.num_free(1000)
    assert limit.unchecked_rows == 1000


def test_use_of_memory_is_read_once_for_many_tables() -> None:
    num_reads, now = 0, 0.0

    def read() -> float:
        nonlocal num_reads
        num_reads += 1
        return 0.5

    use = MemoryUse(read, lambda: now, lambda: 1 << 30)
    assert [use.share() for _ in range(5)] == [0.5] * 5
    now = 1.0
    use.share()
    assert num_reads == 2


def test_rejected_ids_are_warned_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    times = [0.0]
    limit = limit_of([0.5], times=times)
    for second in range(130):
        times.append(second)
        limit.reject(10)
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [10, 600, 600]
