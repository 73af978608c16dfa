from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core import reused_memory
from fleet_sparse.core.reused_memory import UNUSED, ReusedMemory, find_by_references

reuses = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="this build of Python counts no references"
)

VIEWS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "array": lambda array: array,
    "view": lambda array: array[3:5],
    "view of a view": lambda array: array[2:].reshape(-1, 2)[4:].T,
    "memoryview": lambda array: array.data,
    "part of a memoryview": lambda array: array.data.cast("B")[8:16],
    "view of a memoryview": lambda array: np.frombuffer(array[2:].data, np.uint8)[4:][::2],
    "memoryview of a view of a view": lambda array: memoryview(array[2:][3:].view(np.uint8)),
    "read-only view": lambda array: np.broadcast_to(array[:1], (4, 1)),
    "container": lambda array: {"columns": [array[1:]]},
    "closure": lambda array: lambda: array,
}


def address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("name", VIEWS)
def test_memory_with_something_alive_is_never_lent_again(name: str) -> None:
    memory = ReusedMemory(np.int64, num_kept=3)
    lent = memory.lend(100)
    first, _held = address(lent), VIEWS[name](lent)
    del lent
    others = [memory.lend(100) for _ in range(10)]
    assert first not in map(address, others)


@reuses
@pytest.mark.parametrize("name", VIEWS)
def test_memory_is_lent_again_when_the_last_reference_ends(name: str) -> None:
    memory = ReusedMemory(np.int64)
    lent = memory.lend(100)
    first, held = address(lent), VIEWS[name](lent)
    del lent
    assert address(memory.lend(100)) != first
    del held
    assert address(memory.lend(100)) == first


@reuses
def test_a_reference_that_another_thread_drops_counts() -> None:
    memory = ReusedMemory(np.int64)
    lent = [memory.lend(100)]
    first = address(lent[0])
    thread = threading.Thread(target=lent.clear)
    thread.start()
    thread.join()
    assert address(memory.lend(100)) == first


def test_two_threads_are_never_lent_the_same_memory() -> None:
    memory, wrong = ReusedMemory(np.int64, num_kept=4), list[int]()

    def work(number: int) -> None:
        for _ in range(2000):
            lent = memory.lend(64)
            lent[:64] = number
            part = lent[10:20]
            del lent
            if (part != number).any():
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@reuses
def test_of_arrays_in_use_only_the_newest_are_kept() -> None:
    memory = ReusedMemory(np.int64, num_kept=2)
    held = [memory.lend(100) for _ in range(5)]
    last = {address(array) for array in held[-2:]}
    held.clear()
    assert {address(array) for array in (memory.lend(100), memory.lend(100))} <= last


@pytest.mark.parametrize(("num_values", "size"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 65)])
def test_sizes_are_powers_of_two_up_to_the_largest(num_values: int, size: int) -> None:
    lent = ReusedMemory(np.float32, smallest=16, largest=64).lend(num_values)
    assert (lent.shape, lent.dtype) == ((size,), np.float32)


@reuses
def test_an_array_that_only_its_list_holds_is_unused() -> None:
    arrays = [np.empty(4), np.empty(4)]
    part = arrays[1][1:]
    assert [find_by_references(arrays, UNUSED, index, 2) for index in (0, 1)] == [0, -1]
    del part
    assert find_by_references(arrays, UNUSED, 1, 2) == 1


def test_without_reference_counts_memory_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")
    spec = spec_from_file_location("reused_memory_without_gil", reused_memory.__file__)
    assert spec is not None
    assert spec.loader is not None
    without = module_from_spec(spec)
    spec.loader.exec_module(without)
    assert without.find_by_references([np.empty(1)], without.UNUSED, 0, 1) == -1
    memory = without.ReusedMemory(np.int64, num_kept=2)
    lent = memory.lend(100)
    lent[:] = 7
    del lent
    arrays = [memory.lend(100) for _ in range(4)]
    assert len({address(array) for array in arrays}) == 4
