from __future__ import annotations

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest

from fleet_sparse.core import kernels_batch, kernels_index, kernels_rows
from fleet_sparse.core.kernels_batch import all_finite, segment_sum
from fleet_sparse.warm_up import warm_up, without_linear_algebra

OUT_OF_BOUNDS = """
import numpy as np
from fleet_sparse.core.kernels_batch import segment_sum
segment_sum(np.ones(2, np.float32), np.array([0, 2]), 1, np.zeros(2, np.float32))
"""


def test_numba_boundscheck_checks_bounds():
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1"}
    run = subprocess.run(
        [sys.executable, "-c", OUT_OF_BOUNDS], check=False, capture_output=True, text=True, env=environment
    )
    assert "IndexError: index is out of bounds" in run.stderr


def test_kernels_release_the_gil_and_keep_ieee_arithmetic():
    for module in (kernels_batch, kernels_index, kernels_rows):
        kernels = [k for k in vars(module).values() if getattr(k, "targetoptions", {}).get("nogil")]
        assert kernels
        assert not any(kernel.targetoptions.get("fastmath") for kernel in kernels)


def test_view_of_bytes_at_an_odd_address_compiles_nothing():
    warm_up()
    frame = b"x" + np.array([1, 2, np.inf], np.float32).tobytes()
    column = np.frombuffer(memoryview(frame)[1:], np.float32)
    assert not column.flags.writeable
    assert not column.flags.aligned
    compiled = list(all_finite.signatures)
    assert all_finite(column) is False
    assert all_finite.signatures == compiled


def test_arguments_of_other_types_are_refused():
    warm_up()
    with pytest.raises(TypeError):
        segment_sum(np.zeros(4, np.float64), np.zeros(2, np.int64), 2, np.zeros(4, np.float32))
    with pytest.raises(TypeError):
        all_finite(np.zeros((2, 2), np.float32).T[::2])


def test_linear_algebra_is_hidden_from_a_block_only(monkeypatch):
    monkeypatch.delitem(sys.modules, "scipy.linalg", raising=False)
    with without_linear_algebra(), pytest.raises(ImportError):
        importlib.import_module("scipy.linalg")
    assert "scipy.linalg" not in sys.modules


def test_linear_algebra_that_is_imported_stays(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", sys)
    monkeypatch.setitem(sys.modules, "scipy.linalg", sys)
    with without_linear_algebra():
        assert importlib.import_module("scipy.linalg") is sys
    assert sys.modules["scipy.linalg"] is sys
