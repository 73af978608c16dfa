from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.mode import AVG, SUM
from fleet_sparse.core.placement import Placement
from fleet_sparse.pserver.tables.kinds import make_table
from fleet_sparse.pserver.tables.merger import Merger
from fleet_sparse.pserver.tables.mutations import Assignment, Push, scaled
from fleet_sparse.pserver.tables.table import Table, TableContext
from fleet_sparse.warm_up import warm_up
from support.shards import DENSE, SGD, floats, ids_of, pull

warm_up()
CONTEXT = TableContext(Placement.even(1), 0, Merger(Placement.even(1), 0), huge_pages=False)


@pytest.fixture
def table() -> Iterator[Table]:
    made = make_table(SGD, CONTEXT)
    yield made
    made.close()


@pytest.fixture
def dense() -> Table:
    made = make_table(DENSE, CONTEXT)
    made.assign(np.zeros(8, np.float32))
    return made


def of_table(ids: Sequence[int], grads: NDArray[np.float32], weight: float = 1.0, rate: float = 1.0) -> Push:
    return Push(SGD.table_id, ids_of(*ids), grads, rate, 1, weight)


def of_dense(value: float, weight: float = 1.0) -> Push:
    return Push(DENSE.table_id, None, np.full(8, value, np.float32), 1.0, 1, weight)


def merged(table: Table, scale: str, *pushes: Push) -> Push:
    """The merged push of workers that pushed once each."""
    return table.merge([[push] for push in pushes], scale)


def rows_of(push: Push) -> dict[int, list[float]]:
    assert push.ids is not None
    return dict(zip(push.ids.tolist(), push.grads.tolist(), strict=True))


# Scaling


def test_scale_of_one_copies_nothing() -> None:
    grads = floats([1, 2])
    assert scaled(grads, 1.0) is grads


def test_scale_multiplies_in_float32_and_leaves_the_gradients_as_they_are() -> None:
    grads = floats([1, 3])
    assert scaled(grads, 1 / 3).tolist() == [[np.float32(1) * np.float32(1 / 3), np.float32(3) * np.float32(1 / 3)]]
    assert grads.tolist() == [[1, 3]]


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 1e300])
def test_scale_that_is_not_finite_shows(scale: float) -> None:
    assert not np.isfinite(scaled(floats([1, 2]), scale)).any()


# Shares of a step


def test_sum_adds_the_shares_as_they_are(table: Table) -> None:
    push = merged(table, SUM, of_table([1, 2], floats([1, 1], [2, 2]), 3), of_table([2], floats([4, 4]), 9))
    assert rows_of(push) == {1: [1, 1], 2: [6, 6]}


def test_avg_divides_by_all_weights_also_for_ids_of_one_worker(table: Table) -> None:
    rows = [([1], floats([4, 4]), 1), ([2], floats([8, 8]), 1), ([2], floats([2, 2]), 2)]
    assert rows_of(merged(table, AVG, *(of_table(*row) for row in rows))) == {1: [1, 1], 2: [3, 3]}


def test_equal_weights_leave_a_plain_mean_whatever_they_are(table: Table) -> None:
    for weight in (1.0, 7.0, 1e30):
        shares = [of_table([5], floats([value, value]), weight) for value in (1, 2, 6)]
        assert rows_of(merged(table, AVG, *shares)) == {5: [3, 3]}


def test_share_of_weight_0_counts_for_nothing(table: Table) -> None:
    push = merged(table, AVG, of_table([1], floats([4, 4]), 0.0), of_table([1, 2], floats([1, 1], [2, 2]), 5))
    assert rows_of(push) == {1: [1, 1], 2: [2, 2]}


def test_shares_that_all_have_weight_0_are_averaged_as_equals(table: Table) -> None:
    push = merged(table, AVG, of_table([1], floats([4, 4]), 0.0), of_table([1], floats([2, 2]), 0.0))
    assert rows_of(push) == {1: [3, 3]}


def test_share_of_one_worker_is_what_it_pushed(table: Table) -> None:
    grads = floats([1, 2])
    for scale in (AVG, SUM):
        push = merged(table, scale, of_table([1], grads, 64))
        assert push.grads is grads


def test_empty_share_weighs_as_any_other(table: Table) -> None:
    none = np.empty((0, 2), np.float32)
    empty = [of_table([], none, weight) for weight in (1, 2)]
    assert rows_of(merged(table, AVG, of_table([1], floats([4, 8]), 1), *empty)) == {1: [1, 2]}


def test_shares_without_any_id_are_an_empty_push(table: Table) -> None:
    empty = of_table([], np.empty((0, 2), np.float32))
    push = merged(table, AVG, empty, empty)
    assert (rows_of(push), push.grads.shape) == ({}, (0, 2))


def test_parts_of_a_share_count_its_weight_once(table: Table) -> None:
    parts = [of_table([1], floats([4, 4]), 1), of_table([2], floats([8, 8]), 1)]
    whole = [of_table([1, 2], floats([2, 2], [2, 2]), 1)]
    assert rows_of(table.merge([parts, whole], AVG)) == {1: [3, 3], 2: [5, 5]}


