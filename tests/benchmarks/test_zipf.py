from __future__ import annotations

import numpy as np
import pytest

from benchmarks.baselines import zipf
from fleet_sparse.tools.capacity.zipf import distinct_of_zipf

NUM_FIELDS, BATCH = 26, 512


def test_a_batch_has_as_many_distinct_ids_as_the_model_says() -> None:
    ranks = zipf.sampler()(np.random.default_rng(0), (BATCH, NUM_FIELDS))
    distinct = sum(len(np.unique(of_field)) for of_field in ranks.T)
    assert distinct == pytest.approx(NUM_FIELDS * distinct_of_zipf(BATCH, 10_000_000, 1.1), rel=0.02)


def test_ranks_are_as_frequent_as_their_power_says() -> None:
    ranks = zipf.sampler(num_ids=3, power=1.0)(np.random.default_rng(0), (11_000,))
    assert np.bincount(ranks).tolist() == pytest.approx([6000, 3000, 2000], rel=0.05)
