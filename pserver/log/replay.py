"""Replay: makes a shard equal to what its log says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.mode import parse_mode
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError, PlanError, SnapshotError
from fleet_sparse.wire.frame_format import Action, Block

from ..engine.jobs import JobsState
from ..engine.progress import NO_PROGRESS, Progress
from ..engine.shard import Shard
from ..tables.admission import statistics_of
from ..tables.embedding import EmbeddingTable
from ..tables.mutations import Assignment, Change, DayEnd, Mutation, Push, Replacement, RowAssignment, Shrink
from ..tables.row_limit import UNLIMITED
from .control_state import CHANGE_OF, ControlState, CutSave, DoneShrink, parse_change
from .loaded_rows import LoadedRows
from .log_format import Kind, Record, corrupt
from .log_reader import LogReader
from .replayed_save import ReplayedSave

_END_SAVE = {Kind.CUT, Kind.END_SAVE, Kind.TABLE, Kind.LOAD, Kind.SHRINK, Kind.END_DAY}
"""Kinds before which no save is under way. One without an end was not committed, or its end is not known."""


class Replayed(NamedTuple):
    """Result of a replay."""

    num_records: int
    """Number of the records that were replayed."""
    num_bytes: int
    """Their bytes."""
    generation: int
    """Largest generation of the log; 0 if it is empty."""
    control: ControlState
    """What the control plane continues from."""
    newest_lsn: int
    """Lsn of the last record."""
    loads: frozenset[str]
    """Directories of the rows files that were loaded."""
    max_rows: Mapping[int, int]
    """By id of a table, the largest number of its rows, where the end of the log says one."""
    has_changes: bool
    """False if all records are states of checkpoints that did not become durable: the log has no content of its own."""


class _MaxRows:
    """Makes tables take the rows that they took when the records were written, whatever there is room for now.

    Attributes:
        by_table: By id, the largest number of rows of the tables that have a limit.
    """

    def __init__(self, shard: Shard) -> None:
        self.by_table: dict[int, int] = {}
        self._shard = shard
        self._set()

    def note(self, record: Record) -> None:
        """Takes note of a record that was carried out."""
        kind = record.head.kind
        if kind is Kind.STATE:
            self.by_table.clear()
        elif kind is Kind.ROOM:
            body = json.loads(record.body)
            self.by_table.pop(body["table_id"], None)
            if body["max_rows"] is not None:
                self.by_table[body["table_id"]] = body["max_rows"]
        elif kind not in (Kind.TABLE, Kind.LOAD):  # these make tables
            return
        self._set()

    def end(self) -> None:
        """Lets tables decide for each change."""
        for entry in self._shard.tables.values():
            if isinstance(entry.table, EmbeddingTable):
                entry.table.limit_rows(None)

    def _set(self) -> None:
        for table_id, entry in self._shard.tables.items():
            if isinstance(entry.table, EmbeddingTable):
                entry.table.limit_rows(self.by_table.get(table_id, UNLIMITED))


class _Step(NamedTuple):
    """What a record of kind APPLY, PREPARE, COMMIT or REJOIN says."""

    mutations: Sequence[Mutation]
    progress: Progress


def replay(
    shard: Shard,
    reader: LogReader,
    *,
    begins_with_state: bool,
    load_rows: Callable[[Shard, LoadedRows], None],
    on_progress: Callable[[], object] = lambda: None,
) -> Replayed:
    """Applies the records of a log to a shard that has none yet, but for a torn end. No file is changed.

    Args:
        shard: Has the rows of the checkpoint, or none.
        reader: Reads the log.
        begins_with_state: True if the first record is the state of a checkpoint.
        load_rows: Fills an empty shard from the rows file of a LOAD.
        on_progress: Called before each record.

    Raises:
        LogCorrupt: Bytes are wrong.
        SnapshotError: As `load_rows`.
        PlanError, MemoryError: This machine has too little memory left.
    """
    num_records, num_bytes, has_changes, control = 0, 0, False, ControlState()
    loads = set[str]()
    max_rows = _MaxRows(shard)
    save: ReplayedSave | None = None
    for number, record in enumerate(_with_effect(reader.records())):
        on_progress()
        num_records += 1
        num_bytes += record.head.end
        kind = record.head.kind
        has_changes |= kind not in (Kind.STATE, Kind.CHANGED)
        try:
            if save is not None and kind in _END_SAVE:
                save.end(is_kept=kind is Kind.END_SAVE and json.loads(record.body)["checksum"] is not None)
                save = None
            if kind is Kind.CUT:
                save = _cut(shard, json.loads(record.body), control)
            elif kind is Kind.END_SAVE:
                _end_save(shard, json.loads(record.body), control)
            elif kind in CHANGE_OF:
                control.apply(parse_change(kind, record.body))
            elif kind is Kind.LOAD:
                rows = LoadedRows.parse(record.body)
                _load(shard, rows, load_rows)
                control.note_load(rows.load_id)
                loads.add(rows.directory)
            elif kind not in (Kind.STATE, Kind.ROOM):
                _carry_out(shard, record, control)
            elif number == 0 and begins_with_state:
                control = _restore(shard, json.loads(record.body), record)
            max_rows.note(record)
        except (SnapshotError, PlanError, MemoryError):
            raise  # of a rows file, which its message names; or memory is short, and the log is right
        except (FleetSparseError, LookupError, TypeError, ValueError, AssertionError) as error:
            what = f"record {record.head.lsn} cannot be replayed ({type(error).__name__}: {error})"
            raise corrupt(record.path, what, record.offset) from error
    if save is not None:
        save.end(is_kept=False)
    max_rows.end()
    return Replayed(
        num_records=num_records,
        num_bytes=num_bytes,
        generation=reader.generation,
        control=control,
        newest_lsn=reader.newest_lsn,
        loads=frozenset(loads),
        max_rows=max_rows.by_table,
        has_changes=has_changes,
    )


def _with_effect(records: Iterator[Record]) -> Iterator[Record]:
    """Yields the records that no VOID follows, without the VOIDs."""
    before: Record | None = None
    for record in records:
        if before is not None and record.head.kind is not Kind.VOID:
            yield before
        before = None if record.head.kind is Kind.VOID else record
    if before is not None:
        yield before


def _carry_out(shard: Shard, record: Record, control: ControlState) -> None:
    kind = record.head.kind
    if kind is Kind.TABLE:
        body = json.loads(record.body)
        shard.add_table(parse_spec(body["spec"]), declared_by=body["declared_by"], is_loaded=body["is_loaded"])
    elif kind is Kind.JOIN:
        body = json.loads(record.body)
        mode = None if body["mode"] is None else parse_mode(body["mode"])
        client_id = bytes.fromhex(body["client_id"])
        shard.join(body["worker"], body["num_workers"], client_id, mode, begins_job=body["begins_job"])
    elif kind is Kind.CHANGED:
        _restore_changes(shard, record.blocks[0], json.loads(record.body))
    elif kind is Kind.SHRINK:
        control.shrink = _shrink(shard, json.loads(record.body))
    elif kind is Kind.END_DAY:
        body = json.loads(record.body)
        shard.replay([], [DayEnd(table_id) for table_id in body["table_ids"]], NO_PROGRESS, [])
        control.note_day_end(body["save_id"])
    else:
        mutations, progress = _step_of(shard, record)
        shard.replay(record.marks, mutations, progress, record.left)


def _load(shard: Shard, rows: LoadedRows, load_rows: Callable[[Shard, LoadedRows], None]) -> None:
    staging = shard.clone_empty()
    try:
        load_rows(staging, rows)
        shard.swap_in(staging)
    finally:
        staging.close()


def _restore(shard: Shard, body: Mapping[str, Any], record: Record) -> ControlState:
    entries = {entry.spec.name: entry for entry in shard.tables.values()}
    for table in body["tables"]:
        entry = entries[table["name"]]
        entry.declared_by, entry.is_loaded = table["declared_by"], table["is_loaded"]
        entry.schema_hashes = {int(schema_hash, 16): trains for schema_hash, trains in table["schema_hashes"]}
    shard.restore(JobsState.parse(body["jobs"]), record.marks, record.left)
    shard.base = _checksum_of(body["base"])
    return ControlState.parse(body["control"])


def _restore_changes(shard: Shard, block: Block, body: Mapping[str, Any]) -> None:
    (entry,) = [entry for entry in shard.tables.values() if entry.spec.name == body["table"]]
    assert block.ids is not None, "checked by the format"
    entry.table.restore_changes(block.ids, is_removed=body["is_removed"], is_counter=body["is_counter"])


def _cut(shard: Shard, body: Mapping[str, Any], control: ControlState) -> ReplayedSave | None:
    """Returns the save, if it decides what the next delta contains: it is one of all tables."""
    control.save = CutSave(body["save_id"], body["ends_day"], tuple(body["tables"]))
    if body["tables"]:
        return None
    left_out = {name: tuple(Criterion(*each) for each in criteria) for name, criteria in body["left_out"].items()}
    return ReplayedSave(shard, left_out)


def _end_save(shard: Shard, body: Mapping[str, Any], control: ControlState) -> None:
    checksum, save = _checksum_of(body["checksum"]), control.save
    if checksum is not None and (save is None or not save.tables):
        shard.note_saved(checksum)
    control.note_end(body["save_id"], is_committed=checksum is not None)


def _checksum_of(text: str | None) -> int | None:
    return None if text is None else int(text, 16)


def _shrink(shard: Shard, body: Mapping[str, Any]) -> DoneShrink:
    """Repeats a shrink; returns what it was answered with."""
    entries = {entry.spec.name: entry for entry in shard.tables.values()}
    criteria = tuple(Criterion(*each) for each in body["criteria"])
    shrinks = [Shrink(entries[name].spec.table_id, criteria, body["decay"]) for name in body["tables"]]
    shard.replay([], shrinks, NO_PROGRESS, [])
    return msgspec.convert({"shrink_id": body["shrink_id"], "tables": body["tables"]}, DoneShrink)


def _step_of(shard: Shard, record: Record) -> _Step:
    kind, step = record.head.kind, record.head.step
    if kind is Kind.COMMIT:
        factors = {block.table_id: _rows_of(block).reshape(-1) for block in record.blocks}
        return _Step([], Progress(step, factors=factors))
    mutations = [_change_of(shard, block) for block in record.blocks]
    if kind is Kind.PREPARE:
        return _Step([], Progress(step, prepared=[each for each in mutations if isinstance(each, Push)]))
    return _Step(mutations, Progress(step, rejoins=kind is Kind.REJOIN))


def _change_of(shard: Shard, block: Block) -> Mutation:
    rows, table_id = _rows_of(block), block.table_id
    if block.action is Action.PUSH:
        numbers = block.learning_rate, block.optimizer_step
        if block.ids is None:
            return Push(table_id, None, rows.reshape(-1), *numbers, begin=block.offset)
        return Push(table_id, block.ids, rows, *numbers, statistics=_statistics_of(shard, block))
    if block.ids is not None:
        return _change_of_copies(block, block.ids, rows)
    values = rows.reshape(-1)
    if block.action is Action.ASSIGN:
        return Assignment(table_id, values, block.offset)
    if block.action is Action.REPLACE:
        return Replacement(table_id, 0, values, block.optimizer_step, block.offset)
    return Replacement(table_id, block.optimizer_step, values, 0, block.offset)


def _change_of_copies(block: Block, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> Mutation:
    table_id, step, copies = block.table_id, block.optimizer_step, block.copies
    if block.action is Action.ASSIGN:
        states = copies.get("states", np.empty((len(ids), 0, block.dim), np.float32))
        return RowAssignment(table_id, ids, rows, states, step)
    numbers = block.statistics["counts"], block.learning_rate, step
    return Change(table_id, ids, rows, *numbers, copies.get("states"), copies.get("versions"))


def _rows_of(block: Block) -> NDArray[np.float32]:
    assert block.rows is not None, "checked by the format"
    rows: NDArray[np.float32] = block.rows.astype(np.float32, copy=False)
    return rows


def _statistics_of(shard: Shard, block: Block) -> NDArray[np.float32] | None:
    spec = shard.tables[block.table_id].spec
    if not isinstance(spec, TableSpec) or not spec.statistics:
        return None
    return statistics_of(block.statistics, spec.statistics)
