from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_sparse.models import behaviours, drawn, synthetic, texts
from fleet_sparse.models.auc import auc
from fleet_sparse.models.source import Batch, DataSource

DRAWS = {
    "clicks": synthetic.draw,
    "conversions": synthetic.draw_conversions,
    "behaviours": behaviours.draw,
    "texts": texts.draw,
    "words": texts.draw_words,
}


@pytest.fixture(params=DRAWS)
def draw(request: pytest.FixtureRequest) -> Any:
    return DRAWS[request.param]


@pytest.fixture
def source(draw: Any) -> DataSource:
    return drawn.source(draw, 1000, batch_size=64, seed=3)


def same(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(np.concatenate(columns) for columns in zip(*batches, strict=True)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_truth_can_be_learnt(draw: Any, seed: int) -> None:
    truth = draw(20_000, seed=seed)
    for label, logit in zip(truth.batch.label.T, truth.logit.T, strict=True):
        assert 0.7 < auc(label, logit) < 0.99


def test_labels_have_the_chances_of_the_truth(draw: Any) -> None:
    truth = draw(50_000, seed=0)
    chance = drawn.chance_of(truth.logit)
    for of_task, expected in zip(truth.batch.label.T, chance.T, strict=True):
        order = np.argsort(expected)
        for part in np.array_split(order, 5):
            assert of_task[part].mean() == pytest.approx(expected[part].mean(), abs=0.02)


def test_a_draw_is_the_same_for_the_same_arguments(draw: Any) -> None:
    assert same(draw(50, seed=1, index=2).batch, draw(50, seed=1, index=2).batch)
    assert not same(draw(50, seed=1, index=2).batch, draw(50, seed=1, index=3).batch)


def test_the_source_has_the_shapes_of_the_draw(source: DataSource) -> None:
    batch = next(source.train(0, 0, 1))
    shapes = (source.num_fields, source.num_dense, source.num_labels)
    assert (batch.ids.shape[1], batch.dense.shape[1], batch.label.shape[1]) == shapes
    assert (batch.ids.dtype, batch.dense.dtype, batch.label.dtype) == (np.int64, np.float32, np.float32)


def test_workers_draw_what_one_worker_draws(source: DataSource) -> None:
    whole = list(source.train(0, 0, 1))
    shares = [list(source.train(0, i, 3)) for i in range(3)]
    assert len(whole) == source.num_batches == 16
    assert all(same(batch, shares[index % 3][index // 3]) for index, batch in enumerate(whole))


def test_test_examples_are_not_those_of_training(source: DataSource) -> None:
    trained, tested = joined(list(source.train(0, 0, 1))), joined(list(source.test()))
    assert len(tested.label) == 100
    assert not np.array_equal(trained.ids[:100], tested.ids)


@pytest.mark.parametrize("batch_size", [1, 256, 700, 5000])
def test_examples_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    def examples(size: int) -> list[Batch]:
        source = drawn.source(synthetic.draw, 1100, batch_size=size, seed=0)
        trained = list(source.train(0, 0, 1))
        assert source.num_batches == len(trained)
        assert [len(batch.label) for batch in trained[:-1]] == [size] * (len(trained) - 1)
        return [joined(trained), joined(list(source.test()))]

    assert all(same(one, other) for one, other in zip(examples(512), examples(batch_size), strict=True))


def test_a_conversion_follows_a_click() -> None:
    click, conversion = synthetic.draw_conversions(10_000, seed=0).batch.label.T
    assert conversion.any()
    assert (click >= conversion).all()


@pytest.mark.parametrize(("draw", "first"), [(behaviours.draw, 1), (texts.draw, 0)])
def test_padding_is_at_the_end(draw: Any, first: int) -> None:
    ids = draw(2000, seed=0).batch.ids[:, first:]
    half = ids.shape[1] if first else ids.shape[1] // 2
    is_padding = ids[:, :half] == 0
    assert is_padding.any()
    assert (np.diff(is_padding.astype(int), axis=1) >= 0).all()
