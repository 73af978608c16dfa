"""Directories: where snapshots lie, on this machine or behind any URL that fsspec knows."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError

MANIFEST = "MANIFEST.json"
"""The file that makes a directory a snapshot: written last, removed first."""

_log = logging.getLogger(__name__)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def corrupt(path: str, what: str, offset: int) -> SnapshotCorrupt:
    """The error that says what is wrong with a file, and where."""
    return SnapshotCorrupt(f"{path}: {what}, at byte {offset}", path=path, offset=offset)


class OutputFile(Protocol):
    """A new file. What fails raises SnapshotError; then, or when it is not wanted any more, `abandon` removes it."""

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of the bytes; the buffer may be reused after that."""

    def finish(self) -> None:
        """Closes it. What was written is durable when this returns."""

    def abandon(self) -> None:
        """Closes and removes it, also after `finish`. Raises nothing: what cannot be removed is logged."""


class InputFile(Protocol):
    """A file that is being read. A context manager that closes it."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    @property
    def size(self) -> int:
        """Bytes in it when it was opened."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills the buffer with the bytes from `offset` on.

        Raises:
            SnapshotCorrupt: The file ends before.
            SnapshotError: It cannot be read.
        """

    def close(self) -> None:
        """Ends reading. May be repeated."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Directory(Protocol):
    """Files and directories under one name. Every method raises SnapshotError if the system refuses.

    Symbolic links that stand for the directory, or for something in it, are refused, not followed.
    """

    renames: bool
    """Whether it can give a directory another name in one step, as file systems can and object stores cannot."""

    def __str__(self) -> str:
        """Path or URL."""

    @property
    def name(self) -> str:
        """The last part of path or URL."""

    def parent(self) -> Directory:
        """The directory that this one is in."""

    def child(self, name: str) -> Directory:
        """The directory of that name in this one, which need not be there."""

    def names(self) -> list[str]:
        """What is in it, sorted; nothing if it is not there."""

    def make(self) -> None:
        """Makes it, and those that it is in, if they are not there yet."""

    def create(self, name: str) -> OutputFile:
        """A new file; a name that is taken is refused."""

    def put(self, name: str, content: bytes) -> None:
        """A new file that is small and whole; a name that is taken is refused. Durable when this returns.

        Object stores have it whole or not at all. Elsewhere a crash may leave a part of it.
        """

    def open(self, name: str) -> InputFile:
        """A file that is there."""

    def size_of(self, name: str) -> int:
        """Bytes of a file that is there."""

    def sync(self) -> None:
        """Makes durable which names are in it."""

    def remove_child(self, name: str) -> None:
        """Removes a directory in this one with the files in it, its manifest first. One that is not there is fine."""

    def rename_child(self, name: str, new_name: str) -> None:
        """Gives a directory in this one another name, durably; a name that is taken is refused. Only if `renames`."""


def read(directory: Directory, name: str, max_bytes: int) -> bytes:
    """A whole file.

    Raises:
        SnapshotCorrupt: It has more than `max_bytes`.
        SnapshotError: It is not there, or cannot be read.
    """
    with directory.open(name) as file:
        if file.size > max_bytes:
            raise corrupt(file.name, f"it has {file.size} bytes, should have at most {max_bytes}", max_bytes)
        content = bytearray(file.size)
        file.read_into(0, memoryview(content))
    return bytes(content)


def directory_at(where: str | Path) -> Directory:
    """The directory that a path or URL names, with the symbolic links of a path resolved.

    Raises:
        SnapshotError: The path cannot be resolved, nothing is installed for that kind of URL, or it is not understood.
    """
    if isinstance(where, str) and where.startswith("file://"):
        where = where.removeprefix("file://")
    if isinstance(where, Path) or not is_url(where):
        try:
            return LocalDirectory(Path(where).resolve())
        except (OSError, RuntimeError, ValueError) as error:
            raise SnapshotError(f"directory {str(where)!r}: cannot be resolved: {error}") from error
    try:
        import fsspec
    except ImportError as error:
        raise SnapshotError(
            f"directory {where!r}: is a URL, which takes fsspec. Install `fleet-sparse[remote]` and the package of "
            "that file system"
        ) from error
    with _remote(where, "opened"):
        return RemoteDirectory(*fsspec.core.url_to_fs(where))


def is_url(where: str) -> bool:
    """Whether it is a URL, not a path."""
    return _URL.match(where) is not None


@contextmanager
def _explained(path: str, what: str, kind: type[Exception] = OSError) -> Iterator[None]:
    """Tells of an error of that kind as SnapshotError."""
    try:
        yield
    except SnapshotError:
        raise
    except kind as error:
        raise SnapshotError(f"{path}: cannot be {what}: {str(error) or repr(error)}") from error


