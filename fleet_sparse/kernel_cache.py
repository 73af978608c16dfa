"""KernelCache: machine code of kernels on disk, so that one process compiles it and the others load it.

It is written to the first of these directories that is writable, in Numba's order: the one that `NUMBA_CACHE_DIR`
names, `__pycache__` next to the kernel's module, the user's cache directory. Unlike Numba, a process also reads the
directories before that one: every user of a container image finds the kernels that were compiled when it was built.

Code for another CPU, another Numba or other sources is not found. The sources are the kernel's own module and all of
`core`, because functions of `core` are inlined into kernels of other modules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from numba import config
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)

import fleet_sparse.core

IS_CACHED = not config.BOUNDSCHECK
"""False if kernels check bounds: such code must not be mistaken for code that does not, nor the other way round."""


class Directory(NamedTuple):
    """A directory for machine code.

    Attributes:
        path: The directory.
        refusal: Reason why it cannot be written; empty if it can.
    """

    path: Path
    refusal: str


class _AnyLocator(InTreeCacheLocator):  # type: ignore[misc]  # Numba has no types
    """Numba's locator without its search for a writable directory: `_directories` does that."""

    def ensure_cache_path(self) -> None:
        """Accepts any directory."""


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]  # Numba has no types
    """Numba's names and contents of cache files, for files in any directory."""

    _locator_classes = (_AnyLocator,)


class KernelCache(FunctionCache):  # type: ignore[misc]  # Numba has no types
    """The machine code of one kernel on disk, as Numba's dispatchers use it.

    Attributes:
        directories: Directories that are read, in this order. The last one is written.
        home: Directory in which the code was found or to which it was written; None before, and if it cannot be
            written.

    Args:
        function: The kernel's function.
        on_miss: Called when no directory has the code, before it is compiled.

    Raises:
        RuntimeError: The function's source is not a file.
    """

    _impl_class = _CacheImpl

    def __init__(self, function: Any, on_miss: Callable[[], object] = lambda: None) -> None:
        super().__init__(function)
        self._on_miss = on_miss
        self.home: Path | None = None
        self.directories = _directories(function, self._impl.locator)
        stamp = (self._impl.locator.get_source_stamp(), _digest_of_core())
        base = self._impl.filename_base
        self._files = [IndexDataCacheFile(str(each.path), base, stamp) for each in self.directories]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for these types, or None."""
        for directory, file in zip(self.directories, self._files, strict=True):
            self._cache_file = file
            try:
                found = super().load_overload(sig, target_context)
            except OSError:  # not readable either
                continue
            if found is not None:
                self.home = directory.path
                return found
        self._on_miss()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Writes the code if the last directory can be written."""
        *before, directory = self.directories
        if not directory.refusal:
            self._cache_file = self._files[-1]
            try:
                super().save_overload(sig, data)
                self.home = directory.path
            except OSError as error:  # a full disk, for example
                self.directories = [*before, directory._replace(refusal=error.strerror or str(error))]


def open_cache(function: Callable[..., Any], on_miss: Callable[[], object] = lambda: None) -> KernelCache | None:
    """Returns the cache of a kernel's function; None if its source is not a file or the kernels check bounds.

    `on_miss` is called before code is compiled that a cache does not have.
    """
    try:
        return KernelCache(function, on_miss) if IS_CACHED else None
    except RuntimeError:
        return None


def _directories(function: Any, source: Any) -> list[Directory]:
    """Numba's directories for the code of a function, up to the first one that can be written."""
    directories: list[Directory] = []
    for kind in (UserProvidedCacheLocator, InTreeCacheLocator, UserWideCacheLocator):
        if kind is UserProvidedCacheLocator and not config.CACHE_DIR:
            continue
        locator = kind(function, source._py_file)
        directories.append(Directory(Path(locator.get_cache_path()), _refusal(locator)))
        if not directories[-1].refusal:
            break
    return directories


def _refusal(locator: Any) -> str:
    try:
        locator.ensure_cache_path()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@cache
def _digest_of_core() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(fleet_sparse.core.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
