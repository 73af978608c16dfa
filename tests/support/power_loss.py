"""A disk that loses power: what no sync has covered reaches it in part, in any order.

All files of logs and snapshots are written by functions of `os`, which are replaced here. Nothing is synced in fact.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

PAGE_BYTES = 4096
_LOG_THREAD = "fleet_sparse log"


class _File:
    """A file: the contents that each of its pages had since the last sync, and its sizes.

    Args:
        descriptor: The file, which keeps its number as long as this is open.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pages: list[list[bytes]] = []
        self._sizes = [0]

    def note(self) -> None:
        """Notes what has changed."""
        size = os.fstat(self.descriptor).st_size
        content = os.pread(self.descriptor, size, 0)
        if size != self._sizes[-1]:
            self._sizes.append(size)
        for number in range(max(len(self._pages), -(-size // PAGE_BYTES))):
            page = content[number * PAGE_BYTES : (number + 1) * PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
            if number == len(self._pages):
                self._pages.append([bytes(PAGE_BYTES)])
            if page != self._pages[number][-1]:
                self._pages[number].append(page)

    def sync(self) -> None:
        self.note()
        self._sizes = self._sizes[-1:]
        self._pages = [versions[-1:] for versions in self._pages]

    def content_after(self, chance: random.Random) -> bytes:
        """Returns what is on the disk after a loss of power."""
        newest_share = chance.choice([0.0, 0.5, 1.0])

        def choose(versions: list[Any]) -> Any:
            return versions[-1] if chance.random() < newest_share else chance.choice(versions)

        size = choose(self._sizes)
        return b"".join(choose(versions) for versions in self._pages)[:size].ljust(size, b"\0")


class _Directory:
    """A directory: its names, and those that are durable."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.names: dict[str, _File | _Directory] = {}
        self.durable: dict[str, _File | _Directory] = {}


_Node = _File | _Directory
_Change = tuple[_Directory, dict[str, _Node | None]]


class PowerLoss:
    """The disk below a directory, whose content so far is durable.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._lock = threading.RLock()
        self._nodes: dict[tuple[int, int], _Node] = {}
        self._changes: list[_Change] = []  # of names, in order, that are not durable
        self._dead: set[threading.Thread] = set()
        self._root = self._found(root)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what the block writes."""
        calls = {name: self._guarded(getattr(self, f"_{name}"), getattr(os, name)) for name in _CALLS}
        with mock.patch.multiple(os, **calls):
            yield

    def kill(self) -> None:
        """Ends the processes that write logs, as the system does: what they wrote stays, and is not durable."""
        with self._lock:
            self._dead |= {thread for thread in threading.enumerate() if thread.name == _LOG_THREAD}

    def lose(self, target: Path, chance: random.Random) -> None:
        """Makes a directory that has what a loss of power now leaves of the root, and ends the processes.

        Args:
            target: The directory, which does not exist.
            chance: Chooses what of the changes that are not durable is there: each change of a name by itself, or those
                up to one of them, as a journal keeps them, and any version of each page.
        """
        with self._lock:
            self.kill()
            kept_share, num_kept = chance.choice([0.0, 0.5, 1.0]), chance.randint(0, len(self._changes))
            keeps_order = chance.random() < 0.5
            names: dict[int, dict[str, _Node]] = {}
            for number, (directory, change) in enumerate(self._changes):
                if number < num_kept if keeps_order else chance.random() < kept_share:
                    of_directory = names.setdefault(id(directory), dict(directory.durable))
                    for name, node in change.items():
                        of_directory.pop(name, None)
                        if node is not None:
                            of_directory[name] = node
            self._make(self._root, target, names, {}, chance)

    def close(self) -> None:
        """Frees what is held to tell files apart."""
        for node in self._nodes.values():
            os.close(node.descriptor)
        self._nodes.clear()

    def _make(
        self,
        directory: _Directory,
        path: Path,
        names: dict[int, dict[str, _Node]],
        made: dict[int, Path],
        chance: random.Random,
    ) -> None:
        path.mkdir()
        for name, node in names.get(id(directory), directory.durable).items():
            if isinstance(node, _Directory):
                self._make(node, path / name, names, made, chance)
            elif id(node) in made:
                (path / name).hardlink_to(made[id(node)])
            else:
                made[id(node)] = path / name
                (path / name).write_bytes(node.content_after(chance))

    def _found(self, path: Path) -> _Directory:
        directory = _Directory(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        self._add(directory)
        for entry in path.iterdir():
            if entry.is_dir():
                directory.names[entry.name] = self._found(entry)
            else:
                file = self._node(os.stat(entry)) or self._add(_File(os.open(entry, os.O_RDONLY)))
                assert isinstance(file, _File)
                file.sync()
                directory.names[entry.name] = file
        directory.durable = dict(directory.names)
        return directory

    def _add(self, node: _Node) -> _Node:
        state = os.fstat(node.descriptor)
        self._nodes[state.st_dev, state.st_ino] = node
        return node

    def _node(self, state: os.stat_result) -> _Node | None:
        return self._nodes.get((state.st_dev, state.st_ino))

    def _guarded(self, handle: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                if threading.current_thread() in self._dead:
                    raise SystemExit
                return handle(real, *arguments, **options)

        return call

    def _place(self, path: Any, dir_fd: int | None) -> tuple[_Directory | None, str]:
        """Returns the directory of a path, None if it is not below the root, and the name in it."""
        parent, name = os.path.split(os.fspath(path))
        try:
            node = self._node(os.stat(parent or ".", dir_fd=dir_fd))
        except FileNotFoundError:
            node = None
        assert node is None or isinstance(node, _Directory)
        return node, name

    def _change(self, directory: _Directory | None, **names: _Node | None) -> None:
        if directory is not None:
            for name, node in names.items():
                directory.names.pop(name, None)
                if node is not None:
                    directory.names[name] = node
            self._changes.append((directory, names))

    # Storage calls

    def _open(self, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        directory, name = self._place(path, dir_fd) if flags & os.O_CREAT else (None, "")
        descriptor: int = real(path, flags, mode, dir_fd=dir_fd)
        if directory is not None and name not in directory.names:
            where = f"/proc/self/fd/{descriptor}"
            self._change(directory, **{name: self._add(_File(real(where, os.O_RDONLY | os.O_CLOEXEC)))})
        return descriptor

    def _written(self, real: Any, file: int, *arguments: Any) -> Any:
        result = real(file, *arguments)
        node = self._node(os.fstat(file))
        if isinstance(node, _File):
            node.note()
        return result

    _write = _pwrite = _pwritev = _ftruncate = _posix_fallocate = _written

    def _fsync(self, real: Any, file: int) -> None:
        node = self._node(os.fstat(file))
        if isinstance(node, _File):
            node.sync()
        elif node is not None:
            node.durable = dict(node.names)
            self._changes = [change for change in self._changes if change[0] is not node]

    _fdatasync = _fsync

    def _mkdir(self, real: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(path, mode, dir_fd=dir_fd)
        directory, name = self._place(path, dir_fd)
        if directory is not None:
            made = _Directory(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd))
            self._change(directory, **{name: self._add(made)})

    def _rename(
        self, real: Any, path: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        (directory, name), (other, new_name) = self._place(path, src_dir_fd), self._place(new, dst_dir_fd)
        assert directory is other, "names of two directories do not change at once here"
        real(path, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if directory is not None:
            self._change(directory, **{name: None, new_name: directory.names[name]})

    def _link(
        self,
        real: Any,
        path: Any,
        new: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        real(path, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        (directory, name), (other, new_name) = self._place(path, src_dir_fd), self._place(new, dst_dir_fd)
        if directory is not None:
            self._change(other, **{new_name: directory.names[name]})

    def _removed(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        real(path, dir_fd=dir_fd)
        directory, name = self._place(path, dir_fd)
        self._change(directory, **{name: None})

    _unlink = _rmdir = _removed


_CALLS = (
    "open",
    "write",
    "pwrite",
    "pwritev",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
    "mkdir",
    "rename",
    "link",
    "unlink",
    "rmdir",
)
