"""The call of the control plane that shrinks the tables of one pserver."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.errors import SnapshotError
from fleet_sparse.wire import control_pb2 as messages

from ..engine.shard import Shard
from ..tables.shrunk import ShrunkTable
from .background import task_of
from .checkpoints import Checkpoints
from .log_appends import LogAppends

_log = logging.getLogger(__name__)


class ShrinkService:
    """Answers the call for one pserver, in the event loop of its control plane.

    Args:
        shard: Used only by tasks on the data thread.
        appends: Appends to the log of the shard.
        hold_saves: As `SaveService.held`.
        checkpoints: Checkpoints of the log.

    Attributes:
        num_done: Number of shrinks of this process that may have changed the tables.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        appends: LogAppends,
        hold_saves: Callable[[str], AbstractAsyncContextManager[None]],
        checkpoints: Checkpoints,
    ) -> None:
        self._shard = shard
        self._appends = appends
        self._hold_saves = hold_saves
        self._checkpoints = checkpoints
        self._done_before = None if shard.log is None else shard.log.control.shrink  # by the process before
        self._newest: tuple[str, asyncio.Task[messages.ShrinkReply]] | None = None  # with its id
        self.num_done = 0

    async def shrink(self, request: messages.ShrinkRequest) -> messages.ShrinkReply:
        """Answers Shrink. It is carried out once, however often it is requested: a repeated decay would count twice."""
        shrink_id, before = request.shrink_id, self._done_before
        if request.dry_run:
            return await self._carry_out(request)
        if before is not None and shrink_id and before.shrink_id == shrink_id:
            return _reply_of(before.tables)
        if self._newest is None or not shrink_id or self._newest[0] != shrink_id:
            self._newest = shrink_id, task_of(self._carry_out(request))
        return await asyncio.shield(self._newest[1])

    async def _carry_out(self, request: messages.ShrinkRequest) -> messages.ShrinkReply:
        async with self._hold_saves("shrink"), self._checkpoints.held():
            begun_at = time.monotonic()
            found = await self._appends.append(partial(self._shrink, request))
        if not request.dry_run:
            self.num_done += 1
            await self._appends.sync()
        reply = _reply_of(found)
        _log.info(
            "shrink: %s %d rows, requests waited %.2f s",
            "would remove" if request.dry_run else "removed",
            sum(each.num_removed for each in reply.removals),
            time.monotonic() - begun_at,
        )
        return reply

    def _shrink(self, request: messages.ShrinkRequest) -> dict[str, ShrunkTable]:
        """Runs on the data thread."""
        try:
            return self._shard.shrink(
                [Criterion(each.name, each.value) for each in request.criteria],
                decay=request.decay,
                tables=list(request.tables),
                dry_run=request.dry_run,
                shrink_id=request.shrink_id,
            )
        except ValueError as error:
            raise SnapshotError(f"shrink: {error}") from None


def _reply_of(found: Mapping[str, ShrunkTable]) -> messages.ShrinkReply:
    removals = [
        messages.ShrinkRemoval(
            table=name, num_removed=each.num_removed, examples=each.examples, num_rows=shrunk.num_rows
        )
        for name, shrunk in found.items()
        for each in shrunk.removals
    ]
    return messages.ShrinkReply(removals=removals)
