"""A small disk in memory for the logs of a chaos job, which is filled and emptied."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet_sparse.errors import FleetSparseError

LOG_DISK_BYTES = 1152 << 20
"""Room for two segments of 256 MiB of each of two pservers, and for half a segment more."""
_MOUNT_HINT = "Run as root, with the capability SYS_ADMIN, or leave this kind of fault out (--kind)"


@contextmanager
def log_disk(directory: Path, num_bytes: int) -> Iterator[None]:
    """Mounts a tmpfs at a new directory until the end of the block. If the block fails, its files are kept there.

    Raises:
        FleetSparseError: The system does not permit it, or there is no room to keep the files.
    """
    directory.mkdir()
    options = f"size={num_bytes},mode=700"
    _run("mount", "-t", "tmpfs", "-o", options, "fleet_sparse-chaos", str(directory), hint=_MOUNT_HINT)
    copy = directory.with_name(f"{directory.name}.copy")
    try:
        yield
    except Exception:
        # Segments are allocated whole, and mostly zeros.
        _run("cp", "--archive", "--sparse=always", str(directory), str(copy), hint="Make room there")
        raise
    finally:
        _run("umount", "--lazy", str(directory), hint=_MOUNT_HINT)
        if copy.exists():
            directory.rmdir()
            copy.rename(directory)


def _run(*command: str, hint: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise FleetSparseError(f"chaos: {' '.join(command)}: {reason}. {hint}") from error


@contextmanager
def filled(disk: Path) -> Iterator[Callable[[], None]]:
    """Fills a disk until the end of the block; yields what takes the room that became free meanwhile."""
    path = disk / "filler"
    with path.open("wb") as file:

        def fill() -> None:
            state = os.statvfs(disk)
            num_bytes = state.f_bavail * state.f_frsize
            try:
                if num_bytes:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, num_bytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:  # a pserver was faster
                    raise

        try:
            fill()
            yield fill
        finally:
            path.unlink()
