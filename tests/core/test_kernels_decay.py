from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.kernels_decay import add_decay


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.25, 0.0), (0.0, 0.125), (0.25, 0.125)])
@pytest.mark.parametrize("stride", [3, 7])
def test_decay_is_added_to_the_gradients_of_the_rows_named(l1, l2, stride):
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((5, stride)).astype(np.float32)
    rows[2, :2] = 0
    indices, grads = np.array([4, 2]), rng.standard_normal((2, 3)).astype(np.float32)
    before, out = rows.copy(), np.empty(6, np.float32)
    add_decay(rows.reshape(-1), stride, indices, grads.reshape(-1), 3, np.array([l1, l2], np.float32), out)
    values = rows[indices, :3]
    expected = grads + (np.float32(l1) * np.sign(values) + np.float32(l2) * values)
    assert (out.reshape(2, 3) == expected).all()
    assert (rows == before).all()
