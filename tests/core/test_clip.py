from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.clip import BY_GLOBAL_NORM, BY_NORM, BY_VALUE, Clip, DensePart, clipped, scaled, squared_norms
from fleet_sparse.core.dense_spec import DenseSpec, Segment

NORM, GLOBAL = Clip(BY_NORM, norm=5.0), Clip(BY_GLOBAL_NORM, norm=13.0)


def dense_spec(*sizes):
    segments = [Segment(f"p{i}", sum(sizes[:i]), size, 1.0) for i, size in enumerate(sizes)]
    return DenseSpec("dense", "sgd", (), tuple(segments))


def squares_of(*gradients):
    return [math.fsum(float(value) ** 2 for value in grads.reshape(-1)) for grads in gradients]


def random_step(seed, *, num_rows=(7, 40), sizes=(3, 12, 1, 30)):
    """Gradients of tables of dim 5 and of one dense array."""
    rng = np.random.default_rng(seed)
    tables = [rng.standard_normal((count, 5)).astype(np.float32) for count in num_rows]
    spec = dense_spec(*sizes)
    return tables, spec, rng.standard_normal(spec.num_values).astype(np.float32)


# Norms.


@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(0, 2**32))
def test_squared_norm_of_a_table_covers_all_its_rows(counts, seed):
    tables = [np.random.default_rng(seed).standard_normal((count, 3)).astype(np.float32) for count in counts]
    np.testing.assert_allclose(squared_norms(tables, []), squares_of(*tables), rtol=1e-14)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2**32))
def test_each_segment_of_a_dense_array_has_its_own_norm(sizes, seed):
    _, spec, grads = random_step(seed, sizes=sizes)
    of_segments = [grads[segment.offset : segment.offset + segment.size] for segment in spec.segments]
    np.testing.assert_allclose(squared_norms([], [DensePart(spec, grads)]), squares_of(*of_segments), rtol=1e-14)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 2**32))
def test_norms_of_ranges_add_up_to_those_of_the_array(sizes, num_shards, seed):
    _, spec, grads = random_step(seed, sizes=sizes)
    ranges = [spec.range_of(shard, num_shards) for shard in range(num_shards)]
    parts = [squared_norms([], [DensePart(spec, grads[begin:end], begin)]) for begin, end in ranges]
    np.testing.assert_allclose(reduce(np.add, parts), squared_norms([], [DensePart(spec, grads)]), rtol=1e-14)


@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 2**32))
def test_norm_of_a_table_has_the_same_bits_in_any_order_of_rows(num_rows, dim, seed):
    rng = np.random.default_rng(seed)
    table = (rng.standard_normal((num_rows, dim)) * 10.0 ** rng.integers(-9, 9, (num_rows, 1))).astype(np.float32)
    assert squared_norms([table], []).tobytes() == squared_norms([rng.permutation(table)], []).tobytes()


def test_tables_come_before_the_segments_of_the_dense_arrays():
    part = DensePart(dense_spec(1, 2), np.array([2, 3, 4], np.float32))
    other = DensePart(dense_spec(1), np.array([6], np.float32))
    assert squared_norms([np.ones((2, 5), np.float32)], [part, other]).tolist() == [10.0, 4.0, 25.0, 36.0]


def test_step_without_gradients_has_no_norms():
    assert squared_norms([], []).shape == (0,)


def test_large_gradients_have_a_finite_squared_norm():
    # Past 1.8e19, float32 squares are infinite.
    assert squared_norms([np.full(4, 1e30, np.float32)], [])[0] == pytest.approx(4e60, rel=1e-6)


def test_gradients_may_be_read_only_and_not_contiguous():
    grads = np.arange(12, dtype=np.float32).reshape(3, 4)
    frame = np.frombuffer(memoryview(b"x" + grads.tobytes())[1:], np.float32)
    assert squared_norms([frame, grads.T], []).tolist() == [506.0, 506.0]


# Factors.


