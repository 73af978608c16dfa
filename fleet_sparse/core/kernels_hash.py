"""Hash of ids, for kernels."""

from __future__ import annotations

import numpy as np

from .ids import GOLDEN_GAMMA, MIX_1, MIX_2
from .jit import inlined

_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@inlined
def splitmix64(state: np.uint64) -> np.uint64:
    """Returns the first output of a generator with this state; `ids.hash_ids` is `splitmix64(id ^ salt)`."""
    z = state + GOLDEN_GAMMA
    z = (z ^ (z >> _S30)) * MIX_1
    z = (z ^ (z >> _S27)) * MIX_2
    return z ^ (z >> _S31)
