"""StepGate: keeps runs that train apart from saves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StepGate:
    """Any number of steps run at once; while the gate is closed, none does. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._num_running = 0
        self._is_closed = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Waits until the gate is open; the block is a step."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                if self._is_closed:
                    self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Waits until no step runs; none begins during the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._num_running == 0)
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()
