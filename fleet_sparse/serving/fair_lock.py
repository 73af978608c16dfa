"""FairLock: a lock that threads get in the order in which they asked for it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Self


class FairLock:
    """A lock for a `with` block; it cannot be taken twice. `threading.Lock` may let one thread wait for ever."""

    def __init__(self) -> None:
        self._state = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of threads that wait for it."""
        return len(self._waiting)

    def __enter__(self) -> Self:
        with self._state:
            if not self._is_taken:
                self._is_taken = True
                return self
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C
            with self._state:
                is_waiting = turn in self._waiting
                if is_waiting:
                    self._waiting.remove(turn)
            if not is_waiting:
                self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._state:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
