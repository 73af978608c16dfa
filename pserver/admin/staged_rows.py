"""StagedRows: the rows file of a staging shard, from which a log repeats the load."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from fleet_sparse.errors import FleetSparseError, SnapshotError
from fleet_sparse.snapshot.directory import LocalDirectory

from ..engine.shard import Shard
from ..log.loaded_rows import LoadedRows, loaded_name, staged_name
from ..log.shard_log import ShardLog
from .log_recovery import at_once
from .snapshot_writer import Save


class StagedRows:
    """A rows file in the directory of a log, durable from the beginning on. It counts once a LOAD names it.

    Its methods belong to any thread, one at a time, but not to the one that owns the shard: they wait for the disk.

    Args:
        log: Log of the shard that the staging shard will replace.
        staging: Nothing else uses it.
        given_up: Makes the writing fail soon once another thread sets it.

    Raises:
        SnapshotError: The system refuses, or the load was given up. Nothing is left.
    """

    def __init__(self, log: ShardLog, staging: Shard, given_up: threading.Event) -> None:
        self._log = log
        self._name = staged_name()
        self._directory = LocalDirectory(log.writer.directory.resolve())

        def post(task: Callable[[], Any]) -> Future[Any]:
            if given_up.is_set():
                raise SnapshotError("the load was given up")
            return at_once(task)

        save = Save(staging, "load", base=None)
        save.cut()
        try:
            target = self._directory.child(self._name)
            target.make()
            self._file = msgspec.structs.replace(save.write(target, post), clients=())
        except BaseException:
            self.remove()
            raise
        finally:
            save.end(None)

    def adopt(self, load_id: str) -> LoadedRows:
        """Gives the file the name that a LOAD may have, durably. No checkpoint is cut from now on until the LOAD.

        Raises:
            SnapshotError: The system refuses.
            LeaseLost: As `LogWriter.exclusive`.
        """
        name = loaded_name(self._log.writer.newest_lsn)
        try:
            with self._log.writer.exclusive():
                self._directory.rename_child(self._name, name)
        except OSError as error:
            raise SnapshotError(f"{self._directory}: the files of the log cannot be changed: {error}") from error
        self._name = name
        return LoadedRows(load_id, name, self._file)

    def remove(self) -> None:
        """Removes the file, which no LOAD names. If the system refuses, the next checkpoint does, or the next start."""
        with suppress(FleetSparseError, OSError), self._log.writer.exclusive():
            shutil.rmtree(self._log.writer.directory / self._name)
