"""ThrottledLog: log lines that other processes can cause, at most one of a kind in a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

INTERVAL_S = 1.0


class ThrottledLog:
    """Logs warnings. Of one kind, which is the text before its arguments are filled in, one is logged in a second.

    Others of that second are counted, and the next one has their number. So a flood costs no disk. Thread-safe.

    Args:
        log: Where the lines go.
        clock: Returns monotonic time in seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_at: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def warning(self, text: str, *arguments: Any) -> None:
        """Logs or counts a warning; arguments as of `logging`."""
        now = self._clock()
        with self._lock:
            if now - self._logged_at.get(text, -INTERVAL_S) < INTERVAL_S:
                self._num_left_out[text] = self._num_left_out.get(text, 0) + 1
                return
            self._logged_at[text] = now
            num_left_out = self._num_left_out.pop(text, 0)
        if num_left_out:
            text, arguments = text + " (and %d more)", (*arguments, num_left_out)
        self._log.warning(text, *arguments)
