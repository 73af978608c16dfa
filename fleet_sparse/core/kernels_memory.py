"""Kernel that makes the system back memory with pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intrinsics import touch
from .jit import INT64, UINT8S, kernel

_PAGE = np.uint64(4096)


@kernel(UINT8S, INT64, INT64)
def touch_pages(memory: NDArray[np.uint8], begin: int, end: int) -> None:
    """Touches every page of `memory[begin:end]` without changing it; `begin` is a multiple of 4096."""
    for at in range(np.uint64(begin), np.uint64(end), _PAGE):
        touch(memory, at)
