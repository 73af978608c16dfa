"""Clocks of the rows of a store, against a dict; and changes that advance them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.kernels_changes import subtract_base_states
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.rules.rule import least_addends
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.table_words import NUM_WORDS
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.storage.virtual_memory import POPULATE_FROM
from support.clocks import clocks_of
from support.cow_views import all_rows

LAG, DRIFT = RowBound(lag=10), RowBound(drift=0.5)
IDS = st.lists(st.integers(0, 40), max_size=12, unique=True)


def spec_of(rule: str = "adagrad", dim: int = 4) -> TableSpec:
    return TableSpec(name="C1", dim=dim, rule=rule, initializer=uniform(-0.5, 0.5), seed=3)


def array(ids: Any) -> NDArray[np.int64]:
    return np.array(ids, np.int64)


def ones(count: int) -> NDArray[np.uint32]:
    return np.ones(count, np.uint32)


def pulled(store: TableStore, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    out = np.empty((len(ids), store.spec.dim), np.float32)
    store.pull(ids, out)
    return out


@pytest.fixture
def store() -> Iterator[TableStore]:
    opened = TableStore(spec_of())
    yield opened
    opened.close()


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["push", "push of several", "merge", "remove", "make clocks"]), IDS), max_size=20
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTIONS)
def test_clocks_count_the_updates_of_each_row(actions: list[tuple[str, list[int]]]) -> None:
    opened = TableStore(spec_of())
    expected: dict[int, int] | None = None
    for action, listed in actions:
        ids, grads = array(listed), np.ones((len(listed), 4), np.float32)
        amounts = (ids % 3 + 1).astype(np.uint32)
        added = ones(len(ids)) if action == "push" else amounts
        if action == "make clocks":
            opened.make_clocks(LAG)
            expected = dict.fromkeys(all_rows(opened).ids.tolist(), 0) if expected is None else expected
        elif action == "remove":
            for id_ in listed if expected is not None else ():
                expected.pop(id_, None)
            opened.remove(ids)
        elif action == "merge":
            opened.merge(ids, grads, amounts, 1.0)
        else:
            opened.push(ids, grads, 0.1, 1, num_updates=None if action == "push" else amounts)
        if expected is not None:
            if action in {"push", "push of several", "merge"}:
                for id_, amount in zip(listed, added.tolist(), strict=True):
                    expected[id_] = expected.get(id_, 0) + amount
            clocks = clocks_of(opened, np.arange(41)).tolist()
            assert clocks == [expected.get(id_, 0) for id_ in range(41)]
    opened.close()


def test_clocks_wrap(store: TableStore) -> None:
    store.make_clocks(LAG)
    for amount in (2**32 - 1, 3):
        store.push(array([7]), np.ones((1, 4), np.float32), 0.1, 1, num_updates=np.array([amount], np.uint32))
    assert clocks_of(store, array([7, 8])).tolist() == [2, 0]


def test_an_epoch_of_clocks_ends_when_rows_are_removed(store: TableStore) -> None:
    store.make_clocks(LAG)
    store.push(array([7, 8]), np.ones((2, 4), np.float32), 0.1, 1)
    store.remove(array([9]))
    assert store.clock_epoch == 0
    store.remove(array([8]))
    assert store.clock_epoch == 1
    store.push(array([8, 9]), np.ones((2, 4), np.float32), 0.1, 2)
    assert (store.clock_epoch, clocks_of(store, array([7, 8, 9])).tolist()) == (1, [1, 1, 1])


def test_clocks_in_distance_count_the_largest_move(store: TableStore) -> None:
    store.make_clocks(DRIFT)
    rng, ids = np.random.default_rng(0), np.arange(30)
    moved = np.zeros(30)
    for step in range(1, 20):
        before = pulled(store, ids)
        store.push(ids, rng.normal(0, 1, (30, 4)).astype(np.float32), 0.1, step)
        moved += np.abs(pulled(store, ids) - before).max(axis=1)
    clocks = clocks_of(store, ids) * (0.5 / 4096)
    assert (clocks >= moved * (1 - 1e-6)).all()
    assert (clocks <= moved + 20 * 0.5 / 4096).all()


def test_a_store_without_clocks_says_so(store: TableStore) -> None:
    with pytest.raises(ValueError, match="C1"):
        _ = store.clocks


def test_frames_of_tables_with_clocks_are_answered_by_the_store(store: TableStore) -> None:
    words = np.zeros(NUM_WORDS, np.int64)
    assert store.describe(words)
    store.make_clocks(LAG)
    assert not store.describe(words)


def test_clocks_are_in_no_snapshot(store: TableStore) -> None:
    before = store.columns
    store.make_clocks(LAG)
    store.push(array([1]), np.ones((1, 4), np.float32), 0.1, 1)
    assert store.columns == before
    assert "clock" not in all_rows(store).columns


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.merge is not None])
@pytest.mark.parametrize("dim", [3, 17])
def test_a_merged_change_leaves_what_its_updates_would(rule: str, dim: int) -> None:
    direct, merging, copies = (TableStore(spec_of(rule, dim)) for _ in range(3))
    rng, ids, n = np.random.default_rng(1), np.arange(10), 5
    merging.push(ids, np.zeros((10, dim), np.float32), 0.0, 1)  # rows that are there, and have states
    for opened in (direct, copies):
        opened.push(ids, np.zeros((10, dim), np.float32), 0.0, 1)
    base = all_rows(copies)
    for step in range(2, 2 + n):
        grads = rng.normal(0, 1, (10, dim)).astype(np.float32)
        for opened in (direct, copies):
            opened.push(ids, grads, 0.05, step)
    copy = all_rows(copies)
    decays = np.array(RULES[rule].merge(dict(copies.spec.hyperparameters)), np.float64)  # type: ignore[misc]
    changes = np.empty(copy.states.size, np.float32)
    flat = [np.ascontiguousarray(each.states).reshape(-1) for each in (copy, base)]
    least = least_addends(RULES[rule])
    subtract_base_states(*flat, np.arange(10), np.full(10, n, np.uint32), dim, decays, least, changes)
    merging.merge(
        copy.ids,
        copy.rows - base.rows,
        np.full(10, n, np.uint32),
        1.0,
        state_changes=changes.reshape(copy.states.shape),
        num_updates=np.full(10, n, np.uint32),
    )
    made, expected = all_rows(merging), all_rows(direct)
    np.testing.assert_allclose(made.rows, expected.rows, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(made.states, expected.states, rtol=1e-6, atol=1e-6)
    for opened in (direct, merging, copies):
        opened.close()


def test_states_that_cannot_be_merged_are_refused() -> None:
    opened = TableStore(spec_of("ftrl"))
    with pytest.raises(ValueError, match="ftrl"):
        opened.merge(
            array([1]),
            np.ones((1, 4), np.float32),
            ones(1),
            1.0,
            state_changes=np.ones((1, 2, 4), np.float32),
            num_updates=ones(1),
        )
    assert opened.num_rows == 0
    opened.close()


def test_dropped_clocks_are_mapped_while_they_are_populated(store: TableStore) -> None:
    store.make_clocks(LAG)
    memory = store._memories[-1]
    memory.in_use = POPULATE_FROM
    store.drop_clocks()
    assert memory not in store._memories
    assert memory.populate_next()  # as by a thread that has begun with it