def _remote(path: str, what: str) -> AbstractContextManager[None]:
    # Each file system of fsspec raises errors of its own.
    return _explained(path, what, Exception)


def _checked(name: str) -> str:
    """A name that leads into the directory it is in, nowhere else."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise SnapshotError(f"{name!r}: should be the plain name of a file or directory")
    return name


class _Input:
    """What input files have in common."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size

    def close(self) -> None:
        """There may be nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


# On this machine


class LocalDirectory:
    """A directory of a file system that this machine has mounted.

    Args:
        path: Absolute, and without symbolic links; `directory_at` makes one of any path.
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

    def make(self) -> None:
        with _explained(str(self), "made"):
            missing = [path for path in (self._path, *self._path.parents) if not path.exists()]
            self._path.mkdir(parents=True, exist_ok=True)
            for path in missing:
                LocalDirectory(path.parent).sync()

    def create(self, name: str) -> OutputFile:
        path = self._path / _checked(name)
        with _explained(str(path), "created"), self._opened() as directory:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
            return _LocalOutput(path, os.open(name, flags, 0o666, dir_fd=directory))

    def put(self, name: str, content: bytes) -> None:
        file = self.create(name)
        try:
            file.write(content)
            file.finish()
        except BaseException:
            file.abandon()
            raise

    def open(self, name: str) -> InputFile:
        path = self._path / _checked(name)
        with _explained(str(path), "opened"), self._opened() as directory:
            # Without O_NONBLOCK a named pipe would hold us until somebody writes to it.
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
        target = self._path / _checked(new_name)
        with _explained(str(self.child(name)), f"renamed to {new_name}"), self._opened() as directory:
            # The system itself refuses to put a directory in the place of one with files, or of a file.
            if os.path.lexists(target):
                raise FileExistsError("there is one of that name")
            os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _file_size(status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is no regular file")
    return status.st_size


class _LocalOutput:
    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor

    def write(self, data: bytes | memoryview) -> None:
        assert self._descriptor is not None, "closed"
        with _explained(str(self._path), "written"):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def finish(self) -> None:
        assert self._descriptor is not None, "closed"
        with _explained(str(self._path), "made durable"):
            os.fsync(self._descriptor)
            self._close()

    def abandon(self) -> None:
        try:
            self._close()
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot remove %s, which no snapshot will name: %s", self._path, error)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class _LocalInput(_Input):
    def __init__(self, name: str, size: int, descriptor: int) -> None:
        super().__init__(name, size)
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

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


# Behind a URL


class RemoteDirectory:
    """A directory of a file system of fsspec.

    Args:
        file_system: An `fsspec.AbstractFileSystem`.
        path: In it, without the protocol, as its methods take it.
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
            # Some list the directory itself, or the file that the path turns out to be.
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

    def open(self, name: str) -> InputFile:
        return _RemoteInput(self._file_system, self._path_of(name), f"{self}/{name}", self.size_of(name))

    def size_of(self, name: str) -> int:
        with _remote(f"{self}/{name}", "seen"):
            self._file_system.invalidate_cache(self._path)
            found = self._file_system.info(self._path_of(name))
            if found["type"] != "file":
                raise OSError("it is no file")
            return int(found["size"])

    def sync(self) -> None:
        """A file that is there is durable."""

    def remove_child(self, name: str) -> None:
        child = self.child(name)
        names = sorted(child.names(), key=lambda file: file != MANIFEST)
        with _remote(str(child), "removed"):
            # One by one: `rm` takes its argument for a pattern.
            for file in names:
                self._file_system.rm_file(child._path_of(file))
        # Object stores have no directories that could stay behind, and each says so in its own way.
        with suppress(Exception):
            self._file_system.rmdir(child._path)

    def rename_child(self, name: str, new_name: str) -> None:
        raise SnapshotError(f"{self}/{name}: cannot be renamed to {new_name}: object stores rename nothing in one step")

    def _check_free(self, path: str) -> None:
        self._file_system.invalidate_cache(self._path)
        if self._file_system.exists(path):
            raise FileExistsError("there is one of that name")

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
        # To close may be to send the rest, which may fail as what was sent before did.
        with suppress(Exception):
            self._file.close()
        try:
            if self._file_system.exists(self._path):
                self._file_system.rm_file(self._path)
        except Exception as error:
            _log.warning("cannot remove %s, which no snapshot will name: %s", self._where, error)


class _RemoteInput(_Input):
    def __init__(self, file_system: Any, path: str, name: str, size: int) -> None:
        super().__init__(name, size)
        self._file_system = file_system
        self._path = path

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        with _remote(self.name, f"read at byte {offset}"):
            content = self._file_system.cat_file(self._path, start=offset, end=end) if buffer else b""
        if len(content) != len(buffer):
            raise corrupt(self.name, "it ends early", min(offset + len(content), self.size))
        buffer[:] = content
