"""Tasks of a control plane's event loop that outlive their callers, and a signal that wakes tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

_Result = TypeVar("_Result")


class Signal:
    """Wakes the tasks that wait for it. It has no state: a task that waits later waits for the next time."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def num_waiting(self) -> int:
        """Number of tasks that wait."""
        return len(self._waiting)

    def send(self) -> None:
        """Wakes all tasks that wait."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, deadline: float | None = None) -> bool:
        """Returns True at the next `send`, False if `deadline` (monotonic) comes first."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            if deadline is None:
                await future
                return True
            # Not wait_for: before Python 3.12 it loses a cancellation that coincides with the result.
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True


def task_of(work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
    """Starts a task that continues if its caller is cancelled."""
    task = asyncio.create_task(work)
    task.add_done_callback(_retrieve)
    return task


def _retrieve(ended: asyncio.Future[Any]) -> None:
    """Marks an error as retrieved, because asyncio logs those that are not."""
    if not ended.cancelled():
        ended.exception()


async def in_thread(work: Callable[..., _Result], *arguments: Any) -> _Result:
    """Returns the result of `work`, run in a thread of its own.

    Unlike threads of asyncio it can start after the script has ended, as a background save of an embedded pserver may
    have to. From Python 3.12 on no thread can: then the event loop runs `work`, and nothing else waits for the loop.
    """
    future: Future[_Result | _Failure] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            # As a result: asyncio logs an error that nobody retrieves, as when the loop ends first.
            future.set_result(_Failure(error))

    try:
        threading.Thread(target=run, name="fleet_sparse snapshot", daemon=True).start()
    except RuntimeError:
        run()
    result = await asyncio.wrap_future(future)
    if isinstance(result, _Failure):
        raise result.error
    return result


class _Failure(NamedTuple):
    """The error that ended the work of a thread."""

    error: BaseException
