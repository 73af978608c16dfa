from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.models import synthetic


def test_shapes_are_those_of_criteo() -> None:
    batch = synthetic.draw(16, seed=3).batch
    assert (batch.ids.shape, batch.dense.shape, batch.label.shape) == ((16, 26), (16, 13), (16, 1))


def test_clicks_are_rare() -> None:
    assert 0.1 < synthetic.draw(20_000, seed=0).batch.label.mean() < 0.5


def test_another_seed_is_another_truth() -> None:
    ids = [synthetic.draw(1000, seed=seed).batch.ids for seed in (0, 1)]
    assert not np.isin(ids[0], ids[1]).any()


def test_fields_are_of_their_sizes_and_follow_zipf() -> None:
    ids = synthetic.draw(50_000, seed=0).batch.ids
    _, smallest = np.unique(ids[:, 0], return_counts=True)
    assert len(smallest) == 10
    _, counts = np.unique(ids[:, 25], return_counts=True)
    first, *_, tenth = np.sort(counts)[::-1][:10]
    assert len(counts) > 10_000
    assert first / tenth == pytest.approx(10**synthetic.EXPONENT, rel=0.35)
