"""Rows that travel in half the bytes, in real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from support.jobs import numbers, outputs_of

NUM_STEPS = 60


class Job(NamedTuple):
    """The losses of a worker, and the bytes that it sent and received."""

    losses: list[float]
    num_bytes: float


def trained(directory: Path, rows_dtype: str) -> Job:
    """One worker on two pservers."""
    directory.mkdir()
    (output,) = outputs_of("rows_dtype.py", directory, 1, FLEET_SPARSE_ROWS_DTYPE=rows_dtype)
    (num_bytes,) = numbers("bytes", output)
    return Job(list(map(float.fromhex, re.findall(r"^loss (\S+)", output, re.MULTILINE))), num_bytes)


@pytest.mark.guarantee("R4")
def test_bfloat16_rows_train_like_float32_in_half_the_bytes(tmp_path: Path) -> None:
    exact, rounded = trained(tmp_path / "float32", "float32"), trained(tmp_path / "bfloat16", "bfloat16")
    assert len(rounded.losses) == NUM_STEPS
    assert np.mean(rounded.losses[-10:]) < 0.2 * rounded.losses[0]
    difference = np.abs(np.subtract(rounded.losses, exact.losses)).max()
    assert 1e-6 < difference < 5e-3
    # A row has 256 bytes or 128, an id 8; all other bytes of a step are equal.
    assert 0.5 < rounded.num_bytes / exact.num_bytes < 0.57


@pytest.mark.slow
@pytest.mark.guarantee("R7")
def test_bfloat16_dense_gradients_train_all_workers_alike(tmp_path: Path) -> None:
    variables = {"DENSE": "pservers", "OPTIMIZER": "Adagrad", "STEPS": "40,40"}
    exact, _ = outputs_of("all_reduce.py", tmp_path, **variables)
    rounded = outputs_of("all_reduce.py", tmp_path, **variables, FLEET_SPARSE_DENSE_GRADS_DTYPE="bfloat16")
    first, second = (re.findall(r"^values .*$", output, re.MULTILINE) for output in rounded)
    assert len(first) == 4
    assert first == second, "both workers have the same values, bit by bit"
    losses = [list(map(float.fromhex, re.findall(r"^loss (\S+)", each, re.MULTILINE))) for each in (exact, rounded[0])]
    assert 1e-6 < np.abs(np.subtract(*losses)).max() < 5e-3
