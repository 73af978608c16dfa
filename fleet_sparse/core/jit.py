"""How kernels are compiled: the only module, with `intrinsics` and `kernel_cache`, that knows Numba.

A kernel is a top-level function of arrays and numbers. It declares its types, releases the GIL, checks no bounds
(`NUMBA_BOUNDSCHECK=1` checks them) and keeps IEEE arithmetic. Its machine code is kept on disk, see `kernel_cache`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import llvmlite.binding
from numba import config, njit, types

from .kernel_cache import KernelCache, Place

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])

# What is only read may be a view of a received frame: not writable, at any address.
_READ = {"readonly": True, "aligned": False}
INT64_IN = types.Array(types.int64, 1, "C", **_READ)
INT32_IN = types.Array(types.int32, 1, "C", **_READ)
UINT32_IN = types.Array(types.uint32, 1, "C", **_READ)
UINT8_IN = types.Array(types.uint8, 1, "C", **_READ)
UINT16_IN = types.Array(types.uint16, 1, "C", **_READ)
FLOAT32_IN = types.Array(types.float32, 1, "C", **_READ)
FLOAT64_IN = types.Array(types.float64, 1, "C", **_READ)
INT64S = types.Array(types.int64, 1, "C")
INT32S = types.Array(types.int32, 1, "C")
UINT8S = types.Array(types.uint8, 1, "C")
UINT16S = types.Array(types.uint16, 1, "C")
UINT32S = types.Array(types.uint32, 1, "C")
FLOAT32S = types.Array(types.float32, 1, "C")
FLOAT64S = types.Array(types.float64, 1, "C")
INT64 = types.int64
UINT64 = types.uint64
BOOL = types.boolean
NOTHING = types.void

IS_CACHED = not config.BOUNDSCHECK
"""Machine code that checks bounds must neither be stored in the cache nor be replaced by code from it that does not."""

_kernels: list[tuple[Any, Any]] = []


def kernel(*arguments: object, result: Any = NOTHING) -> Callable[[_Function], _Function]:
    """Makes a kernel of a function whose arguments have these types, and registers it for `compile_kernels`."""

    def decorate(function: _Function) -> _Function:
        dispatcher = njit(nogil=True, error_model="numpy")(function)
        if IS_CACHED:
            try:
                dispatcher._cache = KernelCache(function)  # as `cache=True` does with Numba's own
            except RuntimeError:  # its source is no file
                _warn_of_no_cache()
        _kernels.append((dispatcher, result(*arguments)))
        return dispatcher  # type: ignore[no-any-return]  # Numba has no types

    return decorate


@cache
def _warn_of_no_cache() -> None:
    """Once."""
    _log.warning("kernels cannot be cached, so this process compiles them. Set NUMBA_CACHE_DIR to a directory of yours")


def inlined(function: _Function) -> _Function:
    """Makes a function that kernels call, compiled into each of them."""
    return njit(inline="always", error_model="numpy")(function)  # type: ignore[no-any-return]  # Numba has no types


class Compiled(NamedTuple):
    """A kernel that is ready to be called."""

    name: str
    is_found: bool
    """Rather than compiled here."""
    home: Path | None
    """The directory that its machine code lies in now; None if it is in none."""
    places: list[Place]
    """Directories that were looked through; the last one is for what is compiled."""


def cpu_name() -> str:
    """The kind of CPU that machine code is made for, as LLVM calls it."""
    return str(config.CPU_NAME or llvmlite.binding.get_host_cpu_name())


def num_to_compile() -> int:
    """Registered kernels that are not ready yet."""
    return len(_kernels)


def compile_kernels() -> Iterator[Compiled]:
    """Compiles every registered kernel for its declared types, or loads it; once all are, no call compiles anything.

    A call whose arguments do not fit the declared types then raises `TypeError`.
    """
    while _kernels:
        dispatcher, signature = _kernels[-1]
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        _kernels.pop()
        kept, is_found = dispatcher._cache, bool(dispatcher.stats.cache_hits)
        if not isinstance(kept, KernelCache):
            yield Compiled(dispatcher.__name__, is_found, None, [])
            continue
        if kept.home is None:
            _warn_of_no_cache()
        yield Compiled(dispatcher.__name__, is_found, kept.home, kept.places)
