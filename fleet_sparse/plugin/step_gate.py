"""StepGate: keeps runs that train apart from saves and loads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.worker.net.deferred_interrupt import DeferredInterrupt


class StepGate:
    """Any number of steps run at once; while the gate is closed, none does. Thread-safe.

    Ctrl-C may stop a wait or a block at any point; the gate does not count that step, or is open, afterwards.

    Args:
        timeout_s: Longest time in seconds that a step or a close waits.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards all below; Ctrl-C waits while the main thread holds it
        self._running: set[object] = set()
        self._closed_by: object = None
        self._waiting: set[SimpleQueue[None]] = set()  # one for each waiting thread, which a change wakes

    @contextmanager
    def step(self) -> Iterator[None]:
        """Waits until the gate is open; the block is a step.

        Raises:
            FleetSparseError: The gate stayed closed for `timeout_s`.
        """
        run = object()

        def begin() -> bool:
            if self._closed_by is None:
                self._running.add(run)
            return self._closed_by is None

        with self._left_at_end(run):
            self._wait_for(begin, lambda: "exe.run: a save, barrier or load holds it back")
            yield

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Waits until no step runs; none begins during the block.

        Raises:
            FleetSparseError: A step, or another thread that closed the gate, did not end within `timeout_s`.
        """
        closer = object()

        def close() -> bool:
            if self._closed_by is None:
                self._closed_by = closer
            return self._closed_by is closer

        with self._left_at_end(closer):
            self._wait_for(close, lambda: "save, barrier or load: another one has not ended")
            self._wait_for(
                lambda: not self._running,
                lambda: f"save, barrier or load: {len(self._running)} runs that train have not ended",
            )
            yield

    @contextmanager
    def _left_at_end(self, block: object) -> Iterator[None]:
        try:
            try:
                yield
            finally:
                self._leave(block)
        finally:
            self._leave(block)  # again: Ctrl-C may have stopped the first before it began

    def _leave(self, block: object) -> None:
        with DeferredInterrupt(), self._lock:
            self._running.discard(block)
            if self._closed_by is block:
                self._closed_by = None
            for wake in tuple(self._waiting):
                wake.put(None)

    def _wait_for(self, attempt: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Returns when `attempt`, called with the lock held, returned True."""
        until, wake = time.monotonic() + self._timeout_s, SimpleQueue[None]()
        try:
            while True:
                with DeferredInterrupt(), self._lock:
                    if attempt():
                        return
                    self._waiting.add(wake)
                remaining_s = until - time.monotonic()
                if remaining_s <= 0:
                    raise FleetSparseError(
                        f"{reason()} for {self._timeout_s:g} s. Look for a thread that is stuck, or set "
                        "FLEET_SPARSE_BARRIER_S higher"
                    )
                with suppress(Empty):
                    wake.get(timeout=remaining_s)
        finally:
            self._waiting.discard(wake)
