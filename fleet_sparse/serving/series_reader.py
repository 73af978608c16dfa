"""SeriesReader: reads rows and dense values inside the process, of the snapshot of a series that readers serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import Version
from fleet_sparse.errors import ErrorCode, ProtocolError, SnapshotError
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import version_of
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.store import SnapshotStore

from .local_reader import LocalReader
from .row_reader import Reading, differences_of_reads

_LOOK_S, _REMOTE_LOOK_S = 0.1, 1.0  # between two looks at a directory on this machine, and at one of a URL
_AWAIT_S = 20.0


class SeriesReader:
    """Answers as a `PserverReader`, from memory. Safe to use from several threads.

    A newer snapshot is read whole while the older one is used; both are held until the caller asks for the version
    that follows the newer one.

    Args:
        directory: Directory of the snapshots.
        tables: Names of the tables whose rows are held.

    Attributes:
        tables: Specs of these tables, by name.
        arrays: Specs of the dense arrays, by name.
        leading: The version that was found last, held or not.
        num_failovers: 0.
        problems: None.

    Raises:
        SnapshotCorrupt: Bytes of the snapshot are wrong.
        SnapshotError: There is none, it cannot be read, or it lacks a table.
    """

    num_failovers = 0
    problems: tuple[str, ...] = ()

    def __init__(self, directory: Directory, tables: Collection[str]) -> None:
        self._directory = directory
        self._store = SnapshotStore(directory)
        self._names = list(tables)
        self._look_s = _LOOK_S if directory.renames else _REMOTE_LOOK_S
        self._closed = threading.Event()
        self._looking = threading.Lock()
        name = self._store.served()
        if name is None:
            raise SnapshotError(f"{self._store}: it has no snapshot; nothing was saved there, or no save was finished")
        self._newest = self._opened(name)
        self._held = {self._newest.version: self._newest}  # replaced, never changed
        self.tables: dict[str, TableSpec] = self._newest.tables
        self.arrays: dict[str, DenseSpec] = self._newest.arrays
        self.leading: Version | None = self._newest.version

    def close(self) -> None:
        """Ends the calls that wait for a version."""
        self._closed.set()
        self._newest.close()

    def newest(self) -> Version:
        """Returns the newest version that is held."""
        return self._newest.version

    def await_version(self, known: Version, timeout_s: float = _AWAIT_S) -> Version:
        """Returns the version that follows `known` as soon as it is held; `known` after `timeout_s`.

        Raises:
            SnapshotCorrupt, SnapshotError: The newest snapshot cannot be read, or is one of another model.
        """
        until = time.monotonic() + timeout_s
        with self._looking:
            while self._newest.version == known:
                self._look(known)
                left_s = until - time.monotonic()
                if self._newest.version == known and (left_s <= 0 or self._closed.wait(min(self._look_s, left_s))):
                    break
            return self._newest.version

    def await_usable(self, known: Version, deadline: float) -> Version:
        """Returns `known` if it is held, else the newest version."""
        return known if known in self._held else self._newest.version

    def read(
        self,
        ids: Mapping[str, NDArray[np.int64]],
        arrays: Collection[str] = (),
        *,
        version: Version | None = None,
        deadline: float | None = None,
    ) -> Reading:
        """As `LocalReader.read`."""
        newest = self._newest
        reader = newest if version is None else self._held.get(version)
        if reader is None:
            assert version is not None, "the newest one is held"
            raise ProtocolError(
                f"version {version.checksum:016x}: it is not held any more; the newest is "
                f"{newest.version.checksum:016x} of snapshot {newest.version.number}",
                code=ErrorCode.VERSION_GONE,
            )
        return reader.read(ids, arrays)

    def changed(self, version: Version, before: Version) -> None:
        """Returns None: all rows count as changed."""

    def _look(self, known: Version) -> None:
        """Reads the newest snapshot if it is not held."""
        name = self._store.served()
        if name is None:
            raise SnapshotError(f"{self._store}: it has no snapshot any more; snapshot {known.number} is still used")
        version = version_of(self._store.manifest(name))
        self.leading = version
        if version == known:
            return
        self._held = {known: self._newest}
        reader = self._opened(name)
        self._check_same(name, reader)
        self._held = {known: self._newest, reader.version: reader}
        self._newest = reader

    def _opened(self, name: str) -> LocalReader:
        with open_content(self._directory.child(name)) as content:
            return LocalReader(content, self._names)

    def _check_same(self, name: str, reader: LocalReader) -> None:
        theirs = {**reader.tables, **reader.arrays}
        for each, ours in {**self.tables, **self.arrays}.items():
            differences = ["it is missing"] if each not in theirs else differences_of_reads(ours, theirs[each])
            if differences:
                raise SnapshotError(
                    f"{name}: {ours.where}: what is served and the snapshot differ: {', '.join(differences)}"
                )
