"""Checkpoints: writes checkpoints of the log while a pserver serves."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from fleet_sparse.snapshot.directory import Directory

from ..engine.shard import Shard
from ..log.log_writer import EMPTY_LOG, LogSize
from ..log.shard_log import ShardLog
from ..tables.table import Post
from .background import in_thread, task_of
from .checkpoint_link import CheckpointLink, link_of
from .log_recovery import finish_checkpoint
from .snapshot_writer import Save

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_MANY_RECORDS = 2_000
"""A checkpoint is due after so many records, however small, unless it takes long: a start replays them in 0.1 s."""
_REPLAYED_PER_S = 25_000
"""Small records that a start replays in a second."""
_RESTS = 20
"""Checkpoints that are due for their number of records only follow each other after so many times what one takes."""
_OVERDUE = 2
"""A checkpoint has priority over a save once the log has grown by so many times what makes one due."""


class _Running(NamedTuple):
    save: Save
    done: asyncio.Task[bool]


class Checkpoints:
    """The checkpoints of one pserver, in one event loop.

    A save of the job has priority: `give_up` ends a checkpoint. A save may become the checkpoint itself.

    Args:
        shard: Used only by posted tasks; its log, if it has one, is constant.
        post: Runs a task in the thread that owns the shard.
        on_data_thread: As `post`, for this event loop.
        max_bytes: Bytes of the log after which a checkpoint is due.
        clock: Returns monotonic time in seconds.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        post: Post,
        on_data_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard = shard
        self._post = post
        self._on_data_thread = on_data_thread
        self._max_bytes = max_bytes
        self._size_before = EMPTY_LOG  # of the log, when the newest checkpoint was cut
        self._many_records = _MANY_RECORDS  # make the next one due, however small they are
        self._rests_until = -math.inf  # if only these make it due
        self._clock = clock
        self._pause_s = _FIRST_PAUSE_S  # after the next one that fails
        self._paused_until = -math.inf
        self._links = True  # the newest save that should have become the checkpoint did so
        self._num_holds = 0
        self._running: _Running | None = None

    def begin_if_due(self) -> None:
        """Begins a checkpoint if the log has grown enough or has a load, and none is under way or has just failed."""
        log = self._shard.log
        if log is None or self._running is not None or self._num_holds or self._clock() < self._paused_until:
            return
        size = self._size(log)
        has_many = size.num_records >= self._many_records and self._clock() >= self._rests_until
        if log.has_loads or size.num_bytes >= self._max_bytes or has_many:
            self._begin()

    async def give_up(self) -> None:
        """Returns when no checkpoint is under way."""
        while (running := self._running) is not None:
            running.save.give_up()
            await asyncio.wait({running.done})

    async def link_of(self, save: Save, source: Directory) -> CheckpointLink | None:
        """Returns the link for a save, as `checkpoint_link.link_of`, while no checkpoint is under way, nor held."""
        if self._shard.log is None or self._num_holds:
            return None
        return await in_thread(link_of, self._shard, save, source)

    async def wait_if_overdue(self, save: Save, source: Directory) -> None:
        """Returns when no checkpoint is overdue, or one has just failed; at once for a save that becomes one."""
        log = self._shard.log
        if log is None or self._num_holds or self._size(log).num_bytes < _OVERDUE * self._max_bytes:
            return
        if self._links and await self.link_of(save, source) is not None:
            return
        if self._running is None and self._clock() < self._paused_until:
            return
        running = self._begin() if self._running is None else self._running
        await asyncio.shield(running.done)

    async def end_link(self, link: CheckpointLink, committed_as: int | None) -> None:
        """Makes a save that has ended the checkpoint.

        Args:
            link: That of the save.
            committed_as: Checksum of the manifest; None if the save failed, or its end is not in the log.
        """
        if committed_as is None:
            self._links = False
            await in_thread(link.drop)
            return
        self._links = await in_thread(link.adopt, committed_as)
        if self._links:
            self._note_durable(link.size)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keeps checkpoints from being under way, and saves that begin from becoming one."""
        self._num_holds += 1
        try:
            await self.give_up()
            yield
        finally:
            self._num_holds -= 1

    def close(self) -> None:
        """Ends the work of another thread soon. Any thread may call it."""
        running = self._running
        if running is not None:
            running.save.give_up()

    def _size(self, log: ShardLog) -> LogSize:
        """Returns the size of the log since the newest checkpoint."""
        return log.writer.size - self._size_before

    def _note_durable(self, size: LogSize) -> None:
        """The log begins with a new checkpoint, which was cut at that size. Since then nothing was loaded."""
        assert self._shard.log is not None, "it has a checkpoint"
        self._shard.log.has_loads = False
        self._size_before, self._pause_s = size, _FIRST_PAUSE_S

    def _begin(self) -> _Running:
        save = Save(self._shard, "checkpoint", base=None)
        self._running = _Running(save, task_of(self._write(save)))
        return self._running

    async def _write(self, save: Save) -> bool:
        """Returns whether the checkpoint is durable. Any failure is logged: the log before stays."""
        log = self._shard.log
        assert log is not None, "checked by the caller"
        try:
            begun_at = self._clock()
            await in_thread(log.writer.sync)  # so that the segment that begins at the cut does not wait for the disk
            size = log.writer.size
            first_lsn = await self._on_data_thread(partial(_cut, self._shard, save))
            if first_lsn is None:
                return False
            try:
                await in_thread(finish_checkpoint, self._shard, save, first_lsn, self._post)
            finally:
                await self._on_data_thread(partial(save.end, None))
            self._note_durable(size)
            _log.info("checkpoint: the log begins with record %d", first_lsn)
            return True
        except Exception as error:
            _log.warning("checkpoint: not written, the log before stays: %s", error)
            if not save.is_given_up:
                self._paused_until = self._clock() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            return False
        finally:
            now = self._clock()
            took_s = now - begun_at
            # A start loads a checkpoint in about the time that it takes: records that cost half of that may wait.
            self._many_records = max(_MANY_RECORDS, int(took_s * _REPLAYED_PER_S / 2))
            self._rests_until = now + _RESTS * took_s
            self._running = None


def _cut(shard: Shard, save: Save) -> int | None:
    """Cuts a save where a segment begins; returns its first lsn, None if that is not possible now."""
    save.cut()
    try:
        first_lsn = shard.begin_checkpoint()
    except BaseException:
        save.end(None)
        raise
    if first_lsn is None:
        save.end(None)
    return first_lsn
