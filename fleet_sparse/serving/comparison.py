"""Comparison: the predictions of two versions of a model for labelled examples, and whether one is worse."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .paired_auc import PairedAuc, paired_auc

SIGNIFICANT_P = 0.05
"""A loss of AUC counts if chance would make it with a smaller probability."""


class Limits(NamedTuple):
    """What still counts as no worse."""

    max_auc_loss: float = 0.0
    max_calibration_error: float = 0.05


class Quality(NamedTuple):
    """The quality of the predictions of one version."""

    num_not_finite: int
    auc: float | None
    """None if the predictions of a version are not all finite."""
    calibration: float
    """Sum of the predictions over the sum of the labels."""


class Comparison(NamedTuple):
    """The qualities of a candidate and of the version that is served."""

    num_examples: int
    served: Quality
    candidate: Quality
    p_value: float | None
    """Probability of such a loss of AUC by chance; None without AUCs."""
    faults: tuple[str, ...]
    """Why the candidate is worse, with the figures; empty if it is not."""


def compare(
    labels: NDArray[np.bool_], served: NDArray[np.floating], candidate: NDArray[np.floating], limits: Limits
) -> Comparison:
    """Compares predictions.

    Args:
        labels: `(n,)`, with at least two of either kind.
        served: Predictions `(n,)` of the version that is served.
        candidate: Those of the candidate.
        limits: What still counts as no worse.
    """
    is_finite = bool(np.isfinite(served).all() and np.isfinite(candidate).all())
    aucs = paired_auc(labels, served, candidate) if is_finite else None
    p_value = None if aucs is None else aucs.p_value_of_loss(limits.max_auc_loss)
    of_served = _quality(labels, served, None if aucs is None else aucs.first)
    of_candidate = _quality(labels, candidate, None if aucs is None else aucs.second)
    faults = [
        *_not_finite(of_candidate, len(labels)),
        *([] if aucs is None or p_value is None else _auc_lost(aucs, p_value, limits)),
        *_miscalibrated(of_served, of_candidate, limits),
    ]
    return Comparison(len(labels), of_served, of_candidate, p_value, tuple(faults))


def _quality(labels: NDArray[np.bool_], predictions: NDArray[np.floating], auc: float | None) -> Quality:
    num_not_finite = int((~np.isfinite(predictions)).sum())
    return Quality(num_not_finite, auc, float(predictions.sum(dtype=np.float64)) / int(labels.sum()))


def _not_finite(candidate: Quality, num_examples: int) -> list[str]:
    if not candidate.num_not_finite:
        return []
    return [f"{candidate.num_not_finite} of {num_examples} predictions are not finite"]


def _auc_lost(aucs: PairedAuc, p_value: float, limits: Limits) -> list[str]:
    loss = aucs.first - aucs.second
    if loss <= limits.max_auc_loss or p_value >= SIGNIFICANT_P:
        return []
    return [
        f"its AUC is {aucs.second:.6f}, that of the served version {aucs.first:.6f}: lower by {loss:.6f}, at most "
        f"{limits.max_auc_loss:g} is allowed (standard error {aucs.std_error:.6f}, p {p_value:.2g})"
    ]


def _miscalibrated(served: Quality, candidate: Quality, limits: Limits) -> list[str]:
    error, error_of_served = abs(candidate.calibration - 1), abs(served.calibration - 1)
    if not np.isfinite(error) or error <= limits.max_calibration_error or error <= error_of_served:
        return []
    return [
        f"its calibration is {candidate.calibration:.4f}, that of the served version {served.calibration:.4f}: it "
        f"should be within {limits.max_calibration_error:g} of 1"
    ]
