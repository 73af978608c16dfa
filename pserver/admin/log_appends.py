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

    Attributes:
        no_room: The error of the log while a task waits for room in it.
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
        self.no_room: LogFull | None = None

    async def append(self, task: Callable[[], _Result], patience_s: float | None = None) -> _Result:
        """Returns the result of a task of the data thread that appends to the log; repeats it while that has no room.

        Args:
            task: Changes nothing if it raises LogFull, or continues where it was when it is called again.
            patience_s: Seconds for which it is repeated; None for `failover_s`, for which pushes wait as well.

        Raises:
            LogFull: The log has had no room for that long.
        """
        until = time.monotonic() + (self._failover_s if patience_s is None else patience_s)
        while True:
            try:
                result: _Result = await self._on_data_thread(task)
            except LogFull as error:
                self.no_room = error
                if time.monotonic() > until:
                    raise
            else:
                self.no_room = None
                return result
            await asyncio.sleep(RETRY_S)

    async def sync(self) -> None:
        """Returns when all that was appended so far is durable."""
        if self._log is not None:
            await in_thread(self._log.writer.sync)
