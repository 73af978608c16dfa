"""Two AUCs of the same examples, and the standard error of their difference.

DeLong, DeLong, Clarke-Pearson, "Comparing the Areas under Two or More Correlated Receiver Operating Characteristic
Curves: A Nonparametric Approach", Biometrics 44, 1988; computed by ranks as in Sun, Xu, "Fast Implementation of
DeLong's Algorithm", IEEE Signal Processing Letters 21, 2014.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PairedAuc(NamedTuple):
    """AUCs of two predictions of the same examples."""

    first: float
    second: float
    std_error: float
    """Standard error of their difference."""

    def p_value_of_loss(self, allowed: float = 0.0) -> float:
        """Returns the one-sided p value of the hypothesis that the second AUC is lower by at most `allowed`."""
        excess = self.first - self.second - allowed
        if self.std_error == 0:
            return 1.0 if excess <= 0 else 0.0
        return 1 - NormalDist().cdf(excess / self.std_error)


def paired_auc(labels: NDArray[np.bool_], first: NDArray[np.floating], second: NDArray[np.floating]) -> PairedAuc:
    """Returns the AUCs of two predictions.

    Args:
        labels: `(n,)`, with at least two of either kind.
        first: Predictions `(n,)`, finite.
        second: Likewise.
    """
    components = [_components(labels, predictions) for predictions in (first, second)]
    (of_positives, of_negatives), others = components
    variance = sum(
        float(np.var(ours - theirs, ddof=1)) / len(ours)
        for ours, theirs in zip((of_positives, of_negatives), others, strict=True)
    )
    return PairedAuc(float(components[0][0].mean()), float(components[1][0].mean()), math.sqrt(variance))


def _components(
    labels: NDArray[np.bool_], predictions: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns for each positive example the share of negative ones below it, and for each negative one that of positive
    ones above it; ties count as one half. The mean of either is the AUC.
    """
    positives, negatives = predictions[labels], predictions[~labels]
    ranks = _midranks(predictions)
    of_positives = (ranks[labels] - _midranks(positives)) / len(negatives)
    of_negatives = 1 - (ranks[~labels] - _midranks(negatives)) / len(positives)
    return of_positives, of_negatives


def _midranks(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Returns the rank of each value, from 1; equal values have the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    midranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return midranks
