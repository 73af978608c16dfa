from __future__ import annotations

from fleet_sparse.plugin.size_hint import SizeHintMonitor
from fleet_sparse.wire.control import TableState


def report(num_rows, name="emb"):
    return [TableState(name, 0, num_rows, False)]


def test_rows_are_counted_over_shards():
    promises = SizeHintMonitor()
    assert list(promises.broken(0, report(6), {"emb": 10})) == []
    assert list(promises.broken(1, report(5), {"emb": 10})) == [("emb", 11, 10)]


def test_a_promise_that_is_just_kept_is_no_news():
    promises = SizeHintMonitor()
    assert list(promises.broken(0, report(10), {"emb": 10})) == []


def test_a_broken_promise_is_told_once():
    promises = SizeHintMonitor()
    assert len(list(promises.broken(0, report(11), {"emb": 10}))) == 1
    assert list(promises.broken(0, report(12), {"emb": 10})) == []


def test_a_later_report_replaces_an_earlier_one_of_the_same_shard():
    promises = SizeHintMonitor()
    for _ in range(3):
        assert list(promises.broken(0, report(6), {"emb": 10})) == []


def test_table_without_a_promise_is_never_told():
    assert list(SizeHintMonitor().broken(0, report(10**6), {"emb": None})) == []
