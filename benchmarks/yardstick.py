"""Yardstick: how long a fixed piece of work takes at the moment, on a machine whose speed others change.

The cores of a shared host are slower by half for seconds or minutes while its other guests use the same caches and
memory, and no counter of the guest shows it. What is timed between two readings can be brought to one speed.
"""

from __future__ import annotations

import os
import time

import numpy as np

from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.table import TableSpec
from fleet_sparse.core.warm_up import warm_up
from fleet_sparse.pserver.storage.table_store import TableStore

_ROWS = 300_000
_IDS = 3000
_COPIED_BYTES = 1 << 20
_ADDED_VALUES = 1 << 14
_ADDED = 4000
_REPEATS = 15


class Yardstick:
    """Kernels of a store past the caches, copies, arithmetic and Python; on each core in turn.

    Nothing of it has threads of its own, whatever `OMP_NUM_THREADS` says.
    """

    def __init__(self) -> None:
        warm_up()
        self._store = TableStore(TableSpec(name="yardstick", dim=16, rule="adagrad", initializer=uniform(-0.01, 0.01)))
        self._rng = np.random.default_rng(0)
        self._rows = np.full((_IDS, 16), 0.01, np.float32)
        self._copied = np.zeros(_COPIED_BYTES, np.uint8), np.ones(_COPIED_BYTES, np.uint8)
        self._values = np.ones(_ADDED_VALUES, np.float32)
        for begin in range(0, _ROWS, _IDS):
            self._store.push(np.arange(begin, begin + _IDS), self._rows, 0.05, 1)

    def read(self) -> float:
        """Seconds of CPU of one piece: the median of a few on each core, on average over the cores.

        The thread that calls it is bound to one core meanwhile, and so are threads and processes that it starts then.
        """
        cores = os.sched_getaffinity(0)
        try:
            return float(np.mean([self._on(core) for core in cores]))
        finally:
            os.sched_setaffinity(0, cores)

    def _on(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        return float(np.median([self._piece() for _ in range(_REPEATS)]))

    def _piece(self) -> float:
        ids = self._rng.integers(0, _ROWS, _IDS)
        begun = time.thread_time()
        self._store.pull(ids, self._rows)
        self._store.push(ids, self._rows, 0.0, 2)
        for _ in range(4):
            np.copyto(*self._copied)
            for _ in range(16):
                np.add(self._values, 1.0, out=self._values)
        total = 0
        for number in range(_ADDED):
            total += number
        return time.thread_time() - begun
