"""Rule of a client that only reads: pserver and client need not agree on the rule, and a push is refused."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .rule import UpdateRule, zeros


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    return np.empty(0, np.float32)


read_only = UpdateRule(
    name="read_only",
    num_states=0,
    defaults=(),
    initial_state=zeros(0),
    scalars=_scalars,
    kernel=None,
    trains=False,
)
