from __future__ import annotations

import pytest

from benchmarks import kernels


@pytest.mark.parametrize(("memory_bytes", "gigabytes"), [(4e9, 2.0), (24e9, 12.0), (1e12, 12.0)])
def test_tables_take_half_of_the_memory_or_what_they_need(memory_bytes: float, gigabytes: float, monkeypatch) -> None:
    values = {"SC_PAGE_SIZE": 4000, "SC_PHYS_PAGES": memory_bytes / 4000}
    monkeypatch.setattr(kernels.os, "sysconf", values.__getitem__)
    assert kernels.gigabytes_here() == gigabytes
