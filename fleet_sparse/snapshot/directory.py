"""Directories for snapshots: on this machine, or behind a URL that fsspec knows.

`LocalDirectory` uses system calls: neither fsspec's local files nor pathlib and shutil open a path without following
its links, or make files and names durable.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError

MANIFEST = "MANIFEST.json"
"""The file that makes a directory a snapshot: written last, removed first."""

_log = logging.getLogger(__name__)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_BEGIN_WRITING_BYTES = 8 << 20
# The last bytes of a file that stay in the page cache while it is written, and how many before are forgotten at once.
_KEPT_BYTES, _FORGOTTEN_BYTES = 32 << 20, 64 << 20
# Smallest read after which the page cache may forget what was read.
_FORGET_FROM_BYTES = 256 << 10
_SYNC_FILE_RANGE_WRITE = 2  # of Linux; Python's `os` has no sync_file_range
_sync_file_range: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def corrupt(path: str, what: str, offset: int) -> SnapshotCorrupt:
    """Returns the error for wrong bytes in a file."""
    return SnapshotCorrupt(f"{path}: {what}, at byte {offset}", path=path, offset=offset)


class OutputFile(Protocol):
    """A new file. Methods raise SnapshotError if the system refuses. `abandon` removes a file that is not wanted."""

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes. The buffer may be reused afterwards."""

    def finish(self) -> None:
        """Closes the file, which is durable when this returns."""

    def abandon(self) -> None:
        """Closes and removes the file, also after `finish`. Raises nothing; a failure is logged."""


