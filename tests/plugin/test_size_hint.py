from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.plugin.size_hint import SizeHintMonitor
from fleet_sparse.wire.control import TableState


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[object, ...]]]:
    """`warned()`: table, rows and size of each warning so far."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.args for record in caplog.records if isinstance(record.args, tuple)]


def tables(max_ids: int | None = 10) -> dict[str, TableSpec]:
    return {"emb": TableSpec(name="emb", dim=2, rule="sgd", initializer=constant(0.0), max_ids=max_ids)}


def observe(monitor: SizeHintMonitor, shard: int, num_rows: int, max_ids: int | None = 10) -> None:
    monitor.observe(shard, [TableState("emb", 0, num_rows, False)], tables(max_ids))


def test_rows_are_added_up_over_shards(warned):
    monitor = SizeHintMonitor()
    observe(monitor, 0, 6)
    assert warned() == []
    observe(monitor, 1, 5)
    assert warned() == [("emb", 11, 10)]


def test_table_of_exactly_its_size_is_not_reported(warned):
    observe(SizeHintMonitor(), 0, 10)
    assert warned() == []


def test_table_past_its_size_is_reported_once(warned):
    monitor = SizeHintMonitor()
    observe(monitor, 0, 11)
    observe(monitor, 0, 12)
    assert warned() == [("emb", 11, 10)]


def test_later_report_of_a_shard_replaces_an_earlier_one(warned):
    monitor = SizeHintMonitor()
    for _ in range(3):
        observe(monitor, 0, 6)
    assert warned() == []


def test_table_without_a_size_is_never_reported(warned):
    observe(SizeHintMonitor(), 0, 10**6, max_ids=None)
    assert warned() == []
