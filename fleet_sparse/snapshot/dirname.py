"""Checks the name of a snapshot directory without access to the pservers' root."""

from __future__ import annotations

from fleet_sparse.errors import SnapshotError


def check_dirname(dirname: str) -> None:
    """Checks that `dirname` can be a path or URL under a root.

    Raises:
        SnapshotError: `dirname` is empty or contains a zero byte or `..`.
    """
    if not dirname or "\0" in dirname:
        raise SnapshotError(f"directory {dirname!r}: should be a path or URL")
    if ".." in dirname.split("/"):
        raise SnapshotError(f"directory {dirname!r}: contains '..', should be a path under the pserver's root")
