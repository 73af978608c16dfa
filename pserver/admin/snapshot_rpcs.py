"""The calls of the control plane about snapshots, without gRPC; what they have in common, and `Shrink`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from google.protobuf.message import Message

from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.wire import control_pb2 as messages

from ..engine.shard import Shard
from ..storage.table_store import TableStore
from .load_rpcs import LoadCalls
from .save_rpcs import SaveCalls

_log = logging.getLogger(__name__)


class SnapshotCalls:
    """Answers the calls for one pserver. All of it runs in the event loop of its `Control`.

    Args:
        shard: Touched by posted tasks alone.
        saves: Of the same shard.
        loads: Likewise.
        on_data_thread: Runs a task in the thread that owns the shard.

    Attributes:
        calls: By name.
    """

    def __init__(
        self,
        shard: Shard,
        saves: SaveCalls,
        loads: LoadCalls,
        on_data_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._shard = shard
        self._saves = saves
        self._loads = loads
        self._on_data_thread = on_data_thread
        self.calls: dict[str, Callable[[Any], Coroutine[Any, Any, Message]]] = {
            **saves.calls,
            **loads.calls,
            "Shrink": self._shrink,
        }

    def note_change(self) -> None:
        """Workers came to a barrier, went through one or were lost: those that wait for them look again."""
        self._saves.note_change()

    def lose(self, worker: int) -> None:
        """A worker is lost, or was started again: a save that it asked for is given up, and a load of the job."""
        self._saves.lose(worker)
        self._loads.lose()

    def close(self) -> None:
        """What other threads do for these calls ends soon. From any thread."""
        self._saves.close()
        self._loads.close()

    async def _shrink(self, request: messages.ShrinkRequest) -> messages.ShrinkReply:
        await self._saves.wait_for_none("shrink")
        begun_at = time.monotonic()
        num_removed = await self._on_data_thread(
            lambda: sum(len(store.shrink(request.max_unseen_days)) for store in self._stores())
        )
        _log.info("shrink: removed %d rows, requests waited %.2f s", num_removed, time.monotonic() - begun_at)
        return messages.ShrinkReply(num_removed=num_removed)

    def _stores(self) -> list[TableStore]:
        return [held.values for held in self._shard.held.values() if isinstance(held.values, TableStore)]


def resumed_json(manifest: Manifest) -> str:
    """What a worker is told of the snapshot that its pservers began with."""
    return json.dumps(
        {
            "snapshot": manifest.name,
            "is_whole": manifest.is_whole,
            "tables": manifest.tables,
            "num_workers": len(manifest.workers),
            "workers": [msgspec.structs.asdict(position) for position in manifest.workers],
        }
    )
