from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse import machine_memory
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.mode import AVG, SUM
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules import RULES
from fleet_sparse.errors import ErrorCode, PlanError
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.pserver.storage.memory_layout import MemoryLayout
from fleet_sparse.pserver.tables.dense import DenseRange, DenseTable
from fleet_sparse.pserver.tables.merger import Merger
from fleet_sparse.pserver.tables.mutations import Assignment, Push
from fleet_sparse.pserver.tables.reply_memory import ReplyMemory
from fleet_sparse.pserver.tables.table import TableContext
from fleet_sparse.wire.frame_format import Action, Block

SEGMENTS = (Segment("a", 0, 4, 1.0), Segment("b", 4, 3, 1.0), Segment("c", 7, 5, 0.5))


def adam(segments: tuple[Segment, ...] = SEGMENTS) -> DenseSpec:
    return DenseSpec("dense", "adam", (), segments)


def lamb() -> DenseSpec:
    return DenseSpec("dense", "lamb", (), SEGMENTS)


def trained(dense: DenseRange, num_steps: int = 3) -> DenseRange:
    rng = np.random.default_rng(1)
    values = rng.standard_normal(dense.spec.num_values).astype(np.float32)
    dense.assign(values[dense.begin : dense.end])
    for step in range(1, num_steps + 1):
        grads = rng.standard_normal(dense.spec.num_values).astype(np.float32)
        dense.push(grads[dense.begin : dense.end], 0.1, step)
    return dense


@pytest.mark.parametrize("num_shards", [2, 3, 5, 20])
def test_ranges_of_several_shards_are_the_whole_array(num_shards: int) -> None:
    whole = trained(DenseRange(adam(), 0, 1))
    parts = [trained(DenseRange(adam(), shard, num_shards)) for shard in range(num_shards)]
    assert np.array_equal(np.concatenate([part.values for part in parts]), whole.values)
    assert np.array_equal(np.concatenate([part.export_states() for part in parts], axis=1), whole.export_states())


@pytest.mark.parametrize("num_shards", [1, 2, 3, 20])
def test_lamb_has_a_trust_ratio_for_each_whole_parameter(num_shards: int) -> None:
    parts = [trained(DenseRange(lamb(), shard, num_shards)) for shard in range(num_shards)]
    values = np.concatenate([part.values for part in parts])
    for begin, end in ((0, 4), (4, 7), (7, 12)):
        alone = RULES["lamb"]
        rng = np.random.default_rng(1)
        expected = rng.standard_normal(12).astype(np.float32)[begin:end]
        states = np.zeros(2 * (end - begin), np.float32)
        for step in range(1, 4):
            grads = rng.standard_normal(12).astype(np.float32)[begin:end]
            scalars = alone.scalars(dict(lamb().hyperparameters), 0.1 if begin < 7 else 0.05, step)
            assert alone.kernel is not None
            alone.kernel(expected, 0, states, 0, 0, np.zeros(1, np.int64), grads, end - begin, scalars)
        assert np.array_equal(values[begin:end], expected)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_each_segment_decays_by_its_own_coefficients(num_shards: int) -> None:
    segments = (Segment("a", 0, 4, 1.0, 0.25, 0.0), Segment("b", 4, 3, 1.0, 0.0, 0.5), Segment("c", 7, 5, 1.0))
    parts = [DenseRange(DenseSpec("dense", "sgd", (), segments), shard, num_shards) for shard in range(num_shards)]
    for part in parts:
        part.assign(np.full(part.size, -2.0, np.float32))
        part.push(np.ones(part.size, np.float32), 0.5, 1)
    values = np.concatenate([part.values for part in parts])
    assert values.tolist() == [-2.375] * 4 + [-2.0] * 3 + [-2.5] * 5


@pytest.mark.parametrize("num_shards", [1, 3])
def test_each_segment_is_clipped_before_it_decays(num_shards: int) -> None:
    segments = (
        Segment("a", 0, 4, 1.0, clip_min=-0.5, clip_max=0.5),
        Segment("b", 4, 3, 1.0, 0.0, 0.5, -1.0, 0.25),
        Segment("c", 7, 5, 1.0),
    )
    parts = [DenseRange(DenseSpec("dense", "sgd", (), segments), shard, num_shards) for shard in range(num_shards)]
    grads = np.full(12, 2.0, np.float32)
    grads[[0, 4, 7]] = -2.0
    grads.setflags(write=False)
    for part in parts:
        part.assign(np.full(part.size, -2.0, np.float32))
        part.push(grads[part.begin : part.end], 1.0, 1)
    values = np.concatenate([part.values for part in parts])
    # In b a decay of 0.5 * -2 comes on top.
    assert values.tolist() == [-1.5, *[-2.5] * 3, 0.0, *[-1.25] * 2, 0.0, *[-4.0] * 4]


