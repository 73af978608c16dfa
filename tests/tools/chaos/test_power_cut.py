"""Logs after a power cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.tools.chaos.power_cut import cut, last_segment, tear, trailing_commits
from support.logs import close, logged_shard
from support.shards import FrameClient, ids_of, push

TABLE = TableSpec(name="C1", dim=2, rule="sgd", initializer=constant(0.0))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The log of a shard with eight pushes of 1."""
    shard = logged_shard(tmp_path / "log", TABLE)
    client = FrameClient(shard)
    for _ in range(8):
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


def test_half_of_the_changes_that_were_not_synced_are_lost(directory: Path) -> None:
    segment = last_segment(directory, 0)
    assert len(trailing_commits(segment)) == 8
    assert cut(segment) == 4
    assert row_of(directory) == 4.0


def test_a_torn_record_loses_nothing(directory: Path) -> None:
    tear(last_segment(directory, 0))
    assert row_of(directory) == 8.0


def test_a_shard_without_a_log_has_no_segment(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="shard 1"):
        last_segment(tmp_path, 1)
