from __future__ import annotations

import logging

import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.plugin.size_hint import SizeHintMonitor
from fleet_sparse.wire.control import TableState

WARNED = [("emb", 11, 10)]
"""Table, rows and size of a warning."""


@pytest.mark.parametrize(
    ("reports", "size", "warned"),
    [
        ([(0, 6)], 10, []),
        ([(0, 6), (1, 5)], 10, WARNED),  # rows of all shards are added
        ([(0, 10)], 10, []),
        ([(0, 11), (0, 12)], 10, WARNED),  # once
        ([(0, 6)] * 3, 10, []),  # a shard's report replaces its last one
        ([(0, 10**6)], None, []),
    ],
)
def test_table_past_its_size_is_reported_once(caplog, reports, size, warned):
    caplog.set_level(logging.WARNING)
    tables = {"emb": TableSpec(name="emb", dim=2, rule="sgd", initializer=constant(0.0), max_ids=size)}
    monitor = SizeHintMonitor()
    for shard, num_rows in reports:
        monitor.observe(shard, [TableState("emb", 0, num_rows, False)], tables)
    assert [record.args for record in caplog.records] == warned
