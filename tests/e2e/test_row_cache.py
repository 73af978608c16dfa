"""Workers that cache rows: real pservers, real Paddle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from support.jobs import outputs_of
from support.saves import saved_rows


@pytest.mark.parametrize(
    ("mode", "look_ahead"),
    [
        ("sync", ""),
        ("async", "1"),
        *(pytest.param(*values, marks=pytest.mark.slow) for values in [("sync", "1"), ("async", ""), ("lag", "1")]),
    ],
)
@pytest.mark.guarantee("H7")
@pytest.mark.guarantee("H8")
def test_cached_rows_have_own_updates_and_at_a_barrier_all(tmp_path: Path, mode: str, look_ahead: str) -> None:
    outputs = outputs_of("cached.py", tmp_path, MODE=mode, LOOK_AHEAD=look_ahead)
    assert all("ended well" in output for output in outputs)
    made = np.stack([np.load(tmp_path / f"made{worker}.npy") for worker in range(2)], axis=1)
    spec = TableSpec(name="counter", dim=2, rule="sgd", initializer=constant(0.0))
    np.testing.assert_array_equal(saved_rows(tmp_path / "model", spec, np.arange(len(made))), made)


@pytest.mark.parametrize("clip", ["", "1"], ids=["whole", "clipped"])
@pytest.mark.guarantee("H3")
def test_copies_are_trained_by_the_mean_of_gradients(tmp_path: Path, clip: str) -> None:
    outputs = outputs_of("cached_own_rows.py", tmp_path, CLIP=clip)
    assert all("ended well" in output for output in outputs)
