from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.initializer import initial_rows, uniform
from fleet_sparse.models.embedding import LocalTables

VOCABULARY = np.array([-(2**63), -5, 0, 7, 2**63 - 1])


def test_positions_are_those_of_the_vocabulary() -> None:
    positions = LocalTables(VOCABULARY).positions(np.array([[7, -5], [2**63 - 1, -(2**63)]]))
    assert positions.tolist() == [[3, 1], [4, 0]]


@pytest.mark.parametrize("unknown", [-6, 2**63 - 2])
def test_an_id_outside_of_the_vocabulary_is_named(unknown: int) -> None:
    with pytest.raises(KeyError, match=f"id {unknown} "):
        LocalTables(VOCABULARY).positions(np.array([7, unknown]))


def test_rows_start_as_they_do_on_a_pserver(static_graph: Any) -> None:
    tables = LocalTables(VOCABULARY)
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        ids = paddle.static.data("ids", [None, 2], "int64")
        rows = tables(ids, name="table", dim=3, bound=0.5)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(startup)
    tables.initialise(static_graph, seed=9)

    asked = np.array([[7, -5]])
    (result,) = executor.run(main, feed={"ids": tables.positions(asked)}, fetch_list=[rows])
    expected = initial_rows(uniform(-0.5, 0.5), asked.ravel(), dim=3, seed=9, salt=table_salt("table"))
    assert np.array_equal(result, expected[np.newaxis])


def test_a_bound_of_0_is_all_zeros(static_graph: Any) -> None:
    tables = LocalTables(VOCABULARY)
    startup = paddle.static.Program()
    with paddle.static.program_guard(paddle.static.Program(), startup):
        tables(paddle.static.data("ids", [None], "int64"), name="table", dim=3, bound=0.0)
    paddle.static.Executor(paddle.CPUPlace()).run(startup)
    tables.initialise(static_graph, seed=9)
    assert not np.array(static_graph.find_var("table").get_tensor()).any()