def test_order_of_the_workers_is_the_order_of_the_sum(table: Table) -> None:
    """In float32 1e8 + 1 is 1e8, so the order shows."""
    values = (1e8, 1.0, -1e8)
    shares = [of_table([5], floats([value, value])) for value in values]
    assert rows_of(merged(table, SUM, *shares)) == {5: [0, 0]}
    assert rows_of(merged(table, SUM, shares[0], shares[2], shares[1])) == {5: [1, 1]}


def test_dense_shares_are_added_in_the_order_of_the_workers(dense: Table) -> None:
    shares = [of_dense(value) for value in (1e8, 1.0, -1e8)]
    assert merged(dense, SUM, *shares).grads.tolist() == [0.0] * 8
    assert merged(dense, SUM, shares[0], shares[2], shares[1]).grads.tolist() == [1.0] * 8


def test_dense_avg_is_weighted(dense: Table) -> None:
    push = merged(dense, AVG, of_dense(4, 1), of_dense(8, 1), of_dense(2, 2))
    assert push.grads.tolist() == [4.0] * 8


def test_merging_changes_no_share(dense: Table) -> None:
    shares = [of_dense(1), of_dense(2)]
    merged(dense, SUM, *shares)
    assert [share.grads.tolist() for share in shares] == [[1.0] * 8, [2.0] * 8]


def test_learning_rate_is_that_of_the_first_share(table: Table) -> None:
    shares = [of_table([1], floats([1, 1]), rate=rate) for rate in (0.5, 0.25)]
    assert merged(table, AVG, *shares).learning_rate == 0.5


def test_sum_past_float32_is_infinite_for_who_looks(table: Table, dense: Table) -> None:
    push = merged(table, SUM, *[of_table([1], floats([3e38, 1])) for _ in range(2)])
    assert rows_of(push) == {1: [np.inf, 2]}
    assert np.isinf(merged(dense, SUM, of_dense(3e38), of_dense(3e38)).grads).all()


SHARES = st.lists(
    st.tuples(st.dictionaries(st.integers(-3, 6), st.floats(-1e3, 1e3, width=32), max_size=6), st.integers(1, 512)),
    min_size=1,
    max_size=5,
)


@given(SHARES, st.sampled_from([AVG, SUM]))
def test_merge_has_the_bits_of_float32_sums_in_the_order_of_the_workers(
    drawn: list[tuple[dict[int, float], int]], scale: str
) -> None:
    table = make_table(SGD, CONTEXT)
    try:
        shares = [
            of_table(list(rows), np.array([[g, -g] for g in rows.values()], np.float32).reshape(-1, 2), weight)
            for rows, weight in drawn
        ]
        push = merged(table, scale, *shares)
    finally:
        table.close()
    weights = np.array([weight for _, weight in drawn], np.float32)
    factors = weights / weights.max() if scale == AVG else np.ones(len(drawn), np.float32)
    total = np.float32(0)
    for factor in factors:
        total += factor
    expected: dict[int, np.float32] = {}
    for (rows, _), factor in zip(drawn, factors, strict=True):
        for id_, grad in rows.items():
            expected[id_] = expected.get(id_, np.float32(0)) + factor * np.float32(grad)
    if scale == AVG:
        expected = {id_: value / total for id_, value in expected.items()}
    assert rows_of(push) == {id_: [value, -value] for id_, value in expected.items()}


# Applying


def test_table_push_moves_its_rows_and_the_tables_step(table: Table) -> None:
    push = of_table([1, 2], floats([1, 2], [3, 4]))
    assert push._replace(step=5).apply_to(table) == 2
    assert table.pull(pull(SGD, ids_of(1, 2))).tolist() == [[-0.5, -1.5], [-2.5, -3.5]]
    assert table.state[:3] == ("sgd", 5, 2)


def test_dense_push_moves_its_values_and_the_arrays_step(dense: Table) -> None:
    assert of_dense(2)._replace(step=3).apply_to(dense) == 0
    assert dense.pull(pull(DENSE, count=8)).ravel().tolist() == [-2.0] * 5 + [-4.0] * 3
    assert (dense.state.optimizer_step, dense.state.assigned) == (3, True)


def test_assignment_sets_the_first_values_only() -> None:
    fresh = make_table(DENSE, CONTEXT)
    assert Assignment(DENSE.table_id, np.arange(8, dtype=np.float32)).apply_to(fresh) == 0
    assert Assignment(DENSE.table_id, np.zeros(8, np.float32)).apply_to(fresh) == 0
    assert fresh.pull(pull(DENSE, count=8)).ravel().tolist() == list(range(8))


def test_bytes_of_a_push_are_those_of_its_columns(table: Table, dense: Table) -> None:
    assert of_table([1, 2], floats([1, 2], [3, 4])).num_bytes == 2 * 8 + 4 * 4
    assert of_dense(1).num_bytes == 8 * 4


def test_messages_name_the_kind(table: Table, dense: Table) -> None:
    assert (table.where, dense.where) == ("table 'sgd'", "dense 'dense'")
