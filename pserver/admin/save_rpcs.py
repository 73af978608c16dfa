"""The calls of the control plane that save, without gRPC: what each of them does to one pserver."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from google.protobuf.message import Message

from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.checksum import Checksum
from fleet_sparse.snapshot.manifest import Base, Manifest, ShardFile, WorkerPosition
from fleet_sparse.snapshot.store import Plan, SnapshotStore
from fleet_sparse.wire import control_pb2 as messages

from ..engine.shard import Shard
from .background import in_thread, task_of
from .lineage import Lineages
from .membership import Membership
from .root import resolve_under
from .snapshot_writer import Post, Save

_log = logging.getLogger(__name__)

# A call that waits for a save to begin is answered after so long at the latest, and made again.
AWAIT_S = 20.0
# Of saves that ended: who asks for one of them need not wait.
MAX_ENDED = 64
# In sync a save is cut without marks; those that have not come by its end bring no position.
LATE_MARKS_S = 5.0


@dataclass(slots=True, eq=False)
class _Running:
    """A save that has begun and not ended.

    Attributes:
        plan: Of the save.
        save: This shard's part.
        asker: Index of the worker that asked.
        step: That this worker had trained.
        marks: Of the other workers, as far as they came.
        needs_marks: Whether the shard is cut only once all workers have brought theirs; so it is until that is known.
        is_cut: Whether it is.
        begun: Ends with the cut.
        written: Ends with the file; None before that was asked for.
        finished: Ends with the manifest; None before that was asked for, or on another pserver.
        ended: Ends when nothing of it is left; None before it is to end.
    """

    plan: messages.SavePlan
    save: Save
    asker: int
    step: int
    marks: dict[int, list[messages.WorkerMark]] = field(default_factory=dict)
    needs_marks: bool = True
    is_cut: bool = False
    begun: asyncio.Task[bool] | None = None
    written: asyncio.Task[messages.ShardFile] | None = None
    finished: asyncio.Task[messages.FinishSaveReply] | None = None
    ended: asyncio.Task[None] | None = None

    def is_news_to(self, request: messages.AwaitSaveRequest) -> bool:
        """Whether a worker neither asked for it nor was told of it."""
        return self.asker != request.worker_index and self.save.save_id != request.last_save_id

    def mark_of(self, worker: int) -> messages.WorkerMark:
        """Where a worker was at the cut. In sync all are at one step, at which one that rests has been for a while."""
        marks = self.marks.get(worker, [])
        if self.needs_marks and marks:
            return marks[-1]
        positions = [mark.position for mark in marks if mark.step <= self.step]
        return messages.WorkerMark(worker_index=worker, step=self.step, position=positions[-1] if positions else "")


class SaveCalls:
    """Answers the calls for one pserver. All of it runs in the event loop of its `Control`.

    Args:
        shard: Touched by posted tasks alone.
        post: Runs a task in the thread that owns the shard.
        on_data_thread: As `post`, for this event loop.
        membership: Of the job.
        root: Directory or URL under which snapshots lie.
        marks_s: Seconds that a save waits for the workers' marks.
        lineages: Of the job; what is saved here is added.

    Attributes:
        calls: By name.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        post: Post,
        on_data_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        membership: Membership,
        root: str,
        marks_s: float,
        lineages: Lineages,
    ) -> None:
        self._shard = shard
        self._post = post
        self._on_data_thread = on_data_thread
        self._membership = membership
        self._root = root
        self._marks_s = marks_s
        self._lineages = lineages
        self._running: _Running | None = None
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        self._changed = asyncio.Event()  # set, and replaced, when those that wait should look again
        self.calls: dict[str, Callable[[Any], Coroutine[Any, Any, Message]]] = {
            "PlanSave": self._plan_save,
            "AwaitSave": self._await_save,
            "BeginSave": self._begin_save,
            "Mark": self._mark,
            "WriteSave": self._write_save,
            "FinishSave": self._finish_save,
            "EndSave": self._end_save,
        }

    def note_change(self) -> None:
        """Workers came to a barrier, went through one or were lost: those that wait for them look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def lose(self, worker: int) -> None:
        """A worker is lost, or was started again: a save that it asked for is given up."""
        running = self._running
        if running is not None and running.ended is None and running.asker == worker:
            _log.warning("save %s: given up, worker %d that asked for it is lost", running.save.save_id, worker)
            self._begin_end(running, None)

    def close(self) -> None:
        """What other threads do for these calls ends soon. From any thread."""
        running = self._running
        if running is not None:
            running.save.give_up()

    async def wait_for_none(self, what: str) -> None:
        """Returns when no save is under way. One that is about to end is waited for.

        Raises:
            SnapshotError: One is, and does not end; `what` cannot be done.
        """
        while (running := self._running) is not None:
            if running.ended is None:
                raise SnapshotError(f"{what}: a snapshot is being written. Wait for the save to end")
            await asyncio.wait({running.ended})

    async def _plan_save(self, request: messages.PlanSaveRequest) -> messages.SavePlan:
        plan = await in_thread(self._series(request.dirname).plan, request.kind, request.save_id)
        base = None if plan.base is None else messages.SnapshotBase(**msgspec.structs.asdict(plan.base))
        return messages.SavePlan(
            dirname=request.dirname, save_id=request.save_id, number=plan.number, kind=plan.kind, base=base
        )

    async def _await_save(self, request: messages.AwaitSaveRequest) -> messages.AwaitSaveReply:
        deadline = time.monotonic() + AWAIT_S
        while True:
            running = self._running
            if running is not None and running.ended is None and running.is_news_to(request):
                return messages.AwaitSaveReply(save_id=running.save.save_id)
            if not await self._change_before(deadline):
                return messages.AwaitSaveReply()

    async def _begin_save(self, request: messages.BeginSaveRequest) -> messages.BeginSaveReply:
        save_id = request.plan.save_id
        self._check_not_ended(save_id)
        while (running := self._running) is not None and running.save.save_id != save_id:
            # Who asks has one save at a time: it has given that one up.
            await self._end(running, None)
        self._check_not_ended(save_id)
        if running is None:
            base = request.plan.base.checksum if request.plan.kind == "delta" else None
            save = Save(self._shard, save_id, base=base, tables=request.tables, ends_day=request.ends_day)
            running = _Running(request.plan, save, request.mark.worker_index, request.mark.step)
            running.marks[running.asker] = [request.mark]
            running.begun = task_of(self._cut(running))
            self._running = running
            self.note_change()
        assert running.begun is not None
        return messages.BeginSaveReply(needs_full=not await asyncio.shield(running.begun))

    async def _cut(self, running: _Running) -> bool:
        """Whether this shard took part."""
        try:
            running.needs_marks = not await self._on_data_thread(self._is_between_steps)
            if running.needs_marks:
                await self._wait_for_marks(running, self._marks_s)
                self._check_not_ended(running.save.save_id)
                if missing := self._missing(running):
                    raise SnapshotError(
                        f"save {running.plan.dirname!r}: worker {missing[0]} did not say where it stands within "
                        f"{self._marks_s:g} s. Look into its log; raise FLEET_SPARSE_MARKS_S if it is only slow"
                    )
            running.is_cut = await self._on_data_thread(partial(running.save.cut, self._membership.client_ids()))
        except BaseException:
            if running.ended is None:
                self._forget(running)
            raise
        if not running.is_cut and running.ended is None:
            self._forget(running)
        self.note_change()
        return running.is_cut

    def _is_between_steps(self) -> bool:
        """Whether all workers are, when one is. On the data thread."""
        return self._shard.job is not None and self._shard.job.is_sync

    def _workers(self, running: _Running) -> list[int]:
        """Whose steps are in the save."""
        return sorted(running.marks.keys() | (set() if running.needs_marks else self._membership.present()))

    def _missing(self, running: _Running) -> list[int]:
        return sorted(self._membership.present() - running.marks.keys())

    async def _wait_for_marks(self, running: _Running, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while running.ended is None and self._missing(running) and await self._change_before(deadline):
            pass

    async def _mark(self, request: messages.MarkRequest) -> messages.MarkReply:
        deadline = time.monotonic() + self._marks_s
        while request.save_id not in self._ended:
            running = self._running
            if running is not None and running.save.save_id == request.save_id and request.marks:
                await self._hold_mark(running, list(request.marks), deadline)
                break
            if not await self._change_before(deadline):
                break
        return messages.MarkReply()

    async def _hold_mark(self, running: _Running, marks: list[messages.WorkerMark], deadline: float) -> None:
        """Keeps a worker's marks until the shard is cut; they count no more if the worker does not wait for that.

        Raises:
            SnapshotError: The shard may be cut yet, but the worker should wait no longer: it should end the save.
        """
        worker = marks[0].worker_index
        if not (running.is_cut and running.needs_marks):
            running.marks[worker] = marks
            self.note_change()
        try:
            while not running.is_cut and running.save.save_id not in self._ended:
                if not await self._change_before(deadline):
                    raise SnapshotError(
                        f"save {running.save.save_id}: shard {self._shard.shard_index} was not cut within "
                        f"{self._marks_s:g} s of the mark of worker {worker}"
                    )
        finally:
            # Not those of another call of this worker, which waits on.
            if not running.is_cut and running.marks.get(worker) is marks:
                del running.marks[worker]

    async def _write_save(self, request: messages.WriteSaveRequest) -> messages.ShardFile:
        running = self._the(request.save_id)
        if running.written is None:
            running.written = task_of(self._write(running))
        return await asyncio.shield(running.written)

    async def _write(self, running: _Running) -> messages.ShardFile:
        begun_at = time.monotonic()
        directory = self._series(running.plan.dirname).target(_plan_of(running.plan), running.save.save_id)
        file = await in_thread(running.save.write, directory, self._post)
        _log.info(
            "saved %d rows, %d bytes to %s in %.2f s",
            file.num_rows,
            file.num_bytes,
            directory,
            time.monotonic() - begun_at,
        )
        clients = [messages.ClientMark(**mark._asdict()) for mark in file.clients]
        return messages.ShardFile(**{**msgspec.structs.asdict(file), "clients": clients})

    async def _finish_save(self, request: messages.FinishSaveRequest) -> messages.FinishSaveReply:
        running = self._the(request.plan.save_id)
        if running.finished is None:
            running.finished = task_of(self._finish(running, request))
        return await asyncio.shield(running.finished)

    async def _finish(self, running: _Running, request: messages.FinishSaveRequest) -> messages.FinishSaveReply:
        if not running.needs_marks:
            await self._wait_for_marks(running, LATE_MARKS_S)
            self._check_not_ended(running.save.save_id)
        plan, save = _plan_of(running.plan), running.save
        manifest = Manifest(
            number=plan.number,
            kind=plan.kind,
            base=plan.base,
            save_id=save.save_id,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            tables=save.table_names,
            is_whole=save.is_whole,
            files=tuple(sorted(map(_file_of, request.files))),
            workers=tuple(map(_worker_mark_of, map(running.mark_of, self._workers(running)))),
            placement_version=self._shard.placement.version,
        )
        series = self._series(running.plan.dirname)
        lineage = self._lineages[str(series)]
        snapshot = await in_thread(series.commit, plan, manifest, request.keep_last or None, lineage.has)
        lineage.saved.add(plan.number)
        path = f"{series}/{snapshot}"
        _log.info("finished save %s: %d rows, %s", save.save_id, manifest.num_rows, path)
        return messages.FinishSaveReply(snapshot=path, checksum=manifest.checksum)

    async def _end_save(self, request: messages.EndSaveRequest) -> messages.EndSaveReply:
        running = self._running
        if running is None or running.save.save_id != request.save_id:
            if request.save_id not in self._ended:  # it never began here, and is not to begin any more
                self._ended.append(request.save_id)
                self.note_change()
            return messages.EndSaveReply()
        await self._end(running, request.checksum if request.committed else None)
        return messages.EndSaveReply()

    async def _end(self, running: _Running, committed_as: int | None) -> None:
        """Ends a save, whatever it is doing; to its end even if who asked for that does not wait for it."""
        self._begin_end(running, committed_as)
        assert running.ended is not None
        await asyncio.shield(running.ended)

    def _begin_end(self, running: _Running, committed_as: int | None) -> None:
        if running.ended is None:
            self._ended.append(running.save.save_id)
            running.ended = task_of(self._clear(running, committed_as))
            self.note_change()

    async def _clear(self, running: _Running, committed_as: int | None) -> None:
        """Until this is done no other save begins here, and nothing is loaded: captures are open."""
        try:
            running.save.give_up()
            tasks = [task for task in (running.begun, running.written, running.finished) if task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._on_data_thread(partial(running.save.end, committed_as))
            if committed_as is None and self._shard.shard_index == 0:
                series, plan = self._series(running.plan.dirname), _plan_of(running.plan)
                await in_thread(series.abandon, plan, running.save.save_id)
        finally:
            self._forget(running)

    def _forget(self, running: _Running) -> None:
        if self._running is running:
            self._running = None
        if running.ended is None:
            self._ended.append(running.save.save_id)
        self.note_change()

    def _series(self, dirname: str) -> SnapshotStore:
        return SnapshotStore(resolve_under(self._root, dirname))

    def _the(self, save_id: str) -> _Running:
        self._check_not_ended(save_id)
        if self._running is None or self._running.save.save_id != save_id or not self._running.is_cut:
            raise SnapshotError(f"save {save_id}: it has not begun here; the pserver may have been started again")
        return self._running

    def _check_not_ended(self, save_id: str) -> None:
        if save_id in self._ended:
            raise SnapshotError(f"save {save_id}: it was given up, or has ended. Save again")

    async def _change_before(self, deadline: float) -> bool:
        try:
            # Not wait_for: before Python 3.12 a cancellation is lost that comes together with the change.
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


def _plan_of(plan: messages.SavePlan) -> Plan:
    base = Base(plan.base.number, plan.base.kind, Checksum(plan.base.checksum)) if plan.HasField("base") else None
    return Plan(plan.number, plan.kind, base)


def _file_of(file: messages.ShardFile) -> ShardFile:
    clients = tuple(Watermark(client.client_id, client.epoch, client.watermark) for client in file.clients)
    checksum = Checksum(file.checksum)
    return ShardFile(file.shard, file.file, file.num_bytes, file.num_rows, file.num_removed, checksum, clients)


def _worker_mark_of(mark: messages.WorkerMark) -> WorkerPosition:
    return WorkerPosition(mark.worker_index, mark.step, json.loads(mark.position) if mark.position else None)