class InputFile(Protocol):
    """A file that is being read."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    @property
    def size(self) -> int:
        """Size of the file in bytes when it was opened."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills the buffer with the bytes from `offset` on.

        Raises:
            SnapshotCorrupt: The file is too short.
            SnapshotError: It cannot be read.
        """

    def close(self) -> None:
        """Closes the file. May be repeated."""


class FileLock(Protocol):
    """A lock file that this process holds. The system releases it when the process ends."""

    def release(self) -> None:
        """Removes the file and releases the lock."""


class Directory(Protocol):
    """A directory and the files in it. Every method raises SnapshotError if the system refuses.

    No symbolic link is followed, neither in its path nor in the directory.
    """

    renames: bool
    """True if it can rename a directory in one step, as file systems can and object stores cannot."""

    def __str__(self) -> str:
        """Path or URL."""

    @property
    def name(self) -> str:
        """The last component of the path or URL."""

    def parent(self) -> Directory:
        """Returns the directory that contains this one."""

    def child(self, name: str) -> Directory:
        """Returns a directory in this one, which need not exist."""

    def names(self) -> list[str]:
        """Returns the sorted names of files and directories in it; none if it does not exist."""

    def make(self) -> None:
        """Creates it and its parents where they are missing."""

    def create(self, name: str) -> OutputFile:
        """Creates a file; an existing name is refused."""

    def put(self, name: str, content: bytes) -> None:
        """Creates a small file with its content, durably; an existing name is refused.

        In an object store it is complete or missing. Elsewhere a crash may leave a part of it.
        """

    def replace(self, name: str, content: bytes) -> None:
        """Creates a small file with its content, durably, in place of an existing one: readers see either of both."""

    def open(self, name: str) -> InputFile:
        """Opens an existing file."""

    def size_of(self, name: str) -> int:
        """Returns the size of an existing file."""

    def sync(self) -> None:
        """Makes the names in it durable."""

    def remove_child(self, name: str) -> None:
        """Removes a directory in this one with its files, its manifest first. A missing directory is ignored."""

    def rename_child(self, name: str, new_name: str) -> None:
        """Renames a directory in this one durably; an existing name is refused. Only if `renames`."""

    def lock(self, name: str, *, create: bool) -> FileLock | None:
        """Takes a lock file without waiting. Only if `renames`.

        Args:
            name: Name of the file.
            create: True to create it if it is missing.

        Returns:
            None if the file is missing, another process holds it, or the file system has no locks.
        """


def read(directory: Directory, name: str, max_bytes: int) -> bytes:
    """Returns the content of a file.

    Raises:
        SnapshotCorrupt: It is larger than `max_bytes`.
        SnapshotError: It is missing, or cannot be read.
    """
    with closing(directory.open(name)) as file:
        if file.size > max_bytes:
            raise corrupt(file.name, f"it has {file.size} bytes, should have at most {max_bytes}", max_bytes)
        content = bytearray(file.size)
        file.read_into(0, memoryview(content))
    return bytes(content)


@contextmanager
def new_file(directory: Directory, name: str) -> Iterator[OutputFile]:
    """Creates a file that the block finishes. It is removed if the block raises."""
    file = directory.create(name)
    try:
        yield file
    except BaseException:
        file.abandon()
        raise


def directory_at(where: str | Path) -> Directory:
    """Returns the directory that a path or URL names, with the symbolic links of a path resolved.

    Raises:
        SnapshotError: The path cannot be resolved, the URL is invalid, or its file system is not installed.
    """
    if isinstance(where, str) and where.startswith("file://"):
        where = where.removeprefix("file://")
    if isinstance(where, Path) or not is_url(where):
        try:
            path = Path(where).resolve()
            # From Python 3.13 on, resolve() leaves a link to itself in the path.
            if any(each.is_symlink() for each in (path, *path.parents)):
                raise SnapshotError(f"directory {str(where)!r}: cannot be resolved: {str(path)!r} has a link to itself")
            return LocalDirectory(path)
        except (OSError, RuntimeError, ValueError) as error:
            raise SnapshotError(f"directory {str(where)!r}: cannot be resolved: {error}") from error
    try:
        import fsspec
    except ImportError as error:
        raise SnapshotError(
            f"directory {where!r}: a URL needs fsspec. Install `fleet-sparse[remote]` and the package of its file "
            "system"
        ) from error
    with _remote(where, "opened"):
        return RemoteDirectory(*fsspec.core.url_to_fs(where))


def is_url(where: str) -> bool:
    """Returns whether it is a URL, not a path."""
    return _URL.match(where) is not None


@contextmanager
def _explained(path: str, what: str, kind: type[Exception] = OSError) -> Iterator[None]:
    """Raises an error of that kind as SnapshotError."""
    try:
        yield
    except SnapshotError:
        raise
    except kind as error:
        raise SnapshotError(f"{path}: cannot be {what}: {str(error) or repr(error)}") from error


def _remote(path: str, what: str) -> AbstractContextManager[None]:
    # Each file system of fsspec raises its own errors.
    return _explained(path, what, Exception)


def _checked(name: str) -> str:
    """Returns a name that cannot lead out of its directory."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise SnapshotError(f"{name!r}: should be the name of a file or directory without its path")
    return name


# On this machine


