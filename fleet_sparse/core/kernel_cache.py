"""Where the machine code of kernels lies on disk, so that one process compiles it and the others load it.

It lies in the first of these directories that can be written, as Numba has it: that of `NUMBA_CACHE_DIR`, `__pycache__`
beside the kernel's module, the user's cache directory. Unlike Numba we also load from those before it, which can only
be read: an image whose kernels were compiled when it was made has them whoever runs it.

Code for another CPU, of another Numba, or of other sources is not found. Sources are the kernel's own module and all of
`core`, whose functions are inlined into kernels of other modules.
"""

from __future__ import annotations

import hashlib
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


class Place(NamedTuple):
    """A directory for machine code."""

    directory: Path
    refusal: str
    """Why it cannot be written; empty if it can."""


class _Anywhere(InTreeCacheLocator):  # type: ignore[misc]  # Numba has no types
    """Numba's, which looks for one directory that can be written; where code lies is decided below."""

    def ensure_cache_path(self) -> None:
        """Asks for nothing."""


class _NamesAndContents(CompileResultCacheImpl):  # type: ignore[misc]  # Numba has no types
    """Numba's, of files in whatever directory."""

    _locator_classes = (_Anywhere,)


class KernelCache(FunctionCache):  # type: ignore[misc]  # Numba has no types
    """The machine code of one kernel on disk; a `_cache` of Numba's dispatchers.

    Attributes:
        places: Those that are read, in this order; the last one is written.
        home: Where the code was found or was written to; None before, and if it could not be written.

    Raises:
        RuntimeError: The function's source is no file.
    """

    _impl_class = _NamesAndContents

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.home: Path | None = None
        self.places = _places(function, self._impl.locator)
        stamp = (self._impl.locator.get_source_stamp(), _digest_of_core())
        self._files = [IndexDataCacheFile(str(each.directory), self._impl.filename_base, stamp) for each in self.places]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for these types, or None."""
        for place, file in zip(self.places, self._files, strict=True):
            self._cache_file = file
            try:
                found = super().load_overload(sig, target_context)
            except OSError:  # it cannot be read either
                continue
            if found is not None:
                self.home = place.directory
                return found
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Writes it if that can be done."""
        *before, place = self.places
        if not place.refusal:
            self._cache_file = self._files[-1]
            try:
                super().save_overload(sig, data)
                self.home = place.directory
            except OSError as error:  # as of a full disk
                self.places = [*before, place._replace(refusal=error.strerror or str(error))]


def _places(function: Any, source: Any) -> list[Place]:
    """Numba's directories for the code of a function, as far as the first that can be written."""
    places: list[Place] = []
    for kind in (UserProvidedCacheLocator, InTreeCacheLocator, UserWideCacheLocator):
        if kind is UserProvidedCacheLocator and not config.CACHE_DIR:
            continue
        locator = kind(function, source._py_file)
        places.append(Place(Path(locator.get_cache_path()), _refusal(locator)))
        if not places[-1].refusal:
            break
    return places


def _refusal(locator: Any) -> str:
    try:
        locator.ensure_cache_path()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@cache
def _digest_of_core() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
