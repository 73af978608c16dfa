"""Snapshot calls: the calls of the control plane that save, load and shrink."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from fleet_sparse.core.criteria import Criterion, Removal, smallest_ids
from fleet_sparse.core.ids import table_salt
from fleet_sparse.errors import FleetSparseError, SnapshotError
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages

from ..modes.step import Progress
from .rpc import Rpc

logger = logging.getLogger(__name__)

_AWAIT_S = 660.0  # longer than a pserver waits before it answers that no save began


class SnapshotRpcs:
    """Calls every pserver of a job. A pserver resolves a relative directory under its root.

    Args:
        rpc: Calls the pservers.
        settings: Timeouts.
        client_id: Client id of this worker.
        worker_index: Returns the index of this worker.
        note_load: Called before the pservers replace what they hold.
    """

    def __init__(
        self,
        rpc: Rpc,
        settings: Settings,
        client_id: bytes,
        worker_index: Callable[[], int],
        note_load: Callable[[], None],
    ) -> None:
        self._rpc = rpc
        self._settings = settings
        self._note_load = note_load
        self._client_id = client_id
        self._worker_index = worker_index

    def plan_save(self, dirname: str, save_id: str, kind: str) -> messages.SavePlan:
        """Asks shard 0 for the plan of a save: the number of the snapshot, and the base of a delta.

        Args:
            dirname: Directory of the series.
            save_id: Id of the save, used once.
            kind: "full" or "delta". The plan is full if a delta would have no base.

        Raises:
            SnapshotError: The directory cannot be read or made.
            ShardUnavailable: Shard 0 is gone, or took longer than `settings.barrier_s`.
        """
        request = messages.PlanSaveRequest(dirname=dirname, save_id=save_id, kind=kind)
        plan: messages.SavePlan = self._rpc.call(0, "PlanSave", request, self._settings.barrier_s)
        return plan

    def begin_save(
        self,
        plan: messages.SavePlan,
        tables: Sequence[str],
        progress: Progress,
        *,
        ends_day: bool = False,
        left_out: Mapping[str, Sequence[Criterion]] = MappingProxyType({}),
    ) -> bool:
        """Cuts every shard; returns when all are cut, or one of them cannot write this delta.

        Args:
            plan: Plan of the save.
            tables: Names of the tables to save; empty for all tables and dense arrays.
            progress: Position of this worker, which pushes nothing until this returns.
            ends_day: True if the save ends a day of the tables.
            left_out: By table, criteria of the rows that are not saved.

        Returns:
            True if all shards are cut. If not, the save has to be ended, and a full one is possible.

        Raises:
            SnapshotError: A worker did not report its position in time, or a pserver does not have a table.
            ShardUnavailable: A pserver is gone, or did not answer in time.
        """
        request = messages.BeginSaveRequest(
            plan=plan,
            tables=tables,
            position=self._position_of(progress),
            ends_day=ends_day,
            client_id=self._client_id,
        )
        for table, criteria in left_out.items():
            request.left_out.append(messages.LeftOut(table=table, criteria=map(_message_of, criteria)))
        replies = self._rpc.call_all("BeginSave", request, self._settings.positions_s + self._settings.deadline_s)
        return not any(reply.needs_full for reply in replies)

    def write_save(self, save_id: str) -> list[messages.ShardFile]:
        """Makes every pserver write its file; returns when all are durable. Each has `settings.barrier_s` for it.

        Raises:
            SnapshotError: A pserver could not write.
            ShardUnavailable: A pserver is gone, or took too long.
        """
        return self._rpc.call_all("WriteSave", messages.WriteSaveRequest(save_id=save_id), self._settings.barrier_s)

    def finish_save(
        self, plan: messages.SavePlan, files: Sequence[messages.ShardFile], keep_last: int | None
    ) -> messages.FinishSaveReply:
        """Makes shard 0 write the manifest, which turns the files into a snapshot, and remove older snapshots.

        Args:
            plan: Plan of the save.
            files: Files of all shards.
            keep_last: Number of full snapshots that stay, with their deltas; None for all.

        Returns:
            Path or URL of the snapshot, as shard 0 sees it, and the checksum of its manifest.

        Raises:
            SnapshotError: A file is missing or differs from what was written, or the manifest could not be written.
            ShardUnavailable: Shard 0 is gone, or took longer than `settings.barrier_s`; there may be a snapshot.
        """
        request = messages.FinishSaveRequest(plan=plan, files=files, keep_last=keep_last or 0)
        reply: messages.FinishSaveReply = self._rpc.call(0, "FinishSave", request, self._settings.barrier_s)
        return reply

    def end_save(
        self,
        save_id: str,
        *,
        committed: bool,
        checksum: int = 0,
        plan: messages.SavePlan | None = None,
        lacks_rows: bool = False,
    ) -> list[FleetSparseError]:
        """Tells every shard that a save has ended; returns the errors of those that did not end it, which are logged.

        A shard that has not ended a save ends it when the next one begins, or after a long time, as one without a
        snapshot. A committed one therefore waits for pservers that are being started again.

        Args:
            save_id: Id of the save.
            committed: True if there is a snapshot.
            checksum: Checksum of its manifest.
            plan: Plan of a committed save.
            lacks_rows: True if it has some tables only, or leaves rows out.
        """
        if self._rpc.closed.is_set():
            return []
        request = messages.EndSaveRequest(
            save_id=save_id, committed=committed, checksum=checksum, plan=plan, lacks_rows=lacks_rows
        )
        patience_s = self._rpc.patience_s if committed else self._settings.retry_s
        # A pserver whose log has no room for the end of a day answers after `failover_s`.
        timeout_s = self._settings.deadline_s + (self._settings.failover_s if committed else 0.0)
        errors = []
        for shard, reply in enumerate(self._rpc.try_all("EndSave", request, timeout_s, patience_s=patience_s)):
            if isinstance(reply, FleetSparseError):
                where = self._rpc.where(shard)
                logger.warning("save %s: %s does not know that it has ended: %s", save_id, where, reply)
                errors.append(reply)
        return errors

    def await_save(self, last_save_id: str) -> str:
        """Returns the id of a save once one begins that is not `last_save_id`; empty if none began for a while.

        Raises:
            ShardUnavailable: Shard 0 is gone, or did not answer.
        """
        request = messages.AwaitSaveRequest(worker_index=self._worker_index(), last_save_id=last_save_id)
        save_id: str = self._rpc.call(0, "AwaitSave", request, _AWAIT_S, patience_s=0.0).save_id
        return save_id

    def report_position(self, save_id: str, passed: Sequence[Progress]) -> None:
        """Reports to every shard that the pushes of this worker up to here, and no later ones, belong to a save.

        Args:
            save_id: Id of the save.
            passed: Position of this worker; in sync training with several workers, after each of its last steps.

        Raises:
            ShardUnavailable: A pserver is gone, or did not answer within `settings.positions_s`.
        """
        positions = map(self._position_of, passed)
        request = messages.ReportPositionRequest(save_id=save_id, positions=positions, client_id=self._client_id)
        self._rpc.call_all("ReportPosition", request, self._settings.positions_s, patience_s=self._settings.positions_s)

    def stage_load(
        self, dirname: str, load_id: str, tables: Sequence[str] = (), *, missing_ok: bool = False
    ) -> int | None:
        """Makes every pserver load its part of a snapshot into a staging shard. Each has `settings.barrier_s` for it.

        Args:
            dirname: Directory of a series, for its newest snapshot; or of one snapshot.
            load_id: Id of the load, used once.
            tables: Names of the tables to load; empty for all tables and dense arrays.
            missing_ok: True if a directory without a snapshot of all tables is no error.

        Returns:
            Number of rows of all shards; None if there is no snapshot and nothing is staged.

        Raises:
            SnapshotError: The snapshot cannot be read, or a pserver cannot write it to its disk for its log.
            TableMismatch: The snapshot and the job describe a table differently.
            ShardUnavailable: A pserver is gone, or took too long.
        """
        request = messages.StageLoadRequest(dirname=dirname, load_id=load_id, tables=tables, missing_ok=missing_ok)
        replies = self._rpc.call_all("StageLoad", request, self._settings.barrier_s)
        if all(reply.is_missing for reply in replies):
            return None
        if missing := [shard for shard, reply in enumerate(replies) if reply.is_missing]:
            raise SnapshotError(
                f"{dirname}: {self._rpc.where(missing[0])} finds no snapshot there, another pserver does. All pservers "
                "should load from one directory"
            )
        return sum(int(reply.num_rows) for reply in replies)

    def finish_load(self, load_id: str, *, keep: bool, resumes: bool = False) -> None:
        """Replaces what the pservers hold by what was staged; without `keep` the staging shards are discarded.

        Args:
            load_id: Id of the load.
            keep: See above.
            resumes: True if workers that register from now on continue where the snapshot was saved.

        Raises:
            SnapshotError: A pserver has not staged this load, as one that was started again since then, or saves. It
                keeps what it holds; others may hold what was staged.
            LogFull: The log of a pserver has had no room; likewise.
            ShardUnavailable: A pserver is gone, or did not answer in time.
        """
        if keep:
            self._note_load()
        request = messages.FinishLoadRequest(load_id=load_id, keep=keep, resumes=resumes)
        # A pserver that is gone has discarded its staging shard.
        self._rpc.call_all("FinishLoad", request, self._settings.barrier_s, patience_s=None if keep else 0.0)

    def shrink(
        self, criteria: Sequence[Criterion], *, decay: float = 1.0, tables: Sequence[str] = (), dry_run: bool = False
    ) -> list[Removal]:
        """Removes the rows that criteria select, as docs/protocol.md says; returns which, the same for any pservers.

        Args:
            criteria: A row counts for the first one that selects it.
            decay: Factor of shows and clicks, which are multiplied first.
            tables: Names of the tables; empty for all tables.
            dry_run: True to change nothing.

        Raises:
            SnapshotError: A pserver saves, it does not have a table, or a criterion or the decay is invalid.
            ShardUnavailable: A pserver is gone, or took longer than `settings.barrier_s`.
        """
        request = messages.ShrinkRequest(
            criteria=map(_message_of, criteria),
            decay=decay,
            tables=tables,
            dry_run=dry_run,
            shrink_id=uuid.uuid4().hex,
        )
        replies = self._rpc.call_all("Shrink", request, self._settings.barrier_s)
        of_table: dict[str, list[list[messages.ShrinkRemoval]]] = {}  # the removals of each shard
        for reply in replies:
            parts: dict[str, list[messages.ShrinkRemoval]] = {}
            for removal in reply.removals:
                parts.setdefault(removal.table, []).append(removal)
            for name, removals in parts.items():
                of_table.setdefault(name, []).append(removals)
        return [
            _joined(name, criterion, of_shards)
            for name in sorted(of_table)
            for criterion, of_shards in zip(criteria, zip(*of_table[name], strict=True), strict=True)
        ]

    def _position_of(self, progress: Progress) -> messages.WorkerPosition:
        return messages.WorkerPosition(
            worker_index=self._worker_index(),
            step=progress.num_steps,
            position=progress.position or "",
            num_untrained=progress.num_untrained,
        )


def _message_of(criterion: Criterion) -> messages.ShrinkCriterion:
    return messages.ShrinkCriterion(name=criterion.name, value=criterion.value)


def _joined(table: str, criterion: Criterion, of_shards: Sequence[messages.ShrinkRemoval]) -> Removal:
    ids = np.array([id_ for each in of_shards for id_ in each.examples], np.int64)
    num_removed = sum(each.num_removed for each in of_shards)
    return Removal(table, str(criterion), num_removed, smallest_ids(ids, table_salt(table)))
