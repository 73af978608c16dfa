"""Logs after a power cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.log.log_format import record_ends
from fleet_sparse.tools.chaos import sync_trace
from fleet_sparse.tools.chaos.power_cut import cut_power, last_segment, tear, unsynced_records
from support.logs import close, logged_shard
from support.pservers import logged_pserver
from support.shards import FrameClient, ids_of, push

TABLE = TableSpec(name="C1", dim=2, rule="sgd", initializer=constant(0.0))
NUM_PUSHES = 8


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The log of a shard with eight pushes of 1."""
    shard = logged_shard(tmp_path / "log", TABLE)
    client = FrameClient(shard)
    for _ in range(NUM_PUSHES):
        client.push(push(TABLE, ids_of(1), -np.ones((1, 2), np.float32)))
    close(shard)
    return tmp_path


def row_of(directory: Path) -> float:
    """A value of the row on the pserver that continues."""
    shard = logged_shard(directory / "log", TABLE)
    try:
        return FrameClient(shard).rows(TABLE, 1)[0][0]
    finally:
        close(shard)


class Chance(random.Random):
    """Keeps the pages that a list says, and then none."""

    def __init__(self, *keeps: bool) -> None:
        super().__init__(0)
        self._keeps = list(keeps)

    def choice(self, seq: Any) -> Any:
        return 0.5

    def random(self) -> float:
        return 0.0 if self._keeps and self._keeps.pop(0) else 1.0


def test_all_pages_that_were_not_synced_are_lost(directory: Path) -> None:
    segment = last_segment(directory / "log")
    *_, fourth, _, _, _, _ = unsynced_records(segment, 0)
    assert len(unsynced_records(segment, fourth)) == 5
    assert cut_power(segment, fourth, Chance()) == 5
    assert row_of(directory) == 3.0


def test_records_behind_a_lost_page_are_lost(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", TABLE, segment_bytes=1 << 20)
    client = FrameClient(shard)
    for number in range(8):  # records of 4000 bytes and more
        client.push(push(TABLE, ids_of(1, *range(10, 250)), np.full((241, 2), -1.0, np.float32)))
        if number == 1:
            num_synced_bytes = newest_end(tmp_path)
    close(shard)
    lost = cut_power(last_segment(tmp_path / "log"), num_synced_bytes, Chance(True, True, False, True, True))
    assert 0 < lost < 6
    assert row_of(tmp_path) == 8.0 - lost


def newest_end(directory: Path) -> int:
    """The end of the newest record."""
    segment = last_segment(directory / "log")
    return max(end for _, end in record_ends(memoryview(segment.read_bytes())))


def test_a_record_that_is_synced_in_part_is_lost(directory: Path) -> None:
    segment = last_segment(directory / "log")
    *_, last = unsynced_records(segment, 0)
    assert cut_power(segment, last + 64, Chance()) == 1


def test_a_log_that_is_synced_loses_nothing(directory: Path) -> None:
    segment = last_segment(directory / "log")
    assert cut_power(segment, segment.stat().st_size, Chance()) == 0
    assert row_of(directory) == 8.0


def test_a_torn_record_loses_nothing(directory: Path) -> None:
    tear(last_segment(directory / "log"))
    assert row_of(directory) == 8.0


def test_a_log_without_content_has_no_segment(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        last_segment(tmp_path)


@pytest.mark.guarantee("F5")
@pytest.mark.parametrize(
    ("durability", "num_kept"), [("sync", NUM_PUSHES), ("log", 0)], ids=["ack behind the sync", "ack before the sync"]
)
def test_a_power_cut_shows_acks_that_came_before_their_sync(tmp_path: Path, durability: str, num_kept: int) -> None:
    """The pserver of the second case acks what no sync has covered, and the client keeps no copy of its pushes."""
    trace = tmp_path / "synced"
    variables = {
        "FLEET_SPARSE_DURABILITY": durability,
        "FLEET_SPARSE_LOG_SYNC_S": "1000",
        "FLEET_SPARSE_RULES": sync_trace.__name__,
        sync_trace.TRACE_VARIABLE: str(trace),
    }
    with logged_pserver(tmp_path, **variables) as (pserver, remote):
        client = FrameClient(remote.register(TABLE, job_id="a"))
        for _ in range(NUM_PUSHES):
            assert client.push(push(TABLE, ids_of(1), -np.ones((1, 2), np.float32))).error is None
        pserver.kill()
    segment = last_segment(tmp_path / "log" / "shard-0-of-1")
    cut_power(segment, sync_trace.num_synced_bytes(trace, segment), Chance())
    with logged_pserver(tmp_path, **variables) as (_, remote):
        client = FrameClient(remote.register(TABLE, job_id="a"))
        client.seq = num_kept
        assert client.rows(TABLE, 1)[0][0] == num_kept
