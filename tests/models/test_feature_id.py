from __future__ import annotations

import numpy as np

from fleet_sparse.models.feature_id import feature_ids


def test_an_id_never_changes() -> None:
    # Saved tables hold these ids.
    assert feature_ids("carrier", ["UA", ""]).tolist() == [-8535566172315222215, -3000839770393417331]


def test_the_field_is_part_of_the_id() -> None:
    assert feature_ids("C1", ["68fd1e64"]) != feature_ids("C2", ["68fd1e64"])


def test_all_64_bits_are_used() -> None:
    ids = feature_ids("C1", [str(value) for value in range(1000)])
    assert len(np.unique(ids)) == 1000
    share_of_ones = np.unpackbits(ids.view(np.uint8)).reshape(-1, 64).mean(0)
    assert share_of_ones.min() > 0.4
    assert share_of_ones.max() < 0.6
