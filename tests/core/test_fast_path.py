"""LLVM vectorizes hot kernels and keeps their prefetches: read from their assembly, so no timing is involved."""

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
    pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of other CPUs have other names"),
    pytest.mark.skipif(bool(numba.config.BOUNDSCHECK), reason="checks of bounds prevent vectorization"),
]


def instructions_of(kernel):
    """Names of a kernel's instructions and of the memory functions that it calls."""
    warm_up()
    # Compiled again: code from the cache cannot be inspected.
    compiled = numba.njit(nogil=True, error_model="numpy")(kernel.py_func)
    (types,) = kernel.nopython_signatures
    compiled.compile(types)
    (assembly,) = compiled.inspect_asm().values()
    return set(re.findall(r"^\s+([a-z]\w+)", assembly, re.MULTILINE)) | set(re.findall(r"\bmem\w+", assembly))


def has(instructions, pattern):
    return any(re.fullmatch(pattern, each) for each in instructions)


@pytest.mark.parametrize(("rule", "operations"), [("sgd", ["mul", "sub"]), ("adagrad", ["sqrt", "div"])])
def test_updates_are_vectorized_and_prefetch(rule, operations) -> None:
    instructions = instructions_of(RULES[rule].kernel)
    assert [has(instructions, f"v?{operation}ps") for operation in operations] == [True] * len(operations)
    assert has(instructions, "prefetch.*")


def test_sums_of_gradients_are_vectorized() -> None:
    assert has(instructions_of(segment_sum), "v?addps")


def test_check_for_finite_values_is_vectorized() -> None:
    assert has(instructions_of(all_finite), "v?p(max|cmpgt).*")


def test_rows_are_copied_by_memcpy_and_prefetched() -> None:
    instructions = instructions_of(gather_or_initialize)
    assert "memcpy" in instructions
    assert has(instructions, "prefetch.*")


def test_cells_of_the_index_are_prefetched() -> None:
    assert has(instructions_of(find), "prefetch.*")
