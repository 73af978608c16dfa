"""CountedUpdates: which updates the workers of a job have made, and whether rows have them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.row_bound import RowBound

NUM_IDS = 20
EVERY_ID = np.arange(NUM_IDS, dtype=np.int64)


class CountedUpdates:
    """The updates of a job in which one of worker j adds 1 to value j of a row, so that each row says which it has.

    Args:
        bound: What rows may lack; None for nothing.
        num_workers: Number of workers.
        seed: Seed of the batches.
        weight: What the job makes of a gradient.

    Attributes:
        num_made: `(NUM_IDS, num_workers)`.
        rng: Chooses the batches.
    """

    def __init__(self, bound: RowBound | None, num_workers: int, seed: int, weight: float = 1.0) -> None:
        self._bound, self._num_workers, self._size = bound, num_workers, 1 / weight
        self.num_made = np.zeros((NUM_IDS, num_workers), np.int64)
        self.rng = np.random.default_rng(seed)
        weights = 1.0 / np.arange(1, NUM_IDS + 1)
        self._frequencies = weights / weights.sum()

    def batch(self) -> NDArray[np.int64]:
        """Chooses distinct ids."""
        ids = self.rng.choice(NUM_IDS, self.rng.integers(0, 9), replace=False, p=self._frequencies)
        return ids.astype(np.int64)

    def grads(self, worker: int, num_ids: int) -> NDArray[np.float32]:
        """Returns the gradients of an update of a worker, for a learning rate of 1."""
        grads = np.zeros((num_ids, self._num_workers), np.float32)
        grads[:, worker] = -self._size
        return grads

    def note(self, worker: int, ids: NDArray[np.int64]) -> None:
        """Takes note that a worker made an update of these rows."""
        self.num_made[ids, worker] += 1

    def check(self, worker: int, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Checks rows that a worker reads to train on them."""
        self.check_own(worker, ids, rows)
        self.check_others(ids, rows)

    def check_own(self, worker: int, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Checks that rows have all updates of the worker that reads them, each once."""
        np.testing.assert_array_equal(rows[:, worker], self.num_made[ids, worker])

    def check_others(self, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Checks what rows lack, of which the reader has all of its own updates."""
        made = self.num_made[ids]
        if self._bound is not None and self._bound.drift is not None:
            assert (made - rows <= self._bound.drift).all()
            return
        num_lacked = (made - rows).sum(axis=1)
        most = 0 if self._bound is None or self._bound.lag is None else self._bound.lag
        assert (num_lacked <= most).all()
        if self._bound is not None and self._bound.share is not None:
            assert (num_lacked <= self._bound.share * made.sum(axis=1)).all()
