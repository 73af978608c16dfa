"""ShardLog: what a shard writes to its log, as records. It belongs to the thread that owns the shard."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode, LogFailed, LogFull
from fleet_sparse.settings import Settings
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAX_BLOCKS,
    STATISTICS_COLUMNS,
    UNCHECKED_COLUMNS,
    Action,
    Block,
    Buffer,
    Frame,
    Header,
    Op,
)
from fleet_sparse.wire.message_words import HEAD_WORDS

from ..engine.jobs import JobsState
from ..engine.plain_frames import PlainPush
from ..engine.progress import Progress
from ..engine.table_map import TableMap
from ..refusal import Refusal
from ..tables.mutations import Assignment, Change, CopyMutation, DayEnd, Mutation, Push, Replacement, Shrink
from ..tables.row_limit import UNLIMITED
from ..tables.shrunk import ShrunkTable
from .control_state import KIND_OF, ControlChange, ControlState, CutSave, DoneShrink, encoded_change
from .loaded_rows import LoadedRows
from .log_format import HEAD_BYTES, MARK_BYTES, Kind, pack_marks, padded
from .log_writer import LogWriter

_log = logging.getLogger(__name__)

_MAX_BLOCK_BYTES = BLOCK_BYTES + 8 * 8
"""Entry of a block, and the padding of its columns."""
_ROOM_BYTES = HEAD_BYTES + 64
"""A ROOM record."""


class ShardLog:
    """The log of one shard.

    Args:
        writer: Writes the records.
        tables: Tables of the shard.
        is_synced: True if a push is durable before it is acked.
        failover_s: As `Settings.failover_s`.
        control: What the control plane continues from; None for a log that begins.
        durable: Newest durable push of each client whose pushes the log continues.
        has_loads: As the attribute, for a log that continues.
        num_torn_bytes: As the attribute.

    Attributes:
        writer: As given.
        is_synced: As given.
        control: All changes of the control plane so far.
        is_finished: True if the job has ended in order, so that nothing continues from the log.
        has_loads: True if there is a LOAD behind the newest checkpoint: its rows file takes the room of one.
        max_rows: By id of a table, the largest number of its rows, where the log says one.
        num_torn_bytes: Length of the torn end that was cut off when this process continued the log.
    """

    def __init__(
        self,
        writer: LogWriter,
        tables: TableMap,
        *,
        is_synced: bool = False,
        failover_s: float = Settings.failover_s,
        control: ControlState | None = None,
        durable: Sequence[Watermark] = (),
        has_loads: bool = False,
        num_torn_bytes: int = 0,
    ) -> None:
        self.writer = writer
        self.is_synced = is_synced
        self.control = ControlState() if control is None else control
        self.is_finished = False
        self.has_loads = has_loads
        self.max_rows: dict[int, int] = {}
        self.num_torn_bytes = num_torn_bytes
        self._tables = tables
        self._failover_s = failover_s
        self._marks: deque[tuple[int, Sequence[Watermark]]] = deque()  # by lsn, of records that are not durable
        self._durable = {mark.client_id: mark.watermark for mark in durable}

    def commit(
        self,
        watermarks: Sequence[Watermark],
        mutations: Sequence[Mutation | PlainPush],
        progress: Progress,
        left: Sequence[Watermark],
        max_rows: Mapping[int, int],
    ) -> None:
        """Appends the record of a commit.

        Args:
            watermarks: As of `Shard.commit`.
            mutations: As of `Shard.commit`.
            progress: As of `Shard.commit`.
            left: LEAVE pushes of the workers that left and wait for the others.
            max_rows: By id, the largest number of rows of the tables that the mutations may make larger.

        Raises:
            Refusal: The disk has no room. Nothing was appended that has an effect.
        """
        marks = pack_marks([*watermarks, *left])
        lsn, step, num_marks, num_left = 0, progress.step, len(watermarks), len(left)
        try:
            first = mutations[0] if mutations else None
            self._limit_rows(max_rows)
            if isinstance(first, PlainPush):
                frame = first.frame
                content = frame.message[frame.num_parts + HEAD_WORDS :].data.cast("B")
                lsn = self.writer.append(
                    Kind.APPLY,
                    step=step,
                    num_marks=num_marks,
                    num_left=num_left,
                    num_blocks=frame.num_blocks,
                    parts=[marks, content],
                )
            elif isinstance(first, Shrink):
                self._shrink(first, [each for each in mutations if isinstance(each, Shrink)])
            elif isinstance(first, DayEnd):
                table_ids = [each.table_id for each in mutations if isinstance(each, DayEnd)]
                self._append_json(Kind.END_DAY, {"save_id": first.save_id, "table_ids": table_ids})
            else:
                kind, op, blocks = self._blocks_of(mutations, progress)
                parts = [marks, *_encoded(op, blocks)]
                lsn = self.writer.append(
                    kind, step=step, num_marks=num_marks, num_left=num_left, num_blocks=len(blocks), parts=parts
                )
        except LogFull as error:
            raise Refusal(ErrorCode.LOG_FULL, str(error)) from error
        is_push = bool(watermarks and lsn)
        if is_push:
            self._marks.append((lsn, watermarks))
        # The reply to a push waits itself where it has to. Without assigned dense values no step can be made again.
        if (self.is_synced and not is_push) or isinstance(first, Assignment):
            self.writer.sync()

    def _limit_rows(self, max_rows: Mapping[int, int]) -> None:
        """Appends the limits that have changed."""
        for table_id, most in max_rows.items():
            if self.max_rows.get(table_id, UNLIMITED) == most:
                continue
            self._append_json(Kind.ROOM, {"table_id": table_id, "max_rows": None if most == UNLIMITED else most})
            if most == UNLIMITED:
                del self.max_rows[table_id]
            else:
                self.max_rows[table_id] = most

    def _shrink(self, first: Shrink, shrinks: Sequence[Shrink]) -> None:
        found = {self._tables[each.table_id].spec.name: each.found for each in shrinks}
        criteria = [[each.name, each.value] for each in first.criteria]
        body = {"shrink_id": first.shrink_id, "criteria": criteria, "decay": first.decay, "tables": found}
        self._append_json(Kind.SHRINK, body)

    def note_shrink(self, shrink_id: str, found: Mapping[str, ShrunkTable]) -> None:
        """A shrink that was committed is done: the same request is answered with what it found."""
        self.control.shrink = DoneShrink(shrink_id, dict(found))

    def note_day_end(self, save_id: str) -> None:
        """The end of a day that was committed is done: that of the same save changes nothing."""
        self.control.note_day_end(save_id)

    def void(self) -> None:
        """Appends that the record before has no effect.

        Raises:
            LogFailed: As `LogWriter.append`.
        """
        if self._marks and self._marks[-1][0] == self.writer.newest_lsn:
            self._marks.pop()
        self.writer.append(Kind.VOID)

    def add_table(self, spec: TableSpec | DenseSpec, declared_by: str, *, is_loaded: bool) -> None:
        """Appends the declaration of a table."""
        body = {"spec": spec.to_json(), "declared_by": declared_by, "is_loaded": is_loaded}
        self._append_json(Kind.TABLE, body)

    def join(self, worker: int, num_workers: int, client_id: bytes, mode: Mode | None, *, begins_job: bool) -> None:
        """Appends that a client is a worker."""
        body = {
            "worker": worker,
            "num_workers": num_workers,
            "client_id": client_id.hex(),
            "mode": None if mode is None else mode.to_json(),
            "begins_job": begins_job,
        }
        self._append_json(Kind.JOIN, body)

    def note(self, change: ControlChange, body: bytes | None = None) -> None:
        """Appends a change of the control plane.

        Args:
            change: The change.
            body: Its body, if another thread has encoded it, because it is large.
        """
        self._append_body(KIND_OF[type(change)], encoded_change(change) if body is None else body)
        self.control.apply(change)

    def cut_save(self, save: CutSave, left_out: Mapping[str, Sequence[Criterion]]) -> None:
        """Appends that a save was cut."""
        criteria = {name: [[each.name, each.value] for each in some] for name, some in left_out.items()}
        body = {"save_id": save.save_id, "left_out": criteria, "ends_day": save.ends_day, "tables": save.tables}
        self._append_json(Kind.CUT, body)
        self.control.save = save

    def end_save(self, save_id: str, checksum: int | None) -> bool:
        """Appends that the save that was cut last ended, with the checksum of its manifest if it was committed.

        Returns whether the log has it. A failure is logged: without the record the next delta contains more, or is
        refused for a full snapshot.
        """
        body = {"save_id": save_id, "checksum": None if checksum is None else f"{checksum:016x}"}
        try:
            self._append_json(Kind.END_SAVE, body)
        except (LogFull, LogFailed) as error:
            _log.warning("save %s: its end is not in the log: %s", save_id, error)
            return False
        self.control.note_end(save_id, is_committed=checksum is not None)
        return True

    def note_changed(self, spec: TableSpec, ids: NDArray[np.int64], *, is_removed: bool) -> None:
        """Appends ids of a table that changed, or were removed, since the base of the next delta."""
        name = spec.counts_for or spec.name
        body = {"table": name, "is_removed": is_removed, "is_counter": spec.counts_for is not None}
        block = Block(Action.PULL, spec.table_id, spec.schema_hash, spec.dim, len(ids), ids)
        head, *columns = encode(Frame(Header(Op.PULL), [block]))
        text = json.dumps(body).encode()
        parts: list[Buffer] = [head[HEADER_BYTES:], *columns, *padded(text)]
        self.writer.append(Kind.CHANGED, num_blocks=1, body_bytes=len(text), parts=parts)

    def load(self, rows: LoadedRows) -> None:
        """Appends that tables are replaced by those of a rows file, which is durable."""
        self._append_body(Kind.LOAD, rows.to_json())
        self.control.note_load(rows.load_id)
        self.has_loads = True

    def begin_checkpoint(
        self, jobs: JobsState, watermarks: Sequence[Watermark], left: Sequence[Watermark], base: int | None
    ) -> int:
        """Begins a segment with the state that a rows file does not have; returns its first lsn."""
        tables = [
            {
                "name": entry.spec.name,
                "declared_by": entry.declared_by,
                "is_loaded": entry.is_loaded,
                "schema_hashes": [[f"{each:016x}", trains] for each, trains in entry.schema_hashes.items()],
            }
            for entry in self._tables.values()
        ]
        first_lsn = self.writer.begin_segment()
        state = {
            "tables": tables,
            "jobs": jobs.to_builtins(),
            "control": self.control.to_builtins(),
            "base": None if base is None else f"{base:016x}",
        }
        body = json.dumps(state).encode()
        lsn = self.writer.append(
            Kind.STATE,
            num_marks=len(watermarks),
            num_left=len(left),
            body_bytes=len(body),
            parts=[pack_marks([*watermarks, *left]), *padded(body)],
        )
        self.max_rows.clear()
        self._marks.append((lsn, watermarks))
        return first_lsn

    @property
    def is_full(self) -> bool:
        """True if a new push should wait, because the disk has no room for the next segment."""
        return self.writer.full_since is not None

    @staticmethod
    def most_record_bytes(column_bytes: int, num_blocks: int, num_marks: int = 1, num_records: int = 1) -> int:
        """Returns a bound for the bytes of the records of a push, or of a step, behind the head of the first.

        Args:
            column_bytes: Most bytes of their columns.
            num_blocks: Most blocks.
            num_marks: Most marks, of workers that left, too.
            num_records: Most records.
        """
        heads = HEAD_BYTES * (num_records - 1)
        return heads + column_bytes + (_MAX_BLOCK_BYTES + _ROOM_BYTES) * num_blocks + MARK_BYTES * num_marks

    def has_room(self, num_bytes: int) -> bool:
        """Returns whether a new push need not wait for room.

        Args:
            num_bytes: `most_record_bytes` of its record.
        """
        return self.writer.has_room(num_bytes)

    def check_waits(self, num_bytes: int) -> None:
        """Checks that a push without room may wait for it.

        Args:
            num_bytes: As of `has_room`.

        Raises:
            Refusal: The disk has had no room for too long.
        """
        since = self.writer.lacks_room_since(num_bytes)
        if since is not None and time.monotonic() - since > self._failover_s:
            raise Refusal(
                ErrorCode.LOG_FULL,
                f"log {str(self.writer.directory)!r}: the disk has had no room for {self._failover_s:g} s "
                "(FLEET_SPARSE_FAILOVER_S). Free some, or set FLEET_SPARSE_LOG to another disk",
            )

    def durable_push(self, client_id: bytes) -> int:
        """Returns the newest push of a client that is known to be durable; 0 if there is none."""
        self._take_durable()
        return self._durable.get(client_id, 0)

    def forget(self, client_ids: Collection[bytes]) -> None:
        """Nobody asks for the durable pushes of these clients any more."""
        self._take_durable()
        self._durable = {each: seq for each, seq in self._durable.items() if each not in client_ids}

    def _take_durable(self) -> None:
        durable_lsn = self.writer.durable_lsn
        while self._marks and self._marks[0][0] <= durable_lsn:
            for mark in self._marks.popleft()[1]:
                self._durable[mark.client_id] = mark.watermark

    def _append_json(self, kind: Kind, body: Mapping[str, object]) -> None:
        self._append_body(kind, json.dumps(body).encode())

    def _append_body(self, kind: Kind, body: bytes) -> None:
        self.writer.append(kind, body_bytes=len(body), parts=padded(body))

    def _blocks_of(self, mutations: Sequence[Mutation | PlainPush], progress: Progress) -> tuple[Kind, Op, list[Block]]:
        """Returns kind and blocks of the record of a commit, and an op that may have such blocks."""
        if progress.factors is not None:
            return Kind.COMMIT, Op.COMMIT, [self._factors(*each) for each in progress.factors.items()]
        if progress.prepared is not None:
            return Kind.PREPARE, Op.PUSH, [self._block(push) for push in progress.prepared]
        blocks = [self._block(mutation) for mutation in mutations]
        is_push = not blocks or blocks[0].action is Action.PUSH or blocks[0].ids is not None
        return Kind.REJOIN if progress.rejoins else Kind.APPLY, Op.PUSH if is_push else Op.ASSIGN, blocks

    def _block(self, mutation: Mutation | PlainPush) -> Block:
        if isinstance(mutation, CopyMutation):
            return self._block_of_copies(mutation)
        assert isinstance(mutation, (Push, Assignment, Replacement)), "the others are not encoded as blocks"
        table_id = mutation.table_id
        spec = self._tables[table_id].spec
        if isinstance(mutation, Push):
            rows = mutation.grads if mutation.ids is not None else mutation.grads.reshape(-1, 1)
            numbers = mutation.learning_rate, mutation.step
            block = Block(
                Action.PUSH,
                table_id,
                spec.schema_hash,
                rows.shape[1],
                len(rows),
                mutation.ids,
                _contiguous(rows),
                *numbers,
            )
            if mutation.statistics is not None:
                assert isinstance(spec, TableSpec), "dense arrays have no statistics"
                block.statistics = {
                    name: np.ascontiguousarray(mutation.statistics[:, index], STATISTICS_COLUMNS[name].dtype)
                    for index, name in enumerate(spec.statistics)
                }
            block.offset = mutation.begin
            return block
        values = _contiguous(mutation.values.reshape(-1, 1))
        block = Block(Action.ASSIGN, table_id, spec.schema_hash, 1, len(values), None, values, offset=mutation.begin)
        if isinstance(mutation, Replacement):
            block.action = Action.REPLACE_STATE if mutation.number else Action.REPLACE
            block.optimizer_step = mutation.number or mutation.step
        return block

    def _block_of_copies(self, mutation: CopyMutation) -> Block:
        rows, table_id = _contiguous(mutation.rows), mutation.table_id
        block = Block(
            *(Action.ASSIGN, table_id, self._tables[table_id].spec.schema_hash, rows.shape[1], len(rows)),
            *(mutation.ids, rows),
            optimizer_step=mutation.step,
        )
        if isinstance(mutation, Change):
            block.action, block.learning_rate = Action.CHANGE, mutation.weight
            block.statistics = {"counts": mutation.amounts}
            if mutation.states is not None and mutation.num_updates is not None:
                block.copies = {"versions": mutation.num_updates, "states": _contiguous(mutation.states)}
        elif mutation.states.shape[1]:
            block.copies = {"states": _contiguous(mutation.states)}
        if block.copies:
            block.gradient_scale = block.copies["states"].shape[1]
        return block

    def _factors(self, table_id: int, factors: NDArray[np.float32]) -> Block:
        rows = _contiguous(factors.reshape(-1, 1))
        return Block(Action.FACTORS, table_id, self._tables[table_id].spec.schema_hash, 1, len(rows), None, rows)


def _encoded(op: Op, blocks: Sequence[Block]) -> list[Buffer]:
    """Returns a block table and its columns. A step of many workers may have more blocks than a frame."""
    table = b""
    columns: list[Buffer] = []
    for begin in range(0, len(blocks), MAX_BLOCKS):
        head, *its_columns = encode(
            Frame(Header(op, UNCHECKED_COLUMNS, push_seq=1), [*blocks[begin : begin + MAX_BLOCKS]])
        )
        table += head[HEADER_BYTES:]
        for column in its_columns:
            columns += padded(column)
    return [table, *columns]


def _contiguous(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(rows, np.float32)
