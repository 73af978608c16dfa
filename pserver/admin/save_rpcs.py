"""The calls of the control plane that save one pserver's part of a snapshot."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from fleet_sparse.core.criteria import Criterion, checked
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode, ProtocolError, SnapshotError
from fleet_sparse.snapshot.checksum import Checksum
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import Base, Manifest, ShardFile, WorkerPosition
from fleet_sparse.snapshot.store import Plan, SnapshotStore
from fleet_sparse.wire import control_pb2 as messages

from ..engine.shard import Shard
from ..log.lineage import LineageChange, Lineages
from ..tables.table import Post
from .background import Signal, in_thread, task_of
from .checkpoint_link import CheckpointLink
from .checkpoints import Checkpoints
from .log_appends import LogAppends
from .membership import Membership
from .root import resolve_under
from .snapshot_writer import Save

_log = logging.getLogger(__name__)

# After this long a call that waits for a save to begin is answered, and repeated.
AWAIT_S = 600.0
# Number of saves that have ended whose ids are known: a call for one of them does not wait.
MAX_ENDED = 64
# In sync a save is cut without positions; workers that have not reported them by this long after it have none in it.
LATE_POSITIONS_S = 5.0
# For so long a save that begins waits for the end of a load or a shrink, which may wait for room in the log.
HELD_S = 10.0


@dataclass(slots=True, eq=False)
class _Running:
    """A save that has begun and not ended.

    Attributes:
        plan: Plan of the save.
        save: This shard's part of it.
        coordinator: Index of the worker that makes the save.
        step: Number of steps that the coordinator had made.
        positions: Positions of the workers that have reported them.
        needs_positions: True if the shard is cut only once all workers have reported; assumed until it is known.
        is_cut: True once the shard is cut.
        link: Makes the save the checkpoint of the log; None if it does not become that, or before that is known.
        reported: Sent when a position is reported or withdrawn, a worker is lost, or the save ends.
        settled: Sent when the shard is cut, or the save ends.
        begun: Ends with the cut.
        written: Ends with the file; None before that was requested.
        finished: Ends with the manifest; None before that was requested, and on other pservers than that of shard 0.
        ended: Ends when nothing of the save is left; None before it is to end.
        idle_since: When it was first seen to do nothing, since something was requested last; None if it was not.
    """

    plan: messages.SavePlan
    save: Save
    coordinator: int
    step: int
    positions: dict[int, list[messages.WorkerPosition]] = field(default_factory=dict)
    needs_positions: bool = True
    is_cut: bool = False
    link: CheckpointLink | None = None
    reported: Signal = field(default_factory=Signal)
    settled: Signal = field(default_factory=Signal)
    begun: asyncio.Task[bool] | None = None
    written: asyncio.Task[messages.ShardFile] | None = None
    finished: asyncio.Task[messages.FinishSaveReply] | None = None
    ended: asyncio.Task[None] | None = None
    idle_since: float | None = None

    @property
    def is_busy(self) -> bool:
        """True while it is being cut, written or finished."""
        return any(task is not None and not task.done() for task in (self.begun, self.written, self.finished))

    def is_new_to(self, request: messages.AwaitSaveRequest) -> bool:
        """Returns True for a worker that neither coordinates the save nor knows it."""
        return self.coordinator != request.worker_index and self.save.save_id != request.last_save_id

    def position_of(self, worker: int) -> messages.WorkerPosition:
        """Returns the position of a worker at the cut. In sync all workers are at one step."""
        reported = self.positions.get(worker, [])
        if self.needs_positions and reported:
            return reported[-1]
        # A worker that has left the step group keeps the position of its last step.
        position = next((each.position for each in reversed(reported) if each.step <= self.step), "")
        return messages.WorkerPosition(worker_index=worker, step=self._num_trained, position=position)

    @property
    def _num_trained(self) -> int:
        """In sync the number of steps before the cut in which workers trained: that of the one with the most."""
        before = (each for reported in self.positions.values() for each in reported if each.step <= self.step)
        return max(each.step - each.num_untrained for each in before)  # the coordinator's is there

    def wake_all(self) -> None:
        """Wakes the tasks that wait for this save."""
        self.reported.send()
        self.settled.send()


class SaveService:
    """Answers the calls for one pserver, in the event loop of its control plane.

    Args:
        shard: Used only by posted tasks.
        post: Runs a task in the thread that owns the shard.
        on_data_thread: As `post`, for this event loop.
        appends: Appends to the log of the shard.
        membership: Workers of the job.
        root: Directory or URL under which snapshots lie.
        positions_s: Seconds that a save waits for the workers' positions.
        abandoned_after_s: Seconds after which a save is ended that does nothing, and of which nothing is requested.
        lineages: Snapshots of the job; those that are saved here are added.
        on_written: Called with the name of each complete snapshot with all rows, and its save id, once the file of this
            shard is durable: it may be committed from then on.
        on_snapshot: Called with the name of each such snapshot that was committed.
        checkpoints: Checkpoints of the log.
    """

    def __init__(  # noqa: PLR0913  # the parts of a pserver that a save needs
        self,
        shard: Shard,
        *,
        post: Post,
        on_data_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        appends: LogAppends,
        membership: Membership,
        root: str,
        positions_s: float,
        abandoned_after_s: float,
        lineages: Lineages,
        on_written: Callable[[str, str], None],
        on_snapshot: Callable[[str], None],
        checkpoints: Checkpoints,
    ) -> None:
        self._shard = shard
        self._post = post
        self._on_data_thread = on_data_thread
        self._appends = appends
        self._membership = membership
        self._root = root
        self._positions_s = positions_s
        self._abandoned_after_s = abandoned_after_s
        self._lineages = lineages
        self._on_written = on_written
        self._on_snapshot = on_snapshot
        self._checkpoints = checkpoints
        self._running: _Running | None = None
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        self._committed: deque[str] = deque(maxlen=MAX_ENDED)  # of them, those after which nothing is left to do
        self._changed = Signal()  # sent when a save begins or ends, or may begin again
        self._holders: list[str] = []  # what keeps saves from beginning
        self._is_stopping = False

    @property
    def is_saving(self) -> bool:
        """True if a save is under way, or is ending."""
        return self._running is not None

    def lose(self, worker: int) -> None:
        """Gives up the save that a worker coordinates: the worker is lost, or was started again."""
        running = self._running
        if running is None:
            return
        if running.ended is None and running.coordinator == worker:
            _log.warning("save %s: given up, its coordinator, worker %d, is lost", running.save.save_id, worker)
            self._begin_end(running, None)
        running.reported.send()

    def end_abandoned(self, now: float) -> None:
        """Ends a save whose end was lost, as one that was not committed. To be called again and again."""
        running = self._running
        if running is None or running.ended is not None:
            return
        if running.is_busy:
            running.idle_since = None
        elif running.idle_since is None:
            running.idle_since = now
        elif now - running.idle_since > self._abandoned_after_s:
            _log.warning(
                "save %s: given up, nothing was requested of it for %g s. Look into the log of worker %d",
                running.save.save_id,
                self._abandoned_after_s,
                running.coordinator,
            )
            self._begin_end(running, None)

    def close(self) -> None:
        """Ends the work of other threads soon. Any thread may call it."""
        running = self._running
        if running is not None:
            running.save.give_up()

    def release_waiting(self) -> None:
        """Answers the calls that wait for a save to begin: the pserver stops."""
        self._is_stopping = True
        self._changed.send()

    @asynccontextmanager
    async def held(self, what: str) -> AsyncIterator[None]:
        """Keeps saves from being under way, once one that is ending has ended. One that begins waits.

        Raises:
            SnapshotError: One is under way and does not end; `what` cannot be done.
        """
        while (running := self._running) is not None:
            if running.ended is None:
                raise SnapshotError(f"{what}: a snapshot is being written. Wait for the save to end")
            await asyncio.wait({running.ended})
        self._holders.append(what)
        try:
            yield
        finally:
            self._holders.remove(what)
            self._changed.send()

    async def plan(self, request: messages.PlanSaveRequest) -> messages.SavePlan:
        """Answers PlanSave."""
        plan = await in_thread(self._store(request.dirname).plan, request.kind, request.save_id)
        base = None if plan.base is None else messages.SnapshotBase(**msgspec.structs.asdict(plan.base))
        return messages.SavePlan(
            dirname=request.dirname, save_id=request.save_id, number=plan.number, kind=plan.kind, base=base
        )

    async def await_save(self, request: messages.AwaitSaveRequest) -> messages.AwaitSaveReply:
        """Answers AwaitSave once a save begins that the worker does not know, or none did for `AWAIT_S`."""
        deadline = time.monotonic() + AWAIT_S
        while not self._is_stopping:
            running = self._running
            if running is not None and running.ended is None and running.is_new_to(request):
                return messages.AwaitSaveReply(save_id=running.save.save_id)
            if not await self._changed.wait(deadline):
                break
        return messages.AwaitSaveReply()

    async def begin(self, request: messages.BeginSaveRequest) -> messages.BeginSaveReply:
        """Answers BeginSave once the shard is cut, or cannot write this delta."""
        save_id = request.plan.save_id
        _check_position(request.position)
        self._membership.check_not_ended(f"save {request.plan.dirname!r}", request.client_id)
        self._check_not_ended(save_id)
        deadline = time.monotonic() + HELD_S
        while (running := self._running) is None or running.save.save_id != save_id:
            if running is not None:
                # A coordinator has one save at a time: it has given that one up, whose errors are not this one's.
                self._begin_end(running, None)
                assert running.ended is not None
                await asyncio.wait({running.ended})
            elif not self._holders:
                break
            elif not await self._changed.wait(deadline):
                raise SnapshotError(
                    f"save {request.plan.dirname!r}: shard {self._shard.shard_index} has been busy with a "
                    f"{self._holders[0]} for {HELD_S:g} s. Save again"
                )
            self._check_not_ended(save_id)
        if running is None:
            base = request.plan.base.checksum if request.plan.kind == "delta" else None
            save = Save(
                self._shard,
                save_id,
                base=base,
                tables=request.tables,
                ends_day=request.ends_day,
                left_out=_left_out_of(request),
                is_logged=True,
            )
            position = request.position
            running = _Running(request.plan, save, position.worker_index, position.step)
            running.positions[running.coordinator] = [position]
            running.begun = task_of(self._cut(running))
            self._running = running
            self._changed.send()
        assert running.begun is not None
        return messages.BeginSaveReply(needs_full=not await asyncio.shield(running.begun))

    async def _cut(self, running: _Running) -> bool:
        """Returns whether this shard takes part."""
        try:
            await self._checkpoints.wait_if_overdue(running.save, self._target(running))
            running.needs_positions = not await self._on_data_thread(self._is_between_steps)
            if running.needs_positions:
                await self._wait_for_positions(running, self._positions_s)
                self._check_not_ended(running.save.save_id)
                if missing := self._missing(running):
                    raise SnapshotError(
                        f"save {running.plan.dirname!r}: worker {missing[0]} did not report its position within "
                        f"{self._positions_s:g} s. Look into its log; raise FLEET_SPARSE_POSITIONS_S if it is only slow"
                    )
            await self._checkpoints.give_up()
            running.link = await self._checkpoints.link_of(running.save, self._target(running))
            cut = running.save.cut if running.link is None else running.link.cut
            running.is_cut = await self._on_data_thread(partial(cut, self._membership.client_ids()))
            if running.is_cut and running.save.ends_day:
                await self._appends.sync()  # the end of the day needs the record of the cut
        except BaseException:
            if running.ended is None:
                self._forget(running)
            raise
        if not running.is_cut and running.ended is None:
            self._forget(running)
        running.wake_all()
        return running.is_cut

    def _is_between_steps(self) -> bool:
        """Returns True if all workers are between two steps when one is. Runs on the data thread."""
        return self._shard.job is not None and self._shard.job.is_sync

    def _workers(self, running: _Running) -> list[int]:
        """Returns the workers whose steps are in the save."""
        return sorted(running.positions.keys() | (set() if running.needs_positions else self._membership.present()))

    def _missing(self, running: _Running) -> list[int]:
        return sorted(self._membership.present() - running.positions.keys())

    async def _wait_for_positions(self, running: _Running, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while running.ended is None and self._missing(running) and await running.reported.wait(deadline):
            pass

    async def report_position(self, request: messages.ReportPositionRequest) -> messages.ReportPositionReply:
        """Answers ReportPosition once the shard is cut, or the save has ended or did not begin in time."""
        for position in request.positions:
            _check_position(position)
        self._membership.check_not_ended(f"save {request.save_id}", request.client_id)
        deadline = time.monotonic() + self._positions_s
        while request.save_id not in self._ended:
            running = self._running
            if running is not None and running.save.save_id == request.save_id and request.positions:
                await self._hold_position(running, list(request.positions), deadline)
                break
            if not await self._changed.wait(deadline):
                break
        return messages.ReportPositionReply()

    async def _hold_position(
        self, running: _Running, positions: list[messages.WorkerPosition], deadline: float
    ) -> None:
        """Keeps the positions of a worker until the shard is cut. They are withdrawn if the worker stops waiting.

        Raises:
            SnapshotError: The shard may still be cut, but the worker should not wait longer: it should end the save.
        """
        worker = positions[0].worker_index
        if not (running.is_cut and running.needs_positions):
            running.positions[worker] = positions
            running.reported.send()
        try:
            while not running.is_cut and running.save.save_id not in self._ended:
                if not await running.settled.wait(deadline):
                    raise SnapshotError(
                        f"save {running.save.save_id}: shard {self._shard.shard_index} was not cut within "
                        f"{self._positions_s:g} s after worker {worker} reported its position"
                    )
        finally:
            # Those of another call of this worker, which still waits, stay.
            if not running.is_cut and running.positions.get(worker) is positions:
                del running.positions[worker]

    async def write(self, request: messages.WriteSaveRequest) -> messages.ShardFile:
        """Answers WriteSave once the file is durable."""
        running = self._cut_save(request.save_id)
        if running.written is None:
            running.written = task_of(self._write(running))
        return await asyncio.shield(running.written)

    async def _write(self, running: _Running) -> messages.ShardFile:
        begun_at = time.monotonic()
        plan, directory = _plan_of(running.plan), self._target(running)
        file = await in_thread(running.save.write, directory, self._post)
        if running.link is not None:
            await in_thread(running.link.link, file)
        if self._has_all_rows(running):
            self._on_written(f"{running.plan.dirname}/{plan.name}", running.save.save_id)
        _log.info(
            "saved %d rows, %d bytes for %s/%s in %.2f s",
            file.num_rows,
            file.num_bytes,
            directory.parent(),
            plan.name,
            time.monotonic() - begun_at,
        )
        clients = [messages.ClientWatermark(**watermark._asdict()) for watermark in file.clients]
        return messages.ShardFile(**{**msgspec.structs.asdict(file), "clients": clients})

    async def finish(self, request: messages.FinishSaveRequest) -> messages.FinishSaveReply:
        """Answers FinishSave once the manifest is durable."""
        running = self._cut_save(request.plan.save_id)
        if running.finished is None:
            running.finished = task_of(self._finish(running, request))
        return await asyncio.shield(running.finished)

    async def _finish(self, running: _Running, request: messages.FinishSaveRequest) -> messages.FinishSaveReply:
        if not running.needs_positions:
            await self._wait_for_positions(running, LATE_POSITIONS_S)
            self._check_not_ended(running.save.save_id)
        plan, save = _plan_of(running.plan), running.save
        manifest = Manifest(
            number=plan.number,
            kind=plan.kind,
            base=plan.base,
            save_id=save.save_id,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            tables=save.table_names,
            is_complete=save.is_complete,
            files=tuple(sorted(map(_file_of, request.files))),
            workers=tuple(map(_position_of, map(running.position_of, self._workers(running)))),
            placement_version=self._shard.placement.version,
        )
        store = self._store(running.plan.dirname)
        has = self._lineages.of(str(store)).has
        snapshot = await in_thread(store.commit, plan, manifest, request.keep_last or None, has)
        self._lineages.add(LineageChange(str(store), saved=plan.number))
        path = f"{store}/{snapshot}"
        _log.info("finished save %s: %d rows, %s", save.save_id, manifest.num_rows, path)
        return messages.FinishSaveReply(snapshot=path, checksum=manifest.checksum, num_rows=manifest.num_rows)

    async def end(self, request: messages.EndSaveRequest) -> messages.EndSaveReply:
        """Answers EndSave once nothing of the save is left.

        Raises:
            SnapshotError: The save was committed, and this pserver does not know it, or gave it up.
            LogFull: The end of a day has found no room in the log. The call may be repeated.
        """
        save_id, running = request.save_id, self._running
        if running is not None and running.save.save_id == save_id:
            await self._end(running, request.checksum if request.committed else None)
        elif save_id not in self._ended and not request.committed:  # it never began here, and must not begin any more
            self._ended.append(save_id)
            self._changed.send()
        if request.committed and save_id not in self._committed:
            await self._complete(request)
        return messages.EndSaveReply()

    async def _complete(self, request: messages.EndSaveRequest) -> None:
        """Completes the end of a committed save that the process before had cut, or whose day found no room to end."""
        save_id = request.save_id
        async with self._checkpoints.held():
            is_known = await self._appends.append(partial(self._end_day, save_id))
        base = await self._on_data_thread(lambda: self._shard.base)
        if not is_known and base != request.checksum:  # else this process began with the snapshot, and all that it has
            self._note_unknown(request, base)
            raise SnapshotError(
                f"save {save_id}: shard {self._shard.shard_index} does not know it: it was started again "
                "without a log, or gave the save up. The snapshot is complete"
            )
        await self._appends.sync()
        self._committed.append(save_id)

    def _end_day(self, save_id: str) -> bool:
        """Ends the day of a save that the log has, unless that is done; returns whether it has the save.

        Runs on the data thread.
        """
        save = None if self._shard.log is None else self._shard.log.control.save
        if save is None or save.save_id != save_id:
            return False
        if save.ends_day and not save.has_ended:
            specs = [entry.spec for entry in self._shard.tables.values()]
            self._shard.end_day(
                [spec.table_id for spec in specs if not save.tables or spec.name in save.tables], save_id
            )
        return True

    async def _end(self, running: _Running, committed_as: int | None) -> None:
        """Ends a save, whatever it is doing; completely even if its caller is cancelled."""
        self._begin_end(running, committed_as)
        assert running.ended is not None
        await asyncio.shield(running.ended)

    def _begin_end(self, running: _Running, committed_as: int | None) -> None:
        if running.ended is None:
            self._ended.append(running.save.save_id)
            running.ended = task_of(self._clear(running, committed_as))
            running.wake_all()
            self._changed.send()

    async def _clear(self, running: _Running, committed_as: int | None) -> None:
        """Until this is done no other save begins here, and nothing is loaded: copy-on-write views are open."""
        try:
            running.save.give_up()
            tasks = [task for task in (running.begun, running.written, running.finished) if task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)
            is_logged = await self._on_data_thread(partial(running.save.end, committed_as))
            if running.link is not None:
                await self._checkpoints.end_link(running.link, committed_as if is_logged else None)
            if committed_as is not None and running.save.is_complete:
                self._note_snapshot(running)
            if committed_as is None and self._shard.shard_index == 0:
                store, plan = self._store(running.plan.dirname), _plan_of(running.plan)
                await in_thread(store.abandon, plan, running.save.save_id)
            if committed_as is not None:
                await self._appends.append(running.save.end_day)
                if running.save.ends_day:
                    await self._appends.sync()
                self._committed.append(running.save.save_id)
        finally:
            self._forget(running)

    def _note_snapshot(self, running: _Running) -> None:
        """Notes a complete snapshot. The job does not continue from one that lacks rows, nor from its deltas."""
        plan = _plan_of(running.plan)
        if plan.base is None:
            series = str(self._store(running.plan.dirname))
            self._lineages.add(LineageChange(series, lacks_rows=running.save.lacks_rows))
        if self._has_all_rows(running):
            self._on_snapshot(f"{running.plan.dirname}/{plan.name}")

    def _has_all_rows(self, running: _Running) -> bool:
        """Returns whether the job can continue from the snapshot of a save."""
        if not running.save.is_complete:
            return False
        if running.plan.HasField("base"):
            return not self._lineages.of(str(self._store(running.plan.dirname))).lacks_rows
        return not running.save.lacks_rows

    def _note_unknown(self, request: messages.EndSaveRequest, base: int | None) -> None:
        """Notes the snapshot of a save whose shard the process before had written: the next process continues from it.

        A delta has all rows if its base has, and `base`, with which this process began, does.
        """
        plan = request.plan
        has_base = not plan.HasField("base") or plan.base.checksum == base
        if request.HasField("plan") and has_base and not request.lacks_rows:
            self._on_snapshot(f"{plan.dirname}/{_plan_of(plan).name}")

    def _forget(self, running: _Running) -> None:
        if self._running is running:
            self._running = None
        if running.ended is None:
            self._ended.append(running.save.save_id)
        running.wake_all()
        self._changed.send()

    def _target(self, running: _Running) -> Directory:
        """Returns the directory for the files of a save."""
        return self._store(running.plan.dirname).target(_plan_of(running.plan), running.save.save_id)

    def _store(self, dirname: str) -> SnapshotStore:
        return SnapshotStore(resolve_under(self._root, dirname))

    def _cut_save(self, save_id: str) -> _Running:
        self._check_not_ended(save_id)
        if self._running is None or self._running.save.save_id != save_id or not self._running.is_cut:
            raise SnapshotError(f"save {save_id}: it has not begun here; the pserver may have been started again")
        self._running.idle_since = None
        return self._running

    def _check_not_ended(self, save_id: str) -> None:
        if save_id in self._ended:
            raise SnapshotError(f"save {save_id}: it was given up, or has ended. Save again")


def _left_out_of(request: messages.BeginSaveRequest) -> dict[str, tuple[Criterion, ...]]:
    """By table, the criteria of the rows that the request leaves out."""
    try:
        return {
            each.table: checked([Criterion(criterion.name, criterion.value) for criterion in each.criteria])
            for each in request.left_out
        }
    except ValueError as error:
        raise SnapshotError(f"save {request.plan.save_id}: {error}") from None


def _plan_of(plan: messages.SavePlan) -> Plan:
    base = Base(plan.base.number, plan.base.kind, Checksum(plan.base.checksum)) if plan.HasField("base") else None
    return Plan(plan.number, plan.kind, base)


def _file_of(file: messages.ShardFile) -> ShardFile:
    clients = tuple(Watermark(client.client_id, client.epoch, client.watermark) for client in file.clients)
    checksum = Checksum(file.checksum)
    return ShardFile(file.shard, file.file, file.num_bytes, file.num_rows, file.num_removed, checksum, clients)


def _check_position(position: messages.WorkerPosition) -> None:
    """Refuses a position that a manifest cannot have: the save would fail at its end.

    Raises:
        ProtocolError: It is not JSON, or has a number that is not finite, or its step is past all bounds.
    """
    if position.num_untrained > position.step:
        raise ProtocolError(
            f"worker {position.worker_index}: {position.num_untrained} of its {position.step} steps trained nothing",
            code=ErrorCode.MALFORMED,
        )
    if position.step >= 1 << 63:
        raise ProtocolError(
            f"worker {position.worker_index}: its step is {position.step}, should be below 2^63",
            code=ErrorCode.MALFORMED,
        )
    if not position.position:
        return
    try:
        json.dumps(json.loads(position.position), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"worker {position.worker_index}: its position is not JSON: {error}", code=ErrorCode.MALFORMED
        ) from None


def _position_of(position: messages.WorkerPosition) -> WorkerPosition:
    return WorkerPosition(
        position.worker_index, position.step, json.loads(position.position) if position.position else None
    )