def test_initial_state_is_the_rules() -> None:
    spec = DenseSpec("dense", "adagrad", (("initial_accumulator_value", 0.25),), SEGMENTS)
    assert DenseRange(spec, 0, 1).export_states().tolist() == [[0.25] * 12]


def test_loaded_range_trains_like_the_exported_one() -> None:
    one = trained(DenseRange(adam(), 1, 2))
    other = DenseRange(adam(), 1, 2)
    other.load(one.values, one.export_states())
    assert other.assigned
    grads = np.ones(other.size, np.float32)
    one.push(grads, 0.1, 4)
    other.push(grads, 0.1, 4)
    assert np.array_equal(one.values, other.values)


def test_range_without_values_can_be_pushed() -> None:
    dense = DenseRange(adam((Segment("a", 0, 1, 1.0),)), 0, 2)
    assert dense.size == 0
    dense.push(np.empty(0, np.float32), 0.1, 1)
    assert dense.export_states().shape == (2, 0)


def test_read_only_range_refuses_a_push() -> None:
    dense = DenseRange(DenseSpec("dense", "read_only", (), SEGMENTS), 0, 1)
    with pytest.raises(ValueError, match="'dense'"):
        dense.push(np.ones(12, np.float32), 0.1, 1)


def test_only_the_range_of_the_shard_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: 4 * 3 * 6)
    assert DenseRange(adam(), 0, 2).size == 6
    with pytest.raises(PlanError):
        DenseRange(adam(), 0, 1)


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.5, 1.0])), min_size=1, max_size=6), st.integers(1, 7))
def test_every_value_is_updated_with_the_rate_of_its_segment(sizes: list[tuple[int, float]], num_shards: int) -> None:
    segments: list[Segment] = []
    for size, rate in sizes:
        segments.append(Segment("s", sum(segment.size for segment in segments), size, rate))
    spec = DenseSpec("dense", "sgd", (), tuple(segments))
    moved: list[float] = []
    for shard in range(num_shards):
        dense = DenseRange(spec, shard, num_shards)
        dense.push(np.full(dense.size, -1, np.float32), 1.0, 1)
        moved += dense.values.tolist()
    assert moved == [rate for size, rate in sizes for _ in range(size)]


# Steps of several workers


def table_of(spec: DenseSpec, shard: int = 0, num_shards: int = 1) -> DenseTable:
    placement = Placement.even(num_shards)
    return DenseTable(
        spec, TableContext(placement, shard, Merger(placement, shard), ReplyMemory(), MemoryLayout(), huge_pages=False)
    )


def plainly_merged(grads: Sequence[NDArray[np.float32]], weights: Sequence[int], scale: str) -> NDArray[np.float32]:
    """The gradients of one step, merged by NumPy: one operation after the other, in worker order."""
    if scale == SUM:
        weights = [1] * len(grads)
    factors = [np.float32(weight / max(weights)) for weight in weights]
    merged = grads[0] * factors[0]
    for grad, factor in zip(grads[1:], factors[1:], strict=True):
        merged = merged + grad * factor
    total = np.float32(sum(factors)) if scale == AVG else np.float32(1)
    return merged / total


RULE_NAMES = [name for name, rule in RULES.items() if rule.kernel is not None]


