"""Shard: the rows of every table whose ids hash to this pserver, and its range of every dense array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.criteria import Criterion, checked
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode, LogFull
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frame_format import PULLS, PUSHES, Block, Header, Op

from ..refusal import Refusal
from ..storage.memory_layout import MemoryLayout
from ..tables.embedding import EmbeddingTable
from ..tables.merger import Merger
from ..tables.mutations import Change, CopyMutation, DayEnd, Mutation, Push, RowAssignment, Shrink
from ..tables.reply_memory import ReplyMemory
from ..tables.row_limit import NO_LIMITS, UNLIMITED, RowLimits
from ..tables.shrunk import ShrunkTable
from ..tables.table import TableContext
from .dedup import DedupLedger, Verdict
from .job import DeferredRequest, Job
from .jobs import Jobs, JobsState
from .plain_frames import PlainFrame, PlainFrames, PlainPush
from .progress import NO_PROGRESS, Progress
from .reply import REPLIES, DeferredReply, Outs, Reply, answer_of, finish_step, rows_of
from .steps import Steps
from .table_map import TableEntry, TableMap
from .validate import STEP_OPS, check_step, find_mutations, find_pulls

if TYPE_CHECKING:
    from ..log.loaded_rows import LoadedRows
    from ..log.shard_log import ShardLog

_FLOAT_BYTES = 4
_OF_IDS = (Push, Change, RowAssignment)


@dataclass(slots=True)
class Counters:
    """Work of a shard since it was made."""

    num_requests: int = 0
    num_pulled_rows: int = 0
    num_pushed_rows: int = 0


class Shard:
    """The tables of one pserver.

    One thread owns a shard. Nothing here locks, sleeps or does I/O. A request is applied as a whole or not at all: all
    of it is checked before the first value changes.

    Args:
        max_staged_bytes: Largest total size of the pushes that are staged for a sync step.
        max_pre_image_bytes: As of a `TableStore`.
        huge_pages: As of a `TableStore`.
        row_limits: Bounds for the rows of each table.
        layout: Changes when arrays of the tables may have moved; None for one of its own.
        only_registered: As of `Jobs`.
        max_reply_bytes: Size of the largest frame of a reply about copies of rows.

    Attributes:
        shard_index: Index of the shard, from 0.
        num_shards: Number of shards of the placement.
        cluster_id: u64 of the job.
        incarnation: u64 that differs for each start of the pserver.
        placement: Which shard owns which ids.
        counters: Work done so far.
        tables: Tables and dense arrays by their number on the wire.
        plain_frames: Finds the frames that `execute_plain` takes.
        ledger: Applied pushes by client.
        base: Checksum of the manifest of the snapshot since which the stores note changes; None if there is none.
        deferred_replies: Results of deferred requests that are ready; `take_deferred_replies` takes them.
        log: Receives every change before it is applied; None without a log.
        fault: Why the values may be neither served nor saved any more; empty if all is well.
        requests: Ops that it answers.
    """

    requests = PULLS | PUSHES

    def __init__(  # noqa: PLR0913  # what a placement, a store and a step take
        self,
        shard_index: int,
        num_shards: int,
        *,
        cluster_id: int,
        incarnation: int,
        placement: Placement,
        max_staged_bytes: int = Settings.max_staged_bytes,
        max_pre_image_bytes: int = Settings.max_pre_image_bytes,
        huge_pages: bool = True,
        row_limits: RowLimits = NO_LIMITS,
        layout: MemoryLayout | None = None,
        only_registered: bool = False,
        max_reply_bytes: int = Settings.max_frame_bytes,
    ) -> None:
        if placement.num_shards != num_shards or not 0 <= shard_index < num_shards:
            raise ValueError(f"shard {shard_index} of {num_shards}: the placement has {placement.num_shards} shards")
        self.shard_index = shard_index  # constant after construction, as all down to the blank line
        self.num_shards = num_shards
        self.cluster_id = cluster_id
        self.incarnation = incarnation
        self.placement = placement
        merger = Merger(placement, shard_index)
        self._layout = MemoryLayout() if layout is None else layout
        self._context = TableContext(
            placement, shard_index, merger, ReplyMemory(), self._layout, max_pre_image_bytes, huge_pages, row_limits
        )
        self.tables = TableMap(self._context)
        self.plain_frames = PlainFrames(self.tables, self._context)
        self._steps = Steps(self.tables, self._commit_pushes)
        self._jobs = Jobs(max_staged_bytes, only_registered=only_registered)
        self._max_reply_bytes = max_reply_bytes

        self.counters = Counters()
        self.ledger = DedupLedger()
        self.base: int | None = None
        self.log: ShardLog | None = None
        self.fault = ""
        self.deferred_replies: list[DeferredReply] = []
        # The newest push of each client that waits for room in the log, and the bytes that it needs.
        self._waiting_for_room: dict[bytes, tuple[Header, int]] = {}

    # Tables

    def add_table(
        self, spec: TableSpec | DenseSpec, *, declared_by: str = "this process", is_loaded: bool = False
    ) -> TableEntry:
        """Makes a table, or checks that the existing one has the same spec; see `TableMap.declare`.

        Args:
            spec: A table or dense array.
            declared_by: `worker 1`, for the message if another process declares another spec.
            is_loaded: The spec is that of a snapshot.

        Raises:
            TableMismatch, PlanError: As `TableMap.declare`.
            LogFull: The disk of the log has no room. Nothing changed.
        """
        self.tables.check([spec], declared_by, is_loaded=is_loaded)
        known = self.tables.get(spec.table_id)
        before = None if known is None else known.spec
        is_new = known is None or spec.schema_hash not in known.schema_hashes or (known.is_loaded and not is_loaded)
        if is_new and self.log is not None:
            self.log.add_table(spec, declared_by, is_loaded=is_loaded)
        try:
            entry = self.tables.declare(spec, declared_by, is_loaded=is_loaded)
        except BaseException as error:
            if is_new and self.log is not None:
                self._void(self.log, error)
            raise
        if isinstance(before, TableSpec) and isinstance(entry.spec, TableSpec) and before.entry != entry.spec.entry:
            self.base = None  # files of one chain have the same specs
        return entry

    def add_tables(self, specs: Sequence[TableSpec | DenseSpec], *, declared_by: str) -> None:
        """Makes several tables, as `add_table`, or none if another process declared one of them with another spec.

        If one fails otherwise, those before it stay where the log has them: a replay makes them again.
        """
        self.tables.check(specs, declared_by)
        before = set(self.tables)
        try:
            for spec in specs:
                self.add_table(spec, declared_by=declared_by)
        except Exception:
            if self.log is None:
                self.tables.remove(set(self.tables) - before)
            raise

    def clone_empty(self) -> Shard:
        """Returns an empty shard of the same buckets, to load into."""
        return Shard(
            self.shard_index,
            self.num_shards,
            cluster_id=self.cluster_id,
            incarnation=self.incarnation,
            placement=self.placement,
            max_pre_image_bytes=self._context.max_pre_image_bytes,
            huge_pages=self._context.huge_pages,
            row_limits=self._context.row_limits,
            layout=self._layout,  # `swap_in` takes its tables
        )

    def swap_in(self, other: Shard, rows: LoadedRows | None = None) -> None:
        """Replaces tables by those of another shard of the same buckets, which has none afterwards.

        Tables that `other` does not have stay as they are, and so does the ledger.

        Args:
            other: Nothing else uses it.
            rows: The rows file of `other`, durable in the directory of the log; None without a log.

        Raises:
            TableMismatch: As `TableMap.check_swap`. Nothing changed.
            LogFull: The disk of the log has no room. Nothing changed.
        """
        self.tables.check_swap(other.tables)
        if self.log is not None:
            assert rows is not None, "the log of a shard needs the rows"
            self.log.load(rows)
        try:
            self.tables.swap_in(other.tables)
        except BaseException as error:
            self.fault = (
                f"a load failed half-way ({type(error).__name__}: {error}); the values of shard {self.shard_index} are "
                "wrong. Start the pserver again from a snapshot"
            )
            if self.log is not None:
                self._void(self.log, error)
            raise
        self.base = None

    def states(self) -> list[TableState]:
        """Returns the state of every table, in the order of their declaration."""
        return self.tables.states()

    def close(self) -> None:
        """Frees all memory. Nothing may be called afterwards."""
        self.tables.close()

    @property
    def num_bytes(self) -> int:
        """Memory of all rows, values and states, estimated."""
        return self.tables.num_bytes

    # Workers

    @property
    def job(self) -> Job | None:
        """The job whose steps are counted; None if steps are not counted."""
        return self._jobs.current

    @property
    def complete_step(self) -> int:
        """The newest complete step; 0 if steps are not counted."""
        return 0 if self.job is None else self.job.clock.complete

    def join(self, worker: int, num_workers: int, client_id: bytes, mode: Mode | None, *, begins_job: bool) -> None:
        """Makes a client a worker of a job; see `Jobs.join`."""
        if self.log is not None:
            self.log.join(worker, num_workers, client_id, mode, begins_job=begins_job)
        former, former_terms = self.job, self._jobs.cache_terms
        self._jobs.join(worker, num_workers, client_id, mode, begins_job=begins_job)
        if former_terms is not None and self._jobs.cache_terms != former_terms:
            for entry in self.tables.values():
                entry.table.forget_copies()
        if former is not None:
            self._answer_ready(former)

    def resume_worker(self, worker: int, client_id: bytes, push_seq: int, step: int) -> None:
        """A worker continues with this shard, which was started again and may lack pushes of it.

        Args:
            worker: Index of the worker, which has joined.
            client_id: Its client.
            push_seq: The newest push that it will not send again; those up to it count as applied.
            step: The step of the newest of them that has one; 0 without.
        """
        mark = Watermark(client_id, 1, push_seq)
        if self.log is not None and push_seq > self.ledger.applied(client_id):
            left, is_member = () if self.job is None else self.job.left, self._takes_steps(client_id)
            self.log.commit([mark], [], Progress(step if is_member else 0), left, {})
        self.ledger.skip_to(mark)
        if self.job is not None:
            self.job.clock.push(worker, step)
            self._answer_ready(self.job)

    def pushed_step(self, worker: int) -> int:
        """Returns the newest step that a worker has pushed; 0 before the first, and if steps are not counted."""
        return 0 if self.job is None else self.job.clock.next_step(worker) - 1

    def _takes_steps(self, client_id: bytes) -> bool:
        return self.job is not None and client_id in self.job.members()

    def visit(self, client_id: bytes) -> None:
        """Refuses the pushes of a client from now on: it is a reader or a tool."""
        self._jobs.visit(client_id)

    def evict_worker(self, worker: int, reason: str) -> None:
        """Fails the steps that wait for a lost worker."""
        self._jobs.evict_worker(worker, reason)
        if self.job is not None:
            self._answer_ready(self.job)

    def knows(self, client_id: bytes) -> bool:
        """Returns whether a client has registered and is not forgotten: none of its pushes is applied twice."""
        return self._jobs.knows(client_id)

    def expect(self, watermarks: Sequence[Watermark]) -> None:
        """Continues with the pushes of a snapshot. Clients that do not register again are forgotten after two saves."""
        self.ledger = DedupLedger(watermarks)
        self._jobs.expect(mark.client_id for mark in watermarks)

    def note_saved(self, checksum: int) -> None:
        """A save of all tables was committed: it is the base of the next delta, and old clients are forgotten.

        Args:
            checksum: That of its manifest.
        """
        self.base = checksum
        forgotten = self._jobs.forget_departed()
        if forgotten:
            self.ledger.forget(forgotten)
            if self.log is not None:
                self.log.forget(forgotten)

    # Requests

    def execute(self, header: Header, blocks: Sequence[Block], outs: Outs = ()) -> Reply:
        """Carries out a request; its op is WAIT if the result follows by `take_deferred_replies`.

        Args:
            header: Header of the request, addressed to this shard.
            blocks: What it pulls and pushes.
            outs: Memory of the caller for the rows of the PULL blocks; rows that are written there are not in the
                reply. A deferred reply has all rows, and so has an answer about copies.

        Raises:
            Refusal: A check failed. Nothing changed.
        """
        if self.fault:
            raise Refusal(ErrorCode.INTERNAL, self.fault)
        job = self._jobs.current
        if header.step > 0 or header.op in STEP_OPS:
            check_step(job, self._jobs.ended, header)
        client_id = header.client_id
        is_pull = header.op in PULLS
        known = self._jobs.reading if is_pull else self._jobs.pushing
        if client_id not in known and not self._jobs.admits(client_id, header.op):
            raise self._jobs.refusal(client_id, header.op)
        verdict = (
            self.ledger.judge_pull(client_id, header.push_floor)
            if is_pull
            else self.ledger.judge_push(client_id, header.push_seq)
        )
        if verdict is Verdict.GAP:
            raise self._gap_before(header)
        is_new_push = verdict is Verdict.NEW
        if is_new_push and self.log is not None:
            record_bytes = self._most_record_bytes(self.log, header.op, blocks)
            if not self.log.has_room(record_bytes):
                self.log.check_waits(record_bytes)
                self._waiting_for_room[client_id] = header, record_bytes
                return Reply(Op.WAIT, [], self.acked_push(header), self.complete_step)
        try:
            pulls = find_pulls(
                self.tables,
                header,
                blocks,
                max_reply_bytes=self._max_reply_bytes,
                cache_terms=self._jobs.cache_terms,
            )
            if is_new_push:
                _check_pulls(pulls)
                self._accept(job, header, blocks)
            elif header.op is Op.LEAVE and job is not None and job.clock.have_all_left:
                self._steps.rejoin(job)  # the log had ended between the step of the last LEAVE and its REJOIN
                self._answer_ready(job)
        except Exception as error:
            if is_new_push and job is not None and self._steps.fail(job, header, error):
                self._answer_ready(job)
            raise
        if job is not None and job.must_wait(header, self.ledger.applied(header.client_id)):
            _check_pulls(() if is_new_push else pulls)
            job.defer(DeferredRequest(header, pulls))
            return Reply(Op.WAIT, [], self.acked_push(header), job.clock.complete)
        return self._answer(job, header, pulls, outs)

    def pull_plain(self, header: Header, frame: PlainFrame) -> tuple[NDArray[np.float32], Reply] | None:
        """Carries out a plain PULL, as `execute` would.

        Args:
            header: Header of the request, addressed to this shard.
            frame: Its blocks.

        Returns:
            The message of its rows, as of `PlainFrames.pull`, and its result without blocks; None if `execute` has to
            answer it.
        """
        job, client_id = self._jobs.current, header.client_id
        if (
            self.fault
            or (header.step > 0 and not self._is_plain_step(job, header))
            or (client_id not in self._jobs.reading and not self._jobs.admits(client_id, Op.PULL))
            or self.ledger.newest(client_id) < header.push_floor
            or (job is not None and job.must_wait(header, self.ledger.applied(client_id)))
        ):
            return None
        rows = self.plain_frames.pull(frame, client_id)
        if rows is None:
            return None
        self.counters.num_pulled_rows += frame.num_rows
        step = 0 if job is None else job.clock.complete
        return rows, Reply(Op.ROWS, [], self.acked_push(header), step)

    def push_plain(self, header: Header, frame: PlainFrame) -> Reply | None:
        """Carries out a plain PUSH, as `execute` would; returns None, and nothing changed, if that has to answer it.

        Args:
            header: Header of the request, addressed to this shard.
            frame: Its blocks.
        """
        job, client_id = self._jobs.current, header.client_id
        if (
            self.fault
            or (job is None) is (header.step > 0)
            or (header.step > 0 and not self._is_plain_step(job, header))
            or (client_id not in self._jobs.pushing and not self._jobs.admits(client_id, Op.PUSH))
            or self.ledger.judge_push(client_id, header.push_seq) is not Verdict.NEW
            or self.ledger.has_staged(client_id)
            or (self.log is not None and not self._has_room_for(self.log, frame))
        ):
            return None
        push = self.plain_frames.check_push(frame, client_id)
        if push is None:
            return None
        if job is not None:
            if not self._steps.accept_plain(job, header, push, frame.column_bytes):
                return None
            self._answer_ready(job)
            return Reply(Op.ACK, [], header.push_seq, job.clock.complete)
        watermark = Watermark(client_id, header.client_epoch, header.push_seq)
        self.counters.num_pushed_rows += self.commit([watermark], [push])
        return Reply(Op.ACK, [], header.push_seq, 0)

    def _most_record_bytes(self, log: ShardLog, op: Op, blocks: Sequence[Block]) -> int:
        """Returns a bound for the bytes of the record of a push, or of the step and the REJOIN that it completes."""
        job = self._jobs.current
        column_bytes, num_blocks = sum(map(_column_bytes, blocks)), len(blocks)
        if job is None:
            return log.most_record_bytes(column_bytes, num_blocks)
        column_bytes, num_blocks = column_bytes + job.staged_bytes, num_blocks + job.num_staged
        num_marks, num_records = 1 + job.num_left, 1
        if job.is_sync:
            num_marks += job.num_workers
        if op is Op.LEAVE:
            num_marks, num_records = num_marks + job.num_workers, 2
        return log.most_record_bytes(column_bytes, num_blocks, num_marks, num_records)

    def _has_room_for(self, log: ShardLog, frame: PlainFrame) -> bool:
        num_marks = 1 if self.job is None else 1 + self.job.num_left
        return log.has_room(log.most_record_bytes(frame.column_bytes, frame.num_blocks, num_marks))

    def commits_at_once(self) -> bool:
        """Returns whether the push of a step is a step of its own, whose scales are weights without an effect."""
        job = self._jobs.current
        return job is not None and job.is_sync and job.is_single_worker

    def _is_plain_step(self, job: Job | None, header: Header) -> bool:
        """Returns whether `check_step` accepts a PULL or a PUSH with a step."""
        if job is None:
            return self._jobs.ended is None
        return job.failure is None and job.worker_of(header) is not None

    def shrink(
        self,
        criteria: Sequence[Criterion],
        *,
        decay: float = 1.0,
        tables: Sequence[str] = (),
        dry_run: bool = False,
        shrink_id: str = "",
    ) -> dict[str, ShrunkTable]:
        """Removes the rows that criteria select; returns which, by the names of the tables.

        All tables are changed, or none.

        Args:
            criteria: A row counts for the first one that selects it.
            decay: Factor of shows and clicks, which are multiplied first.
            tables: Names of the tables; empty for all tables.
            dry_run: True to change nothing.
            shrink_id: Id of the request, which the log keeps with the result; empty without one.

        Raises:
            ValueError: A criterion or the decay is invalid, there is no such table, or a copy-on-write view of a table
                is open.
            LogFull: The disk of the log has no room.
        """
        checked_criteria = checked(criteria, decay)
        of_shard = [entry.table for entry in self.tables.values()]
        every = {table.spec.name: table for table in of_shard if isinstance(table.spec, TableSpec)}
        if unknown := [name for name in tables if name not in every]:
            raise ValueError(f"table {unknown[0]!r}: there is no such table, the job has {', '.join(sorted(every))}")
        names = [name for name in every if not tables or name in tables]
        found, judged = {}, {}
        for name in names:
            judged[name] = every[name].judge(checked_criteria, decay)
            removals = tuple(every[name].removals(checked_criteria, judged[name]))
            found[name] = ShrunkTable(every[name].state.num_rows, removals)
        if not dry_run:
            for name in names:
                every[name].check_shrink()
            shrinks = [
                Shrink(every[name].spec.table_id, checked_criteria, decay, judged.pop(name), found[name], shrink_id)
                for name in names
            ]
            self._commit_alone(shrinks)
            if self.log is not None:
                self.log.note_shrink(shrink_id, found)
            for shrink in shrinks:
                if self.job is not None and any(each.num_removed for each in shrink.found.removals):
                    self.job.early_pulls.mark_all(shrink.table_id)
        return found

    def end_day(self, table_ids: Sequence[int], save_id: str = "") -> None:
        """Ends a day of tables, of all or of none.

        Args:
            table_ids: The tables. No copy-on-write view of them is open, and their day can end.
            save_id: Id of the save with which the day ends.

        Raises:
            LogFull: The disk of the log has no room. Nothing changed.
        """
        if table_ids:
            self._commit_alone([DayEnd(table_id, save_id) for table_id in table_ids])
            if self.log is not None:
                self.log.note_day_end(save_id)

    def _commit_alone(self, mutations: Sequence[Mutation]) -> None:
        """Commits what no push stands for.

        Raises:
            LogFull: The disk of the log has no room. Nothing changed.
        """
        try:
            self.commit([], mutations)
        except Refusal as error:
            if error.error.code is ErrorCode.LOG_FULL:
                raise LogFull(str(error)) from error
            raise

    def commit(
        self,
        watermarks: Sequence[Watermark],
        mutations: Sequence[Mutation | PlainPush],
        progress: Progress = NO_PROGRESS,
    ) -> int:
        """Applies checked mutations and records the pushes that they stand for. Tables change in no other way.

        Args:
            watermarks: Newest push, by client, of those that the mutations stand for: one push, or all of a sync step.
            mutations: What changes, in this order.
            progress: What the commit means for the steps of the job.

        Returns:
            The number of rows changed.

        Raises:
            Refusal: The disk of the log has no room. Nothing changed.
            ValueError: A push was recorded before, or the table refused the first mutation. Nothing changed.
            MemoryError: The first mutation found no room for new rows. Nothing changed.
        """
        self.ledger.check_new(watermarks)
        if self.log is None:
            num_rows = self._apply(mutations)
        else:
            left = () if self.job is None or progress.rejoins else self.job.left
            max_rows = self._max_rows(mutations, self.log.max_rows)
            self.log.commit(watermarks, mutations, progress, left, max_rows)
            self._limit_rows(max_rows)
            try:
                num_rows = self._apply(mutations)
            finally:
                self._limit_rows(dict.fromkeys(max_rows))
        self.ledger.record(watermarks)
        return num_rows

    def _max_rows(self, mutations: Sequence[Mutation | PlainPush], before: Mapping[int, int]) -> dict[int, int]:
        """Decides, by id, how many rows each table that mutations may make larger may have after them.

        It is decided before the log has it: a replay makes the same rows, whatever there is room for then.

        Args:
            mutations: As of `commit`.
            before: What the log says, of tables that have a limit there.
        """
        num_ids: dict[int, int] = {}
        for mutation in mutations:
            if isinstance(mutation, PlainPush):
                num_ids = mutation.num_ids() if before else {}  # all of its ids may have a row
            elif isinstance(mutation, _OF_IDS) and mutation.ids is not None:
                num_ids[mutation.table_id] = num_ids.get(mutation.table_id, 0) + len(mutation.ids)
        return {each: self._rows_of(each).max_rows_for(n, before.get(each, UNLIMITED)) for each, n in num_ids.items()}

    def _limit_rows(self, max_rows: Mapping[int, int | None]) -> None:
        for table_id, most in max_rows.items():
            self._rows_of(table_id).limit_rows(most)

    def _rows_of(self, table_id: int) -> EmbeddingTable:
        table = self.tables[table_id].table
        assert isinstance(table, EmbeddingTable), "no other table has ids"
        return table

    def _apply(self, mutations: Sequence[Mutation | PlainPush]) -> int:
        num_rows = 0
        for index, mutation in enumerate(mutations):
            try:
                if isinstance(mutation, PlainPush):
                    num_rows += mutation.apply()
                else:
                    num_rows += mutation.apply_to(self.tables[mutation.table_id].table)
            except BaseException as error:
                # What is applied in part would, sent again, be applied twice, and not sent again, be lost in part.
                if index or not mutation.has_no_effect_after(error):
                    self.fault = (
                        f"a push failed half-way ({type(error).__name__}: {error}); the values of shard "
                        f"{self.shard_index} are wrong. Start the pserver again from a snapshot"
                    )
                if self.log is not None:
                    self._void(self.log, error)
                raise
        return num_rows

    def _void(self, log: ShardLog, reason: BaseException) -> None:
        """Makes the record of a change void that failed. Without that nothing may follow it in the log."""
        try:
            log.void()
        except Exception as error:
            self.fault = (
                f"a change failed ({type(reason).__name__}: {reason}), and the log cannot say so ({error}). Start the "
                "pserver again"
            )

    def take_deferred_replies(self) -> list[DeferredReply]:
        """Returns the results of deferred requests that are ready, each once."""
        replies, self.deferred_replies = self.deferred_replies, []
        return replies

    def _gap_before(self, header: Header) -> Refusal:
        """Returns why a request is refused that comes before a push that it follows."""
        seq = header.push_floor if header.op in PULLS else header.push_seq
        expected = self.ledger.newest(header.client_id) + 1
        return Refusal(ErrorCode.GAP, f"header: push {seq} was received before push {expected}", expected)

    def _accept(self, job: Job | None, header: Header, blocks: Sequence[Block]) -> None:
        """Commits a new push, or stages it for its step."""
        if job is not None and (header.step > 0 or header.op in STEP_OPS):
            self._steps.accept(job, self.ledger, header, blocks, self._jobs.cache_terms)
            self._answer_ready(job)
            return
        if self.ledger.has_staged(header.client_id):
            message = "header: push without a step while an earlier push of this client is staged"
            raise Refusal(ErrorCode.MALFORMED, message)
        mutations = find_mutations(
            self.tables,
            blocks,
            is_staged=job is not None and job.is_sync,
            cache_terms=self._jobs.cache_terms,
        )
        watermark = Watermark(header.client_id, header.client_epoch, header.push_seq)
        self.counters.num_pushed_rows += self.commit([watermark], mutations)
        if job is not None:
            job.early_pulls.mark([each for each in mutations if isinstance(each, CopyMutation)], self.tables)

    def durable_push(self, client_id: bytes) -> int:
        """Returns the newest push of a client that survives the machine, as far as it is known; 0 without a log."""
        return 0 if self.log is None else self.log.durable_push(client_id)

    def acked_push(self, request: Header) -> int:
        """Returns the newest push that the reply to a request acknowledges.

        Where a push is durable before it is acked, the reply to a push waits for that, and the others do not.
        """
        applied = self.ledger.applied(request.client_id)
        if self.log is None or not self.log.is_synced or request.op in PUSHES:
            return applied
        return min(applied, self.log.durable_push(request.client_id))

    # The log

    def end_waits_for_room(self) -> None:
        """Has clients send the pushes again that waited for room in the log, if there is some."""
        if self.log is None or not self._waiting_for_room:
            return
        for client_id, (header, record_bytes) in [*self._waiting_for_room.items()]:
            newest = self.ledger.newest(client_id)
            is_taken = header.push_seq <= newest  # the client had sent it again by itself
            if not (is_taken or self.log.has_room(record_bytes)):
                continue
            del self._waiting_for_room[client_id]
            if is_taken:
                continue
            expected = newest + 1
            again = Refusal(ErrorCode.GAP, f"header: the log has room again, send push {expected} again", expected)
            self.deferred_replies.append(DeferredReply(header, again))

    def begin_checkpoint(self) -> int | None:
        """Begins a segment of the log with the state that rows files do not have; returns its first lsn.

        To be called at a cut.

        Returns:
            None if the state is not complete now: a step was prepared by some workers, or first values are arriving.
        """
        assert self.log is not None, "the caller has a log"
        job = self.job
        if job is not None and job.prepared.step > job.clock.complete:
            return None
        if any(entry.table.is_partly_assigned for entry in self.tables.values()):
            return None
        left = [] if job is None else job.left
        return self.log.begin_checkpoint(self._jobs.state(), self.ledger.watermarks(), left, self.base)

    def restore(self, state: JobsState, watermarks: Sequence[Watermark], left: Sequence[Watermark]) -> None:
        """Continues with the jobs and pushes that a log kept.

        Raises:
            ValueError: The state cannot be read.
        """
        self._jobs.restore(state)
        self.expect(watermarks)
        self._restore_left(left)

    def replay(
        self,
        watermarks: Sequence[Watermark],
        mutations: Sequence[Mutation],
        progress: Progress,
        left: Sequence[Watermark],
    ) -> None:
        """Commits what a log says, with what it means for the steps of the job. The shard has no log yet.

        Raises:
            ValueError, MemoryError: As `commit`.
        """
        job = self.job
        if job is not None and progress.prepared is not None:
            self._steps.restore_prepared(job, job.clock.complete + 1, [*progress.prepared])
        if job is not None and progress.factors is not None:
            mutations = self._steps.restore_committed(job, progress.factors)
        self.commit(watermarks, mutations)
        if job is None:
            return
        if progress.step:
            job.restore_step([mark.client_id for mark in watermarks], progress.step)
        self._restore_left(watermarks if progress.rejoins else left)
        if progress.rejoins:
            job.rejoin_all()

    def _restore_left(self, left: Sequence[Watermark]) -> None:
        for mark in left:
            assert self.job is not None, "only workers of a job leave"
            self.ledger.stage(mark.client_id, mark.watermark)
            self.job.restore_left(mark)

    def _commit_pushes(
        self, watermarks: Sequence[Watermark], mutations: Sequence[Mutation | PlainPush], progress: Progress
    ) -> None:
        self.counters.num_pushed_rows += self.commit(watermarks, mutations, progress)

    def _answer(
        self, job: Job | None, header: Header, pulls: Sequence[tuple[Block, TableEntry]], outs: Outs = ()
    ) -> Reply:
        blocks: list[Block] = []
        step = 0
        for index, (block, entry) in enumerate(pulls):
            out = outs[index] if outs else None
            if block.copies:
                blocks += self._answer_of(block, entry)
            elif out is None:
                blocks.append(rows_of(block, entry))
            else:
                entry.table.pull(block, out)
            if block.ids is not None:
                self.counters.num_pulled_rows += block.count
        if job is not None:
            blocks, step = finish_step(job, header, pulls, blocks), job.clock.complete
        return Reply(REPLIES.get(header.op, Op.ACK), blocks, self.acked_push(header), step)

    def _answer_of(self, block: Block, entry: TableEntry) -> list[Block]:
        if self._jobs.cache_terms is None:  # another job has begun while the request was deferred
            raise Refusal(ErrorCode.MALFORMED, f"{entry.table.where}: asks about copies, the job has no row cache")
        return answer_of(block, entry, self._jobs.cache_terms)

    def _answer_ready(self, job: Job) -> None:
        """Answers the deferred requests that need not wait any more."""
        for header, pulls in job.take_ready(self.ledger.applied):
            try:
                if self.fault:
                    raise Refusal(ErrorCode.INTERNAL, self.fault)
                if job.failure is not None:
                    raise Refusal.because(job.failure)
                outcome: Reply | Exception = self._answer(job, header, pulls)
            except Exception as error:
                outcome = error
            self.deferred_replies.append(DeferredReply(header, outcome))


def _check_pulls(pulls: Sequence[tuple[Block, TableEntry]]) -> None:
    for block, entry in pulls:
        entry.table.check_pull(block)


def _column_bytes(block: Block) -> int:
    """Returns the size of the columns of a pushed block in the log, where rows are FLOAT32."""
    if block.rows is None:
        return 0
    columns = [*block.statistics.values(), *block.copies.values(), *([] if block.ids is None else [block.ids])]
    return _FLOAT_BYTES * block.rows.size + sum(column.nbytes for column in columns)
