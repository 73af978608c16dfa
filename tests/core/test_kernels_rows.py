from __future__ import annotations

import numpy as np

from fleet_sparse.core.kernels_rows import move_rows


def test_rows_move_whole_and_those_that_are_removed_do_not():
    values = np.arange(12, dtype=np.float32)
    move_rows(values, 2, 3, np.array([1, -1, 0]))
    assert values.reshape(6, 2)[:3].tolist() == [[10, 11], [6, 7], [4, 5]]
