"""Root: the directory under which a pserver saves and loads."""

from __future__ import annotations

from pathlib import Path

from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory, LocalDirectory, directory_at, is_url
from fleet_sparse.snapshot.dirname import check_dirname


def resolve_under(root: str, dirname: str) -> Directory:
    """Returns the directory that `dirname` names: a relative name under `root`, or a path or URL that lies under it.

    It need not exist. No symbolic link on its way leads out of the root.

    Args:
        root: A path, or a URL that fsspec knows.
        dirname: A path; or, if the root is a URL, one that begins with it, as the root or as fsspec writes it.

    Raises:
        SnapshotError: It does not lie under the root, or contains `..`.
    """
    root, dirname = root.removeprefix("file://"), dirname.removeprefix("file://")
    check_dirname(dirname)
    if is_url(root):
        return _under_url(root, dirname)
    return _under_path(root, dirname)


def _under_path(root: str, dirname: str) -> Directory:
    if is_url(dirname):
        raise _outside(dirname, dirname, root)
    try:
        real_root = Path(root).resolve()
        real = (real_root / dirname).resolve()
        # Python 3.13 leaves a link that leads to itself in the path; up to 3.12 the lines above raise.
        is_loop = any(directory.is_symlink() for directory in (real, *real.parents))
    except (OSError, RuntimeError, ValueError) as error:
        raise SnapshotError(f"directory {dirname!r}: cannot be resolved: {error}") from error
    if is_loop:
        raise SnapshotError(f"directory {dirname!r}: cannot be resolved: {str(real)!r} has a symbolic link to itself")
    if not real.is_relative_to(real_root):
        raise _outside(dirname, str(real), str(real_root))
    return LocalDirectory(real)


def _under_url(root: str, dirname: str) -> Directory:
    directory = directory_at(root)
    relative = dirname
    if is_url(dirname) or dirname.startswith("/"):
        begins = (root.rstrip("/"), str(directory))
        begin = next((each for each in begins if f"{dirname}/".startswith(f"{each}/")), None)
        if begin is None:
            raise _outside(dirname, dirname, root)
        relative = dirname.removeprefix(begin)
    # Name by name: joined into a URL they could mean more than names.
    for name in relative.split("/"):
        if name not in ("", "."):
            directory = directory.child(name)
    return directory


def _outside(dirname: str, found: str, root: str) -> SnapshotError:
    return SnapshotError(
        f"directory {dirname!r}: is {found!r}, should lie under {root!r}. "
        "Set FLEET_SPARSE_ROOT of the pservers to a directory that contains it"
    )
