"""Shards that write a log, and what shards that continue from one have in common with them."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.admin.checkpoint_link import link_of
from fleet_sparse.pserver.admin.log_recovery import at_once, start_log
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.admin.staged_rows import StagedRows
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.log.log_format import LogIdentity
from fleet_sparse.pserver.log.log_writer import LogWriter
from fleet_sparse.pserver.tables.dense import DenseTable
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.pserver.tables.row_limit import NO_LIMITS, RowLimits
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.store import SnapshotStore
from fleet_sparse.wire.frame_format import Block, Frame, Op

from .cow_views import everything
from .shards import CLIENT, FrameClient, make_shard
from .straight import StraightAnswers

IDENTITY = LogIdentity(0, 1, 0, 77, 99)
_numbers = itertools.count()


def logged_shard(
    directory: Path,
    *specs: TableSpec | DenseSpec,
    segment_bytes: int = 1 << 16,
    only_registered: bool = False,
    row_limits: RowLimits = NO_LIMITS,
    **settings: Any,
) -> Shard:
    """Returns a shard that continues the log in a directory, or begins one."""
    shard = make_shard(only_registered=only_registered, row_limits=row_limits)
    values = {"durability": "log", "job_id": "a job", "log_sync_s": 1000.0, **settings}
    start_log(shard, directory, Settings(**values), segment_bytes=segment_bytes)
    for spec in specs:
        shard.add_table(spec, declared_by="worker 0")
    return shard


def recovered(shard: Shard, **settings: Any) -> Shard:
    """Returns the shard that continues after a crash of this one, whose log is copied as it is."""
    assert shard.log is not None
    source = shard.log.writer.directory
    directory = source.with_name(f"crash-{next(_numbers)}") / "log"
    shutil.copytree(source, directory)
    return logged_shard(directory, **settings)


def close(shard: Shard) -> None:
    """Frees a shard and its log."""
    assert shard.log is not None
    shard.log.writer.close()
    shard.close()


class StraightClient(FrameClient[Shard]):
    """A client whose frames the straight path gets first."""

    def __init__(self, shard: Shard, client_id: bytes = CLIENT) -> None:
        super().__init__(shard, client_id)
        self.answers = StraightAnswers(shard, 1 << 20)

    def ask(self, op: Op, *blocks: Block, **header: Any) -> Frame:
        reply = self.answers.answer_frame(self.frame(op, *blocks, **header))
        self.seq = max(self.seq, reply.header.push_seq)
        return reply


def linked_save(shard: Shard, where: Path, kind: str = "full") -> bool:
    """Saves a shard as `SaveService` does; returns whether the save has become the checkpoint of its log.

    A delta without its base on the shard becomes a full snapshot.
    """
    series, save_id = SnapshotStore(directory_at(where)), f"save{next(_numbers)}"
    plan = series.plan(kind, save_id)
    save = Save(shard, save_id, base=None if plan.base is None else plan.base.checksum, is_logged=True)
    target = series.target(plan, save_id)
    link = link_of(shard, save, target)
    if not (save.cut() if link is None else link.cut()):
        series.abandon(plan, save_id)
        return linked_save(shard, where)
    file = save.write(target, at_once)
    if link is not None:
        link.link(file)
    manifest = Manifest(plan.number, plan.kind, plan.base, save_id, "", save.table_names, True, (file,), ())
    series.commit(plan, manifest)
    is_logged = save.end(manifest.checksum)
    return link is not None and is_logged and link.adopt(manifest.checksum)


def load_into(shard: Shard, staging: Shard) -> None:
    """Replaces the tables of a shard with a log as `LoadService` does."""
    assert shard.log is not None
    rows = StagedRows(shard.log, staging, threading.Event()).adopt("a load")
    shard.swap_in(staging, rows)


def state_of(shard: Shard) -> dict[str, Any]:
    """Returns all of a shard that a log keeps: values, states, days, marks and steps."""
    state: dict[str, Any] = {each.name: each for each in shard.states()}
    for entry in shard.tables.values():
        table, name = entry.table, entry.spec.name
        state[f"{name}: specs"] = dict(entry.schema_hashes)
        if isinstance(table, EmbeddingTable):
            state[f"{name}: rows"] = everything(table.store), table.store.num_days
            counters = None if table.admission is None else table.admission.counters
            state[f"{name}: counters"] = None if counters is None else everything(counters.store)
        elif isinstance(table, DenseTable):
            dense = table.range
            values = dense.values.tobytes() if dense.assigned or dense.num_written else b""
            state[f"{name}: values"] = values, dense.export_states().tobytes()
    state["marks"] = sorted(shard.ledger.watermarks())
    job = shard.job
    if job is not None:
        prepared = job.prepared.step > job.clock.complete
        norms = [block.rows.tobytes() for block in job.prepared.norms if block.rows is not None] if prepared else []
        if job.mode.can_replace_workers:
            state["pushed steps"] = job.clock.pushed_steps()
        state["steps"] = job.clock.steps(), job.clock.complete, sorted(job.left), job.members(), norms
    return state


def small_writer(directory: Path, **changes: Any) -> LogWriter:
    """Returns a writer with small segments that syncs only when it is told to."""
    return LogWriter(directory, IDENTITY, **{"sync_s": 1000.0, "segment_bytes": 4096, **changes})
