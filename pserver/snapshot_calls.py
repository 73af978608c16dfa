"""The calls of the control plane that save, load and shrink, without gRPC: what each of them does to one pserver."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from fleet_sparse.errors import SnapshotError
from fleet_sparse.wire import control_pb2 as messages

from .ledger import Mark
from .membership import Membership
from .root import resolve_under
from .shard import Shard
from .snapshot.directory import Directory
from .snapshot.load import Loaded, load
from .snapshot.manifest import Base, Manifest, ShardFile, WorkerMark
from .snapshot.save import Post, Save
from .snapshot.series import Plan, Series
from .store import Store

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

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


@dataclass(slots=True, eq=False)
class _Lineage:
    """Which snapshots of a series are this job's to remove: those that it saved, and what it began with or before it.

    Attributes:
        began_with: Number of the newest one that it began with, or loaded; 0 for none.
        saved: Numbers.
    """

    began_with: int = 0
    saved: set[int] = field(default_factory=set)

    def begin_with(self, number: int) -> None:
        """The job goes on from that one."""
        self.began_with = max(self.began_with, number)

    def has(self, number: int) -> bool:
        """Whether a snapshot belongs to it."""
        return number <= self.began_with or number in self.saved


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


class SnapshotCalls:
    """Answers the calls for one pserver. All of it runs in the event loop of its `Control`.

    Args:
        shard: Touched by posted tasks alone.
        post: Runs a task in the thread that owns the shard.
        on_data_thread: As `post`, for this event loop.
        membership: Of the job.
        root: Directory or URL under which snapshots lie.
        marks_s: Seconds that a save waits for the workers' marks.
        began_with: What the shard began with; None if with nothing.

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
        began_with: Loaded | None = None,
    ) -> None:
        self._shard = shard
        self._post = post
        self._on_data_thread = on_data_thread
        self._membership = membership
        self._root = root
        self._marks_s = marks_s
        self._running: _Running | None = None
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        self._draft: _Draft | None = None
        self._lineages: defaultdict[str, _Lineage] = defaultdict(_Lineage)  # by series
        if began_with is not None:
            self._lineages[began_with.series].begin_with(began_with.manifest.number)
        self._loaded: dict[str, list[messages.TableState]] = {}  # loads that were kept, by id
        self._changed = asyncio.Event()  # set, and replaced, when those that wait should look again
        self.calls: dict[str, Callable[[Any], Coroutine[Any, Any, Message]]] = {
            "PlanSave": self._plan_save,
            "AwaitSave": self._await_save,
            "BeginSave": self._begin_save,
            "Mark": self._mark,
            "WriteSave": self._write_save,
            "FinishSave": self._finish_save,
            "EndSave": self._end_save,
            "LoadDraft": self._load_draft,
            "FinishLoad": self._finish_load,
            "Shrink": self._shrink,
        }

    def note_change(self) -> None:
        """Workers came to a barrier, went through one or were lost: those that wait for them look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def lose(self, worker: int) -> None:
        """A worker is lost, or was started again: a save that it asked for is given up, and a load of the job."""
        running = self._running
        if running is not None and running.ended is None and running.asker == worker:
            _log.warning("save %s: given up, worker %d that asked for it is lost", running.save.save_id, worker)
            self._begin_end(running, None)
        if self._draft is not None:
            self._begin_drop(self._draft)

    def close(self) -> None:
        """What other threads do for these calls ends soon. From any thread."""
        running, draft = self._running, self._draft
        if running is not None:
            running.save.give_up()
        if draft is not None:
            draft.given_up.set()

    # Saving

    async def _plan_save(self, request: messages.PlanSaveRequest) -> messages.SavePlan:
        plan = await _in_thread(self._series(request.dirname).plan, request.kind, request.save_id)
        base = None if plan.base is None else messages.SnapshotBase(**plan.base._asdict())
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
            running.begun = _task(self._cut(running))
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
            running.is_cut = await self._on_data_thread(running.save.cut)
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
            running.written = _task(self._write(running))
        return await asyncio.shield(running.written)

    async def _write(self, running: _Running) -> messages.ShardFile:
        begun_at = time.monotonic()
        directory = self._series(running.plan.dirname).target(_plan_of(running.plan), running.save.save_id)
        file = await _in_thread(running.save.write, directory, self._post)
        _log.info("saved %d rows, %d bytes to %s in %.2f s", file.num_rows, file.num_bytes, directory, _since(begun_at))
        clients = [messages.ClientMark(**mark._asdict()) for mark in file.clients]
        return messages.ShardFile(**{**file._asdict(), "clients": clients})

    async def _finish_save(self, request: messages.FinishSaveRequest) -> messages.FinishSaveReply:
        running = self._the(request.plan.save_id)
        if running.finished is None:
            running.finished = _task(self._finish(running, request))
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
        )
        series = self._series(running.plan.dirname)
        lineage = self._lineages[str(series)]
        snapshot = await _in_thread(series.commit, plan, manifest, request.keep_last or None, lineage.has)
        lineage.saved.add(plan.number)
        _log.info("finished save %s: %d rows, %s", save.save_id, manifest.num_rows, snapshot)
        return messages.FinishSaveReply(snapshot=snapshot, checksum=manifest.checksum)

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
            running.ended = _task(self._clear(running, committed_as))
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
                await _in_thread(series.abandon, plan, running.save.save_id)
        finally:
            self._forget(running)

    def _forget(self, running: _Running) -> None:
        if self._running is running:
            self._running = None
        if running.ended is None:
            self._ended.append(running.save.save_id)
        self.note_change()

    # Loading

    async def _load_draft(self, request: messages.LoadDraftRequest) -> messages.LoadDraftReply:
        while (draft := self._draft) is not None and draft.load_id != request.load_id:
            await self._drop(draft)
        if draft is None:
            directory = resolve_under(self._root, request.dirname)
            draft = self._draft = _Draft(request.load_id, self._shard.another())
            draft.filled = _task(self._fill(draft, directory, tuple(request.tables)))
        assert draft.filled is not None
        loaded = await asyncio.shield(draft.filled)
        return messages.LoadDraftReply(num_rows=loaded.num_rows)

    async def _fill(self, draft: _Draft, directory: Directory, tables: tuple[str, ...]) -> Loaded:
        begun_at = time.monotonic()
        try:
            loaded = await _in_thread(partial(load, draft.shard, directory, tables, given_up=draft.given_up))
            await self._on_data_thread(partial(self._shard.check_takes, draft.shard))
        except Exception:
            await self._close(draft)
            raise
        _log.info("loaded %d rows of %s in %.2f s", loaded.num_rows, directory, _since(begun_at))
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
                draft.taken = _task(self._take(draft))
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
        self._shard.take_over(draft)
        return [messages.TableState(**state._asdict()) for state in self._shard.states()]

    async def _drop(self, draft: _Draft) -> None:
        """Returns when it is there no more; one that is being taken is taken."""
        self._begin_drop(draft)
        await asyncio.wait({task for task in (draft.taken, draft.dropped) if task is not None})

    def _begin_drop(self, draft: _Draft) -> None:
        if draft.taken is None and draft.dropped is None:
            draft.given_up.set()
            draft.dropped = _task(self._throw_away(draft))

    async def _throw_away(self, draft: _Draft) -> None:
        assert draft.filled is not None
        await asyncio.wait({draft.filled})
        await self._close(draft)

    async def _close(self, draft: _Draft) -> None:
        """Gives memory back, when nobody fills it any more. Again does nothing."""
        try:
            await _in_thread(draft.shard.close)
        finally:
            if self._draft is draft:
                self._draft = None

    # Shrinking

    async def _shrink(self, request: messages.ShrinkRequest) -> messages.ShrinkReply:
        await self._wait_for_no_save("shrink")
        begun_at = time.monotonic()
        num_removed = await self._on_data_thread(
            lambda: sum(len(store.shrink(request.max_unseen_days)) for store in self._stores())
        )
        _log.info("shrink: removed %d rows, requests waited %.2f s", num_removed, _since(begun_at))
        return messages.ShrinkReply(num_removed=num_removed)

    def _stores(self) -> list[Store]:
        return [held.values for held in self._shard.held.values() if isinstance(held.values, Store)]

    # Both

    def _series(self, dirname: str) -> Series:
        return Series(resolve_under(self._root, dirname))

    def _the(self, save_id: str) -> _Running:
        self._check_not_ended(save_id)
        if self._running is None or self._running.save.save_id != save_id or not self._running.is_cut:
            raise SnapshotError(f"save {save_id}: it has not begun here; the pserver may have been started again")
        return self._running

    def _check_not_ended(self, save_id: str) -> None:
        if save_id in self._ended:
            raise SnapshotError(f"save {save_id}: it was given up, or has ended. Save again")

    async def _wait_for_no_save(self, what: str) -> None:
        """Returns when no save is under way. One that is about to end is waited for, any other is an error."""
        while (running := self._running) is not None:
            if running.ended is None:
                raise SnapshotError(f"{what}: a snapshot is being written. Wait for the save to end")
            await asyncio.wait({running.ended})

    async def _change_before(self, deadline: float) -> bool:
        try:
            # Not wait_for: before Python 3.12 a cancellation is lost that comes together with the change.
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


def resumed_json(manifest: Manifest) -> str:
    """What a worker is told of the snapshot that its pservers began with."""
    return json.dumps(
        {
            "snapshot": manifest.name,
            "is_whole": manifest.is_whole,
            "tables": manifest.tables,
            "num_workers": len(manifest.workers),
            "workers": [mark._asdict() for mark in manifest.workers],
        }
    )


def _task(work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
    """A task that goes on when who asked for it gives up."""
    task = asyncio.create_task(work)
    task.add_done_callback(_heard)
    return task


def _heard(ended: asyncio.Future[Any]) -> None:
    """Has asyncio not complain of an error that nobody takes."""
    if not ended.cancelled():
        ended.exception()


async def _in_thread(work: Callable[..., _Result], *arguments: Any) -> _Result:
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


def _plan_of(plan: messages.SavePlan) -> Plan:
    base = Base(plan.base.number, plan.base.kind, plan.base.checksum) if plan.HasField("base") else None
    return Plan(plan.number, plan.kind, base)


def _file_of(file: messages.ShardFile) -> ShardFile:
    clients = tuple(Mark(client.client_id, client.epoch, client.watermark) for client in file.clients)
    return ShardFile(file.shard, file.file, file.num_bytes, file.num_rows, file.num_removed, file.checksum, clients)


def _worker_mark_of(mark: messages.WorkerMark) -> WorkerMark:
    return WorkerMark(mark.worker_index, mark.step, json.loads(mark.position) if mark.position else None)


def _since(begun_at: float) -> float:
    return time.monotonic() - begun_at
