"""Which candidates are worse than what is served."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.serving.comparison import Comparison, Limits, compare

LABELS = np.arange(4000) % 4 == 0
GOOD = (np.where(LABELS, 0.4, 0.2) + np.random.default_rng(0).uniform(-0.2, 0.2, 4000)).astype(np.float32)
NOISE = np.random.default_rng(1).normal(0, 0.05, 4000).astype(np.float32)


def compared(candidate: NDArray[np.float32], *limits: float, served: NDArray[np.float32] = GOOD) -> Comparison:
    return compare(LABELS, served, candidate, Limits(*limits))


def test_an_equal_candidate_is_no_worse() -> None:
    found = compared(GOOD)
    assert (found.faults, found.p_value, found.num_examples) == ((), 1.0, 4000)
    assert found.served == found.candidate
    assert found.served.calibration == pytest.approx(1.0, abs=0.02)


def test_a_lower_auc_is_worse_and_names_both() -> None:
    found = compared(GOOD + 4 * NOISE)
    (fault,) = found.faults
    assert found.served.auc is not None
    assert found.candidate.auc is not None
    assert all(f"{each.auc:.6f}" in fault for each in (found.served, found.candidate))
    assert compared(GOOD + 4 * NOISE, found.served.auc - found.candidate.auc).faults == ()
    assert compared(GOOD, served=GOOD + 4 * NOISE).faults == ()


def test_a_loss_that_chance_makes_is_no_fault() -> None:
    labels, served = LABELS[:200], GOOD[:200]
    found = compare(labels, served, served + 2 * NOISE[:200], Limits())
    assert found.p_value is not None
    assert found.served.auc is not None
    assert found.candidate.auc is not None
    assert (found.p_value > 0.05, found.served.auc > found.candidate.auc) == (True, True)
    assert found.faults == ()


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_calibration_further_from_1_is_worse(factor: float) -> None:
    factor = np.float32(factor)
    found = compared(GOOD * factor)
    (fault,) = found.faults
    assert f"{found.candidate.calibration:.4f}" in fault
    assert f"{found.served.calibration:.4f}" in fault
    assert compared(GOOD * factor, 0.0, 0.6).faults == ()
    assert compared(GOOD * factor, served=GOOD * factor * factor if factor < 1 else GOOD * 2).faults == ()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_predictions_that_are_not_finite_are_worse(value: float) -> None:
    candidate = GOOD.copy()
    candidate[[3, 5]] = value
    found = compared(candidate)
    assert found.faults[0].startswith("2 of 4000 ")
    assert (found.candidate.num_not_finite, found.candidate.auc) == (2, None)
    assert compared(GOOD, served=candidate).faults == ()
