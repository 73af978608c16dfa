"""DirectoryCoordinator: leases as files in a directory that all pservers of a shard see.

A lease is a file `<shard>.<number>`; the one with the largest number counts. Its process has it locked for as long as
it lives, and renews it by its time of modification. So the lease of a process that has died is free at once, and that
of a process that is suspended, or out of reach, once the time has not changed for longer than its ttl. No clock of
another machine is read, and no process waits for a lock.

Beside it lies a spare file, so that a process that starts again can take its lease on a full disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path
from typing import NamedTuple

from .coordinator import CLOCKS_DIFFER, Holder, holder_from

LEASES = "leases"
"""Name of the directory beside the logs."""
_POLL_S = 0.05
_LEFT_S = 60.0
"""A file that its process has not finished for this time belongs to a process that died."""
_NEW = ".new-"  # in the name of a file that is not finished
_FILE_BYTES = 512  # of a lease, with spaces at its end; it replaces the content of a spare file in place


class _Observation(NamedTuple):
    """The last change of a lease, as this process saw it."""

    number: int
    modified_ns: int
    since: float


class DirectoryCoordinator:
    """Leases of one job in a directory; see `Coordinator`.

    Args:
        directory: The directory; created if missing.
        job: Identity of the job.
    """

    def __init__(self, directory: Path, job: str) -> None:
        self._directory = directory
        self._job = job
        self._held: dict[str, tuple[int, int]] = {}  # number and locked descriptor
        self._observed: dict[str, _Observation] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def lease(self, shard: str, ttl_s: float, *, after: int = 0) -> int | Holder:
        """As `Coordinator`."""
        while True:
            number = self._newest(shard)
            generation = after + 1
            if number:
                try:
                    former, is_free = self._look(shard, number)
                except FileNotFoundError:
                    continue  # there is a newer one
                if not is_free:
                    return former
                generation = max(former.generation, after) + 1
            holder = Holder.of_this_process(generation, self._job, ttl_s)
            descriptor = self._create(shard, number + 1, holder)
            if descriptor is None:
                continue
            if self._newest(shard) != number + 1:  # a newer one was taken, and older files removed, in between
                self._path(shard, number + 1).unlink(missing_ok=True)
                os.close(descriptor)
                continue
            self._held[shard] = number + 1, descriptor
            for older in self._numbers(shard):
                if older <= number:
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(self._path(shard, older), self._spare(shard))
            self._make_spare(shard)
            self._remove_unfinished(shard, descriptor)
            return generation

    def renew(self, shard: str) -> bool:
        """As `Coordinator`."""
        number, descriptor = self._held[shard]
        now_ns = time.time_ns()
        os.utime(descriptor, ns=(now_ns, now_ns))
        return self._newest(shard) == number

    def watch(self, shard: str, timeout_s: float) -> None:
        """As `Coordinator`."""
        until = time.monotonic() + timeout_s
        while (number := self._newest(shard)) and time.monotonic() < until:
            try:
                if self._look(shard, number)[1]:
                    return
            except FileNotFoundError:
                return
            time.sleep(_POLL_S)

    def release(self, shard: str) -> None:
        """As `Coordinator`. The file stays: it has the generation."""
        _, descriptor = self._held.pop(shard)
        os.close(descriptor)

    def close(self) -> None:
        """As `Coordinator`. Leases that are not released are free at once."""
        for shard in list(self._held):
            self.release(shard)

    def _look(self, shard: str, number: int) -> tuple[Holder, bool]:
        """Returns whose lease a file is, and whether it is free.

        Raises:
            FileNotFoundError: The file was removed.
        """
        path = self._path(shard, number)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # afresh: so other machines' changes are seen
        try:
            holder = holder_from(os.pread(descriptor, 1 << 16, 0), str(path))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return holder, True
            except BlockingIOError:
                pass
            modified_ns, now = os.fstat(descriptor).st_mtime_ns, time.monotonic()
        finally:
            os.close(descriptor)
        last = self._observed.get(shard)
        if last is None or (last.number, last.modified_ns) != (number, modified_ns):
            self._observed[shard] = _Observation(number, modified_ns, now)
            return holder, False
        return holder, now - last.since > CLOCKS_DIFFER * holder.ttl_s

    def _create(self, shard: str, number: int, holder: Holder) -> int | None:
        """Makes the file of a lease, complete and locked; returns its descriptor, or None if the file exists."""
        temporary = self._temporary(shard)
        descriptor = self._open_spare(shard, temporary)
        if descriptor is None:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            content = holder.to_json().ljust(_FILE_BYTES)
            os.pwrite(descriptor, content, 0)
            os.truncate(descriptor, len(content))  # the spare file may have had a longer one
            os.fsync(descriptor)
            os.link(temporary, self._path(shard, number))
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, FileExistsError):
                return None
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        return descriptor

    def _open_spare(self, shard: str, path: Path) -> int | None:
        """Moves the spare file to a path; returns its descriptor, locked. None if there is none for this process."""
        try:
            os.rename(self._spare(shard), path)
        except FileNotFoundError:
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # it was the lease of a process that is suspended, which may change it
            os.close(descriptor)
            path.unlink()
            return None
        return descriptor

    def _make_spare(self, shard: str) -> None:
        temporary = self._temporary(shard)
        if self._spare(shard).exists():
            return
        with contextlib.suppress(OSError):  # as on a full disk
            temporary.write_bytes(b" " * _FILE_BYTES)
            os.rename(temporary, self._spare(shard))
        temporary.unlink(missing_ok=True)

    def _remove_unfinished(self, shard: str, held: int) -> None:
        """Removes what processes left that died while they made a file. Only times of the file system are compared."""
        now_s = os.fstat(held).st_ctime
        for path in self._directory.glob(f"{shard}{_NEW}*"):
            with contextlib.suppress(OSError):
                if now_s - path.stat().st_ctime > _LEFT_S and not _is_locked(path):
                    path.unlink()

    def _temporary(self, shard: str) -> Path:
        return self._directory / f"{shard}{_NEW}{secrets.token_hex(8)}"

    def _spare(self, shard: str) -> Path:
        return self._directory / f"{shard}.spare"

    def _path(self, shard: str, number: int) -> Path:
        return self._directory / f"{shard}.{number}"

    def _newest(self, shard: str) -> int:
        return max(self._numbers(shard), default=0)

    def _numbers(self, shard: str) -> list[int]:
        return _numbers(self._directory, shard)


def writer_of(log: Path) -> Holder | None:
    """Returns who has locked the newest lease of a log, and may write it; None if nobody has, as far as files say.

    Args:
        log: Directory of the log of one shard.

    Raises:
        SettingError: The lease cannot be read.
        OSError: The system refuses.
    """
    directory, shard = log.resolve().parent / LEASES, log.resolve().name
    numbers = _numbers(directory, shard) if directory.is_dir() else []
    path = directory / f"{shard}.{max(numbers, default=0)}"
    return holder_from(path.read_bytes(), str(path)) if numbers and _is_locked(path) else None


def _numbers(directory: Path, shard: str) -> list[int]:
    """Returns the numbers of the lease files of a shard."""
    numbers = (name.removeprefix(f"{shard}.") for name in os.listdir(directory) if name.startswith(f"{shard}."))
    return [int(number) for number in numbers if number.isdecimal()]


def _is_locked(path: Path) -> bool:
    """Returns whether a process has a file locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
