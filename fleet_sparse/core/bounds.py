"""Bounds: the interval that gradients are clipped to by value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .initializer import FLOAT32_MAX


class Bounds(NamedTuple):
    """Least and largest value of a gradient, both finite in float32. The defaults clip nothing.

    Merged gradients are clipped before weight decay and update rule see them.
    """

    low: float = -FLOAT32_MAX
    high: float = FLOAT32_MAX

    def clipped(self, grads: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns clipped gradients: a new array, or `grads` itself if these are the default bounds.

        Args:
            grads: Finite gradients of any shape. Clipping would hide an infinite one.
        """
        if self == UNBOUNDED:
            return grads
        return np.clip(grads, np.float32(self.low), np.float32(self.high))


UNBOUNDED = Bounds()
