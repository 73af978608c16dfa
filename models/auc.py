"""Area under the ROC curve."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def auc(label: ArrayLike, score: ArrayLike) -> float:
    """Computes the exact chance that a random positive example scores above a random negative one; ties count half.

    Mann and Whitney's U over the number of pairs: `(sum of the positives' ranks - p (p + 1) / 2) / (p q)` with `p`
    positives, `q` negatives, and equal scores sharing their mean rank.

    Args:
        label: 1 for a positive example, 0 for a negative one; any shape.
        score: The score of each example, in the same order; logits or probabilities.

    Raises:
        ValueError: The sizes differ, a score is NaN, or one of the two classes is absent.
    """
    positive = np.asarray(label).ravel() > 0.5
    scores = np.asarray(score).ravel()
    if positive.size != scores.size:
        raise ValueError(f"auc: {positive.size} labels and {scores.size} scores, should be as many of both")
    if np.isnan(scores).any():
        raise ValueError(f"auc: {np.isnan(scores).sum()} of {scores.size} scores are NaN, should be numbers")
    num_positive = int(positive.sum())
    num_negative = positive.size - num_positive
    if not num_positive or not num_negative:
        raise ValueError(
            f"auc: {num_positive} positive and {num_negative} negative examples, should be at least one of each"
        )
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(mean_rank[inverse][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
