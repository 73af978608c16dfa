"""Shard: the rows of every table whose ids hash to this pserver, and its range of every dense array."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_batch import all_finite
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules import read_only
from fleet_sparse.core.table import DenseSpec, TableSpec
from fleet_sparse.core.warm_up import warm_up
from fleet_sparse.errors import ErrorCode, PlanError, TableMismatch
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frames import PUSHES, Action, Block, Frame, FrameError, Header, Op

from .dense import DenseRange
from .ledger import Ledger, Verdict
from .merge import Merger
from .ownership import count_foreign
from .reserved_memory import MAX_TABLES
from .store import Store

_log = logging.getLogger(__name__)

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class Counters:
    """What a shard did since it was made."""

    num_requests: int = 0
    num_pulled_rows: int = 0
    num_pushed_rows: int = 0


@dataclass(slots=True, eq=False)
class Held:
    """A table or dense array, as this shard holds it.

    Attributes:
        spec: That decides; of several that may meet, the one that trains.
        values: A Store for a TableSpec, a DenseRange for a DenseSpec.
        brought_by: Who brought `spec` first, for error messages.
        optimizer_step: Largest that a push carried.
        schema_hashes: Those that requests may carry, and whether with it they may change values.
    """

    spec: TableSpec | DenseSpec
    values: Store | DenseRange
    brought_by: str
    optimizer_step: int = 0
    schema_hashes: dict[int, bool] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """`table 'C1'`, for messages."""
        return f"{'table' if isinstance(self.spec, TableSpec) else 'dense'} {self.spec.name!r}"

    @property
    def state(self) -> TableState:
        """What other processes are told."""
        if isinstance(self.values, DenseRange):
            return TableState(self.spec.name, self.optimizer_step, 0, self.values.assigned, self.spec.to_json())
        return TableState(self.spec.name, self.optimizer_step, self.values.num_rows, False)


class _Refusal(Exception):
    """A request that is answered with an ERROR frame."""

    def __init__(self, code: ErrorCode, message: str, expected_seq: int = 0) -> None:
        super().__init__(message)
        self.error = FrameError(code, expected_seq, message)


class _TablePush(NamedTuple):
    """A push to a table, checked and merged."""

    held: Held
    store: Store
    ids: NDArray[np.int64]
    grads: NDArray[np.float32]
    learning_rate: float
    step: int

    def apply(self) -> int:
        """Returns the number of rows pushed."""
        self.store.push(self.ids, self.grads, self.learning_rate, self.step)
        self.held.optimizer_step = max(self.held.optimizer_step, self.step)
        return len(self.ids)


class _DensePush(NamedTuple):
    """A push to a dense array, checked."""

    held: Held
    dense: DenseRange
    grads: NDArray[np.float32]
    learning_rate: float
    step: int

    def apply(self) -> int:
        """Returns 0, the number of rows of tables pushed."""
        self.dense.push(self.grads, self.learning_rate, self.step)
        self.held.optimizer_step = max(self.held.optimizer_step, self.step)
        return 0


class _Assignment(NamedTuple):
    """First values of a dense array, checked."""

    dense: DenseRange
    values: NDArray[np.float32]

    def apply(self) -> int:
        """Returns 0, the number of rows of tables pushed."""
        self.dense.assign(self.values)
        return 0


_Change = _TablePush | _DensePush | _Assignment


class Shard:
    """The tables of one pserver, and who may change them.

    One thread owns a shard. Nothing here locks, sleeps or does I/O. A frame is applied as a whole or not at all: all of
    it is checked before the first value changes.

    Attributes:
        shard_index: From 0.
        num_shards: As many as the placement has.
        cluster_id: u64, of the job.
        incarnation: u64, another one each time that the pserver starts.
        placement: Which ids are this shard's.
        counters: What was done so far.
        held: Tables and dense arrays by the id that they have on the wire.
        ledger: Applied pushes by client.
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
        huge_pages: bool = True,
    ) -> None:
        if placement.num_shards != num_shards or not 0 <= shard_index < num_shards:
            raise ValueError(f"shard {shard_index} of {num_shards}: the placement has {placement.num_shards} shards")
        self.shard_index = shard_index  # constant after construction, as all down to the blank line
        self.num_shards = num_shards
        self.cluster_id = cluster_id
        self.incarnation = incarnation
        self.placement = placement
        self._huge_pages = huge_pages
        warm_up()

        self.counters = Counters()
        self.held: dict[int, Held] = {}
        self.ledger = Ledger()
        self._merger = Merger(placement, shard_index)
        self.fault = ""

    def add_table(self, spec: TableSpec | DenseSpec, *, brought_by: str = "this process") -> Held:
        """Makes the table, or agrees that it is the one that is there.

        A spec with rule "read_only" agrees with one that trains; the latter decides, whichever comes first.

        Args:
            spec: Of a table or dense array.
            brought_by: `worker 1`, for the message when another spec comes.

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
            held = Held(spec, self._values_for(spec), brought_by)
            self.held[spec.table_id] = held
        elif held.spec.name != spec.name:
            raise TableMismatch(
                f"table {spec.name!r}: {brought_by} brings it, and {held.brought_by} has brought "
                f"{held.spec.name!r}, which has the same number on the wire. Rename one"
            )
        elif differences := held.spec.differences(spec):
            raise TableMismatch(
                f"{held.where}: {held.brought_by} and {brought_by} describe it differently: {', '.join(differences)}"
            )
        elif held.spec.rule == read_only.name != spec.rule:
            # Nothing was ever written to it, so nothing is lost.
            values = self._values_for(spec)
            held.values.close()
            held.spec, held.values, held.brought_by = spec, values, brought_by
        held.schema_hashes[spec.schema_hash] = spec.rule != read_only.name
        return held

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
        """The reply to a request. Raises nothing: what is refused is answered with an ERROR frame."""
        self.counters.num_requests += 1
        try:
            if self.fault:
                raise _Refusal(ErrorCode.INTERNAL, self.fault)
            return self._answer(frame)
        except _Refusal as refusal:
            return self.refuse(frame.header, refusal.error)
        except Exception as error:
            _log.exception("shard %d: request %d failed", self.shard_index, frame.header.request_id)
            return self.refuse(frame.header, FrameError(ErrorCode.INTERNAL, 0, f"{type(error).__name__}: {error}"))

    def refuse(self, request: Header | None, error: FrameError) -> Frame:
        """The ERROR frame that answers a request; None for one that could not be read."""
        return Frame(self._reply_header(Op.ERROR, request or Header(Op.PULL)), [], error)

    def _answer(self, frame: Frame) -> Frame:
        header = frame.header
        self._check_header(header)
        verdict = self._judge(header)
        changes: list[_Change] = []
        pulls: list[tuple[Block, Held]] = []
        pushed: set[int] = set()
        for index, block in enumerate(frame.blocks):
            if block.action is Action.PULL:
                pulls.append((block, self._check_pull(index, block)))
            elif verdict is Verdict.APPLY:
                if block.table_id in pushed:
                    raise _Refusal(ErrorCode.MALFORMED, f"block {index}: its table has another push in this frame")
                pushed.add(block.table_id)
                changes.append(self._check_change(index, block))
        if header.op in PUSHES and verdict is Verdict.APPLY:
            self._apply(header, changes)
        rows = [self._pull(block, held) for block, held in pulls]
        op = Op.ROWS if header.op in (Op.PULL, Op.PUSH_PULL) else Op.ACK
        return Frame(self._reply_header(op, header), rows)

    def _reply_header(self, op: Op, request: Header) -> Header:
        return Header(
            op,
            cluster_id=self.cluster_id,
            shard=self.shard_index,
            incarnation=self.incarnation,
            placement_version=self.placement.version,
            client_id=request.client_id,
            client_epoch=request.client_epoch,
            request_id=request.request_id,
            push_seq=self.ledger.watermark(request.client_id, request.client_epoch),
            step=request.step,
            part=request.part,
            num_parts=request.num_parts,
        )

    # Checks. None of them changes anything.

    def _check_header(self, header: Header) -> None:
        if header.op not in PUSHES and header.op is not Op.PULL:
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

    def _judge(self, header: Header) -> Verdict:
        client_id, epoch = header.client_id, header.client_epoch
        if header.op is Op.PULL:
            verdict = self.ledger.judge_pull(client_id, epoch, header.push_floor)
            wanted = header.push_floor
        else:
            if header.push_seq == 0:
                raise _Refusal(ErrorCode.MALFORMED, "header: push_seq is 0; pushes count from 1")
            verdict = self.ledger.judge_push(client_id, epoch, header.push_seq)
            wanted = header.push_seq
        if verdict is Verdict.STALE_EPOCH:
            newest = self.ledger.epoch(client_id)
            raise _Refusal(ErrorCode.STALE_EPOCH, f"header: client epoch {epoch}, the newest seen is {newest}")
        if verdict is Verdict.GAP:
            expected = self.ledger.watermark(client_id, epoch) + 1
            raise _Refusal(ErrorCode.GAP, f"header: push {wanted} came before push {expected}", expected)
        return verdict

    def _find(self, index: int, block: Block) -> Held:
        """The table of a block, once id, schema and shape fit it."""
        held = self.held.get(block.table_id)
        if held is None:
            raise _Refusal(ErrorCode.UNKNOWN_TABLE, f"block {index}: no table has number {block.table_id:#010x} here")
        if block.schema_hash not in held.schema_hashes:
            raise _Refusal(
                ErrorCode.SCHEMA, f"{held.where}: schema {block.schema_hash:016x} is not one that a worker registered"
            )
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

    def _check_pull(self, index: int, block: Block) -> Held:
        held = self._find(index, block)
        if isinstance(held.values, DenseRange):
            self._check_assigned(held, held.values)
        elif self.num_shards > 1 and block.ids is not None:
            num_foreign = count_foreign(
                block.ids, np.uint64(held.spec.salt), self.placement.shard_of_bucket, self.shard_index
            )
            if num_foreign:
                raise self._not_owned(held, num_foreign)
        return held

    def _check_change(self, index: int, block: Block) -> _Change:
        held = self._find(index, block)
        if not held.schema_hashes[block.schema_hash]:
            raise _Refusal(ErrorCode.SCHEMA, f"{held.where}: it is read-only for this client, nothing can be pushed")
        if block.rows is None:
            raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: action {block.action.name} without rows")
        if block.action is Action.ASSIGN:
            if not isinstance(held.values, DenseRange):
                raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: rows of a table are pushed, not assigned")
            values = block.rows.reshape(-1)
            self._check_finite(held, "values", values)
            return _Assignment(held.values, values)
        if block.action is not Action.PUSH:
            raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: action {block.action.name} in a push")
        if block.optimizer_step == 0:
            raise _Refusal(ErrorCode.MALFORMED, f"{held.where}: optimizer step is 0, the first push has 1")
        if isinstance(held.values, DenseRange):
            self._check_assigned(held, held.values)
            self._check_learning_rate(held, block.learning_rate * max(held.values.largest_multiplier, 1.0))
            grads = _scaled(block.rows.reshape(-1), block.gradient_scale)
            self._check_finite(held, "gradients", grads)
            return _DensePush(held, held.values, grads, block.learning_rate, block.optimizer_step)
        assert block.ids is not None, "checked by _find"
        self._check_learning_rate(held, block.learning_rate)
        merged = self._merger.merge(block.ids, block.rows, held.spec.salt)
        if merged.num_foreign:
            raise self._not_owned(held, merged.num_foreign)
        grads = _scaled(merged.grads, block.gradient_scale)
        # After merging and scaling: a sum or product of finite gradients may be infinite.
        self._check_finite(held, "gradients", grads.reshape(-1))
        return _TablePush(held, held.values, merged.ids, grads, block.learning_rate, block.optimizer_step)

    def _check_assigned(self, held: Held, dense: DenseRange) -> None:
        if not dense.assigned:
            raise _Refusal(ErrorCode.NOT_READY, f"{held.where}: no worker assigned its first values yet")

    def _check_learning_rate(self, held: Held, learning_rate: float) -> None:
        if not abs(learning_rate) <= _MAX_FLOAT32:
            raise _Refusal(ErrorCode.NOT_FINITE, f"{held.where}: learning rate is {learning_rate}, it should be finite")

    def _check_finite(self, held: Held, what: str, values: NDArray[np.float32]) -> None:
        if not all_finite(values):
            number = len(values) - int(np.count_nonzero(np.isfinite(values)))
            raise _Refusal(ErrorCode.NOT_FINITE, f"{held.where}: {number} of {len(values)} {what} are NaN or infinite")

    def _not_owned(self, held: Held, number: int) -> _Refusal:
        return _Refusal(
            ErrorCode.WRONG_SHARD, f"{held.where}: {number} ids belong to another shard than {self.shard_index}"
        )

    # Changes

    def _apply(self, header: Header, changes: list[_Change]) -> None:
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
        self.ledger.record(header.client_id, header.client_epoch, header.push_seq)

    def _pull(self, block: Block, held: Held) -> Block:
        if isinstance(held.values, DenseRange):
            rows = held.values.values.copy().reshape(-1, 1)
        else:
            assert block.ids is not None, "checked by _find"
            rows = np.empty((len(block.ids), block.dim), np.float32)
            held.values.pull(block.ids, rows)
            self.counters.num_pulled_rows += len(block.ids)
        return Block(Action.ROWS, block.table_id, block.schema_hash, block.dim, block.count, None, rows)

    def _values_for(self, spec: TableSpec | DenseSpec) -> Store | DenseRange:
        if isinstance(spec, DenseSpec):
            return DenseRange(spec, self.shard_index, self.num_shards)
        return Store(spec, huge_pages=self._huge_pages)


def _scaled(grads: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
    if scale == 1.0:
        return grads
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for what is not finite
        return grads * np.float32(scale if math.isfinite(scale) else math.nan)
