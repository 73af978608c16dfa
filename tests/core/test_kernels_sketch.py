"""Kernels of a sketch, against a dict of totals."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.ids import NUM_BUCKETS, hash_ids
from fleet_sparse.core.kernels_sketch import LINE_BYTES, add_counts, find_lines, read_totals


class Sketch:
    """A sketch of all buckets with one line each."""

    def __init__(self, lines_per_bucket: int = 1) -> None:
        self._per_bucket = lines_per_bucket
        self._first = np.arange(NUM_BUCKETS) * lines_per_bucket
        self._counters = np.zeros(NUM_BUCKETS * lines_per_bucket * LINE_BYTES, np.uint8)

    def lines(self, hashes: NDArray[np.int64]) -> NDArray[np.int64]:
        lines = np.empty(len(hashes), np.int64)
        find_lines(hashes, self._first, self._per_bucket, lines)
        return lines

    def totals(self, hashes: NDArray[np.int64]) -> NDArray[np.float32]:
        totals = np.empty(len(hashes), np.float32)
        read_totals(self._counters, hashes, self.lines(hashes), totals)
        return totals

    def add(self, hashes: NDArray[np.int64], counts: NDArray[np.float32]) -> None:
        add_counts(self._counters, hashes, self.lines(hashes), counts)


def hashes_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return hash_ids(ids, 11).view(np.int64)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 200)), max_size=60))
def test_a_total_is_never_too_small_and_ends_at_255(pushes: list[tuple[int, int]]) -> None:
    sketch, model = Sketch(), dict.fromkeys(range(31), 0)
    for id_, count in pushes:
        sketch.add(hashes_of(np.array([id_])), np.array([count], np.float32))
        model[id_] = min(model[id_] + count, 255)
    totals = sketch.totals(hashes_of(np.arange(31)))
    assert (totals >= [model[id_] for id_ in range(31)]).all()
    assert totals.max(initial=0) <= 255


def test_few_totals_are_too_large_at_8_ids_for_each_line() -> None:
    ids = np.random.default_rng(1).integers(-(2**63), 2**63, 8 * NUM_BUCKETS)
    sketch = Sketch()
    sketch.add(hashes_of(ids), np.ones(len(ids), np.float32))
    assert (sketch.totals(hashes_of(ids)) > 1).mean() < 0.03


def test_lines_of_a_bucket_are_all_used() -> None:
    sketch = Sketch(5)
    lines = sketch.lines(hashes_of(np.arange(200_000)))
    assert (lines // 5 == hash_ids(np.arange(200_000), 11) >> np.uint64(50)).all()
    assert set((lines % 5).tolist()) == set(range(5))
