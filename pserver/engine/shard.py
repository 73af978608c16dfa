"""Shard: the rows of every table whose ids hash to this pserver, and its range of every dense array."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.kernels_batch import all_finite
from fleet_sparse.core.kernels_ownership import count_foreign
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules import read_only
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, PlanError, TableMismatch
from fleet_sparse.settings import Settings
from fleet_sparse.warm_up import warm_up
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frame_format import PULLS, PUSHES, Action, Block, Frame, FrameError, Header, Op
from fleet_sparse.wire.row_dtype import RowDtype, for_frame, from_frame

from ..storage.table_store import TableStore
from ..storage.virtual_memory import MAX_TABLES
from ..tables.dense import DenseRange
from .changes import (
    Assignment,
    Change,
    DensePush,
    Push,
    TableEntry,
    TablePush,
    merge_shares,
    squares_of,
    times,
    with_factors,
)
from .dedup import DedupLedger, Verdict
from .early_pulls import EarlyPull
from .job import Client, Contribution, DeferredRequest, Job, Measured, client_of
from .merge import Merger

_log = logging.getLogger(__name__)

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_OF_SYNC = frozenset({Op.PULL_EARLY, Op.PREPARE, Op.COMMIT})
_OF_STEPS = _OF_SYNC | {Op.LEAVE}
_ANSWERED_WITH_ROWS = PULLS | {Op.PUSH_PULL, Op.COMMIT}
_OF_FLOAT16 = " as float16, which ends at 65504. Write FLEET_SPARSE_ROWS_DTYPE=bfloat16, which has the range of float32"
_ALIKE = "the programs that workers run in one step should train the same and have the same grad_clip"


@dataclass(slots=True)
class Counters:
    """What a shard did since it was made."""

    num_requests: int = 0
    num_pulled_rows: int = 0
    num_pushed_rows: int = 0


class _Refusal(Exception):
    """A request that is answered with an ERROR frame."""

    def __init__(self, code: ErrorCode, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.error = FrameError(code, number, message)

    @classmethod
    def because(cls, error: FrameError) -> _Refusal:
        """With an error that was known before."""
        return cls(error.code, error.message, error.number)


class Shard:
    """The tables of one pserver, and who may change them.

    One thread owns a shard. Nothing here locks, sleeps or does I/O. A frame is applied as a whole or not at all: all of
    it is checked before the first value changes.

    Args:
        max_staged_bytes: Largest sum of the pushes that wait for their step to be complete.
        max_pre_image_bytes: As a store's.
        huge_pages: As a store's.

    Attributes:
        shard_index: From 0.
        num_shards: As many as the placement has.
        cluster_id: u64, of the job.
        incarnation: u64, another one each time that the pserver starts.
        placement: Which ids are this shard's.
        counters: What was done so far.
        held: Tables and dense arrays by the id that they have on the wire.
        ledger: Applied pushes by client.
        job: The workers whose steps are counted; None if they are not.
        base: Checksum of the manifest of the snapshot since which the stores note what changes; None if there is none.
        fault: Why the values may be neither served nor saved any more; empty while all is well.
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
        self._max_pre_image_bytes = max_pre_image_bytes
        self._huge_pages = huge_pages
        warm_up()

        self.counters = Counters()
        self.held: dict[int, TableEntry] = {}
        self.ledger = DedupLedger()
        self.job: Job | None = None
        self.base: int | None = None
        self._ended: FrameError | None = None  # why the job before it ended
        self._clients: dict[int, Client] = {}  # by worker
        self._replaced: set[bytes] = set()  # ids of clients in whose place another one came
        self._released: list[Frame] = []
        self._merger = Merger(placement, shard_index)
        self.fault = ""

    def add_table(self, spec: TableSpec | DenseSpec, *, declared_by: str = "this process") -> TableEntry:
        """Makes the table, or agrees that it is the one that is there.

        A spec with rule "read_only" agrees with one that trains; the latter decides, whichever comes first.

        Args:
            spec: Of a table or dense array.
            declared_by: `worker 1`, for the message when another spec comes.

        Raises:
            TableMismatch: The table is there with another spec; the message names both sides.
            PlanError: There are `MAX_TABLES` already, or a dense array does not fit into memory.
        """
        held = self.held.get(spec.table_id)
        if held is None:
            if len(self.held) >= MAX_TABLES:
                raise PlanError(
                    f"table {spec.name!r}: shard {self.shard_index} has {len(self.held)} tables, it should have at "
                    f"most {MAX_TABLES}. Let several fields share one table"
                )
            held = TableEntry(spec, self._values_for(spec), declared_by)
            self.held[spec.table_id] = held
        elif held.spec.name != spec.name:
            raise TableMismatch(
                f"table {spec.name!r}: {declared_by} brings it, and {held.declared_by} has brought "
                f"{held.spec.name!r}, which has the same number on the wire. Rename one"
            )
        elif differences := held.spec.differences(spec):
            raise TableMismatch(
                f"{held.where}: {held.declared_by} and {declared_by} describe it differently: "
                f"{', '.join(differences)}. Make them the same, or load the tables of the snapshot "
                "that fit, each by fleet.load_one_table"
            )
        elif held.spec.rule == read_only.name != spec.rule:
            # Nothing was ever written to it, so nothing is lost.
            values = self._values_for(spec)
            held.values.close()
            held.spec, held.values, held.declared_by = spec, values, declared_by
        held.schema_hashes[spec.schema_hash] = spec.rule != read_only.name
        return held

    def join(self, worker: int, num_workers: int, client: Client, mode: Mode | None, *, begins_job: bool) -> None:
        """A client is a worker of a job from now on.

        In the place of a worker that took part in steps it begins another job, and that one's workers are told so.

        Args:
            worker: Its index.
            num_workers: Of the job.
            client: Who pushes for it.
            mode: Of the job; None if this worker does not know it yet.
            begins_job: There is no other worker: what another job left is forgotten.
        """
        former = {} if begins_job else self._clients
        self._replaced |= {known.client_id for index, known in self._clients.items() if begins_job or index == worker}
        self._replaced.discard(client.client_id)
        self._clients = {**former, worker: client}
        if self.job is not None and self.job.displaces(worker, client):
            self.job.fail(ErrorCode.WORKER_LOST, f"worker {worker} was started again", worker)
            self._release(self.job)
        if begins_job or (self.job is not None and self.job.is_over_for(client)):
            self._ended = None if self.job is None else self.job.failure
            self.job = None
        if self.job is None and mode is not None and mode.is_step_synchronized:
            self.job = Job(mode, num_workers, self._max_staged_bytes)
        if self.job is not None and mode is not None:
            self.job.join(worker, client)

    def evict_worker(self, worker: int, reason: str) -> None:
        """A worker is lost: those that wait for its pushes are told so."""
        if self.job is not None:
            self.job.fail(ErrorCode.WORKER_LOST, f"worker {worker} is lost, {reason}", worker)
            self._release(self.job)

    def take_deferred_replies(self) -> list[Frame]:
        """The replies to requests that were answered with WAIT and need not wait any more, each once."""
        released, self._released = self._released, []
        return released

    def clone_empty(self) -> Shard:
        """An empty shard of the same buckets, to load into."""
        return Shard(
            self.shard_index,
            self.num_shards,
            cluster_id=self.cluster_id,
            incarnation=self.incarnation,
            placement=self.placement,
            max_pre_image_bytes=self._max_pre_image_bytes,
            huge_pages=self._huge_pages,
        )

    def check_takes(self, other: Shard) -> None:
        """Whether `swap_in` may be called with `other`.

        Raises:
            TableMismatch: A table is there with another spec; the message names both sides.
        """
        for theirs in other.held.values():
            ours = self.held.get(theirs.spec.table_id)
            differences = [] if ours is None else ours.spec.differences(theirs.spec)
            if ours is not None and differences:
                raise TableMismatch(
                    f"{theirs.where}: {ours.declared_by} and {theirs.declared_by} describe it differently: "
                    f"{', '.join(differences)}"
                )

    def swap_in(self, other: Shard) -> None:
        """Replaces tables and dense arrays by those of another shard of the same buckets, which has none afterwards.

        What `other` does not hold stays as it is, and so does who pushed what.

        Raises:
            TableMismatch: As `check_takes`. Nothing changed.
        """
        self.check_takes(other)
        for table_id, theirs in other.held.items():
            ours = self.held.get(table_id)
            if ours is None:
                self.held[table_id] = theirs
                continue
            ours.values.close()
            ours.values, ours.optimizer_step = theirs.values, theirs.optimizer_step
            if ours.spec.rule == read_only.name:
                ours.spec = theirs.spec
            elif theirs.spec.rule == read_only.name:  # nothing was ever written to it
                theirs.values.close()
                ours.values = self._values_for(ours.spec)
            ours.schema_hashes.update(theirs.schema_hashes)
        other.held = {}
        self.base = None

    def states(self) -> list[TableState]:
        """Of all tables and dense arrays, in the order in which they came."""
        return [held.state for held in self.held.values()]

    def close(self) -> None:
        """Gives all memory back. Nothing may be asked of it afterwards."""
        for held in self.held.values():
            held.values.close()
        self.held.clear()

    @property
    def num_bytes(self) -> int:
        """Memory of all rows, values and states, estimated."""
        return sum(held.values.num_bytes for held in self.held.values())

    def answer(self, frame: Frame) -> Frame:
        """The reply to a request; WAIT if it comes later, by `take_deferred_replies`.

        Raises nothing: what is refused is answered with an ERROR frame.
        """
        self.counters.num_requests += 1
        return self._guarded(frame.header, lambda: self._answer(frame))

    def _guarded(self, header: Header, reply: Callable[[], Frame]) -> Frame:
        try:
            if self.fault:
                raise _Refusal(ErrorCode.INTERNAL, self.fault)
            return reply()
        except _Refusal as refusal:
            return self.refuse(header, refusal.error)
        except Exception as error:
            _log.exception("shard %d: request %d failed", self.shard_index, header.request_id)
            return self.refuse(header, FrameError(ErrorCode.INTERNAL, 0, _reason_of(error)))

    def refuse(self, request: Header | None, error: FrameError) -> Frame:
        """The ERROR frame that answers a request; None for one that could not be read."""
        return Frame(self._reply_header(Op.ERROR, request or Header(Op.PULL)), [], error)

    def _answer(self, frame: Frame) -> Frame:
        header = frame.header
        self._check_header(header)
        self._check_step(header)
        verdict = self._judge(header)
        is_new_push = header.op in PUSHES and verdict is Verdict.APPLY
        try:
            pulls = [(b, self._check_pull(i, b)) for i, b in enumerate(frame.blocks) if b.action is Action.PULL]
            if is_new_push:
                self._take(header, frame.blocks)
        except Exception as error:
            if is_new_push:
                self._fail_step(header, error)
            raise
        if self.job is not None and self.job.must_wait(header, self._applied_seq(client_of(header))):
            self.job.park(DeferredRequest(header, pulls))
            return Frame(self._reply_header(Op.WAIT, header), [])
        return self._reply(header, pulls)

    def _reply(self, header: Header, pulls: Sequence[tuple[Block, TableEntry]]) -> Frame:
        rows = [self._pull(block, held) for block, held in pulls]
        if self.job is not None and header.op is Op.PULL_EARLY:
            self.job.ahead.note(client_of(header), header, pulls)
        if self.job is not None and header.op in (Op.PUSH_PULL, Op.COMMIT) and header.part + 1 == header.num_parts:
            rows += [self._changed_rows(ahead) for ahead in self.job.ahead.changed_by(client_of(header), header.step)]
        if self.job is not None and header.op is Op.PREPARE:
            is_last = header.part + 1 == header.num_parts
            return Frame(self._reply_header(Op.NORMS, header), self.job.measured.norms if is_last else [])
        op = Op.ROWS if header.op in _ANSWERED_WITH_ROWS else Op.ACK
        return Frame(self._reply_header(op, header), rows)

    def _reply_header(self, op: Op, request: Header) -> Header:
        return Header(
            op,
            request.flags,
            cluster_id=self.cluster_id,
            shard=self.shard_index,
            incarnation=self.incarnation,
            placement_version=self.placement.version,
            client_id=request.client_id,
            client_epoch=request.client_epoch,
            request_id=request.request_id,
            push_seq=self.ledger.watermark(request.client_id, request.client_epoch),
            step=0 if self.job is None else self.job.clock.complete,
            part=request.part,
            num_parts=request.num_parts,
        )

    # Checks. None of them changes anything.

    def _check_header(self, header: Header) -> None:
        if header.op not in PUSHES and header.op not in PULLS:
            raise _Refusal(ErrorCode.MALFORMED, f"header: op {header.op.name} asks for nothing")
        if header.cluster_id != self.cluster_id:
            raise _Refusal(
                ErrorCode.WRONG_SHARD, f"header: cluster {header.cluster_id:016x}, this one is {self.cluster_id:016x}"
            )
        if header.shard != self.shard_index:
            raise _Refusal(ErrorCode.WRONG_SHARD, f"header: shard {header.shard}, this one is {self.shard_index}")
        if header.incarnation != self.incarnation:
            raise _Refusal(
                ErrorCode.WRONG_INCARNATION,
                f"header: incarnation {header.incarnation:016x}, this one is {self.incarnation:016x}",
            )
        if header.placement_version != self.placement.version:
            raise _Refusal(
                ErrorCode.WRONG_SHARD,
                f"header: placement version {header.placement_version}, here it is {self.placement.version}",
            )

    def _check_step(self, header: Header) -> None:
        """Of a request that takes part in the steps of a job."""
        job, is_of_step = self.job, header.step > 0 or header.op in _OF_STEPS
        if is_of_step and self._ended is not None and (job is None or job.worker_of(header) is None):
            raise _Refusal.because(self._ended)
        if job is None:
            if header.op in _OF_STEPS:
                raise _Refusal(ErrorCode.MALFORMED, f"header: op {header.op.name} in a job that does not count steps")
        elif is_of_step:
            if job.worker_of(header) is None:
                raise _Refusal(ErrorCode.MALFORMED, "header: its client is no worker of the job. Register it first")
            if header.op in _OF_SYNC and not job.is_sync:
                raise _Refusal(ErrorCode.MALFORMED, f"header: op {header.op.name} in a job that is not sync")
            if header.op is Op.ASSIGN:
                raise _Refusal(ErrorCode.MALFORMED, f"header: ASSIGN in step {header.step}, it is part of none")
            if job.failure is not None:
                raise _Refusal.because(job.failure)

    def _judge(self, header: Header) -> Verdict:
        client_id, epoch = header.client_id, header.client_epoch
        if header.op in PULLS:
            verdict = self.ledger.judge_pull(client_id, epoch, header.push_floor)
            wanted = header.push_floor
        else:
            if header.push_seq == 0:
                raise _Refusal(ErrorCode.MALFORMED, "header: push_seq is 0; pushes count from 1")
            if client_id in self._replaced:
                raise _Refusal(ErrorCode.STALE_EPOCH, "header: another process came in the place of this worker")
            verdict = self.ledger.judge_push(client_id, epoch, header.push_seq)
            wanted = header.push_seq
        if verdict is Verdict.STALE_EPOCH:
            newest = self.ledger.epoch(client_id)
            raise _Refusal(ErrorCode.STALE_EPOCH, f"header: client epoch {epoch}, the newest seen is {newest}")
        if verdict is Verdict.GAP:
            expected = self.ledger.newest(client_id, epoch) + 1
            raise _Refusal(ErrorCode.GAP, f"header: push {wanted} came before push {expected}", expected)
        return verdict

    def _find_known(self, index: int, block: Block) -> TableEntry:
        """The table of a block, once id and schema fit it."""
        held = self.held.get(block.table_id)
        if held is None:
            raise _Refusal(ErrorCode.UNKNOWN_TABLE, f"block {index}: no table has number {block.table_id:#010x} here")
        if block.schema_hash not in held.schema_hashes:
            raise _Refusal(
                ErrorCode.SCHEMA, f"{held.where}: schema {block.schema_hash:016x} is not one that a worker registered"
            )
        return held

    def _find(self, index: int, block: Block) -> TableEntry:
        """The table of a block, once id, schema and shape fit it."""
        held = self._find_known(index, block)
        if (block.ids is None) is not isinstance(held.values, DenseRange):
            raise _Refusal(ErrorCode.SCHEMA, f"{held.where}: the block {'lacks' if block.ids is None else 'has'} ids")
        dim = held.spec.dim if isinstance(held.spec, TableSpec) else 1
        if block.dim != dim:
            raise _Refusal(ErrorCode.SCHEMA, f"{held.where}: rows have dim {block.dim}, the table has dim {dim}")
        count = block.count if block.ids is None else len(block.ids)
        if block.count != count or (block.rows is not None and block.rows.shape != (count, dim)):
            raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: columns are not of {block.count} ids")
        if isinstance(held.values, DenseRange) and count != held.values.size:
            raise _Refusal(
                ErrorCode.SCHEMA, f"{held.where}: {count} values, the range of this shard has {held.values.size}"
            )
        return held

    def _check_pull(self, index: int, block: Block) -> TableEntry:
        held = self._find(index, block)
        if isinstance(held.values, DenseRange):
            self._check_assigned(held, held.values)
            if block.optimizer_step > held.values.num_states:
                message = (
                    f"state {block.optimizer_step} is asked for, rule {held.spec.rule!r} has {held.values.num_states}"
                )
                raise _Refusal(ErrorCode.SCHEMA, f"{held.where}: {message}")
        elif self.num_shards > 1 and block.ids is not None:
            num_foreign = count_foreign(
                block.ids, np.uint64(held.spec.salt), self.placement.shard_of_bucket, self.shard_index
            )
            if num_foreign:
                raise self._not_owned(held, num_foreign)
        return held

    def _check_changes(self, blocks: Sequence[Block]) -> list[Change]:
        pushed: set[int] = set()
        changes = []
        for index, block in enumerate(blocks):
            if block.action is Action.PULL:
                continue
            if block.table_id in pushed:
                raise _Refusal(ErrorCode.MALFORMED, f"block {index}: its table has another push in this frame")
            pushed.add(block.table_id)
            changes.append(self._check_change(index, block))
        return changes

    def _check_factors(self, blocks: Sequence[Block]) -> dict[int, NDArray[np.float32]]:
        """What the gradients of each table or dense array are multiplied with."""
        factors = {}
        for index, block in enumerate(blocks):
            if block.action is Action.FACTORS:
                held = self._find_known(index, block)
                count = len(held.spec.segments) if isinstance(held.spec, DenseSpec) else 1
                if block.rows is None or block.rows.shape != (count, 1):
                    raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: {block.count} factors, there should be {count}")
                factors[block.table_id] = from_frame(block.rows, block.dtype).reshape(-1)
                if not np.all((block.rows >= 0) & (block.rows <= 1)):
                    raise _Refusal(ErrorCode.NOT_FINITE, f"{held.where}: factors are not all from 0 to 1")
        return factors

    def _check_change(self, index: int, block: Block) -> Change:
        held = self._find(index, block)
        if not held.schema_hashes[block.schema_hash]:
            raise _Refusal(ErrorCode.SCHEMA, f"{held.where}: it is read-only for this client, nothing can be pushed")
        if block.rows is None:
            raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: action {block.action.name} without rows")
        rows = from_frame(block.rows, block.dtype)
        if block.action is Action.ASSIGN:
            if not isinstance(held.values, DenseRange):
                raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: rows of a table are pushed, not assigned")
            values = rows.reshape(-1)
            self._check_finite(held, "values", values)
            return Assignment(held.values, values)
        if block.action is not Action.PUSH:
            raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: action {block.action.name} in a push")
        if block.optimizer_step == 0:
            raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: optimizer step is 0, the first push has 1")
        if isinstance(held.values, DenseRange):
            self._check_assigned(held, held.values)
            self._check_learning_rate(held, block.learning_rate * max(held.values.largest_multiplier, 1.0))
            grads = self._scaled(rows.reshape(-1), block.gradient_scale)
            self._check_finite(held, "gradients", grads)
            return DensePush(held, held.values, grads, block.learning_rate, block.optimizer_step, block.gradient_scale)
        assert block.ids is not None, "checked by _find"
        self._check_learning_rate(held, block.learning_rate)
        merged = self._merger.merge(block.ids, rows, held.spec.salt)
        if merged.num_foreign:
            raise self._not_owned(held, merged.num_foreign)
        grads = self._scaled(merged.grads, block.gradient_scale)
        # After merging and scaling: a sum or product of finite gradients may be infinite.
        self._check_finite(held, "gradients", grads.reshape(-1), block.dtype)
        return TablePush(
            held, held.values, merged.ids, grads, block.learning_rate, block.optimizer_step, block.gradient_scale
        )

    def _scaled(self, grads: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
        """Gradients as they are to be applied; those of a sync step are scaled when they are merged."""
        if self.job is None or not self.job.is_sync:
            return times(grads, scale)
        if not (math.isfinite(scale) and scale >= 0):
            raise _Refusal(ErrorCode.NOT_FINITE, f"header: the weight of a share is {scale}, should be finite and >= 0")
        return grads

    def _check_assigned(self, held: TableEntry, dense: DenseRange) -> None:
        if not dense.assigned:
            raise _Refusal(ErrorCode.NOT_READY, f"{held.where}: no worker assigned its first values yet")

    def _check_learning_rate(self, held: TableEntry, learning_rate: float) -> None:
        if not abs(learning_rate) <= _MAX_FLOAT32:
            raise _Refusal(ErrorCode.NOT_FINITE, f"{held.where}: learning rate is {learning_rate}, it should be finite")

    def _check_finite(
        self, held: TableEntry, what: str, values: NDArray[np.float32], dtype: RowDtype = RowDtype.FLOAT32
    ) -> None:
        if not all_finite(values):
            number = len(values) - int(np.count_nonzero(np.isfinite(values)))
            message = f"{held.where}: {number} of {len(values)} {what} are NaN or infinite"
            raise _Refusal(ErrorCode.NOT_FINITE, message + (_OF_FLOAT16 if dtype is RowDtype.FLOAT16 else ""))

    def _not_owned(self, held: TableEntry, number: int) -> _Refusal:
        return _Refusal(
            ErrorCode.WRONG_SHARD, f"{held.where}: {number} ids belong to another shard than {self.shard_index}"
        )

    # Changes

    def _take(self, header: Header, blocks: Sequence[Block]) -> None:
        """Applies a push, or keeps it until it can be."""
        job = self.job
        if job is None or (header.step == 0 and header.op not in _OF_STEPS):
            self._take_outside(header, blocks)
            return
        worker = job.worker_of(header)
        assert worker is not None, "checked by _check_step"
        if header.op is Op.LEAVE:
            self.ledger.hold(*client_of(header), header.push_seq)
            job.rest(header, worker)
        elif header.op is Op.COMMIT:
            self._take_factors(job, worker, header, blocks)
        else:
            self._take_share(job, worker, header, blocks)
        self._complete_step(job)

    def _take_outside(self, header: Header, blocks: Sequence[Block]) -> None:
        """A push that is part of no step."""
        client = client_of(header)
        if self.ledger.newest(*client) > self.ledger.watermark(*client):
            raise _Refusal(ErrorCode.MALFORMED, "header: a push outside of any step, while one waits for its step")
        self._apply(self._check_changes(blocks))
        self.ledger.record(*client, header.push_seq)

    def _take_share(self, job: Job, worker: int, header: Header, blocks: Sequence[Block]) -> None:
        """A worker's gradients of a step, or a part of them."""
        client = client_of(header)
        pushes = [push for push in self._check_changes(blocks) if not isinstance(push, Assignment)]
        self._check_due(job, worker, header, pushes)
        if job.is_sync:
            self.ledger.hold(*client, header.push_seq)
            job.stage(header, worker, pushes)
        else:
            self._apply(pushes)
            self.ledger.record(*client, header.push_seq)
        if header.op is Op.PREPARE:
            job.measure(header, worker)
        else:
            job.advance(header, worker)

    def _take_factors(self, job: Job, worker: int, header: Header, blocks: Sequence[Block]) -> None:
        """What a worker multiplies the gradients of a measured step with."""
        factors = self._check_factors(blocks)
        self._check_due(job, worker, header, [])
        self._scale(job, header, factors)
        self.ledger.record(*client_of(header), header.push_seq)
        job.advance(header, worker)

    @staticmethod
    def _check_due(job: Job, worker: int, header: Header, pushes: Sequence[Push]) -> None:
        fault = job.fault_of(header, worker, sum(push.num_bytes for push in pushes))
        if fault is not None:
            raise _Refusal(*fault)

    def _complete_step(self, job: Job) -> None:
        """Applies what was staged if its step is complete, and answers all that waited for it."""
        try:
            if shares := job.take_measured():
                pushes = self._merged(job, shares)
                job.measured = Measured(job.staged_step, pushes, [self._norms(push) for push in pushes])
                self._record(shares)
            if shares := job.take_complete():
                self._apply_step(job, self._merged(job, shares))
                self._record(shares)
        except Exception as error:  # of no worker's push, but of all together
            job.fail(ErrorCode.STEP_FAILED, _reason_of(error), step=job.staged_step)
            raise
        for client, seq in job.take_rested().items():
            self.ledger.record(*client, seq)
        self._release(job)

    def _record(self, shares: Sequence[Contribution]) -> None:
        for share in shares:
            self.ledger.record(*share.client, share.last_seq)

    def _apply_step(self, job: Job, pushes: Sequence[Push]) -> None:
        self._apply(pushes)
        for push in pushes:
            self._note_changed(job, push)

    def _scale(self, job: Job, header: Header, factors: Mapping[int, NDArray[np.float32]]) -> None:
        """Applies a step that was measured, times the factors of whoever comes first; all others have the same."""
        measured = job.measured
        if measured.factors is None:
            for push in measured.pushes:
                if push.held.spec.table_id not in factors:
                    message = f"{push.held.where}: step {header.step} is scaled without it; {_ALIKE}"
                    raise _Refusal(ErrorCode.MALFORMED, message)
            pushes, measured.pushes = measured.pushes, []
            self._apply_step(job, [with_factors(push, factors[push.held.spec.table_id]) for push in pushes])
            measured.factors = factors
        elif header.part == 0 and not _are_same(factors, measured.factors):
            message = f"header: the factors of step {header.step} are not those of another worker; {_ALIKE}"
            raise _Refusal(ErrorCode.MALFORMED, message)

    @staticmethod
    def _norms(push: Push) -> Block:
        """Sums of squares of what a step was merged to."""
        sums, spec = squares_of(push), push.held.spec
        rows = sums.view(np.float32).reshape(-1, 2)
        return Block(Action.NORMS, spec.table_id, spec.schema_hash, 2, len(sums), None, rows)

    def _merged(self, job: Job, shares: Sequence[Contribution]) -> list[Push]:
        """One push for each table and array of a step."""
        of_table: dict[int, list[list[Push]]] = {}
        for share in shares:
            of_worker: dict[int, list[Push]] = {}
            for push in share.pushes:
                of_worker.setdefault(push.held.spec.table_id, []).append(push)
            for table_id, pushes in of_worker.items():
                of_table.setdefault(table_id, []).append(pushes)
        merged = []
        for of_workers in of_table.values():
            first, push = of_workers[0][0], merge_shares(of_workers, self._merger, job.mode.scale)
            if job.is_of_one:
                # Shards need not have seen equally many pushes of a process before; what its worker counts is for all.
                push = push._replace(step=first.step)
            if push.grads is not first.grads:  # those were checked when they came
                self._check_finite(push.held, "merged gradients", push.grads.reshape(-1))
            merged.append(push)
        return merged

    def _note_changed(self, job: Job, push: Push) -> None:
        """Marks the rows that clients pulled ahead and the step has changed."""
        if isinstance(push, TablePush):
            for ahead in job.ahead.of_table(push.held.spec.table_id):
                assert ahead.block.ids is not None, "checked by _find"
                ahead.changed[self._merger.among(ahead.block.ids, push.ids, push.held.spec.salt)] = True

    def _fail_step(self, header: Header, error: Exception) -> None:
        """A push that was refused, or failed, leaves its step, if pushes are staged, incomplete for ever."""
        job = self.job
        worker = None if job is None else job.worker_of(header)
        if job is not None and job.is_sync and (header.step > 0 or header.op is Op.LEAVE) and worker is not None:
            job.fail(ErrorCode.STEP_FAILED, f"worker {worker}: {_reason_of(error)}")
            self._release(job)

    def _release(self, job: Job) -> None:
        for parked in job.take_ready(self._applied_seq):
            self._released.append(self._guarded(parked.header, partial(self._late_reply, job, parked)))

    def _late_reply(self, job: Job, parked: DeferredRequest) -> Frame:
        if job.failure is not None:
            raise _Refusal.because(job.failure)
        return self._reply(parked.header, parked.pulls)

    def _applied_seq(self, client: Client) -> int:
        return self.ledger.watermark(*client)

    def _apply(self, changes: Sequence[Change]) -> None:
        for number, change in enumerate(changes):
            try:
                self.counters.num_pushed_rows += change.apply()
            except BaseException as error:
                # A store without room for more rows changed no value. Any other push may be applied in part: sent
                # again, that part would be applied twice; not sent again, the rest would be lost.
                if number or not isinstance(error, MemoryError):
                    self.fault = (
                        f"a push failed half-way ({type(error).__name__}: {error}); the values of shard "
                        f"{self.shard_index} are no longer right. Start the pserver again from a snapshot"
                    )
                raise

    def _pull(self, block: Block, held: TableEntry) -> Block:
        if isinstance(held.values, DenseRange):
            rows = held.values.copy_of(block.optimizer_step).reshape(-1, 1)
        else:
            assert block.ids is not None, "checked by _find"
            rows = np.empty((len(block.ids), block.dim), np.float32)
            if block.optimizer_step:
                rows[:] = held.values.has_rows(block.ids)[:, None]
            else:
                held.values.pull(block.ids, rows)
            self.counters.num_pulled_rows += len(block.ids)
        in_frame = for_frame(rows, block.dtype)
        return Block(
            Action.ROWS, block.table_id, block.schema_hash, block.dim, block.count, None, in_frame, dtype=block.dtype
        )

    def _changed_rows(self, ahead: EarlyPull) -> Block:
        block = ahead.block
        assert block.ids is not None, "checked by _find"
        ids = block.ids[ahead.changed]
        rows = self._pull(replace(block, count=len(ids), ids=ids), ahead.held)
        return replace(rows, ids=ids)

    def _values_for(self, spec: TableSpec | DenseSpec) -> TableStore | DenseRange:
        if isinstance(spec, DenseSpec):
            return DenseRange(spec, self.shard_index, self.num_shards)
        return TableStore(spec, max_pre_image_bytes=self._max_pre_image_bytes, huge_pages=self._huge_pages)


def _are_same(factors: Mapping[int, NDArray[np.float32]], others: Mapping[int, NDArray[np.float32]]) -> bool:
    return factors.keys() == others.keys() and all(np.array_equal(factors[key], others[key]) for key in factors)


def _reason_of(error: Exception) -> str:
    return error.error.message if isinstance(error, _Refusal) else f"{type(error).__name__}: {error}"
