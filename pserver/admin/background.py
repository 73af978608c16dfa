"""Work of a control plane's event loop that goes on when who asked for it gives up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def task_of(work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
    """A task that goes on when who asked for it gives up."""
    task = asyncio.create_task(work)
    task.add_done_callback(_heard)
    return task


def _heard(ended: asyncio.Future[Any]) -> None:
    """Has asyncio not complain of an error that nobody takes."""
    if not ended.cancelled():
        ended.exception()


async def in_thread(work: Callable[..., _Result], *arguments: Any) -> _Result:
    """What `work` returns, in a thread of its own: unlike those of asyncio it still starts when the script has ended,
    as a save in the background of an embedded pserver may have to.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fleet_sparse snapshot", daemon=True).start()
    ended = asyncio.wrap_future(future)
    ended.add_done_callback(_heard)  # nobody may wait for it any more
    return await ended