@settings(deadline=None)
@given(
    st.sampled_from(RULE_NAMES),
    st.sampled_from([AVG, SUM]),
    st.lists(st.integers(1, 512), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 70), st.sampled_from([0.5, 1.0])), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_steps_have_the_bits_of_plain_numpy(
    name: str, scale: str, weights: list[int], sizes: list[tuple[int, float]], num_shards: int, seed: int
) -> None:
    rng, rule = np.random.default_rng(seed), RULES[name]
    assert rule.kernel is not None
    offsets = np.cumsum([0, *(size for size, _ in sizes)]).tolist()
    segments = tuple(Segment(f"s{k}", offsets[k], size, rate) for k, (size, rate) in enumerate(sizes))
    spec = DenseSpec("dense", name, (), segments)
    tables = [table_of(spec, shard, num_shards) for shard in range(num_shards)]
    values = rng.uniform(-1, 1, spec.num_values).astype(np.float32)
    for table in tables:
        table.assign(Assignment(spec.table_id, values[table.range.begin : table.range.end]))
    hyperparameters = dict(spec.hyperparameters)
    states = [
        np.repeat(np.array(rule.initial_state(hyperparameters), np.float32), segment.size) for segment in segments
    ]
    for step in (1, 2):
        grads = [rng.standard_normal(spec.num_values).astype(np.float32) for _ in weights]
        for table in tables:
            begin, end = table.range.begin, table.range.end
            pushes = [
                Push(spec.table_id, None, grad[begin:end], 0.1, step, weight)
                for grad, weight in zip(grads, weights, strict=True)
            ]
            table.apply(table.merge([[push] for push in pushes], scale))
        merged = plainly_merged(grads, weights, SUM if rule.is_summed else scale)
        for segment, of_segment in zip(segments, states, strict=True):
            part = slice(segment.offset, segment.offset + segment.size)
            scalars = rule.scalars(hyperparameters, 0.1 * segment.learning_rate, step)
            row = np.zeros(1, np.int64)
            rule.kernel(values[part], 0, of_segment, 0, 0, row, merged[part], segment.size, scalars)
        assert np.array_equal(np.concatenate([table.range.values for table in tables]), values)


def test_read_values_stay_while_the_array_changes() -> None:
    dense = DenseRange(DenseSpec("dense", "sgd", (), SEGMENTS), 0, 1)
    dense.assign(np.zeros(12, np.float32))
    first, buffer = dense.read(0), dense.read(0).reshape(-1, 1).data.cast("B")  # as a frame refers to them
    assert not first.flags.writeable
    dense.push(np.full(12, -1, np.float32), 1.0, 1)
    second = dense.read(0)
    assert first.tolist() == [0.0] * 12
    assert second.tolist() == [1.0] * 7 + [0.5] * 5
    del first
    dense.replace(0, np.full(12, 4, np.float32))
    assert dense.read(0).tolist() == [4.0] * 12
    assert second.tolist() == [1.0] * 7 + [0.5] * 5
    assert bytes(buffer) == bytes(48)


def test_nothing_is_copied_once_read_values_are_dropped() -> None:
    dense = trained(DenseRange(adam(), 0, 1))
    address = dense.values.__array_interface__["data"][0]
    for step in (4, 5):
        read = [dense.read(0), dense.read(0).reshape(-1, 1)]
        assert {values.__array_interface__["data"][0] for values in read} == {address}
        read.clear()
        dense.push(np.ones(12, np.float32), 0.1, step)
    read = [dense.read(0)]
    dense.push(np.ones(12, np.float32), 0.1, 6)
    assert dense.values.__array_interface__["data"][0] != address


def test_merged_gradients_stay_while_the_next_are_merged() -> None:
    table = table_of(adam())
    pushes = [[Push(table.spec.table_id, None, np.full(12, value, np.float32), 0.1, 1)] for value in (1, 2)]
    prepared = table.merge(pushes, SUM)
    table.merge([*pushes, *pushes], SUM)
    assert prepared.grads.tolist() == [3.0] * 12


def test_decaying_sums_of_workers_are_added_and_not_averaged() -> None:
    table = table_of(DenseSpec("sums", "summary", (("decay", 0.5),), SEGMENTS))
    table.assign(Assignment(table.spec.table_id, np.full(12, 4, np.float32)))
    pushes = [[Push(table.spec.table_id, None, np.full(12, value, np.float32), 0.1, 1, 8.0)] for value in (1, 2)]
    table.apply(table.merge(pushes, AVG))
    assert table.range.values.tolist() == [5.0] * 12


# Values in parts

PARTS = ((0, 2), (2, 5), (5, 12))


