"""Waits for what other threads and processes do, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60.0


def wait_until(is_true: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Returns once it is true, which is looked at every 5 ms; fails after that time."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