@pytest.mark.parametrize("clip", [NORM, GLOBAL])
def test_factors_are_1_if_nothing_needs_clip(clip):
    assert clip.factors(np.array([1e6, np.inf]), [False, False]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_norm_that_is_not_finite_makes_its_factors_nan(wrong):
    squares = np.array([wrong, 100.0, 4.0])
    assert np.isnan(NORM.factors(squares, [True] * 3)).tolist() == [True, False, False]
    assert np.isnan(GLOBAL.factors(squares, [True, True, False])).tolist() == [True, True, False]


def test_factors_are_float32():
    assert NORM.factors(np.array([100.0]), [True]).dtype == np.float32


def test_only_clips_by_norm_need_norms():
    assert [clip.needs_norm for clip in (Clip(BY_VALUE), NORM, GLOBAL)] == [False, True, True]


# Clipped gradients.


@given(st.integers(0, 2**32), st.floats(0.1, 30), st.lists(st.booleans(), min_size=6, max_size=6))
def test_clip_by_norm_bounds_every_parameter(seed, norm, needs_clip):
    tables, spec, grads = random_step(seed)
    of_tables, (of_dense,) = clipped(Clip(BY_NORM, norm=norm), needs_clip, tables, [DensePart(spec, grads)])
    segments = [slice(segment.offset, segment.offset + segment.size) for segment in spec.segments]
    before = [*tables, *(grads[segment] for segment in segments)]
    after = [*of_tables, *(of_dense[segment] for segment in segments)]
    for one, other, needs in zip(before, after, needs_clip, strict=True):
        length = math.sqrt(squares_of(one)[0])
        expected = one * (norm / length) if needs and length > norm else one
        np.testing.assert_allclose(other, expected, rtol=3e-7)
        assert other.shape == one.shape


@given(st.integers(0, 2**32), st.floats(0.1, 30), st.lists(st.booleans(), min_size=6, max_size=6))
def test_clip_by_global_norm_bounds_the_whole_gradient(seed, norm, needs_clip):
    tables, spec, grads = random_step(seed)
    of_tables, (of_dense,) = clipped(Clip(BY_GLOBAL_NORM, norm=norm), needs_clip, tables, [DensePart(spec, grads)])
    segments = [slice(segment.offset, segment.offset + segment.size) for segment in spec.segments]
    before = [*tables, *(grads[segment] for segment in segments)]
    after = [*of_tables, *(of_dense[segment] for segment in segments)]
    length = math.sqrt(math.fsum(squares_of(*(one for one, needs in zip(before, needs_clip, strict=True) if needs))))
    for one, other, needs in zip(before, after, needs_clip, strict=True):
        np.testing.assert_allclose(other, one * (norm / length) if needs and length > norm else one, rtol=3e-7)


@pytest.mark.parametrize("clip", [NORM, GLOBAL])
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_parts_of_a_step_are_clipped_like_the_whole(clip, num_shards):
    tables, spec, grads = random_step(1)
    needs_clip = [True, True, True, False, True, True]
    rows = [[table[shard::num_shards] for table in tables] for shard in range(num_shards)]
    ranges = [spec.range_of(shard, num_shards) for shard in range(num_shards)]
    dense = [[DensePart(spec, grads[begin:end], begin)] for begin, end in ranges]
    norms = reduce(np.add, map(squared_norms, rows, dense))
    parts = [scaled(rows[s], dense[s], clip.factors(norms, needs_clip)) for s in range(num_shards)]
    whole_tables, (whole,) = clipped(clip, needs_clip, tables, [DensePart(spec, grads)])
    np.testing.assert_allclose(np.concatenate([of_dense[0] for _, of_dense in parts]), whole, rtol=2e-7)
    for shard, (of_tables, _) in enumerate(parts):
        for part, whole_table in zip(of_tables, whole_tables, strict=True):
            np.testing.assert_allclose(part, whole_table[shard::num_shards], rtol=2e-7)


def test_several_dense_arrays_have_factors_of_their_own():
    parts = [DensePart(dense_spec(1, 1), np.ones(2, np.float32)), DensePart(dense_spec(2), np.ones(2, np.float32))]
    _, dense = scaled([], parts, np.array([0.5, 1.0, 0.25], np.float32))
    assert [grads.tolist() for grads in dense] == [[0.5, 1.0], [0.25, 0.25]]


def test_gradients_within_the_norm_are_the_same_arrays():
    table, part = np.ones((2, 2), np.float32), DensePart(dense_spec(2), np.ones(2, np.float32))
    of_tables, of_dense = clipped(NORM, [True, True], [table], [part])
    assert of_tables[0] is table
    assert of_dense[0] is part.grads


def test_gradients_of_the_caller_are_not_changed():
    table = np.full((2, 2), 100, np.float32)
    table.setflags(write=False)
    (other,), _ = clipped(NORM, [True], [table], [])
    assert (table == 100).all()
    assert (other == 2.5).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_gradient_that_is_not_finite_stays_visible(wrong):
    tables, spec, grads = random_step(1)
    tables[0][3, 2] = wrong
    of_tables, _ = clipped(NORM, [True] * 6, tables, [DensePart(spec, grads)])
    assert np.isnan(of_tables[0]).all()
    assert np.isfinite(of_tables[1]).all()
    of_tables, of_dense = clipped(GLOBAL, [True] * 6, tables, [DensePart(spec, grads)])
    assert all(np.isnan(values).all() for values in [*of_tables, *of_dense])
