"""Progress: what a commit means for the steps of a job, besides its mutations. A log needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tables.mutations import Push


class Progress(NamedTuple):
    """What a commit completes."""

    step: int = 0
    """Step that the clients of the commit have completely pushed with it; 0 for none."""
    prepared: Sequence[Push] | None = None
    """The merged pushes of a step that all workers have prepared with it; None if it is no such commit."""
    factors: Mapping[int, NDArray[np.float32]] | None = None
    """Factors by table id; the mutations are the prepared pushes times these."""
    rejoins: bool = False
    """True if all workers have left, and rejoin with it."""


NO_PROGRESS = Progress()
