from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.mode import AVG, SUM
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.pserver.storage.memory_layout import MemoryLayout
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.pserver.tables.kinds import make_table
from fleet_sparse.pserver.tables.merger import Merger
from fleet_sparse.pserver.tables.mutations import Assignment, Push, scaled
from fleet_sparse.pserver.tables.reply_memory import ReplyMemory
from fleet_sparse.pserver.tables.table import Table, TableContext
from fleet_sparse.warm_up import warm_up
from support.clocks import clocks_of
from support.shards import DENSE, SGD, floats, ids_of, pull

warm_up()
CONTEXT = TableContext(
    Placement.even(1), 0, Merger(Placement.even(1), 0), ReplyMemory(), MemoryLayout(), huge_pages=False
)


@pytest.fixture
def table() -> Iterator[Table]:
    made = make_table(SGD, CONTEXT)
    yield made
    made.close()


@pytest.fixture
def dense() -> Table:
    made = make_table(DENSE, CONTEXT)
    made.assign(Assignment(DENSE.table_id, np.zeros(8, np.float32)))
    return made


def of_table(ids: Sequence[int], grads: NDArray[np.float32], weight: float = 1.0, rate: float = 1.0) -> Push:
    return Push(SGD.table_id, ids_of(*ids), grads, rate, 1, weight)


def of_dense(value: float, weight: float = 1.0) -> Push:
    return Push(DENSE.table_id, None, np.full(8, value, np.float32), 1.0, 1, weight)


def merged(table: Table, scale: str, *pushes: Push) -> Push:
    """The merged push of workers that pushed once each."""
    return table.merge([[push] for push in pushes], scale)


def test_a_merged_push_counts_the_workers_of_each_id(table: Table) -> None:
    pushes = [of_table(ids, np.ones((len(ids), 2), np.float32)) for ids in ([1, 2], [2, 3], [2])]
    assert merged(table, SUM, *pushes).num_updates is None  # nobody asked
    assert isinstance(table, EmbeddingTable)
    table.store.make_clocks(RowBound(lag=10))
    push = merged(table, SUM, *pushes)
    assert push.ids is not None
    assert push.num_updates is not None
    assert dict(zip(push.ids.tolist(), push.num_updates.tolist(), strict=True)) == {1: 1, 2: 3, 3: 1}
    table.apply(push)
    table.apply(pushes[0])
    assert clocks_of(table.store, ids_of(1, 2, 3, 4)).tolist() == [2, 4, 1, 0]


def rows_of(push: Push) -> dict[int, list[float]]:
    assert push.ids is not None
    return dict(zip(push.ids.tolist(), push.grads.tolist(), strict=True))


# Scaling


def test_factor_1_copies_nothing() -> None:
    grads = floats([1, 2])
    assert scaled(grads, 1.0) is grads


def test_factor_multiplies_a_copy_in_float32() -> None:
    grads = floats([1, 3])
    assert scaled(grads, 1 / 3).tolist() == [[np.float32(1) * np.float32(1 / 3), np.float32(3) * np.float32(1 / 3)]]
    assert grads.tolist() == [[1, 3]]


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 1e300])
def test_factor_that_is_not_finite_gives_no_finite_value(scale: float) -> None:
    assert not np.isfinite(scaled(floats([1, 2]), scale)).any()


# Contributions to a step


def test_equal_weights_give_a_plain_mean(table: Table) -> None:
    for weight in (1.0, 7.0, 1e30):
        pushes = [of_table([5], floats([value, value]), weight) for value in (1, 2, 6)]
        assert rows_of(merged(table, AVG, *pushes)) == {5: [3, 3]}


def test_contribution_of_weight_0_adds_nothing(table: Table) -> None:
    push = merged(table, AVG, of_table([1], floats([4, 4]), 0.0), of_table([1, 2], floats([1, 1], [2, 2]), 5))
    assert rows_of(push) == {1: [1, 1], 2: [2, 2]}


def test_contributions_of_weight_0_only_are_averaged_equally(table: Table) -> None:
    push = merged(table, AVG, of_table([1], floats([4, 4]), 0.0), of_table([1], floats([2, 2]), 0.0))
    assert rows_of(push) == {1: [3, 3]}


def test_single_contribution_is_not_copied(table: Table) -> None:
    grads = floats([1, 2])
    for scale in (AVG, SUM):
        push = merged(table, scale, of_table([1], grads, 64))
        assert push.grads is grads


def test_contributions_without_ids_are_an_empty_push(table: Table) -> None:
    empty = of_table([], np.empty((0, 2), np.float32))
    push = merged(table, AVG, empty, empty)
    assert (rows_of(push), push.grads.shape) == ({}, (0, 2))


