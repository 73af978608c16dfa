from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.pserver.tables.reply_memory import ReplyMemory

SLAB = 2 << 20


def address(array: NDArray[np.float32]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_lent_again_once_nothing_refers_to_it() -> None:
    memory = ReplyMemory()
    lent = memory.lend(1000)
    first = address(lent)
    rows = lent.reshape(10, 100)
    del lent
    assert address(memory.lend(10)) != first
    buffer = rows.data.cast("B")  # as a frame refers to it
    del rows
    assert address(memory.lend(10)) != first
    del buffer
    assert address(memory.lend(10)) == first


def test_more_than_a_slab_gets_memory_of_its_own() -> None:
    memory = ReplyMemory()
    assert memory.lend(SLAB + 1).shape == (SLAB + 1,)
    kept = [memory.lend(SLAB) for _ in range(4)]
    assert len({address(lent) for lent in kept}) == 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, SLAB // 3), st.integers(0, 9)), max_size=40))
def test_no_two_lent_arrays_overlap(calls: list[tuple[int, int]]) -> None:
    memory, held = ReplyMemory(), {}
    for number, (num_values, slot) in enumerate(calls):
        held.pop(slot, None)
        held[slot] = memory.lend(num_values)
        held[slot][:1] = held[slot][-1:] = number
        ranges = sorted((address(lent), address(lent) + lent.nbytes) for lent in held.values() if lent.size)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
