"""Admission by count: an id gets a row once earlier pushes named it often enough (Paddle's `CountFilterEntry`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .policy import COUNTS, KERNEL_TYPES, EntryPolicy


def _scalars(settings: dict[str, float]) -> NDArray[np.float64]:
    return np.array([settings["threshold"]], np.float64)


def _find_fault(settings: dict[str, float]) -> str:
    threshold = settings["threshold"]
    return (
        "" if threshold >= 0 and threshold == int(threshold) else f"threshold is {threshold:g}, should be 0, 1, 2 ..."
    )


@kernel(*KERNEL_TYPES)
def _admit(
    hashes: NDArray[np.int64],
    totals: NDArray[np.float32],
    width: int,
    scalars: NDArray[np.float64],
    admitted: NDArray[np.uint8],
) -> None:
    for i in range(np.uint64(hashes.shape[0])):
        admitted[i] = totals[i] >= scalars[0]


count_filter = EntryPolicy(
    name="count_filter",
    statistics=(COUNTS,),
    defaults=(("threshold", 1.0),),
    scalars=_scalars,
    kernel=_admit,
    find_fault=_find_fault,
    largest_total=lambda settings: settings["threshold"],
)
