from __future__ import annotations

import os

from fleet_sparse import machine_memory


def test_total_is_at_least_the_physical_memory() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert physical <= machine_memory.total_bytes()


def test_what_is_left_is_less_than_the_total() -> None:
    assert 0 < machine_memory.available_bytes() < machine_memory.total_bytes()
