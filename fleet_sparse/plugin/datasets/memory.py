"""Memory: the lines of an `InMemoryDataset`, loaded and shuffled."""

from __future__ import annotations

import threading
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import PlanError

from .global_shuffle import Exchange, redistributed
from .lines import Lines, joined, no_lines
from .source import Source
from .text import Processes

_OF_EPOCH = 1
"""Keeps the random numbers of an epoch apart from those of a shuffle."""


class Memory:
    """The lines that a data set has loaded. For one thread at a time; other threads load.

    Attributes:
        lines: The lines; None before the first load and after `release`.
        order: Order in which they are read, as indices.
        num_shuffles: Number of shuffles so far, of which each has another order.
    """

    def __init__(self) -> None:
        self.lines: Lines | None = None
        self.order: NDArray[np.int64] = np.empty(0, np.int64)
        self.num_shuffles = 0
        self._loading: Loading | None = None

    def preload(self, source: Source, num_threads: int) -> None:
        """Begins to load.

        Raises:
            PlanError: Lines are loaded, or are being loaded.
        """
        if self._loading is not None:
            raise PlanError("InMemoryDataset: it is being loaded already. Call wait_preload_done() first")
        if self.lines is not None:
            raise PlanError(
                f"InMemoryDataset: it holds {self.lines.num_lines} lines already. Call release_memory() before it is "
                "loaded again"
            )
        self._loading = Loading(source, num_threads)

    def wait(self) -> None:
        """Waits until all is loaded.

        Raises:
            PlanError: Nothing is being loaded.
            DatasetError: A file or its `pipe_command` is wrong; nothing is loaded then.
        """
        if self._loading is None:
            raise PlanError("InMemoryDataset: nothing is being loaded. Call preload_into_memory() first")
        loading, self._loading = self._loading, None
        self.replace(loading.result())

    def replace(self, lines: Lines) -> None:
        """Holds other lines from now on, in their order."""
        self.lines = lines
        self.order = np.arange(lines.num_lines)

    def shuffle(self, seed: int, worker_index: int, epoch: int | None = None) -> None:
        """Shuffles the order; the seed, the number of shuffles before, and the worker decide it.

        With an epoch, the epoch decides it in place of the shuffles before.
        """
        if epoch is None:
            self._random(seed, worker_index).shuffle(self.order)
            return
        self.order = np.arange(len(self.order))
        np.random.default_rng([seed, epoch, worker_index, _OF_EPOCH]).shuffle(self.order)

    def shuffle_globally(self, seed: int, worker_index: int, num_workers: int, exchange: Exchange) -> None:
        """Sends each line to a worker, and shuffles what this one has then. All workers call it."""
        random, lines = self._random(seed, worker_index), self.held("global_shuffle")
        targets = random.integers(0, num_workers, lines.num_lines)
        self.replace(redistributed(lines, targets, worker_index, num_workers, exchange))
        random.shuffle(self.order)

    def _random(self, seed: int, worker_index: int) -> np.random.Generator:
        self.num_shuffles += 1
        return np.random.default_rng([seed, self.num_shuffles, worker_index])

    def release(self) -> None:
        """Drops all lines, and ends a load that still runs."""
        if self._loading is not None:
            self._loading.cancel()
        self.lines, self._loading = None, None
        self.order = np.empty(0, np.int64)

    def held(self, caller: str) -> Lines:
        """The lines.

        Raises:
            PlanError: None are loaded; the message names `caller`.
        """
        if self.lines is None:
            raise PlanError(f"{caller}: the InMemoryDataset is not loaded. Call load_into_memory() first")
        return self.lines


class Loading:
    """Threads that load files. The lines are in the order of the files, however many threads there are."""

    def __init__(self, source: Source, num_threads: int) -> None:
        self._source = source
        self._processes = Processes()
        self._lock = threading.Lock()  # guards all below
        self._left = list(enumerate(source.paths))[::-1]
        self._parts: dict[int, list[Lines]] = {}
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"fleet_sparse-load-{number}", daemon=True)
            for number in range(max(1, min(num_threads, len(source.paths))))
        ]
        finalize(self, self._processes.end)  # at the end of the interpreter, too
        for thread in self._threads:
            thread.start()

    def result(self) -> Lines:
        """Waits for all files and returns their lines. Each wait of a thread has a deadline of its own.

        Raises:
            DatasetError: A file or its `pipe_command` is wrong.
        """
        try:
            for thread in self._threads:
                thread.join()
        except BaseException:
            self.cancel()
            raise
        if self._error is not None:
            raise self._error
        parts = [part for _, of_file in sorted(self._parts.items()) for part in of_file]
        self._parts.clear()
        return joined(parts) if parts else no_lines(len(self._source.slots))

    def cancel(self) -> None:
        """Ends the threads and their processes."""
        self._processes.end()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            number, path = found
            try:
                of_file = list(self._source.lines_of([path], self._processes))
            except BaseException as error:  # the caller of result() raises it
                with self._lock:
                    self._error = self._error or error
                self._processes.end()
                return
            with self._lock:
                self._parts[number] = of_file

    def _next(self) -> tuple[int, str] | None:
        with self._lock:
            return self._left.pop() if self._left and not self._processes.is_ended else None
