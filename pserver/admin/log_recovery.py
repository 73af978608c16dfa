"""Start of a pserver with a log: from the directory of the log to a shard that continues it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from fleet_sparse.core.placement import num_row_shards_of
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import LeaseLost, LogCorrupt, LogFull, PlanError, SettingError
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import LocalDirectory, is_url

from ..engine.shard import Shard
from ..log.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    adopt_checkpoint,
    checkpoint_name,
    read_checkpoint,
    remove_abandoned,
    remove_superfluous,
)
from ..log.loaded_rows import LoadedRows, remove_unnamed
from ..log.log_directory import lease_lost, locked, newest_readable_header, sync_names
from ..log.log_format import LogIdentity, corrupt, segment_name
from ..log.log_reader import LogReader
from ..log.log_writer import EMPTY_LOG, SEGMENT_BYTES, LogSize, LogWriter
from ..log.replay import Replayed, replay
from ..log.shard_log import ShardLog
from .snapshot_loader import load_files
from .snapshot_writer import Save

_log = logging.getLogger(__name__)

_CHANGED_IDS = 1 << 16
"""Most ids of a record of kind CHANGED: it is appended between two requests."""
_ROOM_RETRY_S = 0.2
_FIRST_LSN = 1
"""First lsn of a log that has no checkpoint yet."""


def log_directory(settings: Settings, shard: int, num_shards: int) -> Path:
    """Returns the directory of the log of a shard.

    Raises:
        SettingError: There is no job id, or the directory would be on no disk of this machine.
    """
    if not settings.job_id:
        raise SettingError(
            f"FLEET_SPARSE_DURABILITY: is {settings.durability}, which needs FLEET_SPARSE_JOB_ID, so that no other job "
            "continues with these rows. Give each job one of its own"
        )
    if is_url(settings.log) or (is_url(settings.root) and not Path(settings.log).is_absolute()):
        raise SettingError(f"FLEET_SPARSE_LOG: is {settings.log!r}, should be a path, absolute if the root is a URL")
    root = Path() if is_url(settings.root) else Path(settings.root)
    return (root / settings.log).resolve() / f"shard-{shard}-of-{num_shards}"


def identity_of(shard: Shard, job_id: str) -> LogIdentity:
    """Returns whose log the log of a shard is."""
    num_row_shards = num_row_shards_of(shard.placement.version)
    job = xxh3_64_intdigest(job_id.encode())
    return LogIdentity(shard.shard_index, shard.num_shards, num_row_shards, shard.cluster_id, job)


def recover(shard: Shard, directory: Path, identity: LogIdentity | None = None) -> Replayed | None:
    """Fills an empty shard from a log, which is not changed.

    Args:
        shard: Receives tables, rows, jobs and pushes.
        directory: Directory of the log of one shard.
        identity: Whose log it should be; None for any.

    Returns:
        What was replayed; None if there is no log.

    Raises:
        LogCorrupt: Bytes are wrong, or it is the log of something else.
        SnapshotError: The rows file of the checkpoint cannot be read.
        PlanError: This machine has too little memory left.
    """
    opened = _open(directory)
    return None if opened is None else _fill(shard, opened, identity, _ignore)


def start_log(
    shard: Shard,
    directory: Path,
    settings: Settings,
    *,
    generation: int = 0,
    segment_bytes: int = SEGMENT_BYTES,
    on_progress: Callable[[], object] = lambda: None,
) -> bool:
    """Continues the log of a job, or begins one; the shard has it afterwards.

    A log of another job is set aside. One that continues waits until the disk has room for a small segment.

    Args:
        shard: An empty shard.
        directory: Directory of the log of one shard.
        settings: Durability, job id and times.
        generation: Generation of the lease of the shard; 0 without a lease for the next one of the log.
        segment_bytes: Length of a segment.
        on_progress: Called again and again while it reads the log, or waits for it or for room; what it raises ends
            the start.

    Returns:
        True if the shard continues from a log.

    Raises:
        LogCorrupt, SnapshotError, PlanError: As `recover`.
        LogFull: The disk has no room for the first segment of a log.
        LeaseLost: A process with a larger generation has begun to write the log.
    """
    identity = identity_of(shard, settings.job_id)
    where = LocalDirectory(directory.resolve())
    where.make()
    with locked(directory, on_progress):
        _set_aside_other(directory, identity)
    where.make()
    where.parent().sync()  # a process may have ended between making and syncing it
    with locked(directory, on_progress):
        return _continue_log(shard, directory, identity, settings, generation, segment_bytes, on_progress)


def _set_aside_other(directory: Path, identity: LogIdentity) -> None:
    """Renames the directory of a log of another job, whatever else is wrong with it."""
    header = newest_readable_header(directory)
    if header is None or header.identity.job == identity.job:
        return
    suffixes = (f"{header.identity.job:016x}{again}" for again in chain([""], (f".{number}" for number in count(1))))
    aside = next(path for each in suffixes if not (path := directory.with_name(f"{directory.name}.{each}")).exists())
    _log.warning("%s: the log of another job is set aside as %s", directory, aside)
    directory.rename(aside)


def _continue_log(
    shard: Shard,
    directory: Path,
    identity: LogIdentity,
    settings: Settings,
    generation: int,
    segment_bytes: int,
    on_progress: Callable[[], object],
) -> bool:
    """Fills a shard from its log, and makes it write there; returns whether the log had content."""
    begun_at, opened, replayed, num_torn_bytes = time.monotonic(), _open(directory), None, 0
    newest = 0 if opened is None else opened.reader.generation
    if 0 < generation <= newest:
        raise lease_lost(directory, newest, generation)
    _remove_ended(directory)  # a crash may have left it
    if opened is not None:
        replayed = _fill(shard, opened, identity, on_progress)
        if opened.reader.torn is not None:
            torn = opened.reader.torn
            num_torn_bytes = torn.num_bytes
            _log.warning("%s: the last %d bytes, from %d on, are torn: cut off", torn.path, torn.num_bytes, torn.offset)
        opened.reader.cut_off()
        remove_superfluous(directory, opened.checkpoint)
        remove_unnamed(directory, replayed.loads)
        _log.info(
            "continues from the log in %s: %d records, %d rows, in %.2f s",
            directory,
            replayed.num_records,
            sum(state.num_rows for state in shard.states()),
            time.monotonic() - begun_at,
        )
    make_writer = partial(
        LogWriter,
        directory,
        identity,
        generation=generation or newest + 1,
        newest_lsn=0 if opened is None else opened.reader.newest_lsn,
        newest_checksum=0 if opened is None else opened.reader.newest_checksum,
        size=EMPTY_LOG if replayed is None else LogSize(replayed.num_bytes, replayed.num_records),
        sync_s=settings.log_sync_s,
        segment_bytes=segment_bytes,
    )
    shard.log = ShardLog(
        make_writer() if opened is None else _with_room(make_writer, on_progress),
        shard.tables,
        is_synced=settings.durability == "sync",
        failover_s=settings.failover_s,
        control=None if replayed is None else replayed.control,
        durable=shard.ledger.watermarks(),
        has_loads=replayed is not None and bool(replayed.loads),
        num_torn_bytes=num_torn_bytes,
    )
    if opened is None or replayed is None:
        return False
    shard.log.max_rows.update(replayed.max_rows)
    # A pserver that begins with a snapshot may have ended before its first checkpoint was durable.
    return replayed.has_changes or opened.checkpoint is not None


def _with_room(make_writer: Callable[[], LogWriter], on_progress: Callable[[], object]) -> LogWriter:
    """Returns the writer of a log that continues, once the disk has room for it: its workers wait as well."""
    is_said = False
    while True:
        try:
            return make_writer()
        except LogFull as error:
            if not is_said:
                is_said = True
                _log.warning("%s. The pserver waits until there is room", error)
        on_progress()
        time.sleep(_ROOM_RETRY_S)


def write_checkpoint(shard: Shard, on_progress: Callable[[], object] = lambda: None) -> None:
    """Writes a checkpoint of a shard while nothing else uses it. `on_progress` is called every few milliseconds.

    Raises:
        SnapshotError, OSError: The system refuses.
    """
    save = Save(shard, "checkpoint", base=None)
    save.cut()
    first_lsn = shard.begin_checkpoint()
    assert first_lsn is not None, "no request is half-way done"

    def post(task: Callable[[], Any]) -> Future[Any]:
        on_progress()
        return at_once(task)

    try:
        finish_checkpoint(shard, save, first_lsn, post)
    finally:
        save.end(None)


def finish_checkpoint(
    shard: Shard, save: Save, first_lsn: int, post: Callable[[Callable[[], Any]], Future[Any]]
) -> None:
    """Writes the rows file of a checkpoint that is cut, and makes the log begin with it.

    Args:
        shard: The shard.
        save: Its save, cut with the beginning of the segment.
        first_lsn: First lsn of that segment.
        post: Runs tasks in the thread that owns the shard.

    Raises:
        SnapshotError, OSError: The system refuses, or the save was given up.
    """
    assert shard.log is not None, "the caller has begun a segment of it"
    directory = shard.log.writer.directory
    target = LocalDirectory(directory.resolve()).child(checkpoint_name(first_lsn))
    target.make()
    note = partial(_note_changed, shard.log, post)
    try:
        file = msgspec.structs.replace(save.write(target, post, note), clients=())  # the segment has their marks
        shard.log.writer.sync()
        with shard.log.writer.exclusive():
            adopt_checkpoint(directory, Checkpoint(first_lsn, file))
    except Exception:
        with suppress(LeaseLost, LogCorrupt, OSError), shard.log.writer.exclusive():
            remove_abandoned(directory, first_lsn)
        raise


def _note_changed(
    log: ShardLog,
    post: Callable[[Callable[[], Any]], Future[Any]],
    spec: TableSpec,
    ids: NDArray[np.int64],
    *,
    is_removed: bool,
) -> None:
    """Appends what the next delta contains already at a checkpoint, while requests are answered."""
    for begin in range(0, len(ids), _CHANGED_IDS):
        part = ids[begin : begin + _CHANGED_IDS].copy()
        post(partial(log.note_changed, spec, part, is_removed=is_removed)).result()


def close_log(log: ShardLog) -> None:
    """Ends a log, and removes its directory if the job has ended."""
    log.writer.close()
    if log.is_finished:
        directory = log.writer.directory
        with suppress(OSError, LeaseLost), log.writer.exclusive():
            _remove_ended(directory)
            directory.rename(_ended(directory))  # in one step: nothing continues from a part of a log
            sync_names(directory.parent)
            _remove_ended(directory)


def _ended(directory: Path) -> Path:
    """Returns the name of the directory of a log whose job has ended, while it is removed."""
    return directory.with_name(f"{directory.name}.ended")


def _remove_ended(directory: Path) -> None:
    """Removes what is left of a log whose job has ended."""
    shutil.rmtree(_ended(directory), ignore_errors=True)


class _Opened(NamedTuple):
    """A log that was found."""

    directory: Path
    checkpoint: Checkpoint | None
    reader: LogReader


def _open(directory: Path) -> _Opened | None:
    """Returns the log in a directory; None if there is none."""
    if not directory.exists():
        return None
    checkpoint = read_checkpoint(directory)
    reader = LogReader(directory, None if checkpoint is None else checkpoint.first_lsn)
    if not reader.paths:
        return None
    if checkpoint is None and reader.paths[0].name != segment_name(_FIRST_LSN):
        raise corrupt(str(directory / CHECKPOINT), f"it is missing, and the log begins with {reader.paths[0].name}", 0)
    return _Opened(directory, checkpoint, reader)


def _fill(shard: Shard, opened: _Opened, identity: LogIdentity | None, on_progress: Callable[[], object]) -> Replayed:
    found = opened.reader.identity
    if identity is not None and found is not None and identity != found:
        differing = [
            f"{name} {of_log}, should be {ours}"
            for name, of_log, ours in zip(LogIdentity._fields, found, identity, strict=True)
            if of_log != ours
        ]
        raise corrupt(str(opened.reader.paths[0]), f"it has {'; '.join(differing)}", 0)
    try:
        return _read(shard, opened, on_progress)
    except (PlanError, MemoryError) as error:
        raise PlanError(
            f"log {str(opened.directory)!r}: this machine has too little memory left for what the log has "
            f"({type(error).__name__}: {error}). The log stays as it is: free memory, and start the pserver again"
        ) from error


def _read(shard: Shard, opened: _Opened, on_progress: Callable[[], object]) -> Replayed:
    checkpoint, directory = opened.checkpoint, LocalDirectory(opened.directory.resolve())
    if checkpoint is not None:
        files = [(directory.child(checkpoint_name(each.first_lsn)), each.file) for each in checkpoint.files]
        load_files(shard, files, on_progress=on_progress)

    def load_rows(staging: Shard, rows: LoadedRows) -> None:
        load_files(staging, [(directory.child(rows.directory), rows.file)], on_progress=on_progress)

    return replay(
        shard,
        opened.reader,
        begins_with_state=checkpoint is not None,
        load_rows=load_rows,
        on_progress=on_progress,
    )


def _ignore() -> None:
    """Nobody asks whether a recovery goes on."""


def at_once(task: Callable[[], Any]) -> Future[Any]:
    """Runs a task at once, for a shard without other users."""
    future: Future[Any] = Future()
    try:
        future.set_result(task())
    except Exception as error:
        future.set_exception(error)
    return future
