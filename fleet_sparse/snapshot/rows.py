"""Rows as they go between stores, snapshots and captures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rows(NamedTuple):
    """Rows of one table with all that belongs to them.

    Attributes:
        ids: `(n,)`.
        rows: `(n, dim)`.
        states: `(n, num_states, dim)`, their optimizer state.
        last_days: `(n,)`, the day of each row's last push; None if the table counts no days.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    states: NDArray[np.float32]
    last_days: NDArray[np.uint16] | None

    def with_days(self, days: int) -> Rows:
        """As rows of a table that has seen so many days: rows that were saved before the first one were pushed then."""
        if days and self.last_days is None:
            return self._replace(last_days=np.zeros(len(self.ids), np.uint16))
        return self
