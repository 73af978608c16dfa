"""LogAppends: tasks of the control plane that append to the log of the shard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fleet_sparse.errors import LogFull

from ..log.shard_log import ShardLog
from .background import in_thread

_Result = TypeVar("_Result")

RETRY_S = 0.5


class LogAppends:
    """Appends to the log of one pserver, in one event loop. Without a log its tasks run as any others.

    Args:
        log: The log; None without one.
        on_data_thread: Runs a task in the thread that owns the shard.
        failover_s: As `Settings.failover_s`.
    """

    def __init__(
        self,
        log: ShardLog | None,
        *,
        on_data_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        failover_s: float,
    ) -> None:
        self._log = log
        self._on_data_thread = on_data_thread
        self._failover_s = failover_s

    async def append(self, task: Callable[[], _Result]) -> _Result:
        """Returns the result of a task of the data thread that appends to the log; repeats it while that has no room.

        Args:
            task: Changes nothing if it raises LogFull, or continues where it was when it is called again.

        Raises:
            LogFull: The log has had no room for `FLEET_SPARSE_FAILOVER_S`, for which pushes wait as well.
        """
        until = time.monotonic() + self._failover_s
        while True:
            try:
                result: _Result = await self._on_data_thread(task)
                return result
            except LogFull:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(RETRY_S)

    async def sync(self) -> None:
        """Returns when all that was appended so far is durable."""
        if self._log is not None:
            await in_thread(self._log.writer.sync)
