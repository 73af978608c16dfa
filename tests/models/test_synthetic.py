from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.models import drawn, synthetic


def test_shapes_are_those_of_criteo() -> None:
    batch = synthetic.draw(16, seed=3).batch
    assert (batch.ids.shape, batch.dense.shape, batch.label.shape) == ((16, 26), (16, 13), (16, 1))


def test_clicks_are_rare() -> None:
    assert 0.1 < synthetic.draw(20_000, seed=0).batch.label.mean() < 0.5


def test_another_seed_is_another_truth() -> None:
    ids = [synthetic.draw(1000, seed=seed).batch.ids for seed in (0, 1)]
    assert not np.isin(ids[0], ids[1]).any()


def test_fields_are_of_their_sizes_and_follow_zipf() -> None:
    ids = synthetic.draw(50_000, seed=0).batch.ids
    _, smallest = np.unique(ids[:, 0], return_counts=True)
    assert len(smallest) == 10
    _, counts = np.unique(ids[:, 25], return_counts=True)
    first, *_, tenth = np.sort(counts)[::-1][:10]
    assert len(counts) > 10_000
    assert first / tenth == pytest.approx(10**synthetic.EXPONENT, rel=0.35)


def test_criteos_field_sizes_are_scaled_to_the_number_of_ids() -> None:
    sizes = synthetic.criteo_sizes(10_000_000)
    assert sizes.sum() == pytest.approx(10_000_000, rel=1e-4)
    assert [int(a) for a, b in zip(sizes, synthetic.CRITEO_SIZES, strict=True) if b < 100_000] == [
        size for size in synthetic.CRITEO_SIZES if size < 100_000
    ]


def test_fields_have_criteos_sizes() -> None:
    ids = synthetic.draw(20_000, seed=0, field_sizes=synthetic.CRITEO_SIZES).batch.ids
    assert [len(np.unique(ids[:, field])) for field in (5, 8, 16, 19)] == [24, 3, 10, 4]
    assert len(np.unique(ids[:, 2])) > 5000


def hottest(stream: int, index: int) -> int:
    ids = synthetic.draw(5000, seed=1, stream=stream, index=index, drift_at=2).batch.ids[:, 25]
    values, counts = np.unique(ids, return_counts=True)
    return int(values[counts.argmax()])


def test_the_hot_set_moves_at_its_draw_and_for_testing() -> None:
    before, after = (hottest(drawn.TRAIN_STREAM, index) for index in (1, 2))
    assert before == hottest(drawn.TRAIN_STREAM, 0) != after == hottest(drawn.TEST_STREAM, 0)


def test_examples_before_the_move_are_those_without() -> None:
    plain, moved = (
        synthetic.draw(64, seed=1, stream=drawn.TRAIN_STREAM, index=1, drift_at=drift_at) for drift_at in (None, 2)
    )
    np.testing.assert_array_equal(plain.batch.ids, moved.batch.ids)
    np.testing.assert_array_equal(plain.batch.label, moved.batch.label)


def test_a_moved_hot_set_has_the_same_values_with_other_ranks() -> None:
    sizes = np.array([3, 10, 1000])
    ranks = np.stack([np.arange(1000) % size for size in sizes], axis=1)
    found = synthetic.moved(ranks, sizes, seed=1)
    assert [len(np.unique(column)) for column in found.T] == sizes.tolist()
    assert (found[:, 2] != ranks[:, 2]).all()
