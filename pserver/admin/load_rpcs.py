"""The calls of the control plane that load, without gRPC: what each of them does to one pserver."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from google.protobuf.message import Message

from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.wire import control_pb2 as messages

from ..engine.shard import Shard
from .background import in_thread, task_of
from .lineage import Lineages
from .root import resolve_under
from .snapshot_loader import Loaded, load

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Draft:
    """What is loaded, or was, beside the shard.

    Attributes:
        load_id: Of the load.
        shard: That it is loaded into.
        given_up: Makes the loading end soon, with an error.
        filled: Ends when all is there.
        taken: Ends when it has taken the place of what the shard held; None before that was asked for.
        dropped: Ends when it is thrown away; None before it is to be.
    """

    load_id: str
    shard: Shard
    given_up: threading.Event = field(default_factory=threading.Event)
    filled: asyncio.Task[Loaded] | None = None
    taken: asyncio.Task[None] | None = None
    dropped: asyncio.Task[None] | None = None


class LoadCalls:
    """Answers the calls for one pserver. All of it runs in the event loop of its `Control`.

    Args:
        shard: Touched by tasks on the data thread alone.
        on_data_thread: Runs a task in the thread that owns the shard.
        wait_for_no_save: Returns when no save is under way; raises if one is that does not end. Is told what waits.
        root: Directory or URL under which snapshots lie.
        lineages: Of the job; what is loaded here is added.

    Attributes:
        calls: By name.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        on_data_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        wait_for_no_save: Callable[[str], Awaitable[None]],
        root: str,
        lineages: Lineages,
    ) -> None:
        self._shard = shard
        self._on_data_thread = on_data_thread
        self._wait_for_no_save = wait_for_no_save
        self._root = root
        self._lineages = lineages
        self._draft: _Draft | None = None
        self._loaded: dict[str, list[messages.TableState]] = {}  # loads that were kept, by id
        self.calls: dict[str, Callable[[Any], Coroutine[Any, Any, Message]]] = {
            "LoadDraft": self._load_draft,
            "FinishLoad": self._finish_load,
        }

    def lose(self) -> None:
        """A worker is lost, or was started again: a load of the job is given up."""
        if self._draft is not None:
            self._begin_drop(self._draft)

    def close(self) -> None:
        """What other threads do for these calls ends soon. From any thread."""
        draft = self._draft
        if draft is not None:
            draft.given_up.set()

    async def _load_draft(self, request: messages.LoadDraftRequest) -> messages.LoadDraftReply:
        while (draft := self._draft) is not None and draft.load_id != request.load_id:
            await self._drop(draft)
        if draft is None:
            directory = resolve_under(self._root, request.dirname)
            draft = self._draft = _Draft(request.load_id, self._shard.clone_empty())
            draft.filled = task_of(self._fill(draft, directory, tuple(request.tables)))
        assert draft.filled is not None
        loaded = await asyncio.shield(draft.filled)
        return messages.LoadDraftReply(num_rows=loaded.num_rows)

    async def _fill(self, draft: _Draft, directory: Directory, tables: tuple[str, ...]) -> Loaded:
        begun_at = time.monotonic()
        try:
            loaded = await in_thread(partial(load, draft.shard, directory, tables, given_up=draft.given_up))
            await self._on_data_thread(partial(self._shard.tables.check_swap, draft.shard.tables))
        except Exception:
            await self._close(draft)
            raise
        _log.info("loaded %d rows of %s in %.2f s", loaded.num_rows, directory, time.monotonic() - begun_at)
        return loaded

    async def _finish_load(self, request: messages.FinishLoadRequest) -> messages.FinishLoadReply:
        if request.kept and request.load_id not in self._loaded:
            await self._wait_for_no_save("load")
        draft = self._draft
        if draft is not None and draft.load_id != request.load_id:
            draft = None
        if not request.kept:
            if draft is not None:
                await self._drop(draft)
            return messages.FinishLoadReply()
        if request.load_id not in self._loaded:
            if draft is None or draft.dropped is not None or draft.filled is None or not draft.filled.done():
                raise SnapshotError(f"load {request.load_id}: nothing was loaded under this id. Load again")
            if draft.taken is None:
                draft.taken = task_of(self._take(draft))
            await asyncio.shield(draft.taken)
        return messages.FinishLoadReply(tables=self._loaded[request.load_id])

    async def _take(self, draft: _Draft) -> None:
        try:
            states = await self._on_data_thread(partial(self._take_over, draft.shard))
            if draft.filled is not None:
                loaded = draft.filled.result()
                self._lineages[loaded.series].begin_with(loaded.manifest.number)
            self._loaded = {draft.load_id: states}
        finally:
            await self._close(draft)

    def _take_over(self, draft: Shard) -> list[messages.TableState]:
        """On the data thread."""
        self._shard.swap_in(draft)
        return [messages.TableState(**state._asdict()) for state in self._shard.states()]

    async def _drop(self, draft: _Draft) -> None:
        """Returns when it is there no more; one that is being taken is taken."""
        self._begin_drop(draft)
        await asyncio.wait({task for task in (draft.taken, draft.dropped) if task is not None})

    def _begin_drop(self, draft: _Draft) -> None:
        if draft.taken is None and draft.dropped is None:
            draft.given_up.set()
            draft.dropped = task_of(self._throw_away(draft))

    async def _throw_away(self, draft: _Draft) -> None:
        assert draft.filled is not None
        await asyncio.wait({draft.filled})
        await self._close(draft)

    async def _close(self, draft: _Draft) -> None:
        """Gives memory back, when nobody fills it any more. Again does nothing."""
        try:
            await in_thread(draft.shard.close)
        finally:
            if self._draft is draft:
                self._draft = None