def parts_of(values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    return [(begin, values[begin:end]) for begin, end in PARTS]


@pytest.mark.parametrize("rule", [name for name in sorted(RULES) if not RULES[name].needs_whole_row])
def test_gradients_in_parts_train_as_the_whole(rule: str) -> None:
    if RULES[rule].kernel is None:
        pytest.skip("the rule is read-only")
    rng = np.random.default_rng(3)
    whole, divided = (DenseRange(DenseSpec("dense", rule, (), SEGMENTS), 0, 1) for _ in range(2))
    first = rng.standard_normal(12).astype(np.float32)
    for dense in (whole, divided):
        dense.assign(first)
    for step in range(1, 4):
        grads = rng.standard_normal(12).astype(np.float32)
        whole.push(grads, 0.1, step)
        for begin, part in parts_of(grads):
            divided.push(part, 0.1, step, begin)
    np.testing.assert_array_equal(divided.values, whole.values)
    np.testing.assert_array_equal(divided.export_states(), whole.export_states())


def test_values_assigned_in_parts_are_assigned_after_the_last() -> None:
    dense, values = DenseRange(adam(), 0, 1), np.arange(12, dtype=np.float32)
    dense.assign(-values[:5])  # by a worker that ended
    seen = []
    for begin, part in parts_of(values):
        dense.assign(part, begin)
        seen.append(dense.assigned)
    dense.assign(-values[:5])  # by another worker
    assert seen == [False, False, True]
    np.testing.assert_array_equal(dense.values, values)


def test_states_are_replaced_in_parts() -> None:
    dense, states = DenseRange(adam(), 0, 1), np.arange(24, dtype=np.float32).reshape(2, 12)
    for number, state in enumerate(states, start=1):
        for begin, part in parts_of(state):
            dense.replace(number, part, begin)
    np.testing.assert_array_equal(dense.export_states(), states)


def pushes_of(grads: np.ndarray, weight: float = 1.0) -> list[Push]:
    return [Push(adam().table_id, None, part, 0.1, 1, weight, begin=begin) for begin, part in parts_of(grads)]


def test_parts_of_workers_are_merged_as_whole_gradients() -> None:
    rng, table = np.random.default_rng(4), table_of(adam(), 0, 1)
    first, second = rng.standard_normal((2, 12)).astype(np.float32)
    whole = [[Push(adam().table_id, None, grads, 0.1, 1, weight)] for grads, weight in ((first, 3.0), (second, 1.0))]
    expected = table.merge(whole, "avg").grads.copy()
    merged = table.merge([pushes_of(first, 3.0), pushes_of(second, 1.0)], "avg")
    np.testing.assert_array_equal(merged.grads, expected)
    assert merged.begin == 0


def test_parts_that_do_not_cover_the_range_are_refused() -> None:
    table = table_of(adam(), 0, 1)
    with pytest.raises(Refusal) as caught:
        table.merge([pushes_of(np.zeros(12, np.float32))[:2]], "sum")
    assert caught.value.error.code is ErrorCode.MALFORMED


def test_parts_that_overlap_are_refused() -> None:
    table, part = table_of(adam(), 0, 1), np.zeros(6, np.float32)
    with pytest.raises(Refusal) as caught:
        table.merge([[Push(adam().table_id, None, part, 0.1, 1, begin=0)] * 2], "sum")
    assert caught.value.error.code is ErrorCode.MALFORMED


@pytest.mark.parametrize("action", [Action.ASSIGN, Action.REPLACE])
def test_values_that_do_not_follow_are_refused(action: Action) -> None:
    table, values = table_of(adam(), 0, 1), np.zeros((4, 1), np.float32)
    block = Block(action, adam().table_id, 0, 1, 4, None, values, offset=4)
    check = table.check_assignment if action is Action.ASSIGN else table.check_replacement
    with pytest.raises(Refusal) as caught:
        check(block, values)
    assert caught.value.error.code is ErrorCode.MALFORMED


def test_an_array_that_is_half_replaced_is_not_assigned() -> None:
    dense = DenseRange(adam(), 0, 1)
    dense.assign(np.ones(12, np.float32))
    seen = []
    for begin, part in parts_of(np.full(12, 2, np.float32)):
        dense.replace(0, part, begin)
        seen.append(dense.assigned)
    assert seen == [False, False, True]


def test_a_part_for_a_rule_of_whole_rows_is_refused() -> None:
    table = table_of(lamb(), 0, 1)
    table.assign(Assignment(lamb().table_id, np.ones(12, np.float32)))
    grads = np.ones((5, 1), np.float32)
    block = Block(Action.PUSH, lamb().table_id, 0, 1, 5, None, grads, 0.1, 1)
    with pytest.raises(Refusal) as caught:
        table.check_push(block, grads, is_staged=False)
    assert caught.value.error.code is ErrorCode.SCHEMA
    assert table.check_push(block, grads, is_staged=True).begin == 0
