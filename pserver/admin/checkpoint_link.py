"""CheckpointLink: a save whose rows file becomes the checkpoint of the log, too."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress

import msgspec

from fleet_sparse.errors import FleetSparseError, LeaseLost, LogCorrupt, LogFull, SnapshotError
from fleet_sparse.snapshot.checksum import Checksum
from fleet_sparse.snapshot.directory import Directory, LocalDirectory
from fleet_sparse.snapshot.manifest import ShardFile

from ..engine.shard import Shard
from ..log.checkpoint import Checkpoint, adopt_checkpoint, checkpoint_name, read_checkpoint, remove_abandoned
from ..log.shard_log import ShardLog
from .snapshot_writer import Save

_log = logging.getLogger(__name__)


class CheckpointLink:
    """One save of a shard, from its cut until its file is the checkpoint or the save has failed.

    Args:
        shard: The shard, which has a log.
        save: Not cut yet.
        source: Directory into which the save writes its file.
        below: The newest checkpoint; None before the first. If the save is a delta, its base.

    Attributes:
        size: Size of the log before the cut.
    """

    def __init__(self, shard: Shard, save: Save, source: LocalDirectory, below: Checkpoint | None) -> None:
        assert shard.log is not None, "the caller has a log"
        self.size = shard.log.writer.size
        self._shard = shard
        self._log: ShardLog = shard.log
        self._save = save
        self._source = source
        self._below = below
        self._directory = LocalDirectory(self._log.writer.directory.resolve())
        self._first_lsn: int | None = None
        self._file: ShardFile | None = None

    def cut(self, clients: Collection[bytes] | None = None) -> bool:
        """Cuts the save, as `Save.cut`, and begins a segment with the state of the cut.

        Without room for the segment, or with a state that is not complete now, the checkpoint before stays.

        Raises:
            SnapshotError: As `Save.cut`.
            LeaseLost: As `LogWriter.begin_segment`. The save has ended.
        """
        if not self._save.cut(clients):
            return False
        try:
            self.size = self._log.writer.size
            self._first_lsn = self._shard.begin_checkpoint()
        except (LogFull, OSError) as error:
            _log.warning("save %s: does not become the checkpoint: %s", self._save.save_id, error)
        except BaseException:
            self._save.end(None)
            raise
        return True

    def link(self, file: ShardFile) -> None:
        """Links the file that the save has written. If the system refuses, the checkpoint before stays."""
        if self._first_lsn is None:
            return
        target = self._directory.child(checkpoint_name(self._first_lsn))
        try:
            target.make()
            self._source.link(file.file, target)
        except SnapshotError as error:
            _log.info("save %s: does not become the checkpoint: %s", self._save.save_id, error)
            self.drop()
        else:
            self._file = msgspec.structs.replace(file, clients=())  # the segment has their marks

    def adopt(self, committed_as: int) -> bool:
        """Makes the log begin with the file, once its end says that the save was committed; returns whether it does.

        Args:
            committed_as: Checksum of the manifest that names the file.
        """
        if self._first_lsn is None or self._file is None:
            return False
        bases = () if self._below is None or self._save.is_full else self._below.files
        checkpoint = Checkpoint(self._first_lsn, self._file, bases, Checksum(committed_as))
        directory = self._log.writer.directory
        try:
            self._log.writer.sync()
            with self._log.writer.exclusive():
                if read_checkpoint(directory) != self._below:  # the files below are gone
                    raise SnapshotError(f"{directory}: another checkpoint was written since the cut")
                adopt_checkpoint(directory, checkpoint)
        except (FleetSparseError, OSError) as error:
            _log.warning("save %s: does not become the checkpoint: %s", self._save.save_id, error)
            self.drop()
            return False
        _log.info("checkpoint: the log begins with record %d of save %s", self._first_lsn, self._save.save_id)
        return True

    def drop(self) -> None:
        """Removes the link of a save that failed. A failure does not matter: the next start removes it."""
        if self._first_lsn is not None:
            with suppress(LeaseLost, LogCorrupt, OSError), self._log.writer.exclusive():
                remove_abandoned(self._log.writer.directory, self._first_lsn)


def link_of(shard: Shard, save: Save, source: Directory) -> CheckpointLink | None:
    """Returns the link for a save that may become the checkpoint; None if it may not.

    To be called in any thread but the one that owns the shard: the log is made durable so far, so that the segment that
    begins at the cut does not wait for the disk.

    Args:
        shard: The shard of the save.
        save: Not cut yet.
        source: Directory into which the save writes its file; it exists.
    """
    if shard.log is None or not isinstance(source, LocalDirectory):
        return None
    directory = shard.log.writer.directory
    try:
        newest = read_checkpoint(directory)
        if not (save.may_be_checkpoint(newest) and source.shares_files_with(LocalDirectory(directory.resolve()))):
            return None
        shard.log.writer.sync()
    except (LogCorrupt, SnapshotError, OSError) as error:
        _log.warning("save %s: does not become the checkpoint: %s", save.save_id, error)
        return None
    return CheckpointLink(shard, save, source, newest)
