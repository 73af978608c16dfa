from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.bounds import UNBOUNDED, Bounds
from fleet_sparse.core.initializer import FLOAT32_MAX


@pytest.mark.parametrize("bounds", [Bounds(-0.5, 1.0), Bounds(high=0.25), Bounds(low=0.1), Bounds(0.3, 0.3)])
def test_values_outside_move_to_the_nearer_bound(bounds):
    grads = np.array([[-2.0, -0.5, 0.0], [0.25, 0.75, FLOAT32_MAX]], np.float32)
    low, high = np.float32(bounds.low), np.float32(bounds.high)
    clipped = bounds.clipped(grads)
    assert clipped.dtype == np.float32
    assert clipped.tolist() == [[min(max(value, low), high) for value in row] for row in grads]


def test_gradients_of_the_caller_are_not_changed():
    grads = np.array([-2.0, 2.0], np.float32)
    grads.setflags(write=False)
    Bounds(-1.0, 1.0).clipped(grads)
    assert grads.tolist() == [-2.0, 2.0]


def test_unbounded_returns_the_same_array():
    grads = np.array([-FLOAT32_MAX, FLOAT32_MAX], np.float32)
    assert UNBOUNDED.clipped(grads) is grads


def test_nan_stays_nan():
    assert np.isnan(Bounds(-1.0, 1.0).clipped(np.array([np.nan], np.float32))).all()
