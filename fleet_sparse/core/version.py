"""Version: names a snapshot that is served."""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """A snapshot that is served. Two versions are the same if their checksums are."""

    number: int
    """Number of the snapshot."""
    checksum: int
    """Checksum of its manifest; 0 for no version."""


NO_VERSION = Version(0, 0)
