"""The calls of the control plane that load a snapshot into one pserver."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.store import SnapshotStore
from fleet_sparse.wire import control_pb2 as messages

from ..engine.shard import Shard
from ..log.lineage import LineageChange, Lineages
from .background import in_thread, task_of
from .checkpoints import Checkpoints
from .log_appends import LogAppends
from .root import resolve_under
from .snapshot_loader import Loaded, load
from .staged_rows import StagedRows

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Staged:
    """A snapshot that is loaded, or being loaded, into a staging shard.

    Attributes:
        load_id: Id of the load.
        tables: Names of the only tables to load; empty for all.
        shard: The staging shard.
        given_up: Set to end the loading soon, with an error.
        filled: Ends when the staging shard is complete.
        rows: Its rows file in the directory of the log; None before it is complete, and without a log.
        swapped: Ends when the staging shard has replaced the shard; None before that was requested.
        dropped: Ends when the staging shard is discarded; None before that.
    """

    load_id: str
    tables: tuple[str, ...]
    shard: Shard
    given_up: threading.Event = field(default_factory=threading.Event)
    filled: asyncio.Task[Loaded] | None = None
    rows: StagedRows | None = None
    swapped: asyncio.Task[None] | None = None
    dropped: asyncio.Task[None] | None = None


class LoadService:
    """Answers the calls for one pserver, in the event loop of its control plane.

    Args:
        shard: Used only by tasks on the data thread.
        on_data_thread: Runs a task in the thread that owns the shard.
        appends: Appends to the log of the shard.
        hold_saves: As `SaveService.held`.
        root: Directory or URL under which snapshots lie.
        lineages: Snapshots of the job; loaded ones are added.
        on_snapshot: Called with the name of each snapshot that replaced the whole shard.
        checkpoints: Checkpoints of the log.
        on_resumed: Called with the manifest of each snapshot from which the job continues.

    Attributes:
        num_kept: Number of loads into the running job that replaced the shard.
        num_before: By worker, the loads before its client registered first.
    """

    def __init__(  # noqa: PLR0913  # the parts of a pserver that a load needs
        self,
        shard: Shard,
        *,
        on_data_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        appends: LogAppends,
        hold_saves: Callable[[str], AbstractAsyncContextManager[None]],
        root: str,
        lineages: Lineages,
        on_snapshot: Callable[[str], None],
        checkpoints: Checkpoints,
        on_resumed: Callable[[Manifest], None],
    ) -> None:
        self._shard = shard
        self._on_data_thread = on_data_thread
        self._appends = appends
        self._hold_saves = hold_saves
        self._root = root
        self._lineages = lineages
        self._on_snapshot = on_snapshot
        self._checkpoints = checkpoints
        self._on_resumed = on_resumed
        self._staged: _Staged | None = None
        self._kept = ""  # id of the newest load that was kept
        self.num_kept = 0
        self.num_before: dict[int, int] = {}
        if shard.log is not None:
            self._kept, self.num_kept = shard.log.control.newest_load, shard.log.control.num_loads

    def resume(self, worker_index: int, num_loads: int, num_before: int) -> None:
        """A worker goes on with this pserver, which was started again without a log.

        Args:
            worker_index: Index of the worker.
            num_loads: Number of loads into the running job that the worker knows.
            num_before: Number of those before its client registered first.
        """
        self.num_kept = max(self.num_kept, num_loads, num_before)
        self.num_before[worker_index] = num_before

    def give_up(self) -> None:
        """Discards what is staged: a worker is lost, or was started again."""
        if self._staged is not None:
            self._begin_drop(self._staged)

    def close(self) -> None:
        """Ends the loading soon. Any thread may call it."""
        staged = self._staged
        if staged is not None:
            staged.given_up.set()

    async def stage(self, request: messages.StageLoadRequest) -> messages.StageLoadReply:
        """Answers StageLoad once the staging shard is complete, and with a log its rows file is durable."""
        while (staged := self._staged) is not None and staged.load_id != request.load_id:
            await self._drop(staged)
        if staged is None:
            directory = resolve_under(self._root, request.dirname)
            if request.missing_ok and await in_thread(SnapshotStore(directory).newest_with) is None:
                return messages.StageLoadReply(is_missing=True)
            staged = self._staged = _Staged(request.load_id, tuple(request.tables), self._shard.clone_empty())
            staged.filled = task_of(self._fill(staged, directory))
        assert staged.filled is not None
        loaded = await asyncio.shield(staged.filled)
        return messages.StageLoadReply(num_rows=loaded.num_rows)

    async def _fill(self, staged: _Staged, directory: Directory) -> Loaded:
        begun_at = time.monotonic()
        try:
            loaded = await in_thread(partial(load, staged.shard, directory, staged.tables, given_up=staged.given_up))
            await self._on_data_thread(partial(self._shard.tables.check_swap, staged.shard.tables))
            if self._shard.log is not None:
                staged.rows = await in_thread(StagedRows, self._shard.log, staged.shard, staged.given_up)
        except Exception:
            await self._close(staged)
            raise
        what = ", ".join(staged.tables) or "all tables"
        _log.info(
            "loaded %d rows of %s from %s in %.2f s", loaded.num_rows, what, directory, time.monotonic() - begun_at
        )
        return loaded

    async def finish(self, request: messages.FinishLoadRequest) -> messages.FinishLoadReply:
        """Answers FinishLoad once the staging shard has replaced the shard, or is discarded."""
        staged = self._staged
        if staged is not None and staged.load_id != request.load_id:
            staged = None
        if not request.keep:
            if staged is not None:
                await self._drop(staged)
            return messages.FinishLoadReply()
        if request.load_id != self._kept:
            if staged is None or staged.dropped is not None or staged.filled is None or not staged.filled.done():
                raise SnapshotError(
                    f"load {request.load_id}: nothing is staged under this id on shard {self._shard.shard_index}; it "
                    "may have been started again. It keeps what it holds, others may hold the snapshot: load again"
                )
            if staged.swapped is None:
                async with self._hold_saves("load"):  # a save under way refuses it, and it stays staged
                    pass
            if staged.swapped is None:
                staged.swapped = task_of(self._swap(staged, resumes=request.resumes))
            await asyncio.shield(staged.swapped)
        states = await self._on_data_thread(self._shard.states)
        return messages.FinishLoadReply(tables=[messages.TableState(**state._asdict()) for state in states])

    async def _swap(self, staged: _Staged, *, resumes: bool) -> None:
        try:
            async with self._hold_saves("load"), self._checkpoints.held():
                rows = None if staged.rows is None else await in_thread(staged.rows.adopt, staged.load_id)
                await self._appends.append(partial(self._shard.swap_in, staged.shard, rows))
                staged.rows = None  # it is the log's now
            await self._appends.sync()
            if staged.filled is not None:
                loaded = staged.filled.result()
                self._lineages.add(LineageChange(loaded.series, loaded=loaded.manifest.number))
                if loaded.manifest.is_complete and not staged.tables:
                    self._on_snapshot(f"{loaded.series}/{loaded.manifest.name}")
                if resumes:
                    self._on_resumed(loaded.manifest)
            self._kept = staged.load_id
            self.num_kept += 1
        finally:
            await self._close(staged)

    async def _drop(self, staged: _Staged) -> None:
        """Returns when nothing is staged any more. A swap that has begun is completed."""
        self._begin_drop(staged)
        await asyncio.wait({task for task in (staged.swapped, staged.dropped) if task is not None})

    def _begin_drop(self, staged: _Staged) -> None:
        if staged.swapped is None and staged.dropped is None:
            staged.given_up.set()
            staged.dropped = task_of(self._discard(staged))

    async def _discard(self, staged: _Staged) -> None:
        assert staged.filled is not None
        await asyncio.wait({staged.filled})
        await self._close(staged)

    async def _close(self, staged: _Staged) -> None:
        """Frees the staging shard, and its file, once nothing fills it. A second call does nothing."""
        try:
            await in_thread(staged.shard.close)
            if staged.rows is not None:
                await in_thread(staged.rows.remove)
        finally:
            if self._staged is staged:
                self._staged = None
