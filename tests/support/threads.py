"""Calls in parallel threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

JOIN_S = 60.0


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Returns the result of each call, in order; raises the first exception."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a call did not return"
    return results
