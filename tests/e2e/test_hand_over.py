"""Jobs of one and of several workers that continue from each other's snapshots, in real processes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.tools.snapshots.diff import diff
from support.jobs import numbers, outputs_of


def losses(directory: Path, steps: str, *, save: str, **options: Any) -> list[float]:
    """Losses of worker 0 in a job that ends with a save."""
    return numbers("loss", outputs_of("hand_over.py", directory, STEPS=steps, SAVE=save, **options)[0])


def are_equal(directory: Path, *names: str) -> bool:
    """Returns whether two snapshots are equal bit by bit."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(open_content(str(directory / name))) for name in names)
        return diff(first, second).is_equal


@pytest.mark.guarantee("D4")
def test_one_worker_and_two_take_over_from_each_other(tmp_path: Path) -> None:
    whole = losses(tmp_path, "0,12", num_workers=1, num_servers=1, save="whole")
    parts = losses(tmp_path, "0,4", num_workers=1, num_servers=2, save="one")
    parts += losses(tmp_path, "4,8", num_workers=2, num_servers=3, save="two", load="one")
    parts += losses(tmp_path, "8,12", num_workers=1, num_servers=1, save="end", load="two")
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.guarantee("D4")
def test_snapshots_of_one_worker_and_of_two_are_equal_bit_by_bit(tmp_path: Path) -> None:
    losses(tmp_path, "0,4", num_workers=1, num_servers=2, save="one")
    losses(tmp_path, "0,0", num_workers=2, num_servers=3, save="two", load="one")
    losses(tmp_path, "0,0", num_workers=1, num_servers=1, save="end", load="two")
    assert are_equal(tmp_path, "one", "two")
    assert are_equal(tmp_path, "two", "end")
