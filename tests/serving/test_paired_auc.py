"""DeLong's test against its definition, and against how often chance makes such a loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from numpy.typing import NDArray

from fleet_sparse.serving.paired_auc import PairedAuc, paired_auc

Floats = NDArray[np.float64]


def by_definition(labels: NDArray[np.bool_], first: Floats, second: Floats) -> PairedAuc:
    """Equations 2 to 6 of DeLong et al., pair by pair."""
    scores = []
    for predictions in (first, second):
        positives, negatives = predictions[labels][:, None], predictions[~labels][None, :]
        scores.append((positives > negatives) + 0.5 * (positives == negatives))
    num_positives, num_negatives = scores[0].shape
    of_positives = np.cov([each.mean(axis=1) for each in scores])
    of_negatives = np.cov([each.mean(axis=0) for each in scores])
    covariance = of_positives / num_positives + of_negatives / num_negatives
    contrast = np.array([1, -1])
    return PairedAuc(*(each.mean() for each in scores), math.sqrt(max(contrast @ covariance @ contrast, 0)))


@pytest.mark.parametrize("num_values", [3, 50, 10**6])
@pytest.mark.parametrize(("num_positives", "num_negatives"), [(2, 2), (2, 30), (40, 25)])
def test_ranks_give_what_the_definition_gives(num_values: int, num_positives: int, num_negatives: int) -> None:
    rng = np.random.default_rng(num_values + num_positives)
    labels = rng.permutation(np.arange(num_positives + num_negatives) < num_positives)
    first, second = (rng.integers(0, num_values, len(labels)) / num_values for _ in range(2))
    found, expected = paired_auc(labels, first, second), by_definition(labels, first, second)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    expected_first = scipy.stats.mannwhitneyu(first[labels], first[~labels]).statistic / num_positives / num_negatives
    assert found.first == pytest.approx(expected_first)


def test_equal_predictions_are_no_loss() -> None:
    labels = np.arange(100) % 3 == 0
    predictions = np.random.default_rng(0).random(100)
    found = paired_auc(labels, predictions, predictions)
    assert (found.std_error, found.first - found.second, found.p_value_of_loss()) == (0.0, 0.0, 1.0)


def test_the_opposite_of_a_perfect_prediction_is_a_loss() -> None:
    labels = np.arange(100) % 3 == 0
    found = paired_auc(labels, labels.astype(np.float64), 1 - labels.astype(np.float64))
    assert (found.first, found.second, found.p_value_of_loss(), found.p_value_of_loss(1.0)) == (1.0, 0.0, 0.0, 1.0)


def test_equally_good_predictions_are_seldom_called_worse() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(400) < 100
    p_values = []
    for _ in range(400):
        common = labels + rng.standard_normal(400)
        first, second = (common + rng.standard_normal(400) for _ in range(2))
        p_values.append(paired_auc(labels, first, second).p_value_of_loss())
    assert 0.02 < (np.array(p_values) < 0.05).mean() < 0.08


def test_a_loss_that_is_allowed_is_taken_off() -> None:
    found = PairedAuc(0.8, 0.79, 0.005)
    assert found.p_value_of_loss() == pytest.approx(scipy.stats.norm.sf(2))
    assert found.p_value_of_loss(0.01) == pytest.approx(0.5)
