"""Shard: the rows of every table whose ids hash to this pserver, and its range of every dense array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table import DenseSpec, TableSpec
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frames import PULLS, PUSHES, Action, Block, FrameError, Header, Op
from fleet_sparse.wire.row_dtype import for_frame

from ..refusal import Refusal
from ..tables.merger import Merger
from ..tables.mutations import Mutation
from ..tables.table import TableContext
from .dedup import DedupLedger, Verdict
from .early_pulls import EarlyPull
from .job import DeferredRequest, Job, watermark_of
from .steps import Steps, reason_of
from .table_map import TableEntry, TableMap
from .validate import STEP_OPS, check_step, find_mutations, find_pulls

_ANSWERED_WITH_ROWS = PULLS | {Op.PUSH_PULL, Op.COMMIT}


@dataclass(slots=True)
class Counters:
    """Work of a shard since it was made."""

    num_requests: int = 0
    num_pulled_rows: int = 0
    num_pushed_rows: int = 0


class Reply(NamedTuple):
    """The result of a request."""

    op: Op
    """WAIT if the request is deferred."""
    blocks: list[Block]
    push_seq: int
    """Newest applied push of the client."""
    step: int
    """Newest complete step."""


class DeferredReply(NamedTuple):
    """The result of a request that was deferred."""

    header: Header
    """Header of the request."""
    outcome: Reply | Exception


class Shard:
    """The tables of one pserver.

    One thread owns a shard. Nothing here locks, sleeps or does I/O. A request is applied as a whole or not at all: all
    of it is checked before the first value changes.

    Args:
        max_staged_bytes: Largest total size of the pushes that are staged for a sync step.
        max_pre_image_bytes: As of a `TableStore`.
        huge_pages: As of a `TableStore`.

    Attributes:
        shard_index: Index of the shard, from 0.
        num_shards: Number of shards of the placement.
        cluster_id: u64 of the job.
        incarnation: u64 that differs for each start of the pserver.
        placement: Which shard owns which ids.
        counters: Work done so far.
        tables: Tables and dense arrays by their number on the wire.
        ledger: Applied pushes by client.
        job: The workers whose steps are counted; None if steps are not counted.
        base: Checksum of the manifest of the snapshot since which the stores note changes; None if there is none.
        fault: Why the values may be neither served nor saved any more; empty if all is well.
    """

    def __init__(
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
    ) -> None:
        if placement.num_shards != num_shards or not 0 <= shard_index < num_shards:
            raise ValueError(f"shard {shard_index} of {num_shards}: the placement has {placement.num_shards} shards")
        self.shard_index = shard_index  # constant after construction, as all down to the blank line
        self.num_shards = num_shards
        self.cluster_id = cluster_id
        self.incarnation = incarnation
        self.placement = placement
        self._max_staged_bytes = max_staged_bytes
        self._context = TableContext(
            placement, shard_index, Merger(placement, shard_index), max_pre_image_bytes, huge_pages
        )
        self.tables = TableMap(self._context)
        self._steps = Steps(self.tables, self.commit)

        self.counters = Counters()
        self.ledger = DedupLedger()
        self.job: Job | None = None
        self.base: int | None = None
        self._ended: FrameError | None = None  # why the job before this one ended
        self._clients: dict[int, bytes] = {}  # client ids by worker
        self._replaced: set[bytes] = set()  # ids of clients whose worker is another client now
        self._deferred_replies: list[DeferredReply] = []
        self.fault = ""

    # Tables

    def add_table(self, spec: TableSpec | DenseSpec, *, declared_by: str = "this process") -> TableEntry:
        """Makes a table, or checks that the existing one has the same spec; see `TableMap.declare`.

        Args:
            spec: A table or dense array.
            declared_by: `worker 1`, for the message if another process declares another spec.
        """
        return self.tables.declare(spec, declared_by)

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
        )

    def swap_in(self, other: Shard) -> None:
        """Replaces tables by those of another shard of the same buckets, which has none afterwards.

        Tables that `other` does not have stay as they are, and so does the ledger.

        Raises:
            TableMismatch: As `TableMap.check_swap`. Nothing changed.
        """
        self.tables.swap_in(other.tables)
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

    def join(self, worker: int, num_workers: int, client_id: bytes, mode: Mode | None, *, begins_job: bool) -> None:
        """Makes a client a worker of a job.

        In the place of a worker that took part in steps it begins another job; requests of the old one are refused.

        Args:
            worker: Index of the worker.
            num_workers: Number of workers of the job.
            client_id: The client that pushes for it.
            mode: Mode of the job; None if this worker does not know it yet.
            begins_job: There is no other worker: the job before is forgotten.
        """
        former = {} if begins_job else self._clients
        self._replaced |= {known for index, known in self._clients.items() if begins_job or index == worker}
        self._replaced.discard(client_id)
        self._clients = {**former, worker: client_id}
        if self.job is not None and self.job.displaces(worker, client_id):
            self.job.fail(ErrorCode.WORKER_LOST, f"worker {worker} was started again", worker)
            self._answer_ready(self.job)
        if begins_job or (self.job is not None and self.job.is_over_for(client_id)):
            self._ended = None if self.job is None else self.job.failure
            self.job = None
        if self.job is None and mode is not None and mode.is_step_synchronized:
            self.job = Job(mode, num_workers, self._max_staged_bytes)
        if self.job is not None and mode is not None:
            self.job.join(worker, client_id)

    def evict_worker(self, worker: int, reason: str) -> None:
        """Fails the steps that wait for a lost worker."""
        if self.job is not None:
            self.job.fail(ErrorCode.WORKER_LOST, f"worker {worker} is lost, {reason}", worker)
            self._answer_ready(self.job)

    # Requests

    def execute(self, header: Header, blocks: Sequence[Block]) -> Reply:
        """Carries out a request; its op is WAIT if the result follows by `take_deferred_replies`.

        Args:
            header: Header of the request, addressed to this shard.
            blocks: What it pulls and pushes.

        Raises:
            Refusal: A check failed. Nothing changed.
        """
        self._check_fault()
        check_step(self.job, self._ended, header)
        is_new_push = self._is_new_push(header)
        try:
            pulls = find_pulls(self.tables, blocks)
            if is_new_push:
                for block, entry in pulls:
                    entry.table.check_pull(block)
                self._accept(header, blocks)
        except Exception as error:
            if is_new_push:
                self._fail_step(header, error)
            raise
        job = self.job
        if job is not None and job.must_wait(header, self.ledger.applied(header.client_id)):
            for block, entry in () if is_new_push else pulls:
                entry.table.check_pull(block)
            job.defer(DeferredRequest(header, pulls))
            return self._reply(Op.WAIT, header, [])
        return self._answer(header, pulls)

    def commit(self, watermarks: Sequence[Watermark], mutations: Sequence[Mutation]) -> None:
        """Applies checked mutations and records the pushes that they stand for. Tables change in no other way.

        Args:
            watermarks: Newest push, by client, of those that the mutations stand for: one push, or all of a sync step.
            mutations: What changes, in this order.

        Raises:
            ValueError: A push was recorded before. Nothing changed.
            MemoryError: The first mutation found no room for new rows. Nothing changed.
        """
        for mark in watermarks:
            if mark.watermark <= self.ledger.applied(mark.client_id):
                raise ValueError(f"client {mark.client_id.hex()}: push {mark.watermark} is applied already")
        # A log would append the record of both arguments here: before anything changes, and once for each commit.
        for index, mutation in enumerate(mutations):
            try:
                self.counters.num_pushed_rows += mutation.apply_to(self.tables[mutation.table_id].table)
            except BaseException as error:
                # A store without room for more rows changed no value. Any other mutation may be applied in part: sent
                # again, that part would be applied twice; not sent again, the rest would be lost.
                if index or not isinstance(error, MemoryError):
                    self.fault = (
                        f"a push failed half-way ({type(error).__name__}: {error}); the values of shard "
                        f"{self.shard_index} are wrong. Start the pserver again from a snapshot"
                    )
                raise
        self.ledger.record(watermarks)

    def take_deferred_replies(self) -> list[DeferredReply]:
        """Returns the results of deferred requests that are ready, each once."""
        replies, self._deferred_replies = self._deferred_replies, []
        return replies

    def _is_new_push(self, header: Header) -> bool:
        """Returns whether a request is a push that was not applied or staged before."""
        client_id = header.client_id
        if header.op in PULLS:
            wanted = header.push_floor
            verdict = self.ledger.judge_pull(client_id, wanted)
        else:
            wanted = header.push_seq
            if client_id in self._replaced:
                raise Refusal(ErrorCode.STALE_EPOCH, "header: another process has taken the place of this worker")
            verdict = self.ledger.judge_push(client_id, wanted)
        if verdict is Verdict.GAP:
            expected = self.ledger.newest(client_id) + 1
            raise Refusal(ErrorCode.GAP, f"header: push {wanted} was received before push {expected}", expected)
        return verdict is Verdict.APPLY and header.op in PUSHES

    def _accept(self, header: Header, blocks: Sequence[Block]) -> None:
        """Commits a push, or stages it for its step."""
        job = self.job
        if job is not None and (header.step > 0 or header.op in STEP_OPS):
            self._steps.accept(job, self.ledger, header, blocks)
            self._answer_ready(job)
            return
        if self.ledger.newest(header.client_id) > self.ledger.applied(header.client_id):
            raise Refusal(
                ErrorCode.MALFORMED, "header: push without a step while an earlier push of this client is staged"
            )
        mutations = find_mutations(self.tables, blocks, is_staged=job is not None and job.is_sync)
        self.commit([watermark_of(header)], mutations)

    def _fail_step(self, header: Header, error: Exception) -> None:
        """A push that was refused, or failed, makes its step impossible if pushes are staged."""
        job = self.job
        worker = None if job is None else job.worker_of(header)
        if job is not None and job.is_sync and (header.step > 0 or header.op is Op.LEAVE) and worker is not None:
            job.fail(ErrorCode.STEP_FAILED, f"worker {worker}: {reason_of(error)}")
            self._answer_ready(job)

    def _answer_ready(self, job: Job) -> None:
        for header, pulls in job.take_ready(self.ledger.applied):
            try:
                self._check_fault()
                if job.failure is not None:
                    raise Refusal.because(job.failure)
                outcome: Reply | Exception = self._answer(header, pulls)
            except Exception as error:
                outcome = error
            self._deferred_replies.append(DeferredReply(header, outcome))

    def _check_fault(self) -> None:
        if self.fault:
            raise Refusal(ErrorCode.INTERNAL, self.fault)

    # Replies

    def _answer(self, header: Header, pulls: Sequence[tuple[Block, TableEntry]]) -> Reply:
        rows = [self._pull(block, entry) for block, entry in pulls]
        job = self.job
        if job is not None:
            is_last = header.part + 1 == header.num_parts
            if header.op is Op.PULL_EARLY:
                job.early_pulls.add(header, pulls)
            elif header.op is Op.PREPARE:
                return self._reply(Op.NORMS, header, job.prepared.norms if is_last else [])
            elif is_last and header.op in (Op.PUSH_PULL, Op.COMMIT):
                rows += map(self._changed_rows, job.early_pulls.changed_by(header.client_id, header.step))
        return self._reply(Op.ROWS if header.op in _ANSWERED_WITH_ROWS else Op.ACK, header, rows)

    def _reply(self, op: Op, header: Header, blocks: list[Block]) -> Reply:
        return Reply(op, blocks, self.ledger.applied(header.client_id), self.complete_step)

    @property
    def complete_step(self) -> int:
        """The newest complete step; 0 if steps are not counted."""
        return 0 if self.job is None else self.job.clock.complete

    def _pull(self, block: Block, entry: TableEntry) -> Block:
        rows = entry.table.pull(block)
        if block.ids is not None:
            self.counters.num_pulled_rows += block.count
        in_frame, dtype = for_frame(rows, block.dtype), block.dtype
        return Block(
            Action.ROWS, block.table_id, block.schema_hash, block.dim, block.count, None, in_frame, dtype=dtype
        )

    def _changed_rows(self, early: EarlyPull) -> Block:
        block = early.block
        assert block.ids is not None, "only rows are marked as changed"
        ids = block.ids[early.changed]
        return replace(self._pull(replace(block, count=len(ids), ids=ids), early.entry), ids=ids)
