"""Answers to workers that ask about their copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.row_bound import NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW, RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables.row_asks import answer

LAG = RowBound(lag=10)  # of two workers a copy may be 5 behind


@pytest.fixture(params=["sgd", "adagrad", "adam"])
def store(request: pytest.FixtureRequest) -> Iterator[TableStore]:
    spec = TableSpec(name="C1", dim=17, rule=request.param, initializer=uniform(-0.5, 0.5), seed=3)
    opened = TableStore(spec)
    yield opened
    opened.close()


def versions(*each: int) -> NDArray[np.uint32]:
    return np.array(each, np.uint32)


def pushed(store: TableStore, id_: int, times: int) -> None:
    for step in range(1, times + 1):
        store.push(np.array([id_]), np.ones((1, 17), np.float32), 0.1, step)


def rows_of(store: TableStore, *ids: int) -> NDArray[np.float32]:
    out = np.empty((len(ids), 17), np.float32)
    store.pull(np.array(ids), out)
    return out


def test_rows_follow_copies_that_are_too_far_behind(store: TableStore) -> None:
    store.make_clocks(LAG)
    for id_, times in ((1, 105), (2, 106), (3, 103)):
        pushed(store, id_, times)
    said = answer(store, LAG, 2, np.array([1, 2, 3]), versions(100, 100, 100))
    assert said.slack.tolist() == [0, ROW_FOLLOWS, 2]
    np.testing.assert_array_equal(said.rows, rows_of(store, 2))
    assert said.versions.tolist() == [106]
    assert len(said.full_rows) == len(said.full_versions) == len(said.states) == 0


def test_states_follow_rows_that_enter_or_grew_by_an_eighth(store: TableStore) -> None:
    store.make_clocks(LAG)
    pushed(store, 1, 48)
    pushed(store, 2, 49)
    has_states = store.spec.update_rule.num_states > 0
    said = answer(store, LAG, 2, np.array([1, 2, 3]), versions(42, 43, NO_VERSION))
    follows = STATES_FOLLOW if has_states else ROW_FOLLOWS
    assert said.slack.tolist() == [follows, ROW_FOLLOWS, follows]
    np.testing.assert_array_equal(said.full_rows, rows_of(store, 1, 3)[: 2 * has_states])
    np.testing.assert_array_equal(said.states, store.states_at(store.find(np.array([1, 3])[: 2 * has_states])))
    assert said.full_versions.tolist() == [48, 0][: 2 * has_states]


def test_the_first_ask_makes_the_clocks_and_changes_no_row(store: TableStore) -> None:
    pushed(store, 1, 3)
    before = rows_of(store, 1, 2)
    said = answer(store, LAG, 2, np.array([1, 2]), versions(NO_VERSION, NO_VERSION))
    assert [*said.versions.tolist(), *said.full_versions.tolist()] == [0, 0]
    assert store.has_clocks
    assert store.num_rows == 1
    np.testing.assert_array_equal(rows_of(store, 1, 2), before)


@pytest.mark.parametrize("version", [0, 7])
def test_the_only_worker_is_answered_for_rows_that_enter_alone(store: TableStore, version: int) -> None:
    pushed(store, 1, 200)
    said = answer(store, LAG, 1, np.array([1, 2]), versions(version, NO_VERSION))
    has_states = store.spec.update_rule.num_states > 0
    assert said.slack.tolist() == [253, STATES_FOLLOW if has_states else ROW_FOLLOWS]
    assert [*said.versions.tolist(), *said.full_versions.tolist()] == [0]


def test_rows_of_the_only_worker_have_no_clocks(store: TableStore) -> None:
    said = answer(store, LAG, 1, np.array([1]), versions(NO_VERSION))
    assert said.clock_epoch == 0
    assert not store.has_clocks


def test_the_only_worker_is_told_that_rows_were_removed(store: TableStore) -> None:
    pushed(store, 1, 1)
    store.remove(np.array([1]))
    assert answer(store, LAG, 1, np.array([1]), versions(NO_VERSION)).clock_epoch == 1