def test_parts_of_a_contribution_count_its_weight_once(table: Table) -> None:
    parts = [of_table([1], floats([4, 4]), 1), of_table([2], floats([8, 8]), 1)]
    whole = [of_table([1, 2], floats([2, 2], [2, 2]), 1)]
    assert rows_of(table.merge([parts, whole], AVG)) == {1: [3, 3], 2: [5, 5]}


def test_dense_gradients_are_added_in_worker_order(dense: Table) -> None:
    pushes = [of_dense(value) for value in (1e8, 1.0, -1e8)]
    assert merged(dense, SUM, *pushes).grads.tolist() == [0.0] * 8
    assert merged(dense, SUM, pushes[0], pushes[2], pushes[1]).grads.tolist() == [1.0] * 8


def test_dense_avg_is_weighted(dense: Table) -> None:
    push = merged(dense, AVG, of_dense(4, 1), of_dense(8, 1), of_dense(2, 2))
    assert push.grads.tolist() == [4.0] * 8


def test_merging_changes_no_contribution(dense: Table) -> None:
    pushes = [of_dense(1), of_dense(2)]
    merged(dense, SUM, *pushes)
    assert [each.grads.tolist() for each in pushes] == [[1.0] * 8, [2.0] * 8]


def test_learning_rate_is_that_of_the_first_worker(table: Table) -> None:
    pushes = [of_table([1], floats([1, 1]), rate=rate) for rate in (0.5, 0.25)]
    assert merged(table, AVG, *pushes).learning_rate == 0.5


def test_sum_past_float32_is_refused(table: Table, dense: Table) -> None:
    with pytest.raises(Refusal) as refused:
        merged(table, SUM, *[of_table([1], floats([3e38, 1])) for _ in range(2)])
    assert refused.value.error.code is ErrorCode.NOT_FINITE
    assert refused.value.error.message == "table 'sgd': 1 of 2 merged gradients are NaN or infinite"
    for values in ([3e38, 3e38], [3e38, 3e38, -3e38], [3e38, 1.0, 3e38, -3e38]):
        with pytest.raises(Refusal) as refused:
            merged(dense, SUM, *map(of_dense, values))
        assert refused.value.error.message == "dense 'dense': 8 of 8 merged gradients are NaN or infinite"


CONTRIBUTIONS = st.lists(
    st.tuples(st.dictionaries(st.integers(-3, 6), st.floats(-1e3, 1e3, width=32), max_size=6), st.integers(1, 512)),
    min_size=1,
    max_size=5,
)


@given(CONTRIBUTIONS, st.sampled_from([AVG, SUM]))
def test_merge_has_the_bits_of_float32_sums_in_worker_order(
    drawn: list[tuple[dict[int, float], int]], scale: str
) -> None:
    table = make_table(SGD, CONTEXT)
    try:
        pushes = [
            of_table(list(rows), np.array([[g, -g] for g in rows.values()], np.float32).reshape(-1, 2), weight)
            for rows, weight in drawn
        ]
        push = merged(table, scale, *pushes)
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


def test_push_updates_rows_and_optimizer_step_of_a_table(table: Table) -> None:
    push = of_table([1, 2], floats([1, 2], [3, 4]))
    assert push._replace(step=5).apply_to(table) == 2
    assert table.pull(pull(SGD, ids_of(1, 2))).tolist() == [[-0.5, -1.5], [-2.5, -3.5]]
    assert table.state[:3] == ("sgd", 5, 2)


def test_push_updates_values_and_optimizer_step_of_an_array(dense: Table) -> None:
    assert of_dense(2)._replace(step=3).apply_to(dense) == 0
    assert dense.pull(pull(DENSE, count=8)).ravel().tolist() == [-2.0] * 5 + [-4.0] * 3
    assert (dense.state.optimizer_step, dense.state.assigned) == (3, True)


def test_assignment_sets_the_first_values_only() -> None:
    fresh = make_table(DENSE, CONTEXT)
    assert Assignment(DENSE.table_id, np.arange(8, dtype=np.float32)).apply_to(fresh) == 0
    assert Assignment(DENSE.table_id, np.zeros(8, np.float32)).apply_to(fresh) == 0
    assert fresh.pull(pull(DENSE, count=8)).ravel().tolist() == list(range(8))


def test_size_of_a_push_is_that_of_its_columns(table: Table, dense: Table) -> None:
    assert of_table([1, 2], floats([1, 2], [3, 4])).num_bytes == 2 * 8 + 4 * 4
    assert of_dense(1).num_bytes == 8 * 4


def test_where_names_the_kind_and_the_table(table: Table, dense: Table) -> None:
    assert (table.where, dense.where) == ("table 'sgd'", "dense 'dense'")
