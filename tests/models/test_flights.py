from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from fleet_sparse.models import flights
from fleet_sparse.models.auc import auc
from fleet_sparse.models.flights import Flights
from fleet_sparse.models.source import DataSource


@pytest.fixture(scope="module")
def data() -> Flights:
    return flights.load()


@pytest.fixture(scope="module")
def source() -> DataSource:
    return flights.source(batch_size=512, seed=0)


def marked(ids: NDArray[np.int64], dense: NDArray[np.float32]) -> NDArray[np.uint64]:
    """A number for each example, from all that is fed of it."""
    bits = np.concatenate([ids.view(np.uint64), dense.astype(np.float64).view(np.uint64)], axis=1)
    multipliers = np.random.default_rng(0).integers(1, 2**63, bits.shape[1], dtype=np.uint64)
    marks: NDArray[np.uint64] = (bits * multipliers).sum(axis=1, dtype=np.uint64)
    return marks


def test_flights_that_arrived_are_examples_and_a_quarter_is_late(data: Flights) -> None:
    assert data.ids.shape == (327_346, len(flights.FIELDS))
    assert data.label.mean() == pytest.approx(0.2371, abs=1e-4)


def test_the_split_is_the_same_for_all_time(data: Flights) -> None:
    assert int(data.is_test.sum()) == 65_695
    assert xxh3_64_hexdigest(np.packbits(data.is_test).tobytes()) == "ae199d638f99f3be"


def test_there_are_as_many_distinct_ids_as_is_said(data: Flights) -> None:
    assert 150_000 < len(np.unique(data.ids)) < 160_000


def test_nothing_is_used_that_is_known_after_departure() -> None:
    used = {column for field in flights.FIELDS for column in field} | set(flights.DENSE)
    assert not used & {"dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"}


def test_dense_values_are_normalised_by_training_examples(data: Flights) -> None:
    trained = data.dense[~data.is_test]
    assert np.isfinite(data.dense).all()
    assert np.abs(data.dense).max() <= 4
    assert np.abs(trained.mean(0)).max() < 0.1
    assert trained.std(0).max() < 1.01


def test_workers_share_the_training_examples_only(data: Flights, source: DataSource) -> None:
    marks = [marked(batch.ids, batch.dense) for i in range(3) for batch in source.train(0, i, 3)]
    expected = marked(data.ids[~data.is_test], data.dense[~data.is_test])
    assert np.array_equal(np.sort(np.concatenate(marks)), np.sort(expected))


def test_test_batches_are_all_that_is_held_out(data: Flights, source: DataSource) -> None:
    tested = np.concatenate([batch.ids for batch in source.test()])
    assert np.array_equal(tested, data.ids[data.is_test])


def test_an_epoch_has_as_many_batches_as_is_said(source: DataSource) -> None:
    assert source.num_batches == sum(1 for _ in source.train(0, 0, 1))


def test_seed_and_epoch_determine_the_order(source: DataSource) -> None:
    first, again, later = (next(source.train(epoch, 0, 1)).ids for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, later)


def test_a_logistic_regression_reaches_an_auc_of_071(data: Flights) -> None:
    distinct, positions = np.unique(data.ids, return_inverse=True)
    position = positions.reshape(data.ids.shape)
    weight, squares = np.zeros(len(distinct)), np.full(len(distinct), 1e-8)
    order = np.random.default_rng(0).permutation(np.flatnonzero(~data.is_test))
    for rows in np.array_split(order, 512):  # one epoch of Adagrad
        error = 1 / (1 + np.exp(-weight[position[rows]].sum(1))) - data.label[rows, 0]
        flat = position[rows].ravel()
        grad = np.bincount(flat, np.repeat(error, position.shape[1]) / len(rows), len(distinct))
        squares += grad**2
        weight -= 0.05 * grad / np.sqrt(squares)
    assert auc(data.label[data.is_test], weight[position[data.is_test]].sum(1)) > 0.71
