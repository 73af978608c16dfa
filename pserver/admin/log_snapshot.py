"""Snapshot of a dead job: made of the logs of all of its shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleet_sparse.core.placement import Placement, version_of
from fleet_sparse.errors import SettingError, SnapshotError
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import FULL, Manifest, ShardFile, WorkerPosition
from fleet_sparse.snapshot.store import SnapshotStore

from ..engine.shard import Shard
from ..lease.directory import writer_of
from ..log.control_state import ControlState, ReportedProgress
from ..log.log_format import LogIdentity
from ..log.log_reader import LogReader
from .log_recovery import at_once, recover
from .snapshot_writer import Save

_SAVE_ID = "log"


def write_snapshot(logs: Sequence[Path], target: Directory) -> Manifest:
    """Writes a full snapshot of what pservers with these logs would continue from. The logs do not change.

    One shard at a time is in memory. The workers in the manifest are those of shard 0, as far as they reported.

    Args:
        logs: Directory of the log of each shard of a job.
        target: Directory of snapshots that receives the new one.

    Raises:
        LogCorrupt: Bytes of a log are wrong.
        SnapshotError: A log is missing or a pserver may write it, the logs are of several jobs, or the system refuses.
    """
    for path in logs:
        _check_unused(path)
    identities = [_identity_of(path) for path in logs]
    num_shards = identities[0].num_shards
    pservers = {(each.num_shards, each.num_row_shards, each.cluster_id) for each in identities}
    if len(pservers) > 1:
        raise SnapshotError(f"logs: are of {len(pservers)} lists of pservers. Name the logs of one job")
    if (shards := sorted(each.shard for each in identities)) != list(range(num_shards)):
        raise SnapshotError(
            f"logs: are of the shards {', '.join(map(str, shards))}, should be one of each shard from 0 to "
            f"{num_shards - 1}. Name all logs of a job, each once"
        )
    version = version_of(num_shards, identities[0].num_row_shards)
    is_one_job = len({each.job for each in identities}) == 1
    store = SnapshotStore(target)
    plan = store.plan(FULL, _SAVE_ID)
    directory = store.target(plan, _SAVE_ID)
    files: list[ShardFile] = []
    names: tuple[str, ...] = ()
    workers: tuple[WorkerPosition, ...] = ()
    job_ids: dict[Path, int] = {}  # of the workers
    try:
        for identity, path in sorted(zip(identities, logs, strict=True)):
            shard = Shard(
                identity.shard,
                num_shards,
                cluster_id=identity.cluster_id,
                incarnation=0,
                placement=Placement.even(num_shards, version),
            )
            try:
                replayed = recover(shard, path)
                job_ids[path] = 0 if replayed is None else replayed.control.job_id
                if identity.shard == 0 and replayed is not None:
                    workers = _positions_of(replayed.control)
                if not is_one_job and (len(set(job_ids.values())) > 1 or not job_ids[path]):
                    raise _several_jobs(job_ids)
                save = Save(shard, _SAVE_ID, base=None)
                save.cut()
                files.append(save.write(directory, at_once))
                names = save.table_names
                save.end(None)
            finally:
                shard.close()
        saved_at = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(
            plan.number, plan.kind, plan.base, _SAVE_ID, saved_at, names, True, tuple(files), workers, version
        )
        store.commit(plan, manifest, None)
    except BaseException:
        store.abandon(plan, _SAVE_ID)
        raise
    return manifest


def _check_unused(path: Path) -> None:
    """Refuses a log that a pserver may write."""
    try:
        writer = writer_of(path)
    except (SettingError, OSError) as error:
        raise SnapshotError(f"{path}: it is not known whether a pserver writes it: {error}") from error
    if writer is not None:
        raise SnapshotError(
            f"{path}: {writer.process} writes it. Call fleet.save_persistables in its job, or end the job first"
        )


def _positions_of(control: ControlState) -> tuple[WorkerPosition, ...]:
    """Returns how far each worker of a job was when it reported last; nothing if none reported."""
    if not control.progress:
        return ()
    reports = [control.progress.get(worker, ReportedProgress(worker, 0, "")) for worker in sorted(control.workers)]
    return tuple(WorkerPosition(each.worker, each.step, _loader_position(each.position)) for each in reports)


def _loader_position(text: str) -> Any:
    """Returns a position as a manifest can have it; None for another one, which is not worth the rows."""
    try:
        position = json.loads(text)
        json.dumps(position, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return position


def _several_jobs(job_ids: Mapping[Path, int]) -> SnapshotError:
    found = ", ".join(
        f"{path} has {f'those of job {job_id:016x}' if job_id else 'none'}" for path, job_id in job_ids.items()
    )
    return SnapshotError(f"logs: their workers are not of one job: {found}. Name the logs of one job")


def _identity_of(path: Path) -> LogIdentity:
    identity = LogReader(path).identity
    if identity is None:
        raise SnapshotError(f"{path}: there is no log. Name the directories shard-<i>-of-<n> of a job")
    return identity
