"""Bounds: what clipping by value keeps gradients within."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .initializer import FLOAT32_MAX


class Bounds(NamedTuple):
    """The least and the largest value that a gradient may have, both float32; the defaults let every finite one pass.

    Each value of a merged gradient is moved to the nearer bound before weight decay and update rule see it.
    """

    low: float = -FLOAT32_MAX
    high: float = FLOAT32_MAX

    def clipped(self, grads: NDArray[np.float32]) -> NDArray[np.float32]:
        """Gradients inside the bounds: a fresh array, or `grads` itself if every finite value may pass.

        Args:
            grads: Of any shape, finite: an infinite value would be hidden.
        """
        if self == UNBOUNDED:
            return grads
        return np.clip(grads, np.float32(self.low), np.float32(self.high))


UNBOUNDED = Bounds()
