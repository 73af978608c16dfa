"""EntryPolicy: whether an id without a row gets one, as a value of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..jit import FLOAT32_IN, FLOAT64_IN, INT64, INT64_IN, UINT8S

COUNTS, SHOW, CLICK = "counts", "show", "click"
STATISTICS = {COUNTS: np.dtype("<u4"), SHOW: np.dtype("<f4"), CLICK: np.dtype("<f4")}
"""Statistics of each id that a push may carry, with dtype, in the order of columns: how often the batch names it, its
shows, its clicks."""

SETS_OF_STATISTICS: tuple[tuple[str, ...], ...] = ((), (COUNTS,), (SHOW, CLICK), (COUNTS, SHOW, CLICK))
"""The sets of statistics that a policy may read together."""

EntryKernel = Callable[
    [NDArray[np.int64], NDArray[np.float32], int, NDArray[np.float64], NDArray[np.uint8]],
    None,
]
"""`kernel(hashes, totals, width, scalars, admitted)`; all arrays flat.

Id `i` has the hash `hashes[i]`, and earlier pushes said `totals[i * width : +width]` of it: one number for each of the
policy's statistics, in their order. The kernel sets `admitted[i]` to 1 or 0.
"""

KERNEL_TYPES = (INT64_IN, FLOAT32_IN, INT64, FLOAT64_IN, UINT8S)
"""Declared argument types of the kernel of every policy."""


def _no_fault(settings: dict[str, float]) -> str:
    return ""


class EntryPolicy(NamedTuple):
    """Decides which ids without a row get one. The decision depends on the hash of the id and on earlier pushes alone.

    Attributes:
        name: Name in table specs and snapshots. A policy whose meaning changes needs another name.
        statistics: Those of `STATISTICS` that the policy reads, in that order. Pushes carry them; they are added up for
            each id without a row.
        defaults: (name, default) of each setting, sorted by name.
        scalars: Function from the settings to the kernel's scalars.
        kernel: Decides.
        find_fault: Function from the settings to what is wrong with them, as `threshold is -1, should be at least 0`;
            empty if nothing is.
        largest_total: Function from the settings to the largest total that the policy tells from larger ones. None: it
            tells all apart, and a sketch cannot hold them.
    """

    name: str
    statistics: tuple[str, ...]
    defaults: tuple[tuple[str, float], ...]
    scalars: Callable[[dict[str, float]], NDArray[np.float64]]
    kernel: EntryKernel
    find_fault: Callable[[dict[str, float]], str] = _no_fault
    largest_total: Callable[[dict[str, float]], float] | None = None
