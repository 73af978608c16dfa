"""The coordinator of a save, which calls a control plane without gRPC."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.pserver.admin.snapshot_loader import Loaded, load
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.wire import control_pb2 as messages

from .controls import HeldControl, attendance
from .saves import rows_in
from .shards import SGD, FrameClient, floats, ids_of, make_shard, push


class Coordinator:
    """Worker 0, which coordinates a save."""

    def __init__(
        self,
        held: HeldControl,
        save_id: str = "x",
        dirname: str = "model",
        tables: tuple[str, ...] = (),
        left_out: Sequence[messages.LeftOut] = (),
    ) -> None:
        self._held = held
        self._save_id = save_id
        self._dirname = dirname
        self._tables = tables
        self._left_out = left_out
        self.plan = messages.SavePlan()

    def move_to(self, held: HeldControl) -> None:
        """Makes the later calls at another process."""
        self._held = held

    async def plan_save(self, kind: str = "full") -> None:
        self.plan = await self._held.start(
            messages.PlanSaveRequest(dirname=self._dirname, save_id=self._save_id, kind=kind)
        )

    async def begin(
        self,
        kind: str = "full",
        step: int = 0,
        position: str = "",
        *,
        ends_day: bool = False,
        num_untrained: int = 0,
    ) -> messages.BeginSaveReply:
        await self.plan_save(kind)
        return await self.begin_planned(step, position, ends_day=ends_day, num_untrained=num_untrained)

    async def begin_planned(
        self, step: int = 0, position: str = "", *, ends_day: bool = False, num_untrained: int = 0
    ) -> messages.BeginSaveReply:
        own = messages.WorkerPosition(worker_index=0, step=step, position=position, num_untrained=num_untrained)
        reply: messages.BeginSaveReply = await self._held.start(
            messages.BeginSaveRequest(
                plan=self.plan, tables=self._tables, position=own, ends_day=ends_day, left_out=self._left_out
            )
        )
        return reply

    async def write(self) -> Any:
        return await self._held.start(messages.WriteSaveRequest(save_id=self._save_id))

    async def finish(self, *files: Any) -> Any:
        return await self._held.start(messages.FinishSaveRequest(plan=self.plan, files=files, keep_last=1))

    async def end(self, finished: Any = None) -> None:
        await self._held.start(
            messages.EndSaveRequest(
                save_id=self._save_id,
                committed=finished is not None,
                checksum=0 if finished is None else finished.checksum,
                plan=None if finished is None else self.plan,
                lacks_rows=bool(self._tables or self._left_out),
            )
        )

    async def save(self, kind: str = "full", *, ends_day: bool = False) -> str:
        """Makes a whole save; returns the name of the snapshot."""
        await self.begin(kind, ends_day=ends_day)
        finished = await self.finish(await self.write())
        await self.end(finished)
        return Path(finished.snapshot).name


def position(worker: int, step: int, save_id: str = "x", loader: str = "") -> messages.ReportPositionRequest:
    """Returns a worker's report to a save."""
    return messages.ReportPositionRequest(
        save_id=save_id, positions=[messages.WorkerPosition(worker_index=worker, step=step, position=loader)]
    )


def run(work: Callable[[], Awaitable[Any]], timeout_s: float = 20.0) -> Any:
    async def within() -> Any:
        return await asyncio.wait_for(work(), timeout_s)

    return asyncio.run(within())


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine."""

    @functools.wraps(test)
    def run_test(*arguments: Any, **more: Any) -> None:
        run(lambda: test(*arguments, **more))

    return run_test


def load_from(directory: Path) -> tuple[dict[int, Any], Loaded]:
    shard = make_shard()
    told = load(shard, directory_at(directory))
    return rows_in([shard], SGD), told


def train(held: HeldControl, *ids: int, seq_of: bytes = b"") -> None:
    client = FrameClient(held.shard, client_id=seq_of or b"\0" * 16)
    client.seq = held.shard.ledger.applied(client.client_id)
    rows = floats(*([1, 1] for _ in ids))
    assert client.push(push(SGD, ids_of(*ids), rows)).error is None


async def connect_and_leave(held: HeldControl, *workers: int) -> None:
    """Opens connections of workers and closes them."""
    calls = [asyncio.ensure_future(held.start(attendance(worker))) for worker in workers]
    await turns()
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def turns() -> None:
    """Lets every task of the event loop run until it waits for a thread or a later call."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(done: Callable[[], bool]) -> None:
    """Returns once a condition that another thread changes is true."""
    while not done():
        await asyncio.sleep(0)


class SlowWrites:
    """Saves that write until `go_on` is set.

    Attributes:
        begun: Set once one is written.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        write = Save.write

        def slow(save: Save, *arguments: Any) -> Any:
            self.begun.set()
            assert self.go_on.wait(20)
            return write(save, *arguments)

        monkeypatch.setattr(Save, "write", slow)
