"""That LLVM makes of hot kernels what they are written for: read from their assembly, which has no timing in it."""

from __future__ import annotations

import platform
import re

import numba
import pytest

from fleet_sparse.core.kernels_batch import all_finite, segment_sum
from fleet_sparse.core.kernels_index import find
from fleet_sparse.core.kernels_rows import gather_or_initialize
from fleet_sparse.core.rules import RULES
from fleet_sparse.warm_up import warm_up

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of another CPU have other names"),
    pytest.mark.skipif(bool(numba.config.BOUNDSCHECK), reason="a check of each index stands in the way"),
]


def instructions_of(kernel):
    """The names of a kernel's instructions; of symbols that it calls too."""
    warm_up()
    # Anew: code from the cache cannot be looked at.
    compiled = numba.njit(nogil=True, error_model="numpy")(kernel.py_func)
    (types,) = kernel.nopython_signatures
    compiled.compile(types)
    (assembly,) = compiled.inspect_asm().values()
    return set(re.findall(r"^\s+([a-z]\w+)", assembly, re.MULTILINE)) | set(re.findall(r"\bmem\w+", assembly))


def has(instructions, pattern):
    return any(re.fullmatch(pattern, each) for each in instructions)


@pytest.mark.parametrize(("rule", "operations"), [("sgd", ["mul", "sub"]), ("adagrad", ["sqrt", "div"])])
def test_updates_are_of_several_floats_at_once_and_fetch_ahead(rule, operations) -> None:
    instructions = instructions_of(RULES[rule].kernel)
    assert [has(instructions, f"v?{operation}ps") for operation in operations] == [True] * len(operations)
    assert has(instructions, "prefetch.*")


def test_gradients_of_one_row_are_summed_several_floats_at_once() -> None:
    assert has(instructions_of(segment_sum), "v?addps")


def test_values_are_checked_several_at_once() -> None:
    assert has(instructions_of(all_finite), "v?p(max|cmpgt).*")


def test_rows_are_copied_whole_and_fetched_ahead() -> None:
    instructions = instructions_of(gather_or_initialize)
    assert "memcpy" in instructions
    assert has(instructions, "prefetch.*")


def test_ids_are_looked_up_with_their_cells_fetched_ahead() -> None:
    assert has(instructions_of(find), "prefetch.*")
