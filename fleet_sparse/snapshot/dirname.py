"""What a directory for snapshots may be called, as far as anyone can say who does not see the pservers' root."""

from __future__ import annotations

from fleet_sparse.errors import SnapshotError


def check_dirname(dirname: str) -> None:
    """That it can be a name under a root: a path or URL.

    Raises:
        SnapshotError: It is empty, has a zero byte, or contains `..`.
    """
    if not dirname or "\0" in dirname:
        raise SnapshotError(f"directory {dirname!r}: should be a name")
    if ".." in dirname.split("/"):
        raise SnapshotError(f"directory {dirname!r}: contains '..', should be a plain path under the pserver's root")
