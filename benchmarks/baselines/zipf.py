"""Ranks by a power law, as ids in logs of clicks have. Needs NumPy alone: baselines import it in their own venvs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def sampler(num_ids: int = 10_000_000, power: float = 1.1) -> Callable[[np.random.Generator, tuple[int, ...]], Any]:
    """Draws ranks from 0 on, int64, that one of rank `i` of `num_ids` has with a chance like `(i + 1) ** -power`.

    What is returned takes a generator and the shape of what it draws. It is bounded: NumPy's `zipf` is not, and taken
    modulo the number of ids it would draw the frequent ones too rarely.
    """
    edges = np.cumsum(np.arange(1, num_ids + 1, dtype=np.float64) ** -power)
    return lambda rng, shape: np.searchsorted(edges, rng.random(shape) * edges[-1])
