"""Weight decay: a term that is added to a gradient before the update rule sees it."""

from __future__ import annotations

from typing import NamedTuple


class Decay(NamedTuple):
    """Coefficients of the regularizer `l1 sum |p| + l2 / 2 sum p^2`: the gradient becomes g + l1 sign(p) + l2 p.

    Lazy: a row decays only when it is pushed.
    """

    l1: float = 0.0
    l2: float = 0.0
