from __future__ import annotations

import numpy as np

from fleet_sparse.core.kernels_clocks import advance_clocks, measure_moves


def test_clocks_are_counted_modulo_2_32():
    clocks = np.array([5, 0xFFFF_FFFF, 7], np.uint32)
    advance_clocks(clocks, np.array([1, 0]), np.array([3, 4], np.uint32))
    assert clocks.tolist() == [9, 2, 7]


def test_a_row_moved_as_far_as_its_value_that_moved_most():
    rows, before, moves = np.arange(12, dtype=np.float32), np.empty(4, np.float32), np.empty(2, np.float32)
    before[:] = [8.5, 12, 0, np.nan]  # a stride of 4, of which 2 are the row
    measure_moves(rows, 4, np.array([2, 0]), before, 2, moves)
    assert moves.tolist() == [3.0, np.inf]
