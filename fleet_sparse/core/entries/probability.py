"""Admission by chance: a hash of id and seed decides, once and for all (Paddle's `ProbabilityEntry`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ids import GOLDEN_GAMMA
from ..jit import kernel
from ..kernels_hash import splitmix64
from .policy import KERNEL_TYPES, EntryPolicy

_SHIFT = np.uint64(11)  # leaves 53 bits, which a float64 holds


def _scalars(settings: dict[str, float]) -> NDArray[np.float64]:
    return np.array([settings["probability"] * 2.0**53, settings["seed"]], np.float64)


def _find_fault(settings: dict[str, float]) -> str:
    if not 0.0 <= settings["probability"] <= 1.0:
        return f"probability is {settings['probability']:g}, should be 0 to 1"
    seed = settings["seed"]
    return (
        "" if 0 <= seed < 2**53 and seed == int(seed) else f"seed is {seed:g}, should be an integer from 0 to 2^53 - 1"
    )


@kernel(*KERNEL_TYPES)
def _admit(
    hashes: NDArray[np.int64],
    totals: NDArray[np.float32],
    width: int,
    scalars: NDArray[np.float64],
    admitted: NDArray[np.uint8],
) -> None:
    stream = splitmix64(np.uint64(np.int64(scalars[1])) + GOLDEN_GAMMA)
    for i in range(np.uint64(hashes.shape[0])):
        # Hashed again, because the upper bits of the hash choose the shard.
        admitted[i] = np.float64(splitmix64(np.uint64(hashes[i]) ^ stream) >> _SHIFT) < scalars[0]


probability = EntryPolicy(
    name="probability",
    statistics=(),
    defaults=(("probability", 0.5), ("seed", 0.0)),
    scalars=_scalars,
    kernel=_admit,
    find_fault=_find_fault,
)
