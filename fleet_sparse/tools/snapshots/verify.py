"""Verifies snapshots by reading every byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot.directory import MANIFEST, Directory
from fleet_sparse.snapshot.manifest import Manifest, ShardFile
from fleet_sparse.snapshot.open_snapshot import is_evenly_placed, open_file, open_snapshot
from fleet_sparse.snapshot.reader import ProgressCallback, SnapshotReader
from fleet_sparse.snapshot.store import SnapshotStore, open_chain


class FileReport(NamedTuple):
    """Result for a file."""

    path: str
    """Path or URL."""
    num_bytes: int
    """Size according to the manifest; 0 for the manifest itself."""
    error: str | None
    """The first error; None if the file is good."""
    offset: int | None
    """Offset of the error, if bytes are wrong."""


class SnapshotReport(NamedTuple):
    """Result for a snapshot."""

    name: str
    files: tuple[FileReport, ...]
    """The manifest first."""
    error: str | None
    """Why good files do not fit together, or why the chain is broken."""

    @property
    def is_good(self) -> bool:
        """True if there is no error. The base of a delta has its own report."""
        return self.error is None and all(file.error is None for file in self.files)


class Verification:
    """Reads all snapshots in a directory, or the snapshot that the directory is.

    Args:
        where: Directory of snapshots or of one snapshot.
        on_progress: Called now and then with the number of bytes read so far.

    Attributes:
        names: Names of the snapshots, by number.

    Raises:
        SnapshotError: There is no snapshot, or the directory cannot be listed.
    """

    def __init__(self, where: Directory, on_progress: ProgressCallback = lambda num_bytes: None) -> None:
        is_one = MANIFEST in where.names()
        self._directory = where.parent() if is_one else where
        self._series = SnapshotStore(self._directory)
        self.names = [where.name] if is_one else self._series.snapshots()
        if not self.names:
            open_chain(where)  # raises the error
        self._on_progress = on_progress
        self._num_bytes = 0  # size of the files that were read completely or up to an error

    @property
    def num_bytes(self) -> int:
        """Size of all files whose manifest is good."""
        manifests = [_read_manifest(self._series, name) for name in self.names]
        return sum(file.num_bytes for found in manifests if isinstance(found, Manifest) for file in found.files)

    def reports(self) -> Iterator[SnapshotReport]:
        """Yields the result for each snapshot."""
        return (self._report(self._directory.child(name)) for name in self.names)

    def _report(self, directory: Directory) -> SnapshotReport:
        path = f"{directory}/{MANIFEST}"
        manifest = _read_manifest(self._series, directory.name)
        if isinstance(manifest, SnapshotError):
            return SnapshotReport(directory.name, (_report(path, 0, manifest),), None)
        files = [self._read(directory, manifest, expected) for expected in manifest.files]
        error = None
        if all(file.error is None for file in files):
            error = _fault_together(self._series, directory, manifest)
        return SnapshotReport(directory.name, (_report(path, 0, None), *files), error)

    def _read(self, directory: Directory, manifest: Manifest, expected: ShardFile) -> FileReport:
        path = f"{directory}/{expected.file}"
        try:
            file = open_file(directory, manifest, expected)
        except SnapshotError as error:
            self._num_bytes += expected.num_bytes
            return _report(path, expected.num_bytes, error)
        try:
            for _ in file.parts():
                self._on_progress(self._num_bytes + file.num_bytes_read)
        except SnapshotError as error:
            return _report(path, expected.num_bytes, error)
        finally:
            file.close()
            self._num_bytes += expected.num_bytes
            self._on_progress(self._num_bytes)
        return _report(path, expected.num_bytes, None)


def _read_manifest(series: SnapshotStore, name: str) -> Manifest | SnapshotError:
    try:
        return series.manifest(name)
    except SnapshotError as error:
        return error


def _fault_together(series: SnapshotStore, directory: Directory, manifest: Manifest) -> str | None:
    """Returns why good files do not fit together, or why the chain is broken."""
    try:
        with ExitStack() as stack:
            member = open_snapshot(directory, manifest, stack)
            content = SnapshotReader(str(directory), [member])
            # With a known placement, an id cannot be in two files.
            if not all(map(is_evenly_placed, member.files)):
                for table in content.tables:
                    for _ in content.rows(table):
                        pass
            SnapshotReader(str(directory), [open_snapshot(*each, stack) for each in series.chain(directory.name)])
    except SnapshotError as error:
        return str(error)
    return None


def _report(path: str, num_bytes: int, error: SnapshotError | None) -> FileReport:
    offset = error.offset if isinstance(error, SnapshotCorrupt) else None
    return FileReport(path, num_bytes, None if error is None else str(error), offset)
