from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.tools.snapshots.diff import Diff, Differences, TableDiff, diff
from support.snapshots import ADAM, DENSE, SGD, Model, Row, TableModel, random_dense, random_model, save

NAN = np.uint32(0x7FC00001).view(np.float32)
OTHER_NAN = np.uint32(0x7FC00002).view(np.float32)


def compared(where: Path, first: Model, second: Model, **arguments: Any) -> Diff:
    save(where / "first", first, 2)
    save(where / "second", second, 3)
    with open_content(str(where / "first")) as one, open_content(str(where / "second")) as other:
        return diff(one, other, **arguments)


def row(*values: float, states: tuple[float, ...] = (), day: int = 0) -> Row:
    return np.array(values, np.float32).tobytes(), np.array(states, np.float32).tobytes(), day


def table(first: dict[int, Row], second: dict[int, Row], where: Path, **arguments: Any) -> TableDiff:
    """What is different in a table `SGD` with these rows."""
    found = compared(where, Model((TableModel(SGD, first),)), Model((TableModel(SGD, second),)), **arguments)
    return found.tables[0]


def test_the_same_content_in_other_shards_is_equal(tmp_path: Path) -> None:
    found = compared(tmp_path, random_model(1, 3000, days=2), random_model(1, 3000, days=2))
    assert found.is_equal
    assert [each.num_rows for each in found.tables] == [(3000, 3000)] * 2
    assert all(each.is_compared for each in (*found.tables, *found.dense))


def test_ids_of_one_alone_are_counted_and_some_are_named(tmp_path: Path) -> None:
    found = table({one: row(0, 0) for one in range(20)}, {one: row(0, 0) for one in range(10, 25)}, tmp_path)
    assert (found.num_rows, found.num_only) == ((20, 15), (10, 5))
    assert len(found.only[0]) == len(found.only[1]) == 5
    assert set(found.only[0]) <= set(range(10))
    assert set(found.only[1]) == set(range(20, 25))
    assert not found.is_equal


@pytest.mark.parametrize(("tolerance", "num_different"), [(0.0, 2), (0.25, 1), (2.0, 0)])
def test_a_difference_up_to_the_tolerance_is_none(tmp_path: Path, tolerance: float, num_different: int) -> None:
    found = table({1: row(0, 1), 2: row(0, 1)}, {1: row(0.25, 1), 2: row(0, -1)}, tmp_path, tolerance=tolerance)
    assert found.columns["rows"] == Differences(num_different, 2.0)
    assert len(found.different) == num_different
    assert found.is_equal is (num_different == 0)


def test_the_sign_of_zero_is_a_difference_without_tolerance(tmp_path: Path) -> None:
    assert table({1: row(0.0, 1)}, {1: row(-0.0, 1)}, tmp_path / "exact").columns["rows"] == Differences(1, 0.0)
    assert table({1: row(0.0, 1)}, {1: row(-0.0, 1)}, tmp_path / "tolerant", tolerance=1e-9).is_equal


def test_the_same_nan_is_equal_and_another_is_not(tmp_path: Path) -> None:
    assert table({1: row(NAN, 1)}, {1: row(NAN, 1)}, tmp_path / "same").is_equal
    found = table({1: row(NAN, 1)}, {1: row(OTHER_NAN, 1)}, tmp_path / "other", tolerance=1.0)
    assert found.columns["rows"] == Differences(1, math.inf)


def test_states_and_days_are_compared_beside_rows(tmp_path: Path) -> None:
    spec = TableSpec(name="one", dim=1, rule="adam", initializer=constant(0.0))
    first = {1: row(math.inf, states=(1, 2)), 2: row(1, states=(1, 2)), 3: row(1, states=(1, 2), day=1)}
    second = {1: row(-math.inf, states=(1, 2)), 2: row(1, states=(1, 5)), 3: row(1, states=(1, 2), day=2)}
    models = [Model((TableModel(spec, rows, days=3),)) for rows in (first, second)]
    found = compared(tmp_path, *models).tables[0]
    assert found.columns == {
        "rows": Differences(1, math.inf),
        "states": Differences(1, 3.0),
        "last_update_day": Differences(1, 1.0),
    }
    assert set(found.different) == {1, 2, 3}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"optimizer_step": 3}, "optimizer step 0 and 3"),
        ({"days": 4}, "num_days 0 and 4"),
        ({"spec": TableSpec(name="sgd", dim=2, rule="sgd", initializer=constant(1.0))}, "initializer "),
    ],
)
def test_another_description_is_a_difference(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    same = TableModel(SGD, {1: row(0, 0)})
    found = compared(tmp_path, Model((same,)), Model((same._replace(**change),))).tables[0]
    assert found.description[0].startswith(text)
    assert not found.is_equal
    assert found.columns["rows"] == Differences()


def test_of_rows_of_another_shape_only_ids_are_compared(tmp_path: Path) -> None:
    wide = TableSpec(name="sgd", dim=3, rule="sgd", initializer=constant(0.5))
    first = Model((TableModel(SGD, {1: row(0, 0), 2: row(0, 0)}),))
    second = Model((TableModel(wide, {2: row(0, 0, 0)}),))
    found = compared(tmp_path, first, second).tables[0]
    assert (found.is_compared, found.num_only, found.description) == (False, (1, 0), ("dim 2 and 3",))


def test_a_table_that_is_only_read_differs_from_a_trained_one(tmp_path: Path) -> None:
    trained = TableSpec(name="one", dim=1, rule="adagrad", initializer=constant(0.0))
    read = TableSpec(name="one", dim=1, rule="read_only", initializer=constant(0.0))
    first, second = TableModel(trained, {1: row(1, states=(5,))}), TableModel(read, {1: row(1)})
    found = compared(tmp_path, Model((first,)), Model((second,))).tables[0]
    assert (found.is_compared, found.description, found.is_equal) == (False, ("rule adagrad and read_only",), False)


def test_tables_of_one_alone_are_named(tmp_path: Path) -> None:
    found = compared(tmp_path, Model((TableModel(SGD, {}),)), Model((TableModel(ADAM, {}),)))
    assert found.only == ((SGD.name,), (ADAM.name,))
    assert not found.is_equal


def test_dense_values_and_states_are_compared_value_by_value(tmp_path: Path) -> None:
    zeros = np.zeros(DENSE.num_values, np.float32), np.zeros((2, DENSE.num_values), np.float32)
    values, states = (array.copy() for array in zeros)
    values[3], states[0, 5], states[1, 5], states[1, 6] = 2.0, 1.0, 3.0, 1.0
    dense = random_dense(np.random.default_rng(1))
    first = Model(dense=(dense._replace(values=zeros[0], states=zeros[1]),))
    second = Model(dense=(dense._replace(values=values, states=states),))
    found = compared(tmp_path, first, second).dense[0]
    assert (found.values, found.states) == (Differences(1, 2.0), Differences(2, 3.0))
    assert not found.is_equal


def test_dense_values_that_are_not_assigned_are_not_compared(tmp_path: Path) -> None:
    first, second = (random_dense(np.random.default_rng(seed))._replace(assigned=False) for seed in (1, 2))
    found = compared(tmp_path, Model(dense=(first,)), Model(dense=(second,)))
    assert found.is_equal
    assert not found.dense[0].is_compared
