from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fleet_sparse.models.auc import auc


def brute_force(label: list[int], score: list[float]) -> float:
    pairs = [
        (p, n)
        for p, is_p in zip(score, label, strict=True)
        if is_p
        for n, is_n in zip(score, label, strict=True)
        if not is_n
    ]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-3, 3)), min_size=2, max_size=40))
def test_is_the_share_of_ordered_pairs_with_ties_as_halves(examples: list[tuple[int, int]]) -> None:
    label = [is_positive for is_positive, _ in examples]
    score = [float(value) for _, value in examples]
    assume(0 < sum(label) < len(label))
    assert auc(label, score) == pytest.approx(brute_force(label, score), abs=1e-12)


def test_takes_columns() -> None:
    label = np.array([[0], [1], [1]], np.float32)
    assert auc(label, np.array([[0.1], [0.9], [0.05]], np.float32)) == 0.5


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 .* 0 "):
        auc([1, 1], [0.1, 0.2])


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 "):
        auc([0, 1], [0.1, float("nan")])


def test_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 .* 3 "):
        auc([0, 1], [0.1, 0.2, 0.3])
