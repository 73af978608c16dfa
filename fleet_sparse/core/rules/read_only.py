"""No rule: what a job registers that only reads. A push to such a table is refused."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .rule import UpdateRule


def _initial_state(hyperparameters: dict[str, float]) -> tuple[float, ...]:
    return ()


def _scalars(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    return np.empty(0, np.float32)


read_only = UpdateRule("read_only", 0, (), _initial_state, _scalars, None, trains=False)
