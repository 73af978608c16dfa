"""SERVE.json: which snapshot of a series readers serve. `docs/serving.md` defines every field."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fleet_sparse.core.version import Version

from .checked_json import decode_checked, encode_checked
from .checksum import Checksum
from .directory import Directory, read

NAME = "SERVE.json"
FORMAT = "fleet_sparse served version"
VERSION = 1
MAX_BYTES = 64 << 10

Command = Literal["promote", "pin", "unpin", "rollback"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _VersionFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version in JSON."""

    number: _Count
    checksum: Checksum

    @classmethod
    def of(cls, version: Version | None) -> _VersionFields | None:
        return None if version is None else cls(version.number, Checksum(version.checksum))


class ServeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `SERVE.json`; without arguments what holds without the file."""

    sequence: _Count = 0
    """Number of commands that wrote it so far."""
    served: _VersionFields | None = None
    previous: _VersionFields | None = None
    command: Command | None = None
    """The last command."""
    changed_at: str = ""
    """For people."""
    version: int = VERSION
    format: str = FORMAT

    @property
    def pinned(self) -> Version | None:
        """The version that readers serve; None for the newest."""
        return _version_of(self.served)

    @property
    def way_back(self) -> Version | None:
        """The version that a rollback returns to; None without one."""
        return _version_of(self.previous)

    def changed(
        self, command: Command, pinned: Version | None, way_back: Version | None, *, changed_at: str
    ) -> ServeFile:
        """Returns the content after a command."""
        served, previous = _VersionFields.of(pinned), _VersionFields.of(way_back)
        return ServeFile(self.sequence + 1, served, previous, command, changed_at)


def read_serve_file(series: Directory) -> ServeFile:
    """Reads and checks the file of a series.

    Raises:
        SnapshotError: It cannot be read, or is of another version.
        SnapshotCorrupt: It is damaged.
    """
    if NAME not in series.names():
        return ServeFile()
    return decode_checked(read(series, NAME, MAX_BYTES), ServeFile, f"{series}/{NAME}")


def write_serve_file(series: Directory, content: ServeFile) -> None:
    """Replaces the file of a series in one step, durably.

    Raises:
        SnapshotError: The system refuses.
    """
    series.replace(NAME, encode_checked(content))


def _version_of(fields: _VersionFields | None) -> Version | None:
    return None if fields is None else Version(fields.number, int(fields.checksum))