class LocalDirectory:
    """A directory of a mounted file system.

    Args:
        path: Absolute and without symbolic links; `directory_at` resolves any path.
    """

    renames = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    @property
    def name(self) -> str:
        return self._path.name

    def parent(self) -> LocalDirectory:
        return LocalDirectory(self._path.parent)

    def child(self, name: str) -> LocalDirectory:
        return LocalDirectory(self._path / _checked(name))

    def names(self) -> list[str]:
        with _explained(str(self), "listed"):
            try:
                with self._opened() as directory:
                    return sorted(os.listdir(directory))
            except FileNotFoundError:
                return []
            except NotADirectoryError as error:
                raise SnapshotError(
                    f"{self}: is no directory. Name the directory of a snapshot, or of several"
                ) from error

    def make(self) -> None:
        with _explained(str(self), "created"), self._opened(create=True):
            pass

    def create(self, name: str) -> OutputFile:
        path = self._path / _checked(name)
        with _explained(str(path), "created"), self._opened() as directory:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
            return _LocalOutput(self, name, os.open(name, flags, 0o666, dir_fd=directory))

    def put(self, name: str, content: bytes) -> None:
        with new_file(self, name) as file:
            file.write(content)
            file.finish()

    def replace(self, name: str, content: bytes) -> None:
        draft = f".{_checked(name)}.{secrets.token_hex(8)}.draft"  # another process may replace the file too
        self.put(draft, content)
        try:
            with _explained(str(self._path / name), "written"), self._opened() as directory:
                os.rename(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
                os.fsync(directory)
        except BaseException:
            with suppress(OSError):
                self.remove_file(draft)
            raise

    def open(self, name: str) -> InputFile:
        path = self._path / _checked(name)
        with _explained(str(path), "opened"), self._opened() as directory:
            # Without O_NONBLOCK, opening a named pipe would wait for a writer.
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=directory)
            try:
                return _LocalInput(str(path), _file_size(os.fstat(descriptor)), descriptor)
            except BaseException:
                os.close(descriptor)
                raise

    def size_of(self, name: str) -> int:
        with _explained(str(self._path / _checked(name)), "seen"), self._opened() as directory:
            return _file_size(os.stat(name, dir_fd=directory, follow_symlinks=False))

    def sync(self) -> None:
        with _explained(str(self), "made durable"), self._opened() as directory:
            os.fsync(directory)

    def remove_child(self, name: str) -> None:
        child = self.child(name)
        with _explained(str(child), "removed"), suppress(FileNotFoundError):
            with child._opened() as directory:
                names = sorted(os.listdir(directory), key=lambda file: file != MANIFEST)
                for file in names:
                    os.unlink(file, dir_fd=directory)
                    if file == MANIFEST:
                        os.fsync(directory)
            with self._opened() as directory:
                os.rmdir(name, dir_fd=directory)

    def rename_child(self, name: str, new_name: str) -> None:
        _checked(new_name)
        with _explained(str(self.child(name)), f"renamed to {new_name}"), self._opened() as directory:
            # The system refuses to replace a file or a directory with files, but not an empty directory.
            if new_name in os.listdir(directory):
                raise FileExistsError("the name exists")
            os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)

    def lock(self, name: str, *, create: bool) -> FileLock | None:
        path = self._path / _checked(name)
        flags = os.O_RDWR | _FLAGS | (os.O_CREAT if create else 0)
        with _explained(str(path), "locked"):
            while True:
                try:
                    with self._opened() as directory:
                        descriptor = os.open(name, flags, 0o666, dir_fd=directory)
                except FileNotFoundError:
                    return None
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_there = os.fstat(descriptor).st_nlink > 0
                except OSError:
                    os.close(descriptor)
                    return None
                if is_there:
                    return _LocalLock(self, name, descriptor)
                os.close(descriptor)  # its last holder removed it meanwhile

    def shares_files_with(self, other: LocalDirectory) -> bool:
        """Returns whether both are in one file system, so that a file may be linked from one to the other."""
        with _explained(str(self), "seen"), self._opened() as here, other._opened() as there:
            return os.fstat(here).st_dev == os.fstat(there).st_dev

    def link(self, name: str, target: LocalDirectory) -> None:
        """Gives a file the same name in another directory, too, durably; an existing name is refused."""
        path = f"{target}/{_checked(name)}"
        with _explained(path, f"linked to {self}"), self._opened() as here, target._opened() as there:
            os.link(name, name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
            os.fsync(there)

    def remove_file(self, name: str) -> None:
        """Removes a file; a missing one is ignored."""
        with suppress(FileNotFoundError), self._opened() as directory:
            os.unlink(name, dir_fd=directory)

    @contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[int]:
        """Opens the directory component by component, so that no symbolic link put into its path is followed."""
        names = self._path.parts[1:]
        descriptor = os.open(self._path.anchor, os.O_DIRECTORY | os.O_CLOEXEC | (0 if not names else os.O_PATH))
        try:
            for number, name in enumerate(names, 1):
                # Only the last one is read; the others may be closed to us except for what is in them.
                flags = os.O_DIRECTORY | _FLAGS | (os.O_RDONLY if number == len(names) else os.O_PATH)
                try:
                    entered = os.open(name, flags, dir_fd=descriptor)
                except FileNotFoundError:
                    if not create:
                        raise
                    entered = _create_in(descriptor, name, flags)
                os.close(descriptor)
                descriptor = entered
            yield descriptor
        finally:
            os.close(descriptor)


def _create_in(parent: int, name: str, flags: int) -> int:
    """Creates a directory durably and opens it."""
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fsync(readable)
    finally:
        os.close(readable)
    return os.open(name, flags, dir_fd=parent)


class _LocalLock:
    def __init__(self, directory: LocalDirectory, name: str, descriptor: int) -> None:
        self._directory = directory
        self._name = name
        self._close = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        try:
            self._directory.remove_file(self._name)
        except OSError as error:
            _log.warning("cannot remove %s/%s: %s", self._directory, self._name, error)
        self._close()


def _file_size(status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is not a regular file")
    return status.st_size


def _forget(descriptor: int, begin: int, end: int) -> None:
    """Tells the system to keep these bytes in the page cache no longer, if the disk has them.

    Otherwise the cache takes as much memory as the file has. In a virtual machine whose host has to find that memory,
    this takes longer than the disk. It only saves time, so a failure does not matter.
    """
    with suppress(OSError):
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)


class _LocalOutput:
    def __init__(self, directory: LocalDirectory, name: str, descriptor: int) -> None:
        self._directory = directory
        self._name = name
        self._path = f"{directory}/{name}"
        self._descriptor: int | None = descriptor
        self._num_bytes = 0
        self._num_begun = 0

    def write(self, data: bytes | memoryview) -> None:
        assert self._descriptor is not None, "closed"
        with _explained(self._path, "written"):
            rest = memoryview(data)
            while rest:
                num_written = os.write(self._descriptor, rest)
                rest = rest[num_written:]
                self._num_bytes += num_written
        if self._num_bytes >= self._num_begun + _BEGIN_WRITING_BYTES:
            self._begin_writing(self._descriptor)

    def _begin_writing(self, descriptor: int) -> None:
        """Tells the system to begin with the bytes that it holds, and to forget those that the disk has.

        Otherwise the disk is idle until `finish`. It only saves time, and errors of the disk show in `finish`, so a
        failure does not matter.
        """
        begun, self._num_begun = self._num_begun, self._num_bytes
        if _sync_file_range is not None:
            _sync_file_range(descriptor, begun, self._num_bytes - begun, _SYNC_FILE_RANGE_WRITE)
        end = begun - _KEPT_BYTES
        if end > 0:
            # Pages that the disk does not have yet are kept, so those before are named once more.
            _forget(descriptor, max(end - _FORGOTTEN_BYTES, 0), end)

    def finish(self) -> None:
        assert self._descriptor is not None, "closed"
        with _explained(self._path, "made durable"):
            os.fsync(self._descriptor)
            self._close()

    def abandon(self) -> None:
        try:
            self._close()
            self._directory.remove_file(self._name)
        except OSError as error:
            _log.warning("cannot remove %s, which belongs to no snapshot: %s", self._path, error)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class _LocalInput:
    def __init__(self, name: str, size: int, descriptor: int) -> None:
        self.name = name
        self.size = size
        self._descriptor: int | None = descriptor

    def read_into(self, offset: int, buffer: memoryview) -> None:
        assert self._descriptor is not None, "closed"
        rest, at = buffer, offset
        with _explained(self.name, f"read at byte {offset}"):
            while rest:
                num_read = os.preadv(self._descriptor, [rest], at)
                if not num_read:
                    raise corrupt(self.name, "it ends early", at)
                rest, at = rest[num_read:], at + num_read
        if len(buffer) >= _FORGET_FROM_BYTES:
            _forget(self._descriptor, offset - offset % mmap.PAGESIZE, at)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


# Behind a URL


class RemoteDirectory:
    """A directory of a file system of fsspec.

    Args:
        file_system: An `fsspec.AbstractFileSystem`.
        path: Path in it, without the protocol, as its methods take it.
    """

    renames = False

    def __init__(self, file_system: Any, path: str) -> None:
        self._file_system = file_system
        self._path = path.rstrip("/")

    def __str__(self) -> str:
        return str(self._file_system.unstrip_protocol(self._path))

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    def parent(self) -> RemoteDirectory:
        return RemoteDirectory(self._file_system, self._path.rpartition("/")[0])

    def child(self, name: str) -> RemoteDirectory:
        return RemoteDirectory(self._file_system, self._path_of(name))

    def names(self) -> list[str]:
        with _remote(str(self), "listed"):
            self._file_system.invalidate_cache(self._path)
            try:
                paths = self._file_system.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
            # Some file systems list the directory itself, or a file of that path.
            found = (path.rstrip("/").rpartition("/") for path in paths)
            return sorted(name for where, _, name in found if where == self._path)

    def make(self) -> None:
        with _remote(str(self), "made"):
            self._file_system.makedirs(self._path, exist_ok=True)

    def create(self, name: str) -> OutputFile:
        path, where = self._path_of(name), f"{self}/{name}"
        with _remote(where, "created"):
            self._check_free(path)
            return _RemoteOutput(self._file_system, path, where)

    def put(self, name: str, content: bytes) -> None:
        path = self._path_of(name)
        with _remote(f"{self}/{name}", "written"):
            self._check_free(path)
            try:
                self._file_system.pipe_file(path, content)
            except BaseException:
                with suppress(Exception):
                    self._file_system.rm_file(path)
                raise

    def replace(self, name: str, content: bytes) -> None:
        with _remote(f"{self}/{name}", "written"):
            self._file_system.pipe_file(self._path_of(name), content)

    def open(self, name: str) -> InputFile:
        return _RemoteInput(self._file_system, self._path_of(name), f"{self}/{name}", self.size_of(name))

    def size_of(self, name: str) -> int:
        with _remote(f"{self}/{name}", "seen"):
            self._file_system.invalidate_cache(self._path)
            found = self._file_system.info(self._path_of(name))
            if found["type"] != "file":
                raise OSError("it is not a file")
            return int(found["size"])

    def sync(self) -> None:
        """Does nothing: every file is durable."""

    def remove_child(self, name: str) -> None:
        child = self.child(name)
        names = sorted(child.names(), key=lambda file: file != MANIFEST)
        with _remote(str(child), "removed"):
            # One by one, because `rm` treats its argument as a pattern.
            for file in names:
                self._file_system.rm_file(child._path_of(file))
        # Object stores have no directories, and each raises its own error.
        with suppress(Exception):
            self._file_system.rmdir(child._path)

    def rename_child(self, name: str, new_name: str) -> None:
        raise SnapshotError(f"{self}/{name}: cannot be renamed to {new_name}: object stores cannot do it in one step")

    def lock(self, name: str, *, create: bool) -> FileLock | None:
        return None

    def _check_free(self, path: str) -> None:
        self._file_system.invalidate_cache(self._path)
        if self._file_system.exists(path):
            raise FileExistsError("the name exists")

    def _path_of(self, name: str) -> str:
        return f"{self._path}/{_checked(name)}"


class _RemoteOutput:
    def __init__(self, file_system: Any, path: str, where: str) -> None:
        self._file_system = file_system
        self._path = path
        self._where = where
        self._file = file_system.open(path, "wb")

    def write(self, data: bytes | memoryview) -> None:
        with _remote(self._where, "written"):
            self._file.write(data)

    def finish(self) -> None:
        with _remote(self._where, "written"):
            self._file.close()

    def abandon(self) -> None:
        # Closing may send the rest of the file, which may fail as well.
        with suppress(Exception):
            self._file.close()
        try:
            if self._file_system.exists(self._path):
                self._file_system.rm_file(self._path)
        except Exception as error:
            _log.warning("cannot remove %s, which belongs to no snapshot: %s", self._where, error)


class _RemoteInput:
    def __init__(self, file_system: Any, path: str, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._file_system = file_system
        self._path = path

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        with _remote(self.name, f"read at byte {offset}"):
            content = self._file_system.cat_file(self._path, start=offset, end=end) if buffer else b""
        if len(content) != len(buffer):
            raise corrupt(self.name, "it ends early", min(offset + len(content), self.size))
        buffer[:] = content

    def close(self) -> None:
        """Does nothing: no connection is open."""
