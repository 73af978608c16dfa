from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.models import synthetic
from fleet_sparse.models.auc import auc
from fleet_sparse.models.source import Batch, DataSource


@pytest.fixture
def source() -> DataSource:
    return synthetic.source(batch_size=16, num_batches=7, num_test_batches=2, seed=3)


def same(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_truth_can_be_learnt(seed: int) -> None:
    truth = synthetic.draw(20_000, seed=seed)
    assert 0.7 < auc(truth.batch.label, truth.logit) < 0.9
    assert 0.1 < truth.batch.label.mean() < 0.5


def test_shapes_are_those_of_criteo(source: DataSource) -> None:
    batch = next(source.train(0, 0, 1))
    assert (batch.ids.shape, batch.dense.shape, batch.label.shape) == ((16, 26), (16, 13), (16, 1))
    assert (batch.ids.dtype, batch.dense.dtype, batch.label.dtype) == (np.int64, np.float32, np.float32)


def test_workers_draw_what_one_worker_draws(source: DataSource) -> None:
    whole = list(source.train(0, 0, 1))
    shares = [list(source.train(0, i, 3)) for i in range(3)]
    assert len(whole) == 7
    assert all(same(batch, shares[index % 3][index // 3]) for index, batch in enumerate(whole))


def test_test_examples_are_not_those_of_training(source: DataSource) -> None:
    trained, tested = list(source.train(0, 0, 1)), list(source.test())
    assert len(tested) == 2
    assert not any(np.array_equal(one.dense, other.dense) for one in trained for other in tested)


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
