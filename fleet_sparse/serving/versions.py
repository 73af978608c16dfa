"""Versions: the snapshots of a series as what readers serve, and the commands that say which one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from fleet_sparse.core.version import Version
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import Manifest, version_of
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.serve_file import Command, ServeFile, read_serve_file, write_serve_file
from fleet_sparse.snapshot.store import SnapshotStore


class ListedVersion(NamedTuple):
    """A snapshot of a series as a version."""

    manifest: Manifest
    is_newest: bool
    """True for the newest one of all tables."""
    is_served: bool
    is_pinned: bool
    """True if readers stay with it."""
    is_way_back: bool
    """True if a rollback returns to it."""


class Versions:
    """The versions of a series. Every method raises SnapshotError if a manifest or `SERVE.json` cannot be read.

    Args:
        series: Directory of the snapshots.
    """

    def __init__(self, series: Directory) -> None:
        self._series = series
        self._store = SnapshotStore(series)

    def listed(self) -> list[ListedVersion]:
        """Returns all versions, the oldest first.

        Raises:
            SnapshotError: There is none.
        """
        manifests = self._manifests()
        if not manifests:
            raise self._without("snapshot")
        content = read_serve_file(self._series)
        newest = next((version_of(each) for each in reversed(manifests) if each.is_complete), None)
        served = content.pinned or newest
        way_back = None if served is None else self._way_back(content, served)
        return [
            ListedVersion(
                manifest,
                is_newest=version_of(manifest) == newest,
                is_served=version_of(manifest) == served,
                is_pinned=version_of(manifest) == content.pinned,
                is_way_back=manifest.name == way_back,
            )
            for manifest in manifests
        ]

    def served(self) -> Version:
        """Returns the version that readers serve, be it there or not.

        Raises:
            SnapshotError: There is none.
        """
        return read_serve_file(self._series).pinned or self.newest()

    def directory_of(self, number: int | None) -> Directory:
        """Returns the directory of a version.

        Args:
            number: Number of the version; None for the one that readers serve.

        Raises:
            SnapshotError: It is not there.
        """
        if number is not None:
            return self._series.child(self._store.with_number(number))
        return self._series.child(self._store.served() or self._newest())

    def newest(self) -> Version:
        """Returns the newest version.

        Raises:
            SnapshotError: There is none.
        """
        return version_of(self._store.manifest(self._newest()))

    def promote(self, number: int | None = None) -> Version:
        """Makes readers serve a version and stay with it; returns it.

        Args:
            number: Number of the version; None for the newest.

        Raises:
            SnapshotError: It is not there, cannot be read, or is not one of all tables.
        """
        return self._move("promote", self._newest() if number is None else self._store.with_number(number))

    def pin(self, number: int | None = None) -> Version:
        """As `promote`; without a number, of the version that readers serve."""
        return self._move("pin", self.directory_of(number).name)

    def unpin(self) -> Version:
        """Makes readers follow the newest version; returns it.

        Raises:
            SnapshotError: There is none.
        """
        version = self.newest()
        return self._write(read_serve_file(self._series), "unpin", version, None, None)

    def rollback(self) -> Version:
        """Makes readers serve the version before the last promotion, without one the next older one, and stay with it.

        Returns:
            That version.

        Raises:
            SnapshotError: There is none, or it cannot be read.
        """
        served, content = self.served(), read_serve_file(self._series)
        name = self._way_back(content, served)
        if name is None:
            raise SnapshotError(
                f"{self._series}: snapshot {served.number} is served, and there is no version to return to from it"
            )
        version = self._readable(name)
        return self._write(content, "rollback", version, version, None)

    def _move(self, command: Command, name: str) -> Version:
        version, served, content = self._readable(name), self.served(), read_serve_file(self._series)
        way_back = content.way_back if version == served else served
        return self._write(content, command, version, version, way_back)

    def _manifests(self) -> list[Manifest]:
        return [self._store.manifest(name) for name in self._store.snapshots()]

    def _newest(self) -> str:
        name = self._store.newest_with()
        if name is None:
            raise self._without("snapshot of all tables")
        return name

    def _without(self, what: str) -> SnapshotError:
        return SnapshotError(f"{self._series}: it has no {what}; nothing was saved there, or no save was finished")

    def _way_back(self, content: ServeFile, served: Version) -> str | None:
        """Returns the name of the snapshot that a rollback returns to; None without one."""
        if content.way_back is not None and (name := self._store.find(content.way_back)) is not None:
            return name
        older = (each for each in reversed(self._manifests()) if each.number < served.number and each.is_complete)
        return next((each.name for each in older), None)

    def _readable(self, name: str) -> Version:
        """Returns the version that a snapshot is, after opening its files and those that it is based on."""
        with open_content(self._series.child(name)) as content:
            if not content.is_complete:
                raise SnapshotError(f"{content.origin}: it has only some tables of its job. Serve a snapshot of all")
            return version_of(content.manifest)

    def _write(
        self, content: ServeFile, command: Command, version: Version, pinned: Version | None, way_back: Version | None
    ) -> Version:
        changed_at = datetime.now(UTC).isoformat(timespec="seconds")
        write_serve_file(self._series, content.changed(command, pinned, way_back, changed_at=changed_at))
        return version
