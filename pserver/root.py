"""Root: the one directory under which a pserver saves and loads."""

from __future__ import annotations

from pathlib import Path

from fleet_sparse.errors import SnapshotError


def resolve_under(root: Path, dirname: str) -> Path:
    """The directory that `dirname` names: a relative name under `root`, or an absolute one that lies under it.

    It need not exist. What of it exists contains no symbolic link that leads out of the root.

    Raises:
        SnapshotError: It does not lie under the root, or contains `..`.
    """
    if not dirname or "\0" in dirname:
        raise SnapshotError(f"directory {dirname!r}: should be a name")
    if ".." in Path(dirname).parts:
        raise SnapshotError(f"directory {dirname!r}: contains '..', should be a plain path under the pserver's root")
    try:
        real_root = root.resolve()
        real = (real_root / dirname).resolve()
    except (OSError, RuntimeError) as error:
        raise SnapshotError(f"directory {dirname!r}: cannot be resolved: {error}") from error
    if not real.is_relative_to(real_root):
        raise SnapshotError(
            f"directory {dirname!r}: is {str(real)!r}, should lie under {str(real_root)!r}. "
            "Set FLEET_SPARSE_ROOT of the pservers to a directory that contains it"
        )
    return real
